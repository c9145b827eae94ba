// AVX2: registers F of W = 8 floats, 16 registers.
using F = __m256;
constexpr int W = 8;
constexpr int kRegisters = 16;

inline F zero() { return _mm256_setzero_ps(); }
inline F broadcast(float x) { return _mm256_set1_ps(x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
// If an operand is NaN: `b`.
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline float lane_sum(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float first_lane(F a) { return _mm256_cvtss_f32(a); }
inline float lane_max(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load(const Bf16* p) {
    const __m128i first_half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(first_half), 16));
}
inline F load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline __m256i first_lanes_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F load_partial(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes_mask(n)); }
template <class T>
inline F load_partial(const T* p, int n) {
    T copy[W] = {};
    std::memcpy(copy, p, static_cast<size_t>(n) * sizeof(T));
    return load(copy);
}
inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline void store_partial(float* p, F a, int n) { _mm256_maskstore_ps(p, first_lanes_mask(n), a); }

// `a` in the first n lanes, `b` in the others.
inline F blend_first(int n, F a, F b) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(first_lanes_mask(n))); }

inline F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// f * 2^n for an integer n; 0 if n < -126.
inline F scale_by_power(F f, F n) {
    const F enough = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
    // In two steps: 2^128 is no float, while f * 2^128 may be.
    const __m256i whole = _mm256_cvtps_epi32(max(_mm256_set1_ps(-126.0f), _mm256_min_ps(_mm256_set1_ps(200.0f), n)));
    const __m256i first_half = _mm256_srai_epi32(whole, 1), second_half = _mm256_sub_epi32(whole, first_half);
    const __m256i bias = _mm256_set1_epi32(127);
    const F a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first_half, bias), 23));
    const F b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second_half, bias), 23));
    return _mm256_and_ps(mul(mul(f, a), b), enough);
}

inline F unpack_low_64(F a, F b) {
    return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}
inline F unpack_high_64(F a, F b) {
    return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

// Lane i is the sum of the lanes of rows[i].
inline F row_sums(const F* rows) {
    F quad_sums[2];
    for (int i = 0; i < 2; ++i) {
        const F* r = rows + 4 * i;
        const F a = add(_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
        const F b = add(_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
        quad_sums[i] = add(unpack_low_64(a, b), unpack_high_64(a, b));
    }
    return add(_mm256_permute2f128_ps(quad_sums[0], quad_sums[1], 0x20),
               _mm256_permute2f128_ps(quad_sums[0], quad_sums[1], 0x31));
}

// Transpose W rows of W lanes in place.
inline void transpose(F* rows) {
    F t[W];
    for (int i = 0; i < W; i += 4) {
        const F a = _mm256_unpacklo_ps(rows[i], rows[i + 1]), b = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
        const F c = _mm256_unpacklo_ps(rows[i + 2], rows[i + 3]), d = _mm256_unpackhi_ps(rows[i + 2], rows[i + 3]);
        t[i] = unpack_low_64(a, c), t[i + 1] = unpack_high_64(a, c), t[i + 2] = unpack_low_64(b, d),
        t[i + 3] = unpack_high_64(b, d);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}

// Round to the nearest bfloat16, ties to even, as torch does.
inline void store(Bf16* p, F a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(kBf16Nan), is_nan);
    const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
}
// Round to the nearest integer, which must be in -128..127.
inline void store(int8_t* p, F a) {
    const __m256i whole = _mm256_cvtps_epi32(a);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
