// Included by attention_kernel.h: how one query token attends to int8 by products of words.

// As `score`, with queries that `narrow` made where they stood, and their scales.
template <int G>
CUE_APART void score_words(const Segment<int8_t>& segment, float* q, const float* q_scales, int n, float* scores) {
    for (int t = 0; t < segment.count; t += W) {
        F dots[G][W];
        for (int some = 0; some < W; some += kTogether) {
            const int8_t* const* keys = segment.keys + t + some;
            for (int i = 0; i < kTogether; ++i) prefetch(segment.values[t + some + i], n);
            Words sum[G][kTogether], key[kTogether];
#pragma GCC unroll 4
            for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
                for (int i = 0; i < kTogether; ++i) sum[h][i] = no_words();
            for (int d = 0; d < n; d += kWords) {
#pragma GCC unroll 4
                for (int i = 0; i < kTogether; ++i) key[i] = words(keys[i] + d);
#pragma GCC unroll 4
                for (int h = 0; h < G; ++h) {
                    const Words query = load_words(narrow_row(q + h * n) + d);
#pragma GCC unroll 4
                    for (int i = 0; i < kTogether; ++i) add_products(sum[h][i], query, key[i]);
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
                for (int i = 0; i < kTogether; ++i) dots[h][some + i] = as_floats(sum[h][i]);
        }
        for (int h = 0; h < G; ++h) store(scores + h * kSegment + t, mul(sums(dots[h]), set1(q_scales[h])));
    }
}

// As `add_values`, over N registers of words of the head from `i` on.
template <int G, int N>
inline void add_value_words(const Segment<int8_t>& segment, const Segment<int8_t>& next, float* weights,
                            const float* scales, const float* shrink, float* out, int n, int i) {
    Words sum[G][2 * N];
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < 2 * N; ++c) sum[h][c] = no_words();
    for (int t = 0; t < segment.count; t += 2) {
        if (i == 0) prefetch(next.keys[t], n), prefetch(next.keys[t + 1], n);
        Words value[2 * N];
#pragma GCC unroll 2
        for (int c = 0; c < N; ++c) {
            const Words a = words(segment.values[t] + i + c * kWords), b = words(segment.values[t + 1] + i + c * kWords);
            value[2 * c] = first_in_turns(a, b), value[2 * c + 1] = second_in_turns(a, b);
        }
#pragma GCC unroll 4
        for (int h = 0; h < G; ++h) {
            const Words weight = two_words(narrow_row(weights + h * kSegment) + t);
#pragma GCC unroll 4
            for (int c = 0; c < 2 * N; ++c) add_products(sum[h][c], weight, value[c]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < G; ++h)
#pragma GCC unroll 4
        for (int c = 0; c < 2 * N; ++c) {
            float* const to = out + h * n + i + c * W;
            store(to, fma(as_floats(sum[h][c]), set1(scales[h]), mul(load(to), set1(shrink[h]))));
        }
}

template <int G>
CUE_APART void add_all_value_words(const Segment<int8_t>& segment, const Segment<int8_t>& next, float* weights,
                                   const float* scales, const float* shrink, float* out, int n) {
    int i = 0;
    for (; i + 2 * kWords <= n; i += 2 * kWords)
        add_value_words<G, 2>(segment, next, weights, scales, shrink, out, n, i);
    if (i < n) add_value_words<G, 1>(segment, next, weights, scales, shrink, out, n, i);
}

// How `attend_heads` multiplies int8.
template <int G>
struct WordProducts {
    float q_scales[G], weight_scales[G];

    void begin(float* q, int n) {
        for (int h = 0; h < G; ++h) q_scales[h] = narrow(q + h * n, n, magnitude(q + h * n, n), narrow_row(q + h * n));
    }
    void score(const Segment<int8_t>& segment, float* q, int, int n, float* scores) const {
        score_words<G>(segment, q, q_scales, n, scores);
    }
    void add_values(const Segment<int8_t>& segment, const Segment<int8_t>& next, float* weights, const float* shrink,
                    float* out, int, int n) {
        const int count = (segment.count + W - 1) / W * W;
        for (int h = 0; h < G; ++h) {
            float* const mine = weights + h * kSegment;
            weight_scales[h] = narrow(mine, count, magnitude(mine, count), narrow_row(mine));
        }
        add_all_value_words<G>(segment, next, weights, weight_scales, shrink, out, n);
    }
};
