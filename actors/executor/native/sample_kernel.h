// Requires sample_types.h. Included by foreach_isa.h: maxima, softmax weights and selection by logit of one row.

// The maxima of groups of kPeakGroup values, in any order, and the largest of all in *max_logit. Returns their number.
int64_t group_max_row(const float* x, int64_t n, float* peaks, float* max_logit) {
    F row_max = broadcast(-INFINITY);
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kPeakGroup * W, count += W) {
        const int64_t end = begin + kPeakGroup * W < n ? begin + kPeakGroup * W : n;
        F group_max = broadcast(-INFINITY);
        int64_t i = begin;
        for (; i + W <= end; i += W) group_max = max(group_max, load(x + i));
        if (i < end) {
            const int left = static_cast<int>(end - i);
            group_max = max(group_max, blend_first(left, load_partial(x + i, left), broadcast(-INFINITY)));
        }
        store(peaks + count, group_max);
        row_max = max(row_max, group_max);
    }
    *max_logit = lane_max(row_max);
    return count;
}

// exp((x - max_logit) / temperature) with Cody-Waite range reduction; 0 below 2^-126 and for -inf.
inline F softmax_weight(F x, const SoftmaxScale& scale) {
    const F d = max(broadcast(scale.min_difference), sub(x, broadcast(scale.max_logit)));
    const F n = round(mul(d, broadcast(scale.octaves_per_logit)));
    // The first product is exact and the first difference nearly so: no rounding error grows with n.
    const F rest = sub(sub(d, mul(n, broadcast(scale.octave_high))), mul(n, broadcast(scale.octave_low)));
    const F f = mul(rest, broadcast(scale.octaves_per_logit));  // |f| <= 1/2
    // Taylor series of 2^f: the first omitted term is at most 5e-9.
    F y = broadcast(1.5252734e-5f);
    y = fma(y, f, broadcast(1.5403530e-4f));
    y = fma(y, f, broadcast(1.3333558e-3f));
    y = fma(y, f, broadcast(9.6181291e-3f));
    y = fma(y, f, broadcast(5.5504109e-2f));
    y = fma(y, f, broadcast(2.4022651e-1f));
    y = fma(y, f, broadcast(6.9314718e-1f));
    y = fma(y, f, broadcast(1.0f));
    return scale_by_power(y, n);
}

// Not inlined, so that a token has the same weight in every caller.
CUE_NOINLINE void softmax_weights(const float* x, int64_t n, const SoftmaxScale& scale, float* weights) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(weights + i, softmax_weight(load(x + i), scale));
    if (i == n) return;
    const int left = static_cast<int>(n - i);
    store_partial(weights + i, softmax_weight(load_partial(x + i, left), scale), left);
}

// The sum of the first `count` of kTokenRun weights. Sets the others to 0.
inline double sum_of_run(float* weights, int64_t count) {
    for (int64_t i = count; i < kTokenRun; ++i) weights[i] = 0.0f;
    double lanes[kSumLanes] = {};
    for (int i = 0; i < kTokenRun; i += kSumLanes)
        for (int lane = 0; lane < kSumLanes; ++lane) lanes[lane] += static_cast<double>(weights[i + lane]);
    double sum = 0.0;
    for (const double lane : lanes) sum += lane;
    return sum;
}

// The total weight of each run of kTokenRun tokens.
void run_weights_row(const float* x, int64_t n, const SoftmaxScale& scale, double* sums) {
    float weights[kTokenRun];
    for (int64_t begin = 0; begin < n; begin += kTokenRun) {
        const int64_t count = begin + kTokenRun < n ? kTokenRun : n - begin;
        softmax_weights(x + begin, count, scale, weights);
        *sums++ = sum_of_run(weights, count);
    }
}

// The total weight of the tokens before this one in descending order of logits, equal logits in order of ids.
double weight_before_row(const float* x, const float* weights, const int32_t* ids, int64_t n, float logit, int32_t id) {
    double sum = 0.0;
    float counted[kTokenRun];
    for (int64_t begin = 0; begin < n; begin += kTokenRun) {
        const int64_t count = begin + kTokenRun < n ? kTokenRun : n - begin;
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

// The values that are at least `min_logit`, and their positions, in order. Returns their number.
int64_t gather_row(const float* x, int64_t n, float min_logit, float* found, int32_t* ids) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kSkipBlock) {
        const int64_t end = begin + kSkipBlock < n ? begin + kSkipBlock : n;
        F row_max = broadcast(-INFINITY);
        int64_t i = begin;
        for (; i + W <= end; i += W) row_max = max(row_max, load(x + i));
        if (i == end && lane_max(row_max) < min_logit) continue;
        // Every value is stored; the next overwrites it unless `count` advances.
        for (i = begin; i < end; ++i) {
            found[count] = x[i];
            ids[count] = static_cast<int32_t>(i);
            count += x[i] >= min_logit;
        }
    }
    return count;
}
