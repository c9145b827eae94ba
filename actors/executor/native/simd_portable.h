// Portable: vectors F of W = 4 floats by compiler extension, for any processor.
typedef float F __attribute__((vector_size(16)));
constexpr int W = 4;
#if defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

template <class Each>
inline F map_lanes(Each of) {
    return F{of(0), of(1), of(2), of(3)};
}

inline F broadcast(float x) { return F{x, x, x, x}; }
inline F zero() { return F{}; }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
// If an operand is NaN: `b`.
inline F max(F a, F b) { return a > b ? a : b; }
inline F abs(F a) {
    return map_lanes([&](int i) { return std::fabs(a[i]); });
}
inline float lane_sum(F a) { return (a[0] + a[1]) + (a[2] + a[3]); }
inline float first_lane(F a) { return a[0]; }
inline float lane_max(F a) {
    const float low = a[0] > a[1] ? a[0] : a[1];
    const float high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
}

inline F load(const float* p) {
    F a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
inline F load(const Bf16* p) {
    return map_lanes([=](int i) { return bf16_to_float(p[i]); });
}
inline F load(const int8_t* p) {
    return map_lanes([=](int i) { return static_cast<float>(p[i]); });
}
template <class T>
inline F load_partial(const T* p, int n) {
    T copy[W] = {};
    std::memcpy(copy, p, static_cast<size_t>(n) * sizeof(T));
    return load(copy);
}
inline void store(float* p, F a) { std::memcpy(p, &a, sizeof a); }
inline void store_partial(float* p, F a, int n) { std::memcpy(p, &a, static_cast<size_t>(n) * sizeof(float)); }

// `a` in the first n lanes, `b` in the others.
inline F blend_first(int n, F a, F b) {
    return map_lanes([&](int i) { return i < n ? a[i] : b[i]; });
}

// Values of 2^22 and more are returned unchanged; NaN passes.
inline F round(F a) {
    const F shift = broadcast(12582912.0f);  // 1.5 * 2^23: sums with it have no fraction
    return abs(a) < broadcast(4194304.0f) ? (a + shift) - shift : a;
}
inline float power_of_two(int32_t n) {
    const int32_t bits = (n + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
// f * 2^n for an integer n; 0 if n < -126.
inline F scale_by_power(F f, F n) {
    return map_lanes([&](int i) {
        const float exponent = n[i];
        // In two steps: 2^128 is no float, while f * 2^128 may be. NaN becomes 200: f is NaN as well.
        const int32_t whole = exponent < -126.0f ? -126 : exponent < 200.0f ? static_cast<int32_t>(exponent) : 200;
        const float scaled = f[i] * power_of_two(whole >> 1) * power_of_two(whole - (whole >> 1));
        return exponent < -126.0f ? 0.0f : scaled;
    });
}

// Lane i is the sum of the lanes of rows[i].
inline F row_sums(const F* rows) {
    return map_lanes([=](int i) { return lane_sum(rows[i]); });
}

// Transpose W rows of W lanes in place.
inline void transpose(F* rows) {
    const F a = rows[0], b = rows[1], c = rows[2], d = rows[3];
    for (int i = 0; i < W; ++i) rows[i] = F{a[i], b[i], c[i], d[i]};
}

inline void store(Bf16* p, F a) {
    for (int i = 0; i < W; ++i) p[i] = float_to_bf16(a[i]);
}
// Round to the nearest integer, which must be in -128..127.
inline void store(int8_t* p, F a) {
    for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(std::nearbyint(a[i]));
}
