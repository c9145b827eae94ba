// Requires sample_types.h. Included by each_isa.h.

// Largest numbers of groups of kGroup, in any order; returns how many, and the largest of all in *most.
int64_t peaks_row(const float* x, int64_t n, float* peaks, float* most) {
    F high = set1(-INFINITY);
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kGroup * W, count += W) {
        const int64_t end = begin + kGroup * W < n ? begin + kGroup * W : n;
        F here = set1(-INFINITY);
        int64_t i = begin;
        for (; i + W <= end; i += W) here = max(here, load(x + i));
        if (i < end) {
            const int left = static_cast<int>(end - i);
            here = max(here, choose_first(left, load_some(x + i, left), set1(-INFINITY)));
        }
        store(peaks + count, here);
        high = max(high, here);
    }
    *most = largest(high);
    return count;
}

// exp((x - most) / temperature) by Cody and Waite's reduction; 0 below 2^-126 and for -inf.
inline F weight(F x, const Heat& heat) {
    const F d = max(set1(heat.least), sub(x, set1(heat.most)));
    const F n = round(mul(d, set1(heat.factor)));
    // The first product is exact and the first difference nearly, so that no rounding grows with n.
    const F rest = sub(sub(d, mul(n, set1(heat.octave))), mul(n, set1(heat.octave_rest)));
    const F f = mul(rest, set1(heat.factor));  // |f| <= 1/2
    // The Taylor series of 2^f: the first term left out is 5e-9 at most.
    F y = set1(1.5252734e-5f);
    y = fma(y, f, set1(1.5403530e-4f));
    y = fma(y, f, set1(1.3333558e-3f));
    y = fma(y, f, set1(9.6181291e-3f));
    y = fma(y, f, set1(5.5504109e-2f));
    y = fma(y, f, set1(2.4022651e-1f));
    y = fma(y, f, set1(6.9314718e-1f));
    y = fma(y, f, set1(1.0f));
    return scale_by_power(y, n);
}

// Not inlined, so that a token has the same weight wherever it is asked for.
CUE_APART void weigh(const float* x, int64_t n, const Heat& heat, float* weights) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(weights + i, weight(load(x + i), heat));
    if (i == n) return;
    const int left = static_cast<int>(n - i);
    store_some(weights + i, weight(load_some(x + i, left), heat), left);
}

// The sum of the first `count` of kRun weights, and zeros for the others.
inline double sum_of_run(float* weights, int64_t count) {
    for (int64_t i = count; i < kRun; ++i) weights[i] = 0.0f;
    double lanes[kLanes] = {};
    for (int i = 0; i < kRun; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(weights[i + lane]);
    double sum = 0.0;
    for (const double lane : lanes) sum += lane;
    return sum;
}

// The weight of each kRun tokens.
void sums_row(const float* x, int64_t n, const Heat& heat, double* sums) {
    float weights[kRun];
    for (int64_t begin = 0; begin < n; begin += kRun) {
        const int64_t count = begin + kRun < n ? kRun : n - begin;
        weigh(x + begin, count, heat, weights);
        *sums++ = sum_of_run(weights, count);
    }
}

// The weight of the tokens that come before this one in descending order of logits, equals by their ids.
double before_row(const float* x, const float* weights, const int32_t* ids, int64_t n, float logit, int32_t id) {
    double sum = 0.0;
    float counted[kRun];
    for (int64_t begin = 0; begin < n; begin += kRun) {
        const int64_t count = begin + kRun < n ? kRun : n - begin;
        for (int64_t i = 0; i < count; ++i) {
            const float weight = weights[begin + i];
            const float of_equals = ids[begin + i] < id ? weight : 0.0f;
            const float of_lower = x[begin + i] == logit ? of_equals : 0.0f;
            counted[i] = x[begin + i] > logit ? weight : of_lower;
        }
        sum += sum_of_run(counted, count);
    }
    return sum;
}

// The numbers that are not below `least`, and where they were, in order; returns how many.
int64_t gather_row(const float* x, int64_t n, float least, float* found, int32_t* ids) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kLook) {
        const int64_t end = begin + kLook < n ? begin + kLook : n;
        F high = set1(-INFINITY);
        int64_t i = begin;
        for (; i + W <= end; i += W) high = max(high, load(x + i));
        if (i == end && largest(high) < least) continue;
        // Each is written, and overwritten by the next unless it counts.
        for (i = begin; i < end; ++i) {
            found[count] = x[i];
            ids[count] = static_cast<int32_t>(i);
            count += x[i] >= least;
        }
    }
    return count;
}
