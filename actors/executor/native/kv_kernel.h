// Requires kv_pool.h. Included by foreach_isa.h: storing keys and values, and rotary embedding.

// dst[i] = src[i] * factor, for n values of one head of one token.
template <class T>
inline void store_scaled(T* dst, const float* src, int n, float factor) {
    const F scale = broadcast(factor);
    for (int i = 0; i < n; i += W) {
        const F values = mul(load_up_to(src + i, n - i), scale);
        store_up_to(dst + i, sizeof(T) == 1 ? max(values, broadcast(-127.0f)) : values, n - i);  // NaN becomes -127
    }
}

// The largest magnitude; NaN if a value is not finite.
inline float max_abs(const float* x, int n) {
    F high = zero(), nonfinite = zero();
    for (int i = 0; i < n; i += W) {
        const F values = load_up_to(x + i, n - i);
        high = max(high, abs(values));
        nonfinite = fma(values, zero(), nonfinite);
    }
    return lane_max(high) + lane_sum(nonfinite);
}

constexpr int kDimsPerStep = 2 * kPairsPerRegister;

// Store kDimsPerStep dimensions of a key, whose pairs are `pair_stride` values apart.
template <class T>
inline void scatter_key_pairs(T* to, int64_t pair_stride, const T* from) {
    for (int i = 0; i < kDimsPerStep; i += 2, to += pair_stride) std::memcpy(to, from + i, 2 * sizeof(T));
}

// Store kDimsPerStep dimensions of a value as element `half` (0 or 1) of their pairs. The other elements are not
// touched: another thread may be writing them.
template <class T>
inline void scatter_value_pairs(T* to, int half, const T* from) {
    for (int i = 0; i < kDimsPerStep; ++i) to[2 * i + half] = from[i];
}

enum Side { kKeys, kValues };

// Store one head of one token. `head_begin` is the position of the block's first token of that head, counted in tokens.
template <Side kSide, class T>
inline void store_head(const CueKv& kv, T* data, int64_t head_begin, int64_t offset, const float* x, float factor) {
    const int n = kv.head_dim;
    data += head_begin * n;
    if (!kv.vnni_pairs) return store_scaled(data + offset * n, x, n, factor);
    for (int i = 0; i < n; i += kDimsPerStep) {
        T values[kDimsPerStep];
        store_scaled(values, x + i, kDimsPerStep, factor);
        if (kSide == kKeys)
            scatter_key_pairs(data + int64_t{i} * kv.block_size + 2 * offset, 2 * kv.block_size, values);
        else scatter_value_pairs(data + offset / 2 * 2 * n + 2 * i, static_cast<int>(offset % 2), values);
    }
}

// Quantize and store one head of one token. The scale is not finite if a value is not, so that results show it.
template <Side kSide>
inline void store_int8(const CueKv& kv, void* data, float* scales, int64_t head_begin, int64_t offset, const float* x) {
    const float high = max_abs(x, kv.head_dim);
    const float factor = high >= 127.0f * FLT_MIN ? 127.0f / high : 0.0f;  // avoids overflow
    scales[head_begin + offset] = high / 127.0f;
    store_head<kSide>(kv, static_cast<int8_t*>(data), head_begin, offset, x, factor);
}

template <Side kSide>
inline void store_as_type(const CueKv& kv, void* data, float* scales, int64_t head_begin, int64_t offset,
                          const float* x) {
    switch (kv.type) {
        case kFloat32: return store_head<kSide>(kv, static_cast<float*>(data), head_begin, offset, x, 1.0f);
        case kBf16: return store_head<kSide>(kv, static_cast<Bf16*>(data), head_begin, offset, x, 1.0f);
        case kInt8: return store_int8<kSide>(kv, data, scales, head_begin, offset, x);
    }
}

void write_token(const CueKv& kv, int64_t block, int64_t offset, const float* keys, const float* values) {
    for (int head = 0; head < kv.kv_heads; ++head, keys += kv.head_dim, values += kv.head_dim) {
        const int64_t head_begin = head_tokens_begin(kv, block, head);
        store_as_type<kKeys>(kv, kv.keys, kv.key_scales, head_begin, offset, keys);
        store_as_type<kValues>(kv, kv.values, kv.value_scales, head_begin, offset, values);
    }
}

// Rotate each head: (a, b) becomes (a cos - b sin, b cos + a sin), with a and b the two halves of the rotated
// dimensions.
void rope_heads(float* x, int heads, int head_dim, int half, const float* cosines, const float* sines) {
    for (int head = 0; head < heads; ++head, x += head_dim) {
        for (int i = 0; i < half; i += W) {
            const int n = half - i;
            const F c = load_up_to(cosines + i, n), s = load_up_to(sines + i, n);
            const F a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
            store_up_to(x + i, sub(mul(a, c), mul(b, s)), n);
            store_up_to(x + half + i, fma(b, c, mul(a, s)), n);
        }
    }
}
