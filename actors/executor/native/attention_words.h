// Included by attention_kernel.h: how one query token attends by products of words; P says what they stand for.

// As `score_floats`, with queries that became words where they stood, and their scales.
template <class P, int G>
CUE_APART void score_words(const Segment<typename P::Stored>& segment, float* q, const float* q_scales, int n,
                           float* scores) {
    for (int t = 0; t < segment.count; t += W) {
        F dots[G][W];
        for (int some = 0; some < W; some += kTogether) {
            const typename P::Stored* const* keys = segment.keys + t + some;
            for (int i = 0; i < kTogether; ++i) prefetch(segment.values[t + some + i], n);
            typename P::Sums sum[G][kTogether];
            Words key[kTogether];
#pragma GCC unroll 4
            for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
                for (int i = 0; i < kTogether; ++i) sum[h][i] = P::none();
            for (int d = 0; d < n; d += kWords) {
#pragma GCC unroll 4
                for (int i = 0; i < kTogether; ++i) key[i] = P::load(keys[i] + d);
#pragma GCC unroll 4
                for (int h = 0; h < G; ++h) {
                    const Words query = load_words(narrow_row(q + h * n) + d);
#pragma GCC unroll 4
                    for (int i = 0; i < kTogether; ++i) P::add_products(sum[h][i], query, key[i]);
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
                for (int i = 0; i < kTogether; ++i) dots[h][some + i] = P::floats(sum[h][i]);
        }
        for (int h = 0; h < G; ++h) store(scores + h * kSegment + t, mul(sums(dots[h]), set1(q_scales[h])));
    }
}

// As `add_values`, over N registers of words of the head from `i` on.
template <class P, int G, int N, class Segment>
inline void add_value_words(const Segment& segment, const Segment& next, float* weights, const float* scales,
                            const float* shrink, float* out, int n, int i) {
    typename P::Sums sum[G][2 * N];
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < 2 * N; ++c) sum[h][c] = P::none();
    for (int t = 0; t < segment.count; t += 2) {
        if (i == 0) prefetch(next.keys[t], n), prefetch(next.keys[t + 1], n);
        Words value[2 * N];
#pragma GCC unroll 2
        for (int c = 0; c < N; ++c) {
            const Words a = P::load(segment.values[t] + i + c * kWords);
            const Words b = P::load(segment.values[t + 1] + i + c * kWords);
            value[2 * c] = first_in_turns(a, b), value[2 * c + 1] = second_in_turns(a, b);
        }
#pragma GCC unroll 4
        for (int h = 0; h < G; ++h) {
            const Words weight = two_words(narrow_row(weights + h * kSegment) + t);
#pragma GCC unroll 4
            for (int c = 0; c < 2 * N; ++c) P::add_products(sum[h][c], weight, value[c]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < 2 * N; ++c) {
            float* const to = out + h * n + i + c * W;
            store(to, fma(P::floats(sum[h][c]), set1(scales[h]), mul(load(to), set1(shrink[h]))));
        }
}

template <class P, int G, class Segment>
CUE_APART void add_all_value_words(const Segment& segment, const Segment& next, float* weights, const float* scales,
                                   const float* shrink, float* out, int n) {
    int i = 0;
    for (; i + 2 * kWords <= n; i += 2 * kWords)
        add_value_words<P, G, 2>(segment, next, weights, scales, shrink, out, n, i);
    if (i < n) add_value_words<P, G, 1>(segment, next, weights, scales, shrink, out, n, i);
}

// How `attend_heads` multiplies words.
template <class P, int G>
struct WordProducts {
    using Some = Segment<typename P::Stored>;
    float q_scales[G], weight_scales[G];

    void begin(float* q, int n) {
        for (int h = 0; h < G; ++h) q_scales[h] = P::narrow_in_place(q + h * n, n);
    }
    void score(const Some& segment, float* q, int, int n, float* scores) const {
        score_words<P, G>(segment, q, q_scales, n, scores);
    }
    void add_values(const Some& segment, const Some& next, float* weights, const float* shrink, float* out, int,
                    int n) {
        const int count = (segment.count + W - 1) / W * W;
        for (int h = 0; h < G; ++h) weight_scales[h] = P::narrow_in_place(weights + h * kSegment, count);
        add_all_value_words<P, G>(segment, next, weights, weight_scales, shrink, out, n);
    }
};

template <int G>
using Int8WordProducts = WordProducts<Int8Words, G>;
#if CUE_X86_BF16
template <int G>
using Bf16WordProducts = WordProducts<Bf16Words, G>;
#endif
