// Requires sample_types.h. Included by each_isa.h.

// The least and the largest of n > 0 numbers.
void ends_row(const float* x, int64_t n, float* least, float* most) {
    F low = set1(-INFINITY), high = low;  // low is of the negated numbers
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const F some = load(x + i);
        low = max(low, sub(zero(), some)), high = max(high, some);
    }
    *least = -largest(low), *most = largest(high);
    for (; i < n; ++i) {
        if (x[i] < *least) *least = x[i];
        if (x[i] > *most) *most = x[i];
    }
}

// Which bin each of x belongs to: (high - x) * scale, rounded down.
void bins_row(const float* x, int64_t n, double high, double scale, int32_t* bins) {
    for (int64_t i = 0; i < n; ++i) bins[i] = static_cast<int32_t>((high - static_cast<double>(x[i])) * scale);
}

// Where the bins are this one, in order; returns how many.
int64_t members_row(const int32_t* bins, int64_t n, int32_t bin, int32_t* places) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kLook) {
        const int64_t end = begin + kLook < n ? begin + kLook : n;
        int32_t any = 0;
        for (int64_t i = begin; i < end; ++i) any |= bins[i] == bin;
        if (any == 0) continue;
        for (int64_t i = begin; i < end; ++i) {
            places[count] = static_cast<int32_t>(i);
            count += bins[i] == bin;
        }
    }
    return count;
}
