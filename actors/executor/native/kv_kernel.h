// Requires kv_pool.h. Included by each_isa.h.

// dst[i] = src[i] * factor for one head of one token.
template <class T>
inline void put(T* dst, const float* src, int n, float factor) {
    const F by = set1(factor);
    for (int i = 0; i < n; i += W) {
        const F some = mul(load_up_to(src + i, n - i), by);
        store_up_to(dst + i, sizeof(T) == 1 ? max(some, set1(-127.0f)) : some, n - i);  // no byte is made of NaN
    }
}

// NaN if any of them is not finite.
inline float largest_magnitude(const float* x, int n) {
    F most = zero(), poison = zero();
    for (int i = 0; i < n; i += W) {
        const F some = load_up_to(x + i, n - i);
        most = max(most, abs(some));
        poison = fma(some, zero(), poison);
    }
    return largest(most) + sum(poison);
}

constexpr int kSome = 2 * kPairLanes;

// Some dimensions of a key: their pairs lie `apart`.
template <class T>
inline void spread_key(T* to, int64_t apart, const T* from) {
    for (int i = 0; i < kSome; i += 2, to += apart) std::memcpy(to, from + i, 2 * sizeof(T));
}

// Some dimensions of a value into the first or second places of pairs. What stands in the others is left alone, for
// another thread may be writing there.
template <class T>
inline void spread_value(T* to, int second, const T* from) {
    for (int i = 0; i < kSome; ++i) to[2 * i + second] = from[i];
}

enum Side { kKeys, kValues };

// One head of one token: `run` is where the tokens of the block and head begin.
template <Side kSide, class T>
inline void put_head(const CueKv& kv, T* data, int64_t run, int64_t offset, const float* x, float factor) {
    const int n = kv.head_dim;
    data += run * n;
    if (!kv.paired) return put(data + offset * n, x, n, factor);
    for (int i = 0; i < n; i += kSome) {
        T some[kSome];
        put(some, x + i, kSome, factor);
        if (kSide == kKeys) spread_key(data + int64_t{i} * kv.block_size + 2 * offset, 2 * kv.block_size, some);
        else spread_value(data + offset / 2 * 2 * n + 2 * i, static_cast<int>(offset % 2), some);
    }
}

// A head with a number that is not finite gets a scale that is not either, so that whoever reads it notices.
template <Side kSide>
inline void put_int8(const CueKv& kv, void* data, float* scales, int64_t run, int64_t offset, const float* x) {
    const float most = largest_magnitude(x, kv.head_dim);
    const float factor = most >= 127.0f * FLT_MIN ? 127.0f / most : 0.0f;  // of less, it overflows
    scales[run + offset] = most / 127.0f;
    put_head<kSide>(kv, static_cast<int8_t*>(data), run, offset, x, factor);
}

template <Side kSide>
inline void put_any(const CueKv& kv, void* data, float* scales, int64_t run, int64_t offset, const float* x) {
    switch (kv.type) {
        case kFloat32: return put_head<kSide>(kv, static_cast<float*>(data), run, offset, x, 1.0f);
        case kBf16: return put_head<kSide>(kv, static_cast<Bf16*>(data), run, offset, x, 1.0f);
        case kInt8: return put_int8<kSide>(kv, data, scales, run, offset, x);
    }
}

void write_token(const CueKv& kv, int64_t block, int64_t offset, const float* keys, const float* values) {
    for (int head = 0; head < kv.kv_heads; ++head, keys += kv.head_dim, values += kv.head_dim) {
        const int64_t run = run_of(kv, block, head);
        put_any<kKeys>(kv, kv.keys, kv.key_scales, run, offset, keys);
        put_any<kValues>(kv, kv.values, kv.value_scales, run, offset, values);
    }
}

// (a, b) -> (a cos - b sin, b cos + a sin) with a and b the two halves of the turned part.
void turn(float* x, int heads, int head_dim, int half, const float* cosines, const float* sines) {
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
