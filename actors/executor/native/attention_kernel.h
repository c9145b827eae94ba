// Requires attention_task.h. Included by each_isa.h: one query token against a context, keys and values read once for all
// heads of a group.

// Asks for memory before it is needed: the runs of a table lie apart, where no processor would guess them.
template <class T>
inline void prefetch(const T* data, int count) {
    const char* bytes = reinterpret_cast<const char*>(data);
    // Into the second cache: measured, memory gives half as much again or more than when the first one asks.
    for (int i = 0; i < count * static_cast<int>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

#if CUE_WORDS
#include "words.h"
#include "pairs.h"
#endif
#include "attention_tile.h"

constexpr int kTogether = kRegisters / 8;  // tokens whose dot products run side by side
constexpr int kSegment = 64;               // tokens between two looks at the running maximum
constexpr int kHeadsMax = 4;               // query heads per pass over the context

// Where some tokens lie. Behind the last one it stands again and again: never a row that is not ours to read.
template <class T>
struct Segment {
    int count;
    const T* keys[kSegment];
    const T* values[kSegment];
    int64_t index[kSegment];  // of the token's scales
    bool together[kSegment / W];  // whether the scales of so many tokens lie side by side
};

template <class T>
CUE_APART void locate(const AttentionTask& task, int64_t begin, Segment<T>& segment) {
    const CueKv& kv = *task.kv;
    segment.count = static_cast<int>(task.end - begin < kSegment ? task.end - begin : kSegment);
    int64_t entry = begin / kv.block_size, offset = begin % kv.block_size;
    int t = 0;
    for (; t < segment.count; ++entry, offset = 0) {
        int64_t index = run_of(kv, task.table[entry], task.kv_head) + offset;
        if (sizeof(T) == 1) {
            prefetch(kv.key_scales + index, static_cast<int>(kv.block_size - offset));
            prefetch(kv.value_scales + index, static_cast<int>(kv.block_size - offset));
        }
        for (; offset < kv.block_size && t < segment.count; ++offset, ++t, ++index) {
            segment.index[t] = index;
            segment.keys[t] = static_cast<const T*>(kv.keys) + index * kv.head_dim;
            segment.values[t] = static_cast<const T*>(kv.values) + index * kv.head_dim;
        }
    }
    for (; t < kSegment; ++t) {
        segment.index[t] = segment.index[t - 1];
        segment.keys[t] = segment.keys[t - 1], segment.values[t] = segment.values[t - 1];
    }
    for (int group = 0; sizeof(T) == 1 && group < kSegment / W; ++group) {
        const int64_t* index = segment.index + group * W;
        bool together = true;
        for (int i = 1; i < W; ++i) together &= index[i] == index[0] + i;
        segment.together[group] = together;
    }
}

template <class T>
inline void scale_by(float* numbers, const float* scales, const Segment<T>& segment) {
    if (sizeof(T) != 1) return;
    for (int t = 0; t < segment.count; t += W) {
        const int64_t* index = segment.index + t;
        if (segment.together[t / W]) {
            store(numbers + t, mul(load(numbers + t), load(scales + index[0])));
        } else {
            for (int i = 0; i < W && t + i < segment.count; ++i) numbers[t + i] *= scales[index[i]];
        }
    }
}

// sum[h][t] += q[h] . keys[t] over one register of a head, lane by lane.
template <int G>
inline void multiply_some(const float* q, int padded, const F (&key)[kTogether], F (&sum)[G][kTogether]) {
    for (int h = 0; h < G; ++h) {
        const F some = load(q + h * padded);
        for (int t = 0; t < kTogether; ++t) sum[h][t] = fma(some, key[t], sum[h][t]);
    }
}

// scores[h * kSegment + t] for the tokens of a segment; what stands behind them counts for nothing.
template <class T, int G>
CUE_APART void score_floats(const Segment<T>& segment, const float* q, int padded, int n, float* scores) {
    const int whole = n / W * W;
    for (int t = 0; t < segment.count; t += W) {
        F dots[G][W];
        for (int some = 0; some < W; some += kTogether) {
            const T* const* keys = segment.keys + t + some;
            for (int i = 0; i < kTogether; ++i) prefetch(segment.values[t + some + i], n);
            F sum[G][kTogether], key[kTogether];
            for (int h = 0; h < G; ++h)
                for (int i = 0; i < kTogether; ++i) sum[h][i] = zero();
            for (int d = 0; d < whole; d += W) {
                for (int i = 0; i < kTogether; ++i) key[i] = load(keys[i] + d);
                multiply_some<G>(q + d, padded, key, sum);
            }
            if (whole < n) {
                for (int i = 0; i < kTogether; ++i) key[i] = load_some(keys[i] + whole, n - whole);
                multiply_some<G>(q + whole, padded, key, sum);
            }
            for (int h = 0; h < G; ++h)
                for (int i = 0; i < kTogether; ++i) dots[h][some + i] = sum[h][i];
        }
        for (int h = 0; h < G; ++h) store(scores + h * kSegment + t, sums(dots[h]));
    }
}

// out[h] = out[h] * shrink[h] + sum of weights[h][t] * values[t] over N registers of the head from `i` on. `last` is
// how many numbers of the last register are the head's.
template <class T, int G, int N, bool kWhole>
inline void add_values(const Segment<T>& segment, const Segment<T>& next, const float* weights, const float* shrink,
                       float* out, int padded, int i, int last) {
    F sum[G][N];
    for (int h = 0; h < G; ++h)
        for (int c = 0; c < N; ++c) sum[h][c] = mul(load(out + h * padded + i + c * W), set1(shrink[h]));
    for (int t = 0; t < segment.count; ++t) {
        if (i == 0) prefetch(next.keys[t], padded);
        F value[N];
        for (int c = 0; c < N; ++c)
            value[c] = kWhole ? load(segment.values[t] + i + c * W) : load_some(segment.values[t] + i, last);
        for (int h = 0; h < G; ++h) {
            const F weight = set1(weights[h * kSegment + t]);
            for (int c = 0; c < N; ++c) sum[h][c] = fma(weight, value[c], sum[h][c]);
        }
    }
    for (int h = 0; h < G; ++h)
        for (int c = 0; c < N; ++c) store(out + h * padded + i + c * W, sum[h][c]);
}

template <class T, int G>
CUE_APART void add_all_values(const Segment<T>& segment, const Segment<T>& next, const float* weights,
                              const float* shrink, float* out, int padded, int n) {
    constexpr int kMany = kRegisters / 8;
    int i = 0;
    for (; i + kMany * W <= n; i += kMany * W)
        add_values<T, G, kMany, true>(segment, next, weights, shrink, out, padded, i, W);
    for (; i + W <= n; i += W) add_values<T, G, 1, true>(segment, next, weights, shrink, out, padded, i, W);
    if (i < n) add_values<T, G, 1, false>(segment, next, weights, shrink, out, padded, i, n - i);
}

// One step of the running softmax: scores become weights; returns what the earlier weights must be multiplied by.
CUE_APART float soften(float* scores, int count, float& most, float& total) {
    F high = set1(most);
    for (int t = 0; t < count; t += W) {
        const F some = choose_first(count - t, load(scores + t), set1(-INFINITY));
        store(scores + t, some);
        high = max(high, some);
    }
    const float now = largest(high), shrink = exp2_of(most - now);
    F added = zero();
    for (int t = 0; t < count; t += W) {
        const F weight = exp2(sub(load(scores + t), set1(now)));
        store(scores + t, weight);
        added = add(added, weight);
    }
    most = now;
    total = total * shrink + sum(added);
    return shrink;
}

// How `attend_heads` multiplies, in floats.
template <class T, int G>
struct FloatProducts {
    using Some = Segment<T>;

    void begin(const AttentionTask& task, float*, const Some& first) {
        for (const T* keys : first.keys) prefetch(keys, task.kv->head_dim);
    }
    void score(const AttentionTask& task, const Some& segment, const Some&, const float* q, int padded,
               float* scores) const {
        score_floats<T, G>(segment, q, padded, task.kv->head_dim, scores);
        for (int h = 0; h < G; ++h) scale_by(scores + h * kSegment, task.kv->key_scales, segment);
    }
    void add_values(const AttentionTask& task, const Some& segment, const Some& next, float* weights,
                    const float* shrink, float* out, int padded) const {
        for (int h = 0; h < G; ++h) scale_by(weights + h * kSegment, task.kv->value_scales, segment);
        add_all_values<T, G>(segment, next, weights, shrink, out, padded, task.kv->head_dim);
    }
};

#if CUE_WORDS
#include "attention_pairs.h"
#endif

// G heads from `head` of the group on.
template <int G, class Products>
void attend_heads(const AttentionTask& task, int head) {
    const int n = task.kv->head_dim, padded = (n + W - 1) / W * W;
    float* const q = task.scratch;
    float* const out = q + kHeadsMax * padded;
    float* const weights = out + kHeadsMax * padded;
    float most[G], total[G], shrink[G];
    for (int h = 0; h < G; ++h) {
        most[h] = -INFINITY, total[h] = 0.0f;
        for (int i = 0; i < padded; i += W) {
            const float* from = task.q + (head + h) * n + i;
            store(q + h * padded + i, mul(load_up_to(from, n - i), set1(task.scale)));
            store(out + h * padded + i, zero());
        }
    }
    // What comes after the context: it again for the next heads, or what the thread is likely to do next.
    const AttentionTask& following = head + G < task.group || task.following == nullptr ? task : *task.following;
    Products products;
    typename Products::Some segments[2];
    locate(task, task.begin, segments[0]);
    products.begin(task, q, segments[0]);
    for (int64_t begin = task.begin, turn = 0; begin < task.end; begin += kSegment, turn ^= 1) {
        const auto& segment = segments[turn];
        auto& next = segments[turn ^ 1];
        const int64_t after = begin + kSegment;
        if (after < task.end) locate(task, after, next);
        else locate(following, following.begin, next);
        products.score(task, segment, next, q, padded, weights);
        for (int h = 0; h < G; ++h) shrink[h] = soften(weights + h * kSegment, segment.count, most[h], total[h]);
        products.add_values(task, segment, next, weights, shrink, out, padded);
    }
    for (int h = 0; h < G; ++h) {
        float* to = task.out + (head + h) * n;
        float factor = 1.0f / total[h];
        if (task.partial != nullptr) {
            float* part = task.partial + (head + h) * (n + 2);
            part[0] = most[h], part[1] = total[h];
            to = part + 2, factor = 1.0f;
        }
        for (int i = 0; i < n; i += W) store_up_to(to + i, mul(load(out + h * padded + i), set1(factor)), n - i);
    }
}

template <template <int> class Products>
inline void attend_group(const AttentionTask& task) {
    int head = 0;
    for (; head + 4 <= task.group; head += 4) attend_heads<4, Products<4>>(task, head);
    switch (task.group - head) {
        case 3: return attend_heads<3, Products<3>>(task, head);
        case 2: return attend_heads<2, Products<2>>(task, head);
        case 1: return attend_heads<1, Products<1>>(task, head);
    }
}

template <int G>
using Float32Products = FloatProducts<float, G>;
template <int G>
using Bf16Products = FloatProducts<Bf16, G>;
template <int G>
using Int8Products = FloatProducts<int8_t, G>;

void attend_one(const AttentionTask& task) {
#if CUE_WORDS
    if (task.kv->paired && task.kv->type == kInt8) return attend_group<Int8PairProducts>(task);
#if CUE_X86_BF16
    if (task.kv->paired && task.kv->type == kBf16) return attend_group<Bf16PairProducts>(task);
#endif
#endif
    switch (task.kv->type) {
        case kFloat32: return attend_group<Float32Products>(task);
        case kBf16: return attend_group<Bf16Products>(task);
        case kInt8: return attend_group<Int8Products>(task);
    }
}

// Floats that `attend_one` and `attend_tile` need.
size_t scratch_one(int head_dim) {
    return static_cast<size_t>(kHeadsMax) * (2 * ((head_dim + W - 1) / W * W) + kSegment);
}
