// int4 weights in groups of 32 inputs times int8 rows: exact int32 sums of codes within a group, float32 over groups. A
// weight is code * scale + minimum, and the minimum's part of a group's product is minimum * the sum of its x.
// Codes are taken apart in registers, for each tile anew: measured, a panel unpacked once for all tiles was slower.
#include "panels.h"

#include <cstring>

namespace cue {
namespace {

constexpr int kHalf = 64;  // bytes of a quad of 16 outputs

// The 128 codes of one quad, output after output.
inline void quad_codes(const uint8_t* group, int quad, uint8_t* codes) {
    const uint8_t* pair = group + quad / 2 * kQuadBytes;
    for (int i = 0; i < kQuadBytes; ++i) codes[i] = quad % 2 ? pair[i] >> 4 : pair[i] & 15;
}

inline void pairs_to_float(const uint8_t* at, float* values) {
    for (int i = 0; i < kPanel / 2; ++i) {
        uint32_t pair;
        std::memcpy(&pair, at + 4 * i, sizeof pair);
        const uint32_t low = pair << 16, high = pair & 0xffff0000u;
        std::memcpy(&values[i], &low, 4);
        std::memcpy(&values[i + kPanel / 2], &high, 4);
    }
}

template <int R>
void plain(const Tile& tile, const uint8_t* panel) {
    float y[R][kPanel] = {};
    const int8_t* x = reinterpret_cast<const int8_t*>(tile.x);
    for (int64_t group = 0; group < tile.spans * kSpanGroups; ++group, panel += kInt4GroupBytes) {
        int32_t sums[R][kPanel] = {};
        for (int quad = 0; quad < kGroupQuads; ++quad, x += tile.step) {
            uint8_t codes[kQuadBytes];
            quad_codes(panel, quad, codes);
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < kPanel; ++c)
                    for (int i = 0; i < kQuad; ++i) sums[r][c] += codes[c * kQuad + i] * x[r * kQuad + i];
        }
        float scales[kPanel], middles[kPanel];
        pairs_to_float(panel + kInt4CodeBytes, scales);
        pairs_to_float(panel + kInt4CodeBytes + kInt4ScaleBytes, middles);
        for (int r = 0; r < R; ++r) {
            const float scale = tile.scales[group / kSpanGroups * tile.apart + r];
            const float sum = tile.group_sums[group * tile.apart + r];
            for (int c = 0; c < kPanel; ++c) {
                const float least = middles[c] - kInt4Middle * scales[c];
                y[r][c] += static_cast<float>(sums[r][c]) * scales[c] * scale + least * sum;
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kPanel; ++c) tile.y[r * tile.y_stride + c] = y[r][c];
}

constexpr Kernel kPlainKernels[] = {nullptr, plain<1>, plain<2>};

#if CUE_X86

CUE_TARGET_AVX2

inline __m256i load_quad(const uint8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

// codes * x fits 16 bits in pairs: 2 * 15 * 127.
inline __m256i add_codes(__m256i sums, __m256i codes, __m256i x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}

// One group of 8 outputs: `part` of four.
template <int R>
inline void group_avx2(const Tile& tile, const uint8_t* x, const uint8_t* codes, int part, __m256i (&sums)[R]) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int pair = 0; pair < kGroupQuads / 2; ++pair) {
        const auto* at = reinterpret_cast<const __m256i*>(codes + pair * kQuadBytes + part * 32);
        const __m256i both = _mm256_loadu_si256(at);
        const __m256i even = _mm256_and_si256(both, low);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            sums[r] = add_codes(sums[r], even, load_quad(x + 2 * pair * tile.step + r * kQuad));
            sums[r] = add_codes(sums[r], odd, load_quad(x + (2 * pair + 1) * tile.step + r * kQuad));
        }
    }
}

// 8 of the bf16 values that lie in pairs of outputs 16 apart.
inline __m256 part_of_pairs(const uint8_t* at, int part) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at) + (part & 1));
    const __m256i high = _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return _mm256_castsi256_ps(part < 2 ? _mm256_slli_epi32(pairs, 16) : high);
}

template <int R>
void avx2(const Tile& tile, const uint8_t* panel) {
    constexpr int kParts = 4;
    __m256 y[R][kParts] = {};
    const uint8_t* x = tile.x;
    for (int64_t group = 0; group < tile.spans * kSpanGroups; ++group) {
        const float* x_scales = tile.scales + group / kSpanGroups * tile.apart;
        const float* x_sums = tile.group_sums + group * tile.apart;
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
            __m256i sums[R] = {};
            group_avx2<R>(tile, x, panel, p, sums);
            const __m256 scale = part_of_pairs(panel + kInt4CodeBytes, p);
            const __m256 middle = part_of_pairs(panel + kInt4CodeBytes + kInt4ScaleBytes, p);
            const __m256 least = _mm256_fnmadd_ps(scale, _mm256_set1_ps(kInt4Middle), middle);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const __m256 codes = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r]), scale);
                y[r][p] = _mm256_fmadd_ps(least, _mm256_set1_ps(x_sums[r]), y[r][p]);
                y[r][p] = _mm256_fmadd_ps(codes, _mm256_set1_ps(x_scales[r]), y[r][p]);
            }
        }
        panel += kInt4GroupBytes;
        x += kGroupQuads * tile.step;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) _mm256_storeu_ps(tile.y + r * tile.y_stride + 8 * p, y[r][p]);
}

constexpr Kernel kAvx2Kernels[] = {nullptr, avx2<1>, avx2<2>};

CUE_TARGET_END

CUE_TARGET_AVX512

// Into the second-level cache: the first has no room for it.
inline void prefetch(const uint8_t* at) {
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(at) + 64, _MM_HINT_T1);
}

// sums += codes * x, four bytes a lane. Not the intrinsic: compilers copy its sums from register to register.
inline void add_products(__m512i& sums, __m512i codes, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x));
}

template <int R>
inline void add_quad(const uint8_t* x, __m512i codes0, __m512i codes1, __m512i (&sums)[R][2]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, x + r * kQuad, sizeof four);
        const __m512i values = _mm512_set1_epi32(four);
        add_products(sums[r][0], codes0, values);
        add_products(sums[r][1], codes1, values);
    }
}

inline __m512 low_of_pairs(const uint8_t* at) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(at), 16));
}

inline __m512 high_of_pairs(const uint8_t* at) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(at), mask));
}

// y += sums of a group with the scales and middles behind its codes.
template <int R>
inline void end_group(const uint8_t* scales, const float* x_scales, const float* x_sums, const __m512i (&sums)[R][2],
                      __m512 (&y)[R][2]) {
    const uint8_t* middles = scales + kInt4ScaleBytes;
    const __m512 scale[2] = {low_of_pairs(scales), high_of_pairs(scales)};
    const __m512 middle[2] = {low_of_pairs(middles), high_of_pairs(middles)};
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
        const __m512 least = _mm512_fnmadd_ps(scale[p], _mm512_set1_ps(kInt4Middle), middle[p]);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m512 codes = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][p]), scale[p]);
            y[r][p] = _mm512_fmadd_ps(least, _mm512_set1_ps(x_sums[r]), y[r][p]);
            y[r][p] = _mm512_fmadd_ps(codes, _mm512_set1_ps(x_scales[r]), y[r][p]);
        }
    }
}

// 2 R registers of int32 and as many of float32 sums; 8 remain for 6 rows.
template <int R>
void avx512(const Tile& tile, const uint8_t* panel) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512 y[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
    const uint8_t* x = tile.x;
    const uint8_t* ahead = tile.ahead;
    const int64_t step = tile.step, ahead_step = tile.ahead_step;
    for (int64_t group = 0; group < tile.spans * kSpanGroups; ++group) {
        __m512i sums[R][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int pair = 0; pair < kGroupQuads / 2; ++pair) {
            const __m512i both0 = _mm512_loadu_si512(panel + pair * kQuadBytes);
            const __m512i both1 = _mm512_loadu_si512(panel + pair * kQuadBytes + kHalf);
            add_quad<R>(x, _mm512_and_si512(both0, low), _mm512_and_si512(both1, low), sums);
            add_quad<R>(x + step, _mm512_and_si512(_mm512_srli_epi16(both0, 4), low),
                        _mm512_and_si512(_mm512_srli_epi16(both1, 4), low), sums);
            x += 2 * step;
            prefetch(ahead);
            ahead += 2 * ahead_step;
        }
        end_group<R>(panel + kInt4CodeBytes, tile.scales + group / kSpanGroups * tile.apart,
                     tile.group_sums + group * tile.apart, sums, y);
        panel += kInt4GroupBytes;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        _mm512_storeu_ps(tile.y + r * tile.y_stride, y[r][0]);
        _mm512_storeu_ps(tile.y + r * tile.y_stride + 16, y[r][1]);
    }
}

constexpr Kernel kAvx512Kernels[] = {nullptr,   avx512<1>, avx512<2>, avx512<3>,
                                     avx512<4>, avx512<5>, avx512<6>};

CUE_TARGET_END

#endif

}  // namespace

Kernels int4_kernels(Isa isa) {
#if CUE_X86
    if (isa == kAvx512) return {kAvx512Kernels, 6};
    if (isa == kAvx2) return {kAvx2Kernels, 2};
#endif
    (void)isa;
    return {kPlainKernels, 2};
}

}  // namespace cue
