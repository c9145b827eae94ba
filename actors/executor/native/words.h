// Included by attention_kernel.h where the machine multiplies pairs of 16-bit words: 32 products an instruction instead
// of 16. int8 keys and values meet queries and weights of 15 bits and a scale, summed in int32, with half the work to
// widen bytes. What this rounds off is a hundredth of what int8 did. A product of a word and a byte is at most 2^22,
// and at most 2^8 of them meet in a sum: heads of up to kPairedHeadMax dimensions, and the tokens of a segment or tile.
// bfloat16 keys and values meet queries and weights rounded to bfloat16, summed in float32, and nothing is widened.
constexpr float kWordMax = 32767.0f;
constexpr int kWords = 2 * W;  // of 16 bits in a register
using Words = __m512i;

inline Words load_words(const int16_t* p) { return _mm512_loadu_si512(p); }
inline Words no_words() { return _mm512_setzero_si512(); }
// Two neighbours in every pair of lanes.
inline Words two_words(const int16_t* p) {
    int32_t both;
    std::memcpy(&both, p, sizeof both);
    return _mm512_set1_epi32(both);
}
// The first half of both, in turns: a0 b0 a1 b1 and so on; and the second half.
inline Words first_in_turns(Words a, Words b) {
    const Words order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    return _mm512_permutex2var_epi16(a, order, b);
}
inline Words second_in_turns(Words a, Words b) {
    const Words order = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53,
                                         21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    return _mm512_permutex2var_epi16(a, order, b);
}

// Rounded to the nearest whole numbers.
inline void store_words(int16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}

// The largest magnitude of floats in whole registers; NaN if any of them is not finite.
inline float magnitude(const float* x, int count) {
    F most = zero(), poison = zero();
    for (int i = 0; i < count; i += W) {
        const F some = load(x + i);
        most = max(most, abs(some));
        poison = fma(some, zero(), poison);
    }
    return largest(most) + sum(poison);
}

// x[i] becomes about words[i] * the scale that is returned, which is `most` / kWordMax. Both may be the same memory.
inline float narrow(const float* x, int count, float most, int16_t* words) {
    const F factor = set1(most > 0.0f ? kWordMax / most : 0.0f);
    for (int i = 0; i < count; i += W) store_words(words + i, mul(load(x + i), factor));
    return most / kWordMax;
}

inline int16_t* narrow_row(float* row) { return reinterpret_cast<int16_t*>(row); }

// How words stand for what is stored. Products of pairs are added to a lane of `Sums`: by no intrinsic, for compilers
// copy the sums of those from register to register.
struct Int8Words {
    using Stored = int8_t;
    using Sums = Words;
    static constexpr bool kScaled = true;  // what is stored has scales
    static Words load(const Stored* p) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static Sums none() { return no_words(); }
    static void add_products(Sums& sums, Words a, Words b) {
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    }
    static F floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }
    // Words in place of floats; what they are to be multiplied by.
    static float narrow_in_place(float* row, int count) {
        return narrow(row, count, magnitude(row, count), narrow_row(row));
    }
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
