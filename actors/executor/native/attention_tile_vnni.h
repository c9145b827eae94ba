// Requires attention_vnni_groups.h. Included by attention_tile.h: a tile of query tokens multiplied as pairs of 16-bit
// lanes; `Dot` (vnni_dot.h) says how. Arrays of `QueryTile` hold pairs in place of floats: rows of q and weights use
// the front half of their memory, keys are pairs of dimensions, values pairs of tokens.
static_assert(kTileKeys == kGroupsPerSegment * W, "a tile of keys is a run of groups");

// int8 only: scales of the loaded keys and values.
inline float* key_scales(QueryTile& tile) { return tile.vnni_scales + tile.rows_padded; }
inline float* value_scales(QueryTile& tile) { return key_scales(tile) + kTileKeys; }

inline Lanes16 as_lanes16(F bits) { return _mm512_castps_si512(bits); }
inline F as_floats(Lanes16 lanes) { return _mm512_castsi512_ps(lanes); }

// Point the tile at keys and values in a pool of VNNI pairs. Entries behind `count` are undefined.
template <class Dot>
CUE_NOINLINE void locate_pairs(const AttentionTask& task, int64_t begin, int count, QueryTile& tile) {
    TokenGroups<Dot> groups;
    locate_tokens(task, begin, groups);
    tile.key_pair_stride = 2 * task.kv->block_size;
    for (int g = 0; g < kMicroRegisters; ++g)
        tile.key_groups[g] = groups.keys[g], tile.value_groups[g] = groups.values[g];
    if (!Dot::kHasScales) return;
    for (int t = 0; t < kTileKeys; t += W) {
        const int64_t token_index = groups.token_index[t / W];
        store(key_scales(tile) + t, blend_first(count - t, load(task.kv->key_scales + token_index), zero()));
        store(value_scales(tile) + t, blend_first(count - t, load(task.kv->value_scales + token_index), zero()));
    }
}

#if CUE_X86_BF16
// Make VNNI pairs of `count` bfloat16 keys and values from a pool of rows. Zeros follow them.
CUE_NOINLINE void interleave_pairs(const AttentionTask& task, int64_t begin, int count, QueryTile& tile) {
    const CueKv& kv = *task.kv;
    const Bf16* keys[kTileKeys];
    const Bf16* values[kTileKeys];
    int64_t entry = begin / kv.block_size, offset = begin % kv.block_size;
    for (int t = 0; t < count; ++t) {
        const int64_t token_index = head_tokens_begin(kv, task.table[entry], task.kv_head) + offset;
        keys[t] = static_cast<const Bf16*>(kv.keys) + token_index * tile.n;
        values[t] = static_cast<const Bf16*>(kv.values) + token_index * tile.n;
        if (++offset == kv.block_size) ++entry, offset = 0;
    }
    for (int t = 0; t < count; t += 2)
        for (int i = 0; i < tile.n; i += W) {
            const Lanes16 a = as_lanes16(load(values[t] + i));
            const Lanes16 b = as_lanes16(t + 1 < count ? load(values[t + 1] + i) : zero());
            store(tile.values + t / 2 * tile.n + i, as_floats(_mm512_or_si512(_mm512_srli_epi32(a, 16), b)));
        }
    for (int t = 0; t < kTileKeys; t += W)
        for (int i = 0; i < tile.n; i += kLanes16) {
            F block[W];
            for (int r = 0; r < W; ++r)
                block[r] = t + r < count ? as_floats(Bf16VnniDot::load(keys[t + r] + i)) : zero();
            transpose(block);
            for (int r = 0; r < W; ++r) store(tile.keys + (i / 2 + r) * kTileKeys + t, block[r]);
        }
    tile.key_pair_stride = 2 * kTileKeys;
    for (int g = 0; g < kMicroRegisters; ++g) {
        tile.key_groups[g] = tile.keys + g * W;
        tile.value_groups[g] = tile.values + g * W / 2 * tile.n;
    }
}
#endif

// sum[r] += row r of `left` times `right`, pairs `from` to `to - 1`. Rows of `left` are `stride` floats apart; a pair
// takes the place of one float.
template <class Dot, int N, class Right>
inline void dot_micro(const float* left, int stride, int from, int to, Right right,
                      typename Dot::Accumulator (&sum)[kMicroRows][N]) {
    for (int k = from; k < to; ++k) {
        Lanes16 right_row[N];
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) right_row[c] = right(k, c);
#pragma GCC unroll 6
        for (int r = 0; r < kMicroRows; ++r) {
            const Lanes16 pair = as_lanes16(broadcast(left[r * stride + k]));
#pragma GCC unroll 4
            for (int c = 0; c < N; ++c) Dot::dot_accumulate(sum[r][c], pair, right_row[c]);
        }
    }
}

// Loops over arrays of registers have explicit unroll counts: compilers keep the array of a rolled loop in memory.
template <class Dot, int N>
inline void clear_accumulators(typename Dot::Accumulator (&sum)[kMicroRows][N]) {
#pragma GCC unroll 6
    for (int r = 0; r < kMicroRows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) sum[r][c] = Dot::zero_accumulator();
}

template <class Dot>
struct VnniTile {
    using T = typename Dot::Stored;

    static void begin(QueryTile& tile) {
        for (int r = 0; r < tile.rows_padded; ++r) {
            float* const row = tile.q + r * tile.n;
            tile.vnni_scales[r] = Dot::narrow_in_place(row, tile.n);
        }
    }

    static void load_keys_values(const AttentionTask& task, int64_t begin, int count, QueryTile& tile) {
#if CUE_X86_BF16
        if (!task.kv->vnni_pairs) return interleave_pairs(task, begin, count, tile);
#endif
        locate_pairs<Dot>(task, begin, count, tile);
    }

    template <int N>
    static void score(QueryTile& tile, int row) {
        const T* keys[N];
        for (int c = 0; c < N; ++c) keys[c] = static_cast<const T*>(tile.key_groups[c]);
        const int64_t step = tile.key_pair_stride;
        typename Dot::Accumulator sum[kMicroRows][N];
        clear_accumulators<Dot, N>(sum);
        dot_micro<Dot, N>(
            tile.q + row * tile.n, tile.n, 0, tile.n / 2, [&](int k, int c) { return Dot::load(keys[c] + k * step); },
            sum);
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) {
            const F scale = Dot::kHasScales ? load(key_scales(tile) + c * W) : broadcast(1.0f);
#pragma GCC unroll 6
            for (int r = 0; r < kMicroRows; ++r)
                store(tile.weights + (row + r) * kTileKeys + c * W,
                      mul(Dot::to_floats(sum[r][c]), mul(scale, broadcast(tile.vnni_scales[row + r]))));
        }
    }

    // Narrow the weights of row r, with one scale per row: weights that are small beside those of other tiles keep
    // their precision.
    static void prepare_weights(QueryTile& tile, int r) {
        float* const row = tile.weights + r * kTileKeys;
        for (int t = 0; Dot::kHasScales && t < kTileKeys; t += W)
            store(row + t, mul(load(row + t), load(value_scales(tile) + t)));
        tile.weight_scales[r] = Dot::narrow_in_place(row, kTileKeys);
    }

    template <int N>
    static void accumulate_columns(QueryTile& tile, int count, int row, int i) {
        const float* const weights = tile.weights + row * kTileKeys;
        typename Dot::Accumulator sum[kMicroRows][N];
        clear_accumulators<Dot, N>(sum);
        for (int g = 0; g * W < count; ++g) {
            const int from = g * W / 2, whole = count / 2, last = from + W / 2;
            const T* const values = static_cast<const T*>(tile.value_groups[g]) + 2 * i - from * 2 * tile.n;
            const auto pair_row = [&](int k, int c) { return Dot::load(values + k * 2 * tile.n + c * kLanes16); };
            dot_micro<Dot, N>(weights, kTileKeys, from, whole < last ? whole : last, pair_row, sum);
            if (count % 2 == 0 || whole >= last) continue;
            // An unwritten value may be NaN, and NaN times a weight of 0 is NaN.
            const auto first_of_pair = [&](int k, int c) {
                return _mm512_and_si512(pair_row(k, c), _mm512_set1_epi32(0xffff));
            };
            dot_micro<Dot, N>(weights, kTileKeys, whole, whole + 1, first_of_pair, sum);
        }
#pragma GCC unroll 6
        for (int r = 0; r < kMicroRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < N; ++c) {
                float* const to = tile.out + (row + r) * tile.n + i + c * W;
                const F before = mul(load(to), broadcast(tile.rescale[row + r]));
                const F scale = broadcast(Dot::kHasScales ? tile.weight_scales[row + r] : 1.0f);
                store(to, fma(Dot::to_floats(sum[r][c]), scale, before));
            }
    }

    static void accumulate(QueryTile& tile, int count, int row) {
        int i = 0;
        for (; i + kMicroRegisters * W <= tile.n; i += kMicroRegisters * W)
            accumulate_columns<kMicroRegisters>(tile, count, row, i);
        if (i < tile.n) accumulate_columns<2>(tile, count, row, i);
    }
};
