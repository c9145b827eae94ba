// Requires element_types.h. Included by attention_kernel.h: dot products of pairs of 16-bit lanes, 32 products per
// instruction instead of 16.
//
// int8 keys and values are widened to int16 and multiplied by queries and weights quantized to int16 with a scale,
// summed in int32 (vpdpwssd, AVX512-VNNI). The error of that quantization is a hundredth of that of int8. A product of
// an int16 and an int8 is at most 2^22, and a sum has at most 2^8 of them: head_dim <= kVnniInt8HeadDimMax, or the
// tokens of a segment or tile.
//
// bfloat16 keys and values are multiplied as stored by queries and weights rounded to bfloat16, summed in float32
// (vdpbf16ps, AVX512-BF16).
constexpr float kInt16Max = 32767.0f;
constexpr int kLanes16 = 2 * W;  // 16-bit lanes in a register
using Lanes16 = __m512i;

// A pair of neighbouring values, broadcast to all pairs of lanes.
inline Lanes16 broadcast_pair(const int16_t* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return _mm512_set1_epi32(both);
}

// Round to the nearest integers.
inline void store_int16(int16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}

// The largest magnitude of `count` floats, a multiple of W; not finite if one of them is not.
inline float max_abs(const float* x, int count) {
    __m512i largest = _mm512_setzero_si512();  // as bits: in the order of magnitudes, with NaN above all
    for (int i = 0; i < count; i += W) largest = _mm512_max_epi32(largest, _mm512_castps_si512(abs(load(x + i))));
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline int16_t* as_int16(float* row) { return reinterpret_cast<int16_t*>(row); }

// Quantize a row to int16, in place. Returns the scale, which is not finite if one of the floats is not.
inline float quantize_to_int16(float* row, int count) {
    const float largest = max_abs(row, count);
    const F factor = broadcast(largest >= kInt16Max * FLT_MIN ? kInt16Max / largest : 0.0f);  // avoids overflow
    for (int i = 0; i < count; i += W) store_int16(as_int16(row) + i, mul(load(row + i), factor));
    return largest / kInt16Max;
}

// How pairs of stored values are multiplied and added to the lanes of an `Accumulator`. Inline assembly, since
// compilers copy the accumulator of the intrinsics from register to register.
struct Int8VnniDot {
    using Stored = int8_t;
    using Accumulator = Lanes16;
    static constexpr bool kHasScales = true;  // per token and head
    static Lanes16 load(const Stored* p) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static Accumulator zero_accumulator() { return _mm512_setzero_si512(); }
    static void dot_accumulate(Accumulator& sums, Lanes16 a, Lanes16 b) {
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    }
    static F to_floats(Accumulator sums) { return _mm512_cvtepi32_ps(sums); }
    static float narrow_in_place(float* row, int count) { return quantize_to_int16(row, count); }
};

#if CUE_X86_BF16
struct Bf16VnniDot {
    using Stored = Bf16;
    using Accumulator = F;
    static constexpr bool kHasScales = false;
    static Lanes16 load(const Stored* p) { return _mm512_loadu_si512(p); }
    static Accumulator zero_accumulator() { return zero(); }
    static void dot_accumulate(Accumulator& sums, Lanes16 a, Lanes16 b) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    }
    static F to_floats(Accumulator sums) { return sums; }
    static float narrow_in_place(float* row, int count) {
        for (int i = 0; i < count; i += W) {
            F lanes = _mm512_loadu_ps(row + i);
            __asm__("vcvtneps2bf16 %0, %t0" : "+v"(lanes));
            _mm256_storeu_ps(row + i / 2, _mm512_castps512_ps256(lanes));
        }
        return 1.0f;
    }
};
#endif
