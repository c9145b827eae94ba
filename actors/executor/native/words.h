// Included by attention_kernel.h where the machine multiplies pairs of 16-bit words: 32 products an instruction instead
// of 16. int8 keys and values meet queries and weights of 15 bits and a scale, summed in int32, with half the work to
// widen bytes. What this rounds off is a hundredth of what int8 did. A product of a word and a byte is at most 2^22,
// and at most 2^8 of them meet in a sum: heads of up to kPairedHeadMax dimensions, and the tokens of a segment or tile.
// bfloat16 keys and values meet queries and weights rounded to bfloat16, summed in float32, and nothing is widened.
constexpr float kWordMax = 32767.0f;
constexpr int kWords = 2 * W;  // of 16 bits in a register
using Words = __m512i;

// Two neighbours in every pair of lanes.
inline Words two_words(const int16_t* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return _mm512_set1_epi32(both);
}

// Rounded to the nearest whole numbers.
inline void store_words(int16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}

// The largest magnitude of floats in whole registers; not finite if any of them is not.
inline float magnitude(const float* x, int count) {
    __m512i most = _mm512_setzero_si512();  // the bits: their order is that of magnitudes, and NaN is above all
    for (int i = 0; i < count; i += W) most = _mm512_max_epi32(most, _mm512_castps_si512(abs(load(x + i))));
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline int16_t* narrow_row(float* row) { return reinterpret_cast<int16_t*>(row); }

// Words in place of floats; what they are to be multiplied by, which is not finite if one of the floats is not.
inline float narrow(float* row, int count) {
    const float most = magnitude(row, count);
    const F factor = set1(most >= kWordMax * FLT_MIN ? kWordMax / most : 0.0f);  // of less, it overflows
    for (int i = 0; i < count; i += W) store_words(narrow_row(row) + i, mul(load(row + i), factor));
    return most / kWordMax;
}

// How words stand for what is stored. Products of pairs are added to a lane of `Sums`: by no intrinsic, for compilers
// copy the sums of those from register to register.
struct Int8Words {
    using Stored = int8_t;
    using Sums = Words;
    static constexpr bool kScaled = true;  // what is stored has scales
    static Words load(const Stored* p) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static Sums none() { return _mm512_setzero_si512(); }
    static void add_products(Sums& sums, Words a, Words b) {
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    }
    static F floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }
    static float narrow_in_place(float* row, int count) { return narrow(row, count); }
};

#if CUE_X86_BF16
struct Bf16Words {
    using Stored = Bf16;
    using Sums = F;
    static constexpr bool kScaled = false;
    static Words load(const Stored* p) { return _mm512_loadu_si512(p); }
    static Sums none() { return zero(); }
    static void add_products(Sums& sums, Words a, Words b) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    }
    static F floats(Sums sums) { return sums; }
    static float narrow_in_place(float* row, int count) {
        for (int i = 0; i < count; i += W) {
            F some = _mm512_loadu_ps(row + i);
            __asm__("vcvtneps2bf16 %0, %t0" : "+v"(some));
            _mm256_storeu_ps(row + i / 2, _mm512_castps512_ps256(some));
        }
        return 1.0f;
    }
};
#endif
