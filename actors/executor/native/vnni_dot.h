// Included by attention_kernel.h where the machine multiplies pairs of 16-bit words: 32 products an instruction instead
// of 16. int8 keys and values meet queries and weights of 15 bits and a scale, summed in int32, with half the work to
// widen bytes. What this rounds off is a hundredth of what int8 did. A product of a word and a byte is at most 2^22,
// and at most 2^8 of them meet in a sum: heads of up to kPairedHeadMax dimensions, and the tokens of a segment or tile.
// bfloat16 keys and values meet queries and weights rounded to bfloat16, summed in float32, and nothing is widened.
constexpr float kInt16Max = 32767.0f;
constexpr int kLanes16 = 2 * W;  // of 16 bits in a register
using Lanes16 = __m512i;

// Two neighbours in every pair of lanes.
inline Lanes16 broadcast_pair(const int16_t* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return _mm512_set1_epi32(both);
}

// Rounded to the nearest whole numbers.
inline void store_int16(int16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}

// The largest magnitude of floats in whole registers; not finite if any of them is not.
inline float max_abs(const float* x, int count) {
    __m512i largest = _mm512_setzero_si512();  // the bits: their order is that of magnitudes, and NaN is above all
    for (int i = 0; i < count; i += W) largest = _mm512_max_epi32(largest, _mm512_castps_si512(abs(load(x + i))));
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline int16_t* as_int16(float* row) { return reinterpret_cast<int16_t*>(row); }

// Words in place of floats; what they are to be multiplied by, which is not finite if one of the floats is not.
inline float quantize_to_int16(float* row, int count) {
    const float largest = max_abs(row, count);
    const F factor = broadcast(largest >= kInt16Max * FLT_MIN ? kInt16Max / largest : 0.0f);  // of less, it overflows
    for (int i = 0; i < count; i += W) store_int16(as_int16(row) + i, mul(load(row + i), factor));
    return largest / kInt16Max;
}

// How words stand for what is stored. Products of pairs are added to a lane of `Accumulator`: by no intrinsic, for compilers
// copy the sums of those from register to register.
struct Int8VnniDot {
    using Stored = int8_t;
    using Accumulator = Lanes16;
    static constexpr bool kHasScales = true;  // what is stored has scales
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
