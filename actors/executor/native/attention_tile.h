// Included by attention_kernel.h: a tile of query tokens against the context, a tile of keys at a time. A row is one
// query token of one query head; all rows of a tile share a KV head.

constexpr int kRows = kRegisters == 32 ? 6 : 3;  // rows per micro-kernel: kRows * kWide sums live in registers
constexpr int kWide = 4;                         // registers per micro-kernel
constexpr int kKeys = kWide * W;                 // keys per tile

// Memory of one tile, all rows padded with zeros to whole registers and to a whole number of micro-kernels.
struct Tile {
    int rows, rows_padded, n, padded;
    float* q;       // [rows, padded], scaled
    float* out;     // [rows, padded], not yet divided
    float* weights; // [rows, kKeys]
    float* keys;    // [padded, kKeys]: dimension by dimension
    float* values;  // [kKeys, padded]
    float* most;    // [rows]
    float* total;   // [rows, W]: one sum for each lane
    float* shrink;  // [rows]
    // By words:
    float* scales;                    // of the rows of q, [rows]; of keys, [kKeys]; of values, [kKeys]
    float* weight_scales;             // [rows]
    const void* key_groups[kWide];    // where each W keys lie, as pairs of dimensions
    int64_t key_step;                 // so many numbers from pair to pair
    const void* value_groups[kWide];  // where each W values lie, as pairs of tokens
};

inline size_t lay_out(Tile& tile, int rows, int n, float* scratch) {
    tile.rows = rows, tile.n = n;
    tile.rows_padded = (rows + kRows - 1) / kRows * kRows;
    tile.padded = (n + W - 1) / W * W;
    const size_t row_count = static_cast<size_t>(tile.rows_padded), padded = static_cast<size_t>(tile.padded);
    float* at = scratch;
    const auto take = [&at](float*& part, size_t size) { part = at, at += size; };
    take(tile.q, row_count * padded);
    take(tile.out, row_count * padded);
    take(tile.weights, row_count * kKeys);
    take(tile.keys, padded * kKeys);
    take(tile.values, padded * kKeys);
    take(tile.most, row_count);
    take(tile.total, row_count * W);
    take(tile.shrink, row_count);
    take(tile.scales, row_count + 2 * kKeys);
    take(tile.weight_scales, row_count);
    return static_cast<size_t>(at - scratch);
}

inline void begin_tile(const AttentionTask& task, Tile& tile) {
    const size_t size = static_cast<size_t>(tile.rows_padded) * static_cast<size_t>(tile.padded);
    std::memset(tile.q, 0, size * sizeof(float));
    std::memset(tile.out, 0, size * sizeof(float));
    std::memset(tile.total, 0, static_cast<size_t>(tile.rows_padded) * W * sizeof(float));
    for (int r = 0; r < tile.rows_padded; ++r) tile.most[r] = -INFINITY;
    for (int r = 0; r < tile.rows; ++r) {
        const float* from = task.q + (r / task.group) * task.q_stride + (r % task.group) * tile.n;
        for (int i = 0; i < tile.n; i += W)
            store(tile.q + r * tile.padded + i, mul(load_up_to(from + i, tile.n - i), set1(task.scale)));
    }
}

// Keys transposed and values as floats, `count` of them; zeros behind them, for what lies there may be NaN.
template <class T>
CUE_APART void fetch(const AttentionTask& task, int64_t begin, int count, Tile& tile) {
    const CueKv& kv = *task.kv;
    const T* keys[kKeys];
    float scales[kKeys];
    int64_t entry = begin / kv.block_size, offset = begin % kv.block_size;
    for (int t = 0; t < count; ++t) {
        const int64_t index = run_of(kv, task.table[entry], task.kv_head) + offset;
        keys[t] = static_cast<const T*>(kv.keys) + index * tile.n;
        scales[t] = sizeof(T) == 1 ? kv.key_scales[index] : 1.0f;
        const T* value = static_cast<const T*>(kv.values) + index * tile.n;
        const F scale = set1(sizeof(T) == 1 ? kv.value_scales[index] : 1.0f);
        for (int i = 0; i < tile.padded; i += W) {
            const F some = load_up_to(value + i, tile.n - i);
            store(tile.values + t * tile.padded + i, sizeof(T) == 1 ? mul(some, scale) : some);
        }
        if (++offset == kv.block_size) ++entry, offset = 0;
    }
    const size_t behind = static_cast<size_t>(kKeys - count) * static_cast<size_t>(tile.padded);
    std::memset(tile.values + count * tile.padded, 0, behind * sizeof(float));
    for (int t = 0; t < kKeys; t += W)
        for (int i = 0; i < tile.padded; i += W) {
            F square[W];
            for (int r = 0; r < W; ++r) {
                if (t + r >= count) square[r] = zero();
                else square[r] = load_up_to(keys[t + r] + i, tile.n - i);
                if (sizeof(T) == 1 && t + r < count) square[r] = mul(square[r], set1(scales[t + r]));
            }
            transpose(square);
            for (int r = 0; r < W; ++r) store(tile.keys + (i + r) * kKeys + t, square[r]);
        }
}

// A product of kRows rows of `left` [kRows, depth] with `right` [depth, N registers].
template <int N>
inline void multiply(const float* left, int left_stride, const float* right, int right_stride, int depth,
                     F (&sum)[kRows][N]) {
    for (int k = 0; k < depth; ++k) {
        F some[N];
        for (int c = 0; c < N; ++c) some[c] = load(right + k * right_stride + c * W);
        for (int r = 0; r < kRows; ++r) {
            const F one = set1(left[r * left_stride + k]);
            for (int c = 0; c < N; ++c) sum[r][c] = fma(one, some[c], sum[r][c]);
        }
    }
}

template <int N>
inline void score_rows(Tile& tile, int row) {
    F sum[kRows][N];
    for (auto& registers : sum)
        for (F& one : registers) one = zero();
    multiply<N>(tile.q + row * tile.padded, tile.padded, tile.keys, kKeys, tile.n, sum);
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < N; ++c) store(tile.weights + (row + r) * kKeys + c * W, sum[r][c]);
}

// The running softmax of one row that sees the first `seen` keys of the tile, perhaps none.
inline void soften_row(Tile& tile, int r, int64_t seen) {
    float* const scores = tile.weights + r * kKeys;
    F part[kWide], high = set1(tile.most[r]);
    for (int c = 0; c < kWide; ++c) {
        const int64_t left = seen - c * W;
        part[c] = load(scores + c * W);
        if (left < W) part[c] = choose_first(left < 0 ? 0 : static_cast<int>(left), part[c], set1(-INFINITY));
        high = max(high, part[c]);
    }
    const float now = largest(high);
    F added = zero();
    for (int c = 0; c < kWide; ++c) {
        part[c] = exp2(sub(part[c], set1(now)));  // 0 where nothing is seen
        store(scores + c * W, part[c]);
        added = add(added, part[c]);
    }
    const F shrink = exp2(set1(tile.most[r] - now));
    tile.shrink[r] = front(shrink);
    tile.most[r] = now;
    store(tile.total + r * W, fma(load(tile.total + r * W), shrink, added));
}

template <int N>
inline void add_columns(Tile& tile, int count, int row, int i) {
    F sum[kRows][N];
    float* const out = tile.out + row * tile.padded + i;
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < N; ++c) sum[r][c] = mul(load(out + r * tile.padded + c * W), set1(tile.shrink[row + r]));
    multiply<N>(tile.weights + row * kKeys, kKeys, tile.values + i, tile.padded, count, sum);
    for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < N; ++c) store(out + r * tile.padded + c * W, sum[r][c]);
}

inline void add_rows(Tile& tile, int count, int row) {
    int i = 0;
    for (; i + kWide * W <= tile.padded; i += kWide * W) add_columns<kWide>(tile, count, row, i);
    for (; i < tile.padded; i += W) add_columns<1>(tile, count, row, i);
}

inline void fetch_any(const AttentionTask& task, int64_t begin, int count, Tile& tile) {
    switch (task.kv->type) {
        case kFloat32: return fetch<float>(task, begin, count, tile);
        case kBf16: return fetch<Bf16>(task, begin, count, tile);
        case kInt8: return fetch<int8_t>(task, begin, count, tile);
    }
}

// How a tile multiplies, in floats.
struct FloatTile {
    static void begin(Tile&) {}
    static void fetch(const AttentionTask& task, int64_t begin, int count, Tile& tile) {
        fetch_any(task, begin, count, tile);
    }
    template <int N>
    static void score(Tile& tile, int row) {
        score_rows<N>(tile, row);
    }
    static void weigh(Tile&, int) {}
    static void add(Tile& tile, int count, int row) { add_rows(tile, count, row); }
};

// One step of kRows rows. Row r sees the first seen(r) keys of the tile, later rows never fewer.
template <class Products, class Seen>
inline void step_rows(Tile& tile, int count, int row, Seen seen) {
    const int64_t most = seen(row + kRows - 1);
    if (most <= 0) return;
    const int needed = most < count ? static_cast<int>(most) : count;
    if (needed <= kWide / 2 * W) Products::template score<kWide / 2>(tile, row);
    else Products::template score<kWide>(tile, row);
    for (int r = row; r < row + kRows; ++r) {
        soften_row(tile, r, seen(r));
        Products::weigh(tile, r);
    }
    Products::add(tile, needed, row);
}

// Returns whether what it stores is finite.
inline bool end_tile(const AttentionTask& task, Tile& tile) {
    F poison = zero();
    for (int r = 0; r < tile.rows; ++r) {
        float* to = task.out + (r / task.group) * task.out_stride + (r % task.group) * tile.n;
        const F factor = set1(1.0f / sum(load(tile.total + r * W)));
        for (int i = 0; i < tile.n; i += W) {
            const F some = mul(load(tile.out + r * tile.padded + i), factor);
            store_up_to(to + i, some, tile.n - i);
            poison = fma(some, zero(), poison);
        }
    }
    return sum(poison) == 0.0f;
}

#if CUE_WORDS
#include "attention_tile_words.h"
#endif

// As `end_tile`.
template <class Products>
inline bool attend_queries(const AttentionTask& task) {
    Tile tile;
    lay_out(tile, task.queries * task.group, task.kv->head_dim, task.scratch);
    begin_tile(task, tile);
    Products::begin(tile);
    for (int64_t begin = 0; begin < task.end; begin += kKeys) {
        const int count = static_cast<int>(task.end - begin < kKeys ? task.end - begin : kKeys);
        Products::fetch(task, begin, count, tile);
        const auto seen = [&](int r) {
            // The rows of padding see what the last query sees.
            const int query = (r < tile.rows ? r : tile.rows - 1) / task.group;
            return task.end - task.queries + query + 1 - begin;
        };
        for (int row = 0; row < tile.rows_padded; row += kRows) step_rows<Products>(tile, count, row, seen);
    }
    return end_tile(task, tile);
}

// A value that is not finite spoils all rows of a tile, for no weight of 0 takes it away. Then every query is looked at
// by itself, up to the first that sees one.
template <class Products>
inline void attend_tile_by(const AttentionTask& task) {
    if (attend_queries<Products>(task)) return;
    AttentionTask one = task;
    one.queries = 1, one.end -= task.queries;
    for (int i = 0; i < task.queries; ++i, one.q += one.q_stride, one.out += one.out_stride) {
        ++one.end;
        if (!attend_queries<Products>(one)) return;
    }
}

void attend_tile(const AttentionTask& task) {
#if CUE_WORDS
    if (task.kv->paired && task.kv->type == kInt8) return attend_tile_by<WordTile<Int8Words>>(task);
#if CUE_X86_BF16
    if (task.kv->type == kBf16 && has_bf16() && task.kv->head_dim % kWords == 0)
        return attend_tile_by<WordTile<Bf16Words>>(task);
#endif
#endif
    attend_tile_by<FloatTile>(task);
}

size_t scratch_tile(int rows, int head_dim) {
    Tile tile;
    return lay_out(tile, rows, head_dim, nullptr);
}
