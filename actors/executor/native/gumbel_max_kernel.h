// Requires sample_types.h. Included by foreach_isa.h.

// Upper bounds of the scores of n <= kTokenRun tokens, in octaves: exact to less than 1/10 where the noise is high. Of
// the noise -log2(-log1p(-y)) the bound takes -log2(y), with the exponent of y and a linear interpolation of the
// mantissa.
CUE_NOINLINE void score_bounds(const float* x, const int32_t* ids, int64_t n, const SoftmaxScale& scale, NoiseKey key,
                               float* out) {
    float uniforms[kTokenRun];  // y in units of 2^-32
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = noise_bits(key, static_cast<uint32_t>(ids[i]));
        const float high = static_cast<float>(static_cast<int32_t>(bits >> 16));
        uniforms[i] = high * 65536.0f + (static_cast<float>(static_cast<int32_t>(bits & 0xffff)) + 0.5f);
    }
    int32_t float_bits[kTokenRun];
    std::memcpy(float_bits, uniforms, static_cast<size_t>(n) * sizeof(float));
    for (int64_t i = 0; i < n; ++i)
        out[i] = (x[i] - scale.max_logit) * scale.octaves_per_logit +
                 (159.0f - static_cast<float>(float_bits[i]) * 0x1p-23f);
}

// The largest bound of each run of kTokenRun tokens. `ids` may be null: token i is then id i.
void peak_bounds_row(const float* x, const int32_t* ids, int64_t n, const SoftmaxScale& scale, NoiseKey key,
                     float* peaks) {
    float run_bounds[kTokenRun];
    int32_t sequential_ids[kTokenRun];
    for (int64_t begin = 0; begin < n; begin += kTokenRun) {
        const int64_t count = begin + kTokenRun < n ? kTokenRun : n - begin;
        if (ids == nullptr)
            for (int i = 0; i < kTokenRun; ++i) sequential_ids[i] = static_cast<int32_t>(begin) + i;
        score_bounds(x + begin, ids == nullptr ? sequential_ids : ids + begin, count, scale, key, run_bounds);
        for (int64_t i = count; i < kTokenRun; ++i) run_bounds[i] = -INFINITY;
        F high = load(run_bounds);
        for (int i = W; i < kTokenRun; i += W) high = max(high, load(run_bounds + i));
        *peaks++ = lane_max(high);
    }
}
