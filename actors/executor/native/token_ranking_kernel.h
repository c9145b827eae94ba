// Requires sample_types.h. Included by foreach_isa.h: the passes over tokens of a histogram.

// Minimum and maximum of n > 0 values.
void min_max_row(const float* x, int64_t n, float* minimum, float* maximum) {
    F low = broadcast(-INFINITY), high = low;  // low: the maximum of the negated values
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const F values = load(x + i);
        low = max(low, sub(zero(), values)), high = max(high, values);
    }
    *minimum = -lane_max(low), *maximum = lane_max(high);
    for (; i < n; ++i) {
        if (x[i] < *minimum) *minimum = x[i];
        if (x[i] > *maximum) *maximum = x[i];
    }
}

// The bin of each value: (high - x) * scale, rounded down.
void assign_bins_row(const float* x, int64_t n, double high, double scale, int32_t* bins) {
    for (int64_t i = 0; i < n; ++i) bins[i] = static_cast<int32_t>((high - static_cast<double>(x[i])) * scale);
}

// The positions at which `bins` equals `bin`, in order. Returns their number.
int64_t bin_members_row(const int32_t* bins, int64_t n, int32_t bin, int32_t* positions) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kSkipBlock) {
        const int64_t end = begin + kSkipBlock < n ? begin + kSkipBlock : n;
        int32_t any = 0;
        for (int64_t i = begin; i < end; ++i) any |= bins[i] == bin;
        if (any == 0) continue;
        for (int64_t i = begin; i < end; ++i) {
            positions[count] = static_cast<int32_t>(i);
            count += bins[i] == bin;
        }
    }
    return count;
}
