// int4 weights in groups of 32 inputs times int8 rows: exact int32 sums of codes * x within a group, float32 sums over
// groups. A weight is code * scale + minimum, so a group adds scale * (sum of codes * x) + minimum * (sum of x).
//
// Codes are unpacked in registers for each tile. Measured: unpacking a panel once for all tiles was slower.
#include "linear_kernels.h"

#include <cstring>

namespace cue {
namespace {

constexpr int kHalfQuadBytes = 64;  // bytes of a quad of 16 outputs

// The 128 codes of one quad of inputs, output after output.
inline void quad_codes(const uint8_t* group, int quad, uint8_t* codes) {
    const uint8_t* pair = group + quad / 2 * kPanelQuadBytes;
    for (int i = 0; i < kPanelQuadBytes; ++i) codes[i] = quad % 2 ? pair[i] >> 4 : pair[i] & 15;
}

inline void bf16_pairs_to_floats(const uint8_t* address, float* values) {
    for (int i = 0; i < kPanelOutputs / 2; ++i) {
        uint32_t pair;
        std::memcpy(&pair, address + 4 * i, sizeof pair);
        const uint32_t low_nibble = pair << 16, high = pair & 0xffff0000u;
        std::memcpy(&values[i], &low_nibble, 4);
        std::memcpy(&values[i + kPanelOutputs / 2], &high, 4);
    }
}

template <int R>
void portable(const TileArgs& tile, const uint8_t* panel) {
    float y[R][kPanelOutputs] = {};
    const int8_t* x = reinterpret_cast<const int8_t*>(tile.x);
    for (int64_t group = 0; group < tile.spans * kGroupsPerSpan; ++group, panel += kInt4GroupBytes) {
        int32_t sums[R][kPanelOutputs] = {};
        for (int quad = 0; quad < kQuadsPerGroup; ++quad, x += tile.unit_stride) {
            uint8_t codes[kPanelQuadBytes];
            quad_codes(panel, quad, codes);
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < kPanelOutputs; ++c)
                    for (int i = 0; i < kQuadInputs; ++i)
                        sums[r][c] += codes[c * kQuadInputs + i] * x[r * kQuadInputs + i];
        }
        float scales[kPanelOutputs], midpoints[kPanelOutputs];
        bf16_pairs_to_floats(panel + kInt4CodeBytes, scales);
        bf16_pairs_to_floats(panel + kInt4CodeBytes + kInt4ScaleBytes, midpoints);
        for (int r = 0; r < R; ++r) {
            const float scale = tile.scales[group / kGroupsPerSpan * tile.span_stride + r];
            const float sum = tile.group_sums[group * tile.span_stride + r];
            for (int c = 0; c < kPanelOutputs; ++c) {
                const float minimum = midpoints[c] - kInt4MidCode * scales[c];
                y[r][c] += static_cast<float>(sums[r][c]) * scales[c] * scale + minimum * sum;
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kPanelOutputs; ++c) tile.y[r * tile.y_stride + c] = y[r][c];
}

constexpr TileKernel kPortableKernels[] = {nullptr, portable<1>, portable<2>};

#if CUE_X86

CUE_TARGET_AVX2

inline __m256i load_quad(const uint8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, sizeof quad);
    return _mm256_set1_epi32(quad);
}

// sums += codes * x, four bytes per lane. Sums of two products fit 16 bits: 2 * 15 * 127.
inline __m256i dot_accumulate(__m256i sums, __m256i codes, __m256i x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
}

// sums += codes * x over one group, for outputs 8 * part to 8 * part + 7.
template <int R>
inline void accumulate_group_avx2(const TileArgs& tile, const uint8_t* x, const uint8_t* codes, int part,
                                  __m256i (&sums)[R]) {
    const __m256i low_nibble = _mm256_set1_epi8(15);
    for (int pair = 0; pair < kQuadsPerGroup / 2; ++pair) {
        const auto* address = reinterpret_cast<const __m256i*>(codes + pair * kPanelQuadBytes + part * 32);
        const __m256i code_bytes = _mm256_loadu_si256(address);
        const __m256i unrolled_units = _mm256_and_si256(code_bytes, low_nibble);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(code_bytes, 4), low_nibble);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            sums[r] =
                dot_accumulate(sums[r], unrolled_units, load_quad(x + 2 * pair * tile.unit_stride + r * kQuadInputs));
            sums[r] = dot_accumulate(sums[r], odd, load_quad(x + (2 * pair + 1) * tile.unit_stride + r * kQuadInputs));
        }
    }
}

// Outputs 8 * part to 8 * part + 7 of bfloat16 values stored in pairs (output i, output i + 16).
inline __m256 load_bf16_part(const uint8_t* address, int part) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address) + (part & 1));
    const __m256i high = _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return _mm256_castsi256_ps(part < 2 ? _mm256_slli_epi32(pairs, 16) : high);
}

template <int R>
void avx2(const TileArgs& tile, const uint8_t* panel) {
    constexpr int kPanelRegisters = 4;
    __m256 y[R][kPanelRegisters] = {};
    const uint8_t* x = tile.x;
    for (int64_t group = 0; group < tile.spans * kGroupsPerSpan; ++group) {
        const float* x_scales = tile.scales + group / kGroupsPerSpan * tile.span_stride;
        const float* x_sums = tile.group_sums + group * tile.span_stride;
#pragma GCC unroll 4
        for (int p = 0; p < kPanelRegisters; ++p) {
            __m256i sums[R] = {};
            accumulate_group_avx2<R>(tile, x, panel, p, sums);
            const __m256 scale = load_bf16_part(panel + kInt4CodeBytes, p);
            const __m256 midpoint = load_bf16_part(panel + kInt4CodeBytes + kInt4ScaleBytes, p);
            const __m256 minimum = _mm256_fnmadd_ps(scale, _mm256_set1_ps(kInt4MidCode), midpoint);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const __m256 codes = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r]), scale);
                y[r][p] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x_sums[r]), y[r][p]);
                y[r][p] = _mm256_fmadd_ps(codes, _mm256_set1_ps(x_scales[r]), y[r][p]);
            }
        }
        panel += kInt4GroupBytes;
        x += kQuadsPerGroup * tile.unit_stride;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < kPanelRegisters; ++p) _mm256_storeu_ps(tile.y + r * tile.y_stride + 8 * p, y[r][p]);
}

constexpr TileKernel kAvx2Kernels[] = {nullptr, avx2<1>, avx2<2>};

CUE_TARGET_END

CUE_TARGET_AVX512

// sums += codes * x, four bytes per lane (AVX512-VNNI). Inline assembly, since compilers copy the accumulator of the
// intrinsic from register to register.
inline void dot_accumulate(__m512i& sums, __m512i codes, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x));
}

template <int R>
inline void accumulate_quad(const uint8_t* x, __m512i codes0, __m512i codes1, __m512i (&sums)[R][2]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        int32_t quad;
        std::memcpy(&quad, x + r * kQuadInputs, sizeof quad);
        const __m512i values = _mm512_set1_epi32(quad);
        dot_accumulate(sums[r][0], codes0, values);
        dot_accumulate(sums[r][1], codes1, values);
    }
}

inline __m512 load_bf16_low(const uint8_t* address) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(address), 16));
}

inline __m512 load_bf16_high(const uint8_t* address) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(address), mask));
}

// y += the group's sums, scaled. Midpoints lie behind the scales.
template <int R>
inline void dequantize_group(const uint8_t* scales, const float* x_scales, const float* x_sums,
                             const __m512i (&sums)[R][2], __m512 (&y)[R][2]) {
    const uint8_t* midpoints = scales + kInt4ScaleBytes;
    const __m512 scale[2] = {load_bf16_low(scales), load_bf16_high(scales)};
    const __m512 midpoint[2] = {load_bf16_low(midpoints), load_bf16_high(midpoints)};
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
        const __m512 minimum = _mm512_fnmadd_ps(scale[p], _mm512_set1_ps(kInt4MidCode), midpoint[p]);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m512 codes = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][p]), scale[p]);
            y[r][p] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x_sums[r]), y[r][p]);
            y[r][p] = _mm512_fmadd_ps(codes, _mm512_set1_ps(x_scales[r]), y[r][p]);
        }
    }
}

// 2 * R registers of int32 sums and as many of float32 sums: 6 rows leave 8 of 32 registers.
template <int R>
void avx512(const TileArgs& tile, const uint8_t* panel) {
    const __m512i low_nibble = _mm512_set1_epi8(15);
    __m512 y[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
    const uint8_t* x = tile.x;
    const uint8_t* prefetch_at = tile.prefetch_at;
    const int64_t unit_stride = tile.unit_stride, prefetch_step = tile.prefetch_step;
    for (int64_t group = 0; group < tile.spans * kGroupsPerSpan; ++group) {
        __m512i sums[R][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int pair = 0; pair < kQuadsPerGroup / 2; ++pair) {
            const __m512i code_bytes0 = _mm512_loadu_si512(panel + pair * kPanelQuadBytes);
            const __m512i code_bytes1 = _mm512_loadu_si512(panel + pair * kPanelQuadBytes + kHalfQuadBytes);
            accumulate_quad<R>(x, _mm512_and_si512(code_bytes0, low_nibble), _mm512_and_si512(code_bytes1, low_nibble),
                               sums);
            accumulate_quad<R>(x + unit_stride, _mm512_and_si512(_mm512_srli_epi16(code_bytes0, 4), low_nibble),
                               _mm512_and_si512(_mm512_srli_epi16(code_bytes1, 4), low_nibble), sums);
            x += 2 * unit_stride;
            prefetch_two_lines(prefetch_at);
            prefetch_at += 2 * prefetch_step;
        }
        dequantize_group<R>(panel + kInt4CodeBytes, tile.scales + group / kGroupsPerSpan * tile.span_stride,
                            tile.group_sums + group * tile.span_stride, sums, y);
        panel += kInt4GroupBytes;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        _mm512_storeu_ps(tile.y + r * tile.y_stride, y[r][0]);
        _mm512_storeu_ps(tile.y + r * tile.y_stride + 16, y[r][1]);
    }
}

constexpr TileKernel kAvx512Kernels[] = {nullptr, avx512<1>, avx512<2>, avx512<3>, avx512<4>, avx512<5>, avx512<6>};

CUE_TARGET_END

#endif

}  // namespace

TileKernels int4_kernels(Isa isa) {
#if CUE_X86
    if (isa == kAvx512) return {kAvx512Kernels, 6};
    if (isa == kAvx2) return {kAvx2Kernels, 2};
#endif
    (void)isa;
    return {kPortableKernels, 2};
}

}  // namespace cue
