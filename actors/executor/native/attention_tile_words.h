// Included by attention_tile.h: how a tile attends by products of words; P says what they stand for. Pairs of words
// stand where floats of the other way stand: q and weights in the front half of their rows, keys as pairs of
// dimensions, values as pairs of tokens.
static_assert(kKeys == kGroups * W, "a tile of keys is a run of groups");

// Of int8: the scales of the keys and values that were fetched.
inline float* key_scales(Tile& tile) { return tile.scales + tile.rows_padded; }
inline float* value_scales(Tile& tile) { return key_scales(tile) + kKeys; }

inline Words as_words(F bits) { return _mm512_castps_si512(bits); }
inline F as_bits(Words words) { return _mm512_castsi512_ps(words); }

// Where the keys and values of a paired pool lie; what lies there behind `count` is not to be used.
template <class P>
CUE_APART void find_pairs(const AttentionTask& task, int64_t begin, int count, Tile& tile) {
    Groups<P> groups;
    locate(task, begin, groups);
    tile.key_step = 2 * task.kv->block_size;
    for (int g = 0; g < kWide; ++g) tile.key_groups[g] = groups.keys[g], tile.value_groups[g] = groups.values[g];
    if (!P::kScaled) return;
    for (int t = 0; t < kKeys; t += W) {
        const int64_t index = groups.index[t / W];
        store(key_scales(tile) + t, choose_first(count - t, load(task.kv->key_scales + index), zero()));
        store(value_scales(tile) + t, choose_first(count - t, load(task.kv->value_scales + index), zero()));
    }
}

#if CUE_X86_BF16
// Pairs of the bfloat16 of a pool that is not paired, zeros behind `count` of them.
CUE_APART void make_pairs(const AttentionTask& task, int64_t begin, int count, Tile& tile) {
    const CueKv& kv = *task.kv;
    const Bf16* keys[kKeys];
    const Bf16* values[kKeys];
    int64_t entry = begin / kv.block_size, offset = begin % kv.block_size;
    for (int t = 0; t < count; ++t) {
        const int64_t index = run_of(kv, task.table[entry], task.kv_head) + offset;
        keys[t] = static_cast<const Bf16*>(kv.keys) + index * tile.n;
        values[t] = static_cast<const Bf16*>(kv.values) + index * tile.n;
        if (++offset == kv.block_size) ++entry, offset = 0;
    }
    for (int t = 0; t < count; t += 2)
        for (int i = 0; i < tile.n; i += W) {
            const Words a = as_words(load(values[t] + i));
            const Words b = as_words(t + 1 < count ? load(values[t + 1] + i) : zero());
            store(tile.values + t / 2 * tile.n + i, as_bits(_mm512_or_si512(_mm512_srli_epi32(a, 16), b)));
        }
    for (int t = 0; t < kKeys; t += W)
        for (int i = 0; i < tile.n; i += kWords) {
            F square[W];
            for (int r = 0; r < W; ++r)
                square[r] = t + r < count ? as_bits(Bf16Words::load(keys[t + r] + i)) : zero();
            transpose(square);
            for (int r = 0; r < W; ++r) store(tile.keys + (i / 2 + r) * kKeys + t, square[r]);
        }
    tile.key_step = 2 * kKeys;
    for (int g = 0; g < kWide; ++g) {
        tile.key_groups[g] = tile.keys + g * W;
        tile.value_groups[g] = tile.values + g * W / 2 * tile.n;
    }
}
#endif

// sum[r] += row r of `left` (floats apart, pairs side by side) times pairs `from` up to `to` of `right`.
template <class P, int N, class Right>
inline void multiply_pairs(const float* left, int stride, int from, int to, Right right,
                           typename P::Sums (&sum)[kRows][N]) {
    for (int k = from; k < to; ++k) {
        Words some[N];
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) some[c] = right(k, c);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) {
            const Words pair = as_words(set1(left[r * stride + k]));
#pragma GCC unroll 4
            for (int c = 0; c < N; ++c) P::add_products(sum[r][c], pair, some[c]);
        }
    }
}

// Loops over registers are unrolled by name: what is not, compilers keep in memory.
template <class P, int N>
inline void clear(typename P::Sums (&sum)[kRows][N]) {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) sum[r][c] = P::none();
}

template <class P>
struct WordTile {
    using T = typename P::Stored;

    static void begin(Tile& tile) {
        for (int r = 0; r < tile.rows_padded; ++r) {
            float* const row = tile.q + r * tile.n;
            tile.scales[r] = P::narrow_in_place(row, tile.n);
        }
    }

    static void fetch(const AttentionTask& task, int64_t begin, int count, Tile& tile) {
#if CUE_X86_BF16
        if (!task.kv->paired) return make_pairs(task, begin, count, tile);
#endif
        find_pairs<P>(task, begin, count, tile);
    }

    template <int N>
    static void score(Tile& tile, int row) {
        const T* keys[N];
        for (int c = 0; c < N; ++c) keys[c] = static_cast<const T*>(tile.key_groups[c]);
        const int64_t step = tile.key_step;
        typename P::Sums sum[kRows][N];
        clear<P, N>(sum);
        multiply_pairs<P, N>(tile.q + row * tile.n, tile.n, 0, tile.n / 2,
                             [&](int k, int c) { return P::load(keys[c] + k * step); }, sum);
#pragma GCC unroll 4
        for (int c = 0; c < N; ++c) {
            const F scale = P::kScaled ? load(key_scales(tile) + c * W) : set1(1.0f);
#pragma GCC unroll 6
            for (int r = 0; r < kRows; ++r)
                store(tile.weights + (row + r) * kKeys + c * W,
                      mul(P::floats(sum[r][c]), mul(scale, set1(tile.scales[row + r]))));
        }
    }

    // Each row has a scale of its own: what is small beside the weights of other tiles may be all that counts.
    static void weigh(Tile& tile, int r) {
        float* const row = tile.weights + r * kKeys;
        for (int t = 0; P::kScaled && t < kKeys; t += W)
            store(row + t, mul(load(row + t), load(value_scales(tile) + t)));
        tile.weight_scales[r] = P::narrow_in_place(row, kKeys);
    }

    template <int N>
    static void add_columns(Tile& tile, int count, int row, int i) {
        const float* const weights = tile.weights + row * kKeys;
        typename P::Sums sum[kRows][N];
        clear<P, N>(sum);
        for (int g = 0; g * W < count; ++g) {
            const int from = g * W / 2, whole = count / 2, last = from + W / 2;
            const T* const values = static_cast<const T*>(tile.value_groups[g]) + 2 * i - from * 2 * tile.n;
            const auto row_of = [&](int k, int c) { return P::load(values + k * 2 * tile.n + c * kWords); };
            multiply_pairs<P, N>(weights, kKeys, from, whole < last ? whole : last, row_of, sum);
            if (count % 2 == 0 || whole >= last) continue;
            // What nobody has written may be NaN, which no weight of 0 takes away.
            const auto half = [&](int k, int c) { return _mm512_and_si512(row_of(k, c), _mm512_set1_epi32(0xffff)); };
            multiply_pairs<P, N>(weights, kKeys, whole, whole + 1, half, sum);
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < N; ++c) {
                float* const to = tile.out + (row + r) * tile.n + i + c * W;
                const F before = mul(load(to), set1(tile.shrink[row + r]));
                const F scale = set1(P::kScaled ? tile.weight_scales[row + r] : 1.0f);
                store(to, fma(P::floats(sum[r][c]), scale, before));
            }
    }

    static void add(Tile& tile, int count, int row) {
        int i = 0;
        for (; i + kWide * W <= tile.n; i += kWide * W) add_columns<kWide>(tile, count, row, i);
        if (i < tile.n) add_columns<2>(tile, count, row, i);
    }
};
