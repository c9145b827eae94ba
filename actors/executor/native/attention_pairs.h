// Included by attention_kernel.h: how one query token attends to a paired pool by products of words, keys and values as
// they lie there; P says what they stand for.
static_assert(kSegment == kGroups * W, "a segment is a run of groups");

// scores[h * kSegment + t] for N groups of tokens; `apart` numbers from pair to pair of a token's dimensions.
template <class P, int G, int N>
inline void score_groups(const Groups<P>& groups, const Groups<P>& next, float* q, int n, int apart, float* scores) {
    typename P::Sums sum[G][N];
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) sum[h][g] = P::none();
    for (int pair = 0; pair < n / 2; ++pair) {
        Words key[N];
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) key[g] = P::load(groups.keys[g] + pair * apart);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) prefetch(next.keys[g] + pair * apart, kWords);
#pragma GCC unroll 4
        for (int h = 0; h < G; ++h) {
            const Words query = two_words(narrow_row(q + h * n) + 2 * pair);
#pragma GCC unroll 4
            for (int g = 0; g < N; ++g) P::add_products(sum[h][g], query, key[g]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) store(scores + h * kSegment + g * W, P::floats(sum[h][g]));
}

// sums[h] += weights[h] of two tokens times their values, N registers of pairs.
template <class P, int G, int N, bool kBoth>
inline void add_pair(const typename P::Stored* values, float* weights, int t, typename P::Sums (&sum)[G][N]) {
    Words value[N];
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) {
        value[c] = P::load(values + c * kWords);
        // What nobody has written may be NaN, which no weight of 0 takes away.
        if (!kBoth) value[c] = _mm512_and_si512(value[c], _mm512_set1_epi32(0xffff));
    }
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h) {
        const Words weight = two_words(narrow_row(weights + h * kSegment) + t);
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) P::add_products(sum[h][c], weight, value[c]);
    }
}

// out[h] = out[h] * shrink[h] + scales[h] * the sum of weights[h][t] * values[t], dimensions from `i` on.
template <class P, int G, int N>
inline void add_groups(const Groups<P>& groups, const Groups<P>& next, float* weights, const float* scales,
                       const float* shrink, float* out, int n, int i) {
    typename P::Sums sum[G][N];
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) sum[h][c] = P::none();
    for (int t = 0; t < groups.count;) {
        const auto* row = groups.values[t / W] + 2 * i;
        const auto* ahead = next.values[t / W] + 2 * i;
        for (int p = 0; p < kGroupPairs && t < groups.count; ++p, t += 2, row += 2 * n, ahead += 2 * n) {
            prefetch(ahead, N * kWords);
            if (t + 1 < groups.count) add_pair<P, G, N, true>(row, weights, t, sum);
            else add_pair<P, G, N, false>(row, weights, t, sum);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) {
            float* const to = out + h * n + i + c * W;
            store(to, fma(P::floats(sum[h][c]), set1(scales[h]), mul(load(to), set1(shrink[h]))));
        }
}

// How `attend_heads` multiplies words.
template <class P, int G>
struct PairProducts {
    using Some = Groups<P>;
    float q_scales[G], weight_scales[G];

    void begin(const AttentionTask& task, float* q, const Some& first) {
        const int n = task.kv->head_dim;
        for (int h = 0; h < G; ++h) q_scales[h] = P::narrow_in_place(q + h * n, n);
        for (int g = 0; g < kGroups; ++g) {
            prefetch(first.values[g], W * n);
            for (int i = 0; i < n; i += 2) prefetch(first.keys[g] + i * task.kv->block_size, kWords);
        }
    }
    CUE_APART void score(const AttentionTask& task, const Some& groups, const Some& next, float* q, int n,
                         float* scores) const {
        const int apart = 2 * task.kv->block_size;
        if (groups.count <= kSegment / 2) score_groups<P, G, kGroups / 2>(groups, next, q, n, apart, scores);
        else score_groups<P, G, kGroups>(groups, next, q, n, apart, scores);
        if (!P::kScaled) return;
        for (int h = 0; h < G; ++h) scale(groups, task.kv->key_scales, q_scales[h], scores + h * kSegment);
    }
    CUE_APART void add_values(const AttentionTask& task, const Some& groups, const Some& next, float* weights,
                              const float* shrink, float* out, int n) {
        const int count = (groups.count + W - 1) / W * W;
        for (int h = 0; h < G; ++h) {
            float* const mine = weights + h * kSegment;
            if (P::kScaled) scale(groups, task.kv->value_scales, 1.0f, mine);
            weight_scales[h] = P::narrow_in_place(mine, count);
        }
        int i = 0;
        for (; i + 4 * W <= n; i += 4 * W)
            add_groups<P, G, 4>(groups, next, weights, weight_scales, shrink, out, n, i);
        if (i < n) add_groups<P, G, 2>(groups, next, weights, weight_scales, shrink, out, n, i);
    }

private:
    // Behind the last token there may be any scale.
    static void scale(const Some& groups, const float* scales, float factor, float* numbers) {
        for (int g = 0; g * W < groups.count; ++g) {
            const F by = mul(load(scales + groups.index[g]), set1(factor));
            float* const some = numbers + g * W;
            store(some, choose_first(groups.count - g * W, mul(load(some), by), zero()));
        }
    }
};

template <int G>
using Int8PairProducts = PairProducts<Int8Words, G>;
#if CUE_X86_BF16
template <int G>
using Bf16PairProducts = PairProducts<Bf16Words, G>;
#endif
