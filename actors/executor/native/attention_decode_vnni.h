// Requires attention_vnni_groups.h. Included by attention_kernel.h: attention of one query token to a pool of VNNI
// pairs. Keys and values are read as stored; `Dot` (vnni_dot.h) says how pairs are multiplied.
static_assert(kSegmentTokens == kGroupsPerSegment * W, "a segment is a run of groups");

// scores[h * kSegmentTokens + t] = q[h] . keys[t] for N groups of tokens, before scales. `pair_stride` is the distance
// in values between neighbouring pairs of a token's dimensions.
template <class Dot, int G, int N>
inline void score_groups(const TokenGroups<Dot>& groups, const TokenGroups<Dot>& next, float* q, int n, int pair_stride,
                         float* scores) {
    typename Dot::Accumulator sum[G][N];
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) sum[h][g] = Dot::zero_accumulator();
    for (int pair = 0; pair < n / 2; ++pair) {
        Lanes16 key[N];
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) key[g] = Dot::load(groups.keys[g] + pair * pair_stride);
#pragma GCC unroll 4
        for (int g = 0; g < kGroupsPerSegment; ++g) prefetch(next.keys[g] + pair * pair_stride, kLanes16);
#pragma GCC unroll 4
        for (int h = 0; h < G; ++h) {
            const Lanes16 query = broadcast_pair(as_int16(q + h * n) + 2 * pair);
#pragma GCC unroll 4
            for (int g = 0; g < N; ++g) Dot::dot_accumulate(sum[h][g], query, key[g]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) store(scores + h * kSegmentTokens + g * W, Dot::to_floats(sum[h][g]));
}

// sum[h] += weights[h][t] * values[t] + weights[h][t + 1] * values[t + 1] over N registers of pairs; without
// kBothTokens only the first product.
template <class Dot, int G, int N, bool kBothTokens>
inline void accumulate_pair(const typename Dot::Stored* values, float* weights, int t,
                            typename Dot::Accumulator (&sum)[G][N]) {
    Lanes16 value[N];
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) {
        value[c] = Dot::load(values + c * kLanes16);
        // An unwritten value may be NaN, and NaN times a weight of 0 is NaN.
        if (!kBothTokens) value[c] = _mm512_and_si512(value[c], _mm512_set1_epi32(0xffff));
    }
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h) {
        const Lanes16 weight = broadcast_pair(as_int16(weights + h * kSegmentTokens) + t);
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) Dot::dot_accumulate(sum[h][c], weight, value[c]);
    }
}

// out[h] = out[h] * rescale[h] + scales[h] * (sum over t of weights[h][t] * values[t]), N registers of dimensions from
// `i` on.
template <class Dot, int G, int N>
inline void accumulate_groups(const TokenGroups<Dot>& groups, const TokenGroups<Dot>& next, float* weights,
                              const float* scales, const float* rescale, float* out, int n, int i) {
    typename Dot::Accumulator sum[G][N];
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) sum[h][c] = Dot::zero_accumulator();
    for (int t = 0; t < groups.count;) {
        const auto* row = groups.values[t / W] + 2 * i;
        const auto* prefetch_row = next.values[t / W] + 2 * i;
        for (int p = 0; p < kValuePairsPerGroup && t < groups.count; ++p, t += 2, row += 2 * n, prefetch_row += 2 * n) {
            prefetch(prefetch_row, N * kLanes16);
            if (t + 1 < groups.count) accumulate_pair<Dot, G, N, true>(row, weights, t, sum);
            else accumulate_pair<Dot, G, N, false>(row, weights, t, sum);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) {
            float* const to = out + h * n + i + c * W;
            store(to, fma(Dot::to_floats(sum[h][c]), broadcast(scales[h]), mul(load(to), broadcast(rescale[h]))));
        }
}

// Policy of `attend_heads` for VNNI pairs.
template <class Dot, int G>
struct VnniDecode {
    using Tokens = TokenGroups<Dot>;
    float q_scales[G], weight_scales[G];

    void begin(const AttentionTask& task, float* q, const Tokens& first) {
        const int n = task.kv->head_dim;
        for (int h = 0; h < G; ++h) q_scales[h] = Dot::narrow_in_place(q + h * n, n);
        for (int g = 0; g < kGroupsPerSegment; ++g) {
            prefetch(first.values[g], W * n);
            for (int i = 0; i < n; i += 2) prefetch(first.keys[g] + i * task.kv->block_size, kLanes16);
        }
    }
    CUE_NOINLINE void score(const AttentionTask& task, const Tokens& groups, const Tokens& next, float* q, int n,
                            float* scores) const {
        const int pair_stride = 2 * task.kv->block_size;
        if (groups.count <= kSegmentTokens / 2)
            score_groups<Dot, G, kGroupsPerSegment / 2>(groups, next, q, n, pair_stride, scores);
        else score_groups<Dot, G, kGroupsPerSegment>(groups, next, q, n, pair_stride, scores);
        if (!Dot::kHasScales) return;
        for (int h = 0; h < G; ++h)
            multiply_by_scales(groups, task.kv->key_scales, q_scales[h], scores + h * kSegmentTokens);
    }
    CUE_NOINLINE void accumulate_values(const AttentionTask& task, const Tokens& groups, const Tokens& next,
                                        float* weights, const float* rescale, float* out, int n) {
        const int count = (groups.count + W - 1) / W * W;
        for (int h = 0; h < G; ++h) {
            float* const head_weights = weights + h * kSegmentTokens;
            if (Dot::kHasScales) multiply_by_scales(groups, task.kv->value_scales, 1.0f, head_weights);
            weight_scales[h] = Dot::narrow_in_place(head_weights, count);
        }
        int i = 0;
        for (; i + 4 * W <= n; i += 4 * W)
            accumulate_groups<Dot, G, 4>(groups, next, weights, weight_scales, rescale, out, n, i);
        if (i < n) accumulate_groups<Dot, G, 2>(groups, next, weights, weight_scales, rescale, out, n, i);
    }

private:
    // values[t] *= scales[t] * factor; 0 behind the last token, where the scale is undefined.
    static void multiply_by_scales(const Tokens& groups, const float* scales, float factor, float* values) {
        for (int g = 0; g * W < groups.count; ++g) {
            const F scale = mul(load(scales + groups.token_index[g]), broadcast(factor));
            float* const lanes = values + g * W;
            store(lanes, blend_first(groups.count - g * W, mul(load(lanes), scale), zero()));
        }
    }
};

template <int G>
using Int8VnniDecode = VnniDecode<Int8VnniDot, G>;
#if CUE_X86_BF16
template <int G>
using Bf16VnniDecode = VnniDecode<Bf16VnniDot, G>;
#endif
