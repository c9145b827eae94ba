// Requires attention_task.h. Included by attention_kernel.h: attention of a tile of query tokens (prefill), in tiles of
// keys with a running softmax (FlashAttention, Dao et al. 2022). A row is one query token of one query head; all rows
// of a tile share a KV head.

// A micro-kernel has kMicroRows * kMicroRegisters sums in registers.
constexpr int kMicroRows = kRegisters == 32 ? 6 : 3;
constexpr int kMicroRegisters = 4;              // per row
constexpr int kTileKeys = kMicroRegisters * W;  // context tokens per tile of keys

// Scratch memory of one tile. Rows are padded with zeros to whole registers, and the number of rows to whole
// micro-kernels.
struct QueryTile {
    int rows, rows_padded, n, padded;
    float* q;            // [rows, padded], scaled
    float* out;          // [rows, padded], not yet divided by the sum of weights
    float* weights;      // [rows, kTileKeys]: scores, then weights
    float* keys;         // [padded, kTileKeys]: transposed
    float* values;       // [kTileKeys, padded]
    float* running_max;  // [rows]
    float* running_sum;  // [rows, W]: a sum per lane
    float* rescale;      // [rows]
    // Used with VNNI pairs only:
    float* vnni_scales;                         // of q [rows], of keys [kTileKeys], of values [kTileKeys]
    float* weight_scales;                       // [rows]
    const void* key_groups[kMicroRegisters];    // W keys each, in pairs of dimensions
    int64_t key_pair_stride;                    // distance in values between neighbouring pairs
    const void* value_groups[kMicroRegisters];  // W values each, in pairs of tokens
};

inline size_t lay_out(QueryTile& tile, int rows, int n, float* scratch) {
    tile.rows = rows, tile.n = n;
    tile.rows_padded = (rows + kMicroRows - 1) / kMicroRows * kMicroRows;
    tile.padded = (n + W - 1) / W * W;
    const size_t row_count = static_cast<size_t>(tile.rows_padded), padded = static_cast<size_t>(tile.padded);
    float* at = scratch;
    const auto take = [&at](float*& array, size_t size) { array = at, at += size; };
    take(tile.q, row_count * padded);
    take(tile.out, row_count * padded);
    take(tile.weights, row_count * kTileKeys);
    take(tile.keys, padded * kTileKeys);
    take(tile.values, padded * kTileKeys);
    take(tile.running_max, row_count);
    take(tile.running_sum, row_count * W);
    take(tile.rescale, row_count);
    take(tile.vnni_scales, row_count + 2 * kTileKeys);
    take(tile.weight_scales, row_count);
    return static_cast<size_t>(at - scratch);
}

inline void load_queries(const AttentionTask& task, QueryTile& tile) {
    const size_t size = static_cast<size_t>(tile.rows_padded) * static_cast<size_t>(tile.padded);
    std::memset(tile.q, 0, size * sizeof(float));
    std::memset(tile.out, 0, size * sizeof(float));
    std::memset(tile.running_sum, 0, static_cast<size_t>(tile.rows_padded) * W * sizeof(float));
    for (int r = 0; r < tile.rows_padded; ++r) tile.running_max[r] = -INFINITY;
    for (int r = 0; r < tile.rows; ++r) {
        const float* from = task.q + (r / task.group) * task.q_stride + (r % task.group) * tile.n;
        for (int i = 0; i < tile.n; i += W)
            store(tile.q + r * tile.padded + i, mul(load_up_to(from + i, tile.n - i), broadcast(task.scale)));
    }
}

// Copy `count` keys (transposed) and values as float32. Zeros follow them: unwritten memory may hold NaN.
template <class T>
CUE_NOINLINE void load_keys_values(const AttentionTask& task, int64_t begin, int count, QueryTile& tile) {
    const CueKv& kv = *task.kv;
    const T* keys[kTileKeys];
    float scales[kTileKeys];
    int64_t entry = begin / kv.block_size, offset = begin % kv.block_size;
    for (int t = 0; t < count; ++t) {
        const int64_t token_index = head_tokens_begin(kv, task.table[entry], task.kv_head) + offset;
        keys[t] = static_cast<const T*>(kv.keys) + token_index * tile.n;
        scales[t] = sizeof(T) == 1 ? kv.key_scales[token_index] : 1.0f;
        const T* value = static_cast<const T*>(kv.values) + token_index * tile.n;
        const F scale = broadcast(sizeof(T) == 1 ? kv.value_scales[token_index] : 1.0f);
        for (int i = 0; i < tile.padded; i += W) {
            const F lanes = load_up_to(value + i, tile.n - i);
            store(tile.values + t * tile.padded + i, sizeof(T) == 1 ? mul(lanes, scale) : lanes);
        }
        if (++offset == kv.block_size) ++entry, offset = 0;
    }
    const size_t padding = static_cast<size_t>(kTileKeys - count) * static_cast<size_t>(tile.padded);
    std::memset(tile.values + count * tile.padded, 0, padding * sizeof(float));
    for (int t = 0; t < kTileKeys; t += W)
        for (int i = 0; i < tile.padded; i += W) {
            F block[W];
            for (int r = 0; r < W; ++r) {
                if (t + r >= count) block[r] = zero();
                else block[r] = load_up_to(keys[t + r] + i, tile.n - i);
                if (sizeof(T) == 1 && t + r < count) block[r] = mul(block[r], broadcast(scales[t + r]));
            }
            transpose(block);
            for (int r = 0; r < W; ++r) store(tile.keys + (i + r) * kTileKeys + t, block[r]);
        }
}

// sum += left [kMicroRows, depth] @ right [depth, N registers].
template <int N>
inline void multiply_rows(const float* left, int left_stride, const float* right, int right_stride, int depth,
                          F (&sum)[kMicroRows][N]) {
    for (int k = 0; k < depth; ++k) {
        F right_row[N];
        for (int c = 0; c < N; ++c) right_row[c] = load(right + k * right_stride + c * W);
        for (int r = 0; r < kMicroRows; ++r) {
            const F left_value = broadcast(left[r * left_stride + k]);
            for (int c = 0; c < N; ++c) sum[r][c] = fma(left_value, right_row[c], sum[r][c]);
        }
    }
}

template <int N>
inline void score_rows(QueryTile& tile, int row) {
    F sum[kMicroRows][N];
    for (auto& registers : sum)
        for (F& lanes : registers) lanes = zero();
    multiply_rows<N>(tile.q + row * tile.padded, tile.padded, tile.keys, kTileKeys, tile.n, sum);
    for (int r = 0; r < kMicroRows; ++r)
        for (int c = 0; c < N; ++c) store(tile.weights + (row + r) * kTileKeys + c * W, sum[r][c]);
}

// One step of the running softmax for row r, which sees the first `visible` keys of the tile, or none if that is not
// positive.
inline void softmax_row(QueryTile& tile, int r, int64_t visible) {
    float* const scores = tile.weights + r * kTileKeys;
    F lanes[kMicroRegisters], high = broadcast(tile.running_max[r]);
    for (int c = 0; c < kMicroRegisters; ++c) {
        const int64_t remaining = visible - c * W;
        lanes[c] = load(scores + c * W);
        if (remaining < W)
            lanes[c] = blend_first(remaining < 0 ? 0 : static_cast<int>(remaining), lanes[c], broadcast(-INFINITY));
        high = max(high, lanes[c]);
    }
    const float new_max = lane_max(high);
    F step_sum = zero();
    for (int c = 0; c < kMicroRegisters; ++c) {
        lanes[c] = exp2(sub(lanes[c], broadcast(new_max)));  // 0 for keys that the row does not see
        store(scores + c * W, lanes[c]);
        step_sum = add(step_sum, lanes[c]);
    }
    const F rescale = exp2(broadcast(tile.running_max[r] - new_max));
    tile.rescale[r] = first_lane(rescale);
    tile.running_max[r] = new_max;
    store(tile.running_sum + r * W, fma(load(tile.running_sum + r * W), rescale, step_sum));
}

template <int N>
inline void accumulate_columns(QueryTile& tile, int count, int row, int i) {
    F sum[kMicroRows][N];
    float* const out = tile.out + row * tile.padded + i;
    for (int r = 0; r < kMicroRows; ++r)
        for (int c = 0; c < N; ++c)
            sum[r][c] = mul(load(out + r * tile.padded + c * W), broadcast(tile.rescale[row + r]));
    multiply_rows<N>(tile.weights + row * kTileKeys, kTileKeys, tile.values + i, tile.padded, count, sum);
    for (int r = 0; r < kMicroRows; ++r)
        for (int c = 0; c < N; ++c) store(out + r * tile.padded + c * W, sum[r][c]);
}

inline void accumulate_rows(QueryTile& tile, int count, int row) {
    int i = 0;
    for (; i + kMicroRegisters * W <= tile.padded; i += kMicroRegisters * W)
        accumulate_columns<kMicroRegisters>(tile, count, row, i);
    for (; i < tile.padded; i += W) accumulate_columns<1>(tile, count, row, i);
}

inline void load_keys_values_as(const AttentionTask& task, int64_t begin, int count, QueryTile& tile) {
    switch (task.kv->type) {
        case kFloat32: return load_keys_values<float>(task, begin, count, tile);
        case kBf16: return load_keys_values<Bf16>(task, begin, count, tile);
        case kInt8: return load_keys_values<int8_t>(task, begin, count, tile);
    }
}

// Policy of `attend_queries` for float32.
struct FloatTile {
    static void begin(QueryTile&) {}
    static void load_keys_values(const AttentionTask& task, int64_t begin, int count, QueryTile& tile) {
        load_keys_values_as(task, begin, count, tile);
    }
    template <int N>
    static void score(QueryTile& tile, int row) {
        score_rows<N>(tile, row);
    }
    static void prepare_weights(QueryTile&, int) {}
    static void accumulate(QueryTile& tile, int count, int row) { accumulate_rows(tile, count, row); }
};

// One tile of keys for kMicroRows rows. Row r sees the first visible(r) keys of the tile; visible(r) does not decrease
// with r.
template <class Policy, class Visible>
inline void process_rows(QueryTile& tile, int count, int row, Visible visible) {
    const int64_t visible_max = visible(row + kMicroRows - 1);
    if (visible_max <= 0) return;
    const int needed = visible_max < count ? static_cast<int>(visible_max) : count;
    if (needed <= kMicroRegisters / 2 * W) Policy::template score<kMicroRegisters / 2>(tile, row);
    else Policy::template score<kMicroRegisters>(tile, row);
    for (int r = row; r < row + kMicroRows; ++r) {
        softmax_row(tile, r, visible(r));
        Policy::prepare_weights(tile, r);
    }
    Policy::accumulate(tile, needed, row);
}

// Divide by the sums of weights and store. Returns whether all results are finite.
inline bool store_output(const AttentionTask& task, QueryTile& tile) {
    F nonfinite = zero();
    for (int r = 0; r < tile.rows; ++r) {
        float* to = task.out + (r / task.group) * task.out_stride + (r % task.group) * tile.n;
        const F factor = broadcast(1.0f / lane_sum(load(tile.running_sum + r * W)));
        for (int i = 0; i < tile.n; i += W) {
            const F lanes = mul(load(tile.out + r * tile.padded + i), factor);
            store_up_to(to + i, lanes, tile.n - i);
            nonfinite = fma(lanes, zero(), nonfinite);
        }
    }
    return lane_sum(nonfinite) == 0.0f;
}

#if CUE_VNNI
#include "attention_tile_vnni.h"
#endif

// Returns whether all results are finite.
template <class Policy>
inline bool attend_queries(const AttentionTask& task) {
    QueryTile tile;
    lay_out(tile, task.queries * task.group, task.kv->head_dim, task.scratch);
    load_queries(task, tile);
    Policy::begin(tile);
    for (int64_t begin = 0; begin < task.end; begin += kTileKeys) {
        const int count = static_cast<int>(task.end - begin < kTileKeys ? task.end - begin : kTileKeys);
        Policy::load_keys_values(task, begin, count, tile);
        const auto visible = [&](int r) {
            // Rows of padding see what the last query sees.
            const int query = (r < tile.rows ? r : tile.rows - 1) / task.group;
            return task.end - task.queries + query + 1 - begin;
        };
        for (int row = 0; row < tile.rows_padded; row += kMicroRows) process_rows<Policy>(tile, count, row, visible);
    }
    return store_output(task, tile);
}

// A value that is not finite makes all rows of a tile NaN, since 0 * NaN is NaN. In that case each query is computed
// alone, up to the first one that sees such a value.
template <class Policy>
inline void attend_tile_with(const AttentionTask& task) {
    if (attend_queries<Policy>(task)) return;
    AttentionTask single = task;
    single.queries = 1, single.end -= task.queries;
    for (int i = 0; i < task.queries; ++i, single.q += single.q_stride, single.out += single.out_stride) {
        ++single.end;
        if (!attend_queries<Policy>(single)) return;
    }
}

void attend_tile(const AttentionTask& task) {
#if CUE_VNNI
    if (task.kv->vnni_pairs && task.kv->type == kInt8) return attend_tile_with<VnniTile<Int8VnniDot>>(task);
#if CUE_X86_BF16
    if (task.kv->type == kBf16 && has_avx512_bf16() && task.kv->head_dim % kLanes16 == 0)
        return attend_tile_with<VnniTile<Bf16VnniDot>>(task);
#endif
#endif
    attend_tile_with<FloatTile>(task);
}

size_t tile_scratch_floats(int rows, int head_dim) {
    QueryTile tile;
    return lay_out(tile, rows, head_dim, nullptr);
}
