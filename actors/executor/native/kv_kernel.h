// Included by each_isa.h.

// dst[i] = src[i] * factor for one head of one token.
template <class T>
inline void put(T* dst, const float* src, int n, float factor) {
    const F by = set1(factor);
    for (int i = 0; i < n; i += W) store_up_to(dst + i, mul(load_up_to(src + i, n - i), by), n - i);
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

// A head with a number that is not finite gets the scale NaN, so that whoever reads it notices.
inline void put_int8(int8_t* dst, float* scale, const float* x, int n) {
    const float most = largest_magnitude(x, n);
    *scale = most / 127.0f;
    if (most > 0.0f && most < INFINITY) put(dst, x, n, 127.0f / most);
    else std::memset(dst, 0, static_cast<size_t>(n));
}

// `index` counts (block, head, token) of the pool.
inline void put_head(const CueKv& kv, void* data, float* scales, int64_t index, const float* x) {
    const int n = kv.head_dim;
    const int64_t at = index * n;
    if (kv.type == kFloat32) std::memcpy(static_cast<float*>(data) + at, x, static_cast<size_t>(n) * sizeof(float));
    else if (kv.type == kBf16) put(static_cast<Bf16*>(data) + at, x, n, 1.0f);
    else put_int8(static_cast<int8_t*>(data) + at, scales + index, x, n);
}

void write_token(const CueKv& kv, int64_t block, int64_t offset, const float* keys, const float* values) {
    for (int head = 0; head < kv.kv_heads; ++head) {
        const int64_t index = (block * kv.kv_heads + head) * kv.block_size + offset;
        put_head(kv, kv.keys, kv.key_scales, index, keys + head * kv.head_dim);
        put_head(kv, kv.values, kv.value_scales, index, values + head * kv.head_dim);
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
