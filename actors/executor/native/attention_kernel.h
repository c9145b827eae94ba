// Requires attention_task.h. Included by foreach_isa.h: attention of one query token (decode) to its context, with a
// running (online) softmax (Milakov and Gimelshein 2018). Keys and values are read once for up to kHeadsPerPass query
// heads that share a KV head.

// Prefetch `count` values. Neighbouring tokens of a block table lie in distant blocks, which no hardware prefetcher
// predicts.
template <class T>
inline void prefetch(const T* data, int count) {
    const char* bytes = reinterpret_cast<const char*>(data);
    // Into the second-level cache. Measured: memory throughput is 1.5 times that of prefetching into the first level,
    // or more.
    for (int i = 0; i < count * static_cast<int>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

#if CUE_VNNI
#include "vnni_dot.h"
#include "attention_vnni_groups.h"
#endif
#include "attention_tile.h"

constexpr int kInterleavedTokens = kRegisters / 8;  // independent dot products, to hide the latency of FMA
constexpr int kSegmentTokens = 64;                  // tokens per step of the running softmax
constexpr int kHeadsPerPass = 4;                    // query heads per pass over the context

// Pointers to the keys and values of kSegmentTokens tokens. Entries behind `count` repeat the last token, so that every
// pointer may be read.
template <class T>
struct Segment {
    int count;
    const T* keys[kSegmentTokens];
    const T* values[kSegmentTokens];
    int64_t token_index[kSegmentTokens];         // position in the pool, counted in tokens of one head
    bool scales_contiguous[kSegmentTokens / W];  // whether W neighbouring tokens lie side by side
};

template <class T>
CUE_NOINLINE void locate_tokens(const AttentionTask& task, int64_t begin, Segment<T>& segment) {
    const CueKv& kv = *task.kv;
    segment.count = static_cast<int>(task.end - begin < kSegmentTokens ? task.end - begin : kSegmentTokens);
    int64_t entry = begin / kv.block_size, offset = begin % kv.block_size;
    int t = 0;
    for (; t < segment.count; ++entry, offset = 0) {
        int64_t token_index = head_tokens_begin(kv, task.table[entry], task.kv_head) + offset;
        if (sizeof(T) == 1) {
            prefetch(kv.key_scales + token_index, static_cast<int>(kv.block_size - offset));
            prefetch(kv.value_scales + token_index, static_cast<int>(kv.block_size - offset));
        }
        for (; offset < kv.block_size && t < segment.count; ++offset, ++t, ++token_index) {
            segment.token_index[t] = token_index;
            segment.keys[t] = static_cast<const T*>(kv.keys) + token_index * kv.head_dim;
            segment.values[t] = static_cast<const T*>(kv.values) + token_index * kv.head_dim;
        }
    }
    for (; t < kSegmentTokens; ++t) {
        segment.token_index[t] = segment.token_index[t - 1];
        segment.keys[t] = segment.keys[t - 1], segment.values[t] = segment.values[t - 1];
    }
    for (int group = 0; sizeof(T) == 1 && group < kSegmentTokens / W; ++group) {
        const int64_t* token_index = segment.token_index + group * W;
        bool scales_contiguous = true;
        for (int i = 1; i < W; ++i) scales_contiguous &= token_index[i] == token_index[0] + i;
        segment.scales_contiguous[group] = scales_contiguous;
    }
}

template <class T>
inline void multiply_by_scales(float* values, const float* scales, const Segment<T>& segment) {
    if (sizeof(T) != 1) return;
    for (int t = 0; t < segment.count; t += W) {
        const int64_t* token_index = segment.token_index + t;
        if (segment.scales_contiguous[t / W]) {
            store(values + t, mul(load(values + t), load(scales + token_index[0])));
        } else {
            for (int i = 0; i < W && t + i < segment.count; ++i) values[t + i] *= scales[token_index[i]];
        }
    }
}

// sum[h][t] += q[h] * key[t], lane by lane, for one register of dimensions.
template <int G>
inline void accumulate_dots(const float* q, int padded, const F (&key)[kInterleavedTokens],
                            F (&sum)[G][kInterleavedTokens]) {
    for (int h = 0; h < G; ++h) {
        const F query = load(q + h * padded);
        for (int t = 0; t < kInterleavedTokens; ++t) sum[h][t] = fma(query, key[t], sum[h][t]);
    }
}

// scores[h * kSegmentTokens + t] = q[h] . keys[t], before scales. Entries behind the last token are undefined.
template <class T, int G>
CUE_NOINLINE void score_segment(const Segment<T>& segment, const float* q, int padded, int n, float* scores) {
    const int full = n / W * W;
    for (int t = 0; t < segment.count; t += W) {
        F dots[G][W];
        for (int first = 0; first < W; first += kInterleavedTokens) {
            const T* const* keys = segment.keys + t + first;
            for (int i = 0; i < kInterleavedTokens; ++i) prefetch(segment.values[t + first + i], n);
            F sum[G][kInterleavedTokens], key[kInterleavedTokens];
            for (int h = 0; h < G; ++h)
                for (int i = 0; i < kInterleavedTokens; ++i) sum[h][i] = zero();
            for (int d = 0; d < full; d += W) {
                for (int i = 0; i < kInterleavedTokens; ++i) key[i] = load(keys[i] + d);
                accumulate_dots<G>(q + d, padded, key, sum);
            }
            if (full < n) {
                for (int i = 0; i < kInterleavedTokens; ++i) key[i] = load_partial(keys[i] + full, n - full);
                accumulate_dots<G>(q + full, padded, key, sum);
            }
            for (int h = 0; h < G; ++h)
                for (int i = 0; i < kInterleavedTokens; ++i) dots[h][first + i] = sum[h][i];
        }
        for (int h = 0; h < G; ++h) store(scores + h * kSegmentTokens + t, row_sums(dots[h]));
    }
}

// out[h] = out[h] * rescale[h] + (sum over t of weights[h][t] * values[t]), N registers of dimensions from `i` on.
// Without kFullRegisters the register has `tail_lanes` dimensions.
template <class T, int G, int N, bool kFullRegisters>
inline void accumulate_values(const Segment<T>& segment, const Segment<T>& next, const float* weights,
                              const float* rescale, float* out, int padded, int i, int tail_lanes) {
    F sum[G][N];
    for (int h = 0; h < G; ++h)
        for (int c = 0; c < N; ++c) sum[h][c] = mul(load(out + h * padded + i + c * W), broadcast(rescale[h]));
    for (int t = 0; t < segment.count; ++t) {
        if (i == 0) prefetch(next.keys[t], padded);
        F value[N];
        for (int c = 0; c < N; ++c)
            value[c] =
                kFullRegisters ? load(segment.values[t] + i + c * W) : load_partial(segment.values[t] + i, tail_lanes);
        for (int h = 0; h < G; ++h) {
            const F weight = broadcast(weights[h * kSegmentTokens + t]);
            for (int c = 0; c < N; ++c) sum[h][c] = fma(weight, value[c], sum[h][c]);
        }
    }
    for (int h = 0; h < G; ++h)
        for (int c = 0; c < N; ++c) store(out + h * padded + i + c * W, sum[h][c]);
}

template <class T, int G>
CUE_NOINLINE void accumulate_all_values(const Segment<T>& segment, const Segment<T>& next, const float* weights,
                                        const float* rescale, float* out, int padded, int n) {
    constexpr int kRegistersPerPass = kRegisters / 8;
    int i = 0;
    for (; i + kRegistersPerPass * W <= n; i += kRegistersPerPass * W)
        accumulate_values<T, G, kRegistersPerPass, true>(segment, next, weights, rescale, out, padded, i, W);
    for (; i + W <= n; i += W) accumulate_values<T, G, 1, true>(segment, next, weights, rescale, out, padded, i, W);
    if (i < n) accumulate_values<T, G, 1, false>(segment, next, weights, rescale, out, padded, i, n - i);
}

// One step of the running softmax: turns `count` scores into weights relative to the new maximum, and returns the
// factor by which sums with earlier weights are to be multiplied.
CUE_NOINLINE float softmax_step(float* scores, int count, float& running_max, float& running_sum) {
    F high = broadcast(running_max);
    for (int t = 0; t < count; t += W) {
        const F lanes = blend_first(count - t, load(scores + t), broadcast(-INFINITY));
        store(scores + t, lanes);
        high = max(high, lanes);
    }
    const float new_max = lane_max(high), rescale = exp2_scalar(running_max - new_max);
    F step_sum = zero();
    for (int t = 0; t < count; t += W) {
        const F weight = exp2(sub(load(scores + t), broadcast(new_max)));
        store(scores + t, weight);
        step_sum = add(step_sum, weight);
    }
    running_max = new_max;
    running_sum = running_sum * rescale + lane_sum(step_sum);
    return rescale;
}

// Policy of `attend_heads` for rows of keys and values, multiplied in float32.
template <class T, int G>
struct FloatDecode {
    using Tokens = Segment<T>;

    void begin(const AttentionTask& task, float*, const Tokens& first) {
        for (const T* keys : first.keys) prefetch(keys, task.kv->head_dim);
    }
    void score(const AttentionTask& task, const Tokens& segment, const Tokens&, const float* q, int padded,
               float* scores) const {
        score_segment<T, G>(segment, q, padded, task.kv->head_dim, scores);
        for (int h = 0; h < G; ++h) multiply_by_scales(scores + h * kSegmentTokens, task.kv->key_scales, segment);
    }
    void accumulate_values(const AttentionTask& task, const Tokens& segment, const Tokens& next, float* weights,
                           const float* rescale, float* out, int padded) const {
        for (int h = 0; h < G; ++h) multiply_by_scales(weights + h * kSegmentTokens, task.kv->value_scales, segment);
        accumulate_all_values<T, G>(segment, next, weights, rescale, out, padded, task.kv->head_dim);
    }
};

#if CUE_VNNI
#include "attention_decode_vnni.h"
#endif

// Attention for query heads `head` to `head + G - 1` of the group.
template <int G, class Policy>
void attend_heads(const AttentionTask& task, int head) {
    const int n = task.kv->head_dim, padded = (n + W - 1) / W * W;
    float* const q = task.scratch;
    float* const out = q + kHeadsPerPass * padded;
    float* const weights = out + kHeadsPerPass * padded;
    float running_max[G], running_sum[G], rescale[G];
    for (int h = 0; h < G; ++h) {
        running_max[h] = -INFINITY, running_sum[h] = 0.0f;
        for (int i = 0; i < padded; i += W) {
            const float* from = task.q + (head + h) * n + i;
            store(q + h * padded + i, mul(load_up_to(from, n - i), broadcast(task.scale)));
            store(out + h * padded + i, zero());
        }
    }
    // Prefetched at the end of the context: its beginning, for the next heads, or the thread's likely next task.
    const AttentionTask& likely_next = head + G < task.group || task.likely_next == nullptr ? task : *task.likely_next;
    Policy policy;
    typename Policy::Tokens segments[2];
    locate_tokens(task, task.begin, segments[0]);
    policy.begin(task, q, segments[0]);
    for (int64_t begin = task.begin, current = 0; begin < task.end; begin += kSegmentTokens, current ^= 1) {
        const auto& segment = segments[current];
        auto& next = segments[current ^ 1];
        const int64_t after = begin + kSegmentTokens;
        if (after < task.end) locate_tokens(task, after, next);
        else locate_tokens(likely_next, likely_next.begin, next);
        policy.score(task, segment, next, q, padded, weights);
        for (int h = 0; h < G; ++h)
            rescale[h] = softmax_step(weights + h * kSegmentTokens, segment.count, running_max[h], running_sum[h]);
        policy.accumulate_values(task, segment, next, weights, rescale, out, padded);
    }
    for (int h = 0; h < G; ++h) {
        float* to = task.out + (head + h) * n;
        float factor = 1.0f / running_sum[h];
        if (task.partial != nullptr) {
            float* part = task.partial + (head + h) * (n + 2);
            part[0] = running_max[h], part[1] = running_sum[h];
            to = part + 2, factor = 1.0f;
        }
        for (int i = 0; i < n; i += W) store_up_to(to + i, mul(load(out + h * padded + i), broadcast(factor)), n - i);
    }
}

template <template <int> class Policy>
inline void attend_group(const AttentionTask& task) {
    int head = 0;
    for (; head + 4 <= task.group; head += 4) attend_heads<4, Policy<4>>(task, head);
    switch (task.group - head) {
        case 3: return attend_heads<3, Policy<3>>(task, head);
        case 2: return attend_heads<2, Policy<2>>(task, head);
        case 1: return attend_heads<1, Policy<1>>(task, head);
    }
}

template <int G>
using Float32Decode = FloatDecode<float, G>;
template <int G>
using Bf16Decode = FloatDecode<Bf16, G>;
template <int G>
using Int8Decode = FloatDecode<int8_t, G>;

void attend_decode(const AttentionTask& task) {
#if CUE_VNNI
    if (task.kv->vnni_pairs && task.kv->type == kInt8) return attend_group<Int8VnniDecode>(task);
#if CUE_X86_BF16
    if (task.kv->vnni_pairs && task.kv->type == kBf16) return attend_group<Bf16VnniDecode>(task);
#endif
#endif
    switch (task.kv->type) {
        case kFloat32: return attend_group<Float32Decode>(task);
        case kBf16: return attend_group<Bf16Decode>(task);
        case kInt8: return attend_group<Int8Decode>(task);
    }
}

// Scratch floats for `attend_decode`.
size_t decode_scratch_floats(int head_dim) {
    return static_cast<size_t>(kHeadsPerPass) * (2 * ((head_dim + W - 1) / W * W) + kSegmentTokens);
}
