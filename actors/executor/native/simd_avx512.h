// AVX-512: registers F of W = 16 floats, 32 registers.
using F = __m512;
constexpr int W = 16;
constexpr int kRegisters = 32;

inline F zero() { return _mm512_setzero_ps(); }
inline F broadcast(float x) { return _mm512_set1_ps(x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// If an operand is NaN: `b`.
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline float lane_sum(F a) { return _mm512_reduce_add_ps(a); }
inline float first_lane(F a) { return _mm512_cvtss_f32(a); }
inline float lane_max(F a) { return _mm512_reduce_max_ps(a); }

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const Bf16* p) {
    const __m256i first_half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(first_half), 16));
}
inline F load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __mmask16 first_lanes_mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline F load_partial(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes_mask(n), p); }
inline F load_partial(const Bf16* p, int n) {
    const __m256i first_half = _mm256_maskz_loadu_epi16(first_lanes_mask(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(first_half), 16));
}
inline F load_partial(const int8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes_mask(n), p)));
}
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline void store_partial(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first_lanes_mask(n), a); }

// `a` in the first n lanes, `b` in the others.
inline F blend_first(int n, F a, F b) {
    return _mm512_mask_blend_ps(n <= 0 ? 0 : n >= W ? 0xffff : first_lanes_mask(n), b, a);
}

// f * 2^n for an integer n; 0 if n < -126.
inline F scale_by_power(F f, F n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), f, n);
}
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline F unpack_low_64(F a, F b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
inline F unpack_high_64(F a, F b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

// Lane i is the sum of the lanes of rows[i].
inline F row_sums(const F* rows) {
    F quad_sums[4];
    for (int i = 0; i < 4; ++i) {
        const F* r = rows + 4 * i;
        const F a = _mm512_add_ps(_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
        const F b = _mm512_add_ps(_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
        quad_sums[i] = _mm512_add_ps(unpack_low_64(a, b), unpack_high_64(a, b));
    }
    F half_sums[2];
    for (int i = 0; i < 2; ++i) {
        const F a = quad_sums[2 * i], b = quad_sums[2 * i + 1];
        half_sums[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(half_sums[0], half_sums[1], 0x88),
                         _mm512_shuffle_f32x4(half_sums[0], half_sums[1], 0xdd));
}

// Transpose W rows of W lanes in place.
inline void transpose(F* rows) {
    F t[W];
    for (int i = 0; i < W; i += 4) {
        const F a = _mm512_unpacklo_ps(rows[i], rows[i + 1]), b = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
        const F c = _mm512_unpacklo_ps(rows[i + 2], rows[i + 3]), d = _mm512_unpackhi_ps(rows[i + 2], rows[i + 3]);
        t[i] = unpack_low_64(a, c), t[i + 1] = unpack_high_64(a, c), t[i + 2] = unpack_low_64(b, d),
        t[i + 3] = unpack_high_64(b, d);
    }
    for (int i = 0; i < 4; ++i) {
        const F a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
        const F c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
        const F d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
        rows[i] = _mm512_shuffle_f32x4(a, c, 0x88), rows[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        rows[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88), rows[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
}

// Round to the nearest bfloat16, ties to even, as torch does.
inline void store(Bf16* p, F a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    rounded = _mm512_mask_set1_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), kBf16Nan);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
// Round to the nearest integer, which must be in -128..127.
inline void store(int8_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}
