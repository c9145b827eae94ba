// int8 weights times int8 rows: exact int32 sums within a span of 64 inputs, float32 sums over spans. Weights are stored
// as value + 128; kernels that multiply them as unsigned bytes start their sums at -128 * (sum of x).
#include "linear_kernels.h"

#include <cstring>

namespace cue {
namespace {

// Portable loops.

template <int R>
void portable(const TileArgs& tile, const uint8_t* panel) {
    float y[R][kPanelOutputs] = {};
    const uint8_t* weights = panel + kInt8ScaleBytes;
    const int8_t* x = reinterpret_cast<const int8_t*>(tile.x);
    for (int64_t span = 0; span < tile.spans; ++span) {
        int32_t sums[R][kPanelOutputs];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < kPanelOutputs; ++c) sums[r][c] = tile.span_sums[span * tile.span_stride + r];
        for (int quad = 0; quad < kQuadsPerSpan; ++quad, x += tile.unit_stride, weights += kPanelQuadBytes)
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < kPanelOutputs; ++c)
                    for (int i = 0; i < kQuadInputs; ++i)
                        sums[r][c] += weights[c * kQuadInputs + i] * x[r * kQuadInputs + i];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < kPanelOutputs; ++c)
                y[r][c] += static_cast<float>(sums[r][c]) * tile.scales[span * tile.span_stride + r];
    }
    float scales[kPanelOutputs];
    std::memcpy(scales, panel, sizeof scales);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kPanelOutputs; ++c) tile.y[r * tile.y_stride + c] = y[r][c] * scales[c];
}

constexpr TileKernel kPortableKernels[] = {nullptr, portable<1>, portable<2>, portable<3>, portable<4>};

#if CUE_X86

CUE_TARGET_AVX2

constexpr int kPanelRegisters = 4;  // of 8 outputs

// vpmaddubsw adds two products in 16 bits with saturation. |w| * (x with the sign of w) is at most 2 * 127 * 127, which
// fits; (w + 128) * x would not.
template <int R>
inline void accumulate_span(const uint8_t* weights, const uint8_t* x, int64_t unit_stride,
                            __m256i (&sums)[R][kPanelRegisters]) {
    const __m256i ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(-128);
    for (int quad = 0; quad < kQuadsPerSpan; ++quad, x += unit_stride, weights += kPanelQuadBytes) {
        __m256i values[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            int32_t quad;
            std::memcpy(&quad, x + r * kQuadInputs, sizeof quad);
            values[r] = _mm256_set1_epi32(quad);
        }
#pragma GCC unroll 4
        for (int p = 0; p < kPanelRegisters; ++p) {
            const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 32 * p));
            const __m256i w = _mm256_xor_si256(stored, flip);
            const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(values[r], w));
                sums[r][p] = _mm256_add_epi32(sums[r][p], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
}

template <int R>
void avx2(const TileArgs& tile, const uint8_t* panel) {
    __m256 y[R][kPanelRegisters] = {};
    const uint8_t* weights = panel + kInt8ScaleBytes;
    const uint8_t* x = tile.x;
    for (int64_t span = 0; span < tile.spans; ++span) {
        __m256i sums[R][kPanelRegisters] = {};
        accumulate_span<R>(weights, x, tile.unit_stride, sums);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256 scale = _mm256_set1_ps(tile.scales[span * tile.span_stride + r]);
#pragma GCC unroll 4
            for (int p = 0; p < kPanelRegisters; ++p)
                y[r][p] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][p]), scale, y[r][p]);
        }
        x += kQuadsPerSpan * tile.unit_stride;
        weights += kQuadsPerSpan * kPanelQuadBytes;
    }
    const float* scales = reinterpret_cast<const float*>(panel);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < kPanelRegisters; ++p) {
            const __m256 scaled = _mm256_mul_ps(y[r][p], _mm256_loadu_ps(scales + 8 * p));
            _mm256_storeu_ps(tile.y + r * tile.y_stride + 8 * p, scaled);
        }
}

constexpr TileKernel kAvx2Kernels[] = {nullptr, avx2<1>, avx2<2>};

CUE_TARGET_END

CUE_TARGET_AVX512

// sums += w * x, four bytes per lane (AVX512-VNNI). Inline assembly, since compilers copy the accumulator of the
// intrinsic from register to register.
inline void dot_accumulate(__m512i& sums, __m512i w, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
}

// vpdpbusd has a latency of 4 cycles: with few rows, quads are distributed over several chains of sums, so that 8 sums
// are in flight. 2 * R registers of int32 sums and as many of float32 sums: 6 rows leave 8 of 32 registers. Measured:
// 12 rows with float32 sums in memory were slower, and so was a rolled loop over the quads of a span.
template <int R>
void avx512(const TileArgs& tile, const uint8_t* panel) {
    constexpr int kChains = R == 1 ? 4 : R <= 3 ? 2 : 1;
    __m512 y[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
    const uint8_t* weights = panel + kInt8ScaleBytes;
    const uint8_t* x = tile.x;
    const uint8_t* prefetch_at = tile.prefetch_at;
    const float* scales = tile.scales;
    const int32_t* span_sums = tile.span_sums;
    const int64_t unit_stride = tile.unit_stride, prefetch_step = tile.prefetch_step, span_stride = tile.span_stride;
    for (int64_t span = tile.spans; span > 0; --span) {
        __m512i sums[kChains][R][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            sums[0][r][0] = sums[0][r][1] = _mm512_set1_epi32(span_sums[r]);
#pragma GCC unroll 4
            for (int u = 1; u < kChains; ++u) sums[u][r][0] = sums[u][r][1] = _mm512_setzero_si512();
        }
#pragma GCC unroll 16
        for (int quad = 0; quad < kQuadsPerSpan; quad += kChains) {
#pragma GCC unroll 4
            for (int u = 0; u < kChains; ++u) {
                const __m512i w0 = _mm512_loadu_si512(weights), w1 = _mm512_loadu_si512(weights + 64);
                prefetch_two_lines(prefetch_at);
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) {
                    int32_t quad;
                    std::memcpy(&quad, x + r * kQuadInputs, sizeof quad);
                    const __m512i values = _mm512_set1_epi32(quad);
                    dot_accumulate(sums[u][r][0], w0, values);
                    dot_accumulate(sums[u][r][1], w1, values);
                }
                x += unit_stride;
                weights += kPanelQuadBytes;
                prefetch_at += prefetch_step;
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m512 scale = _mm512_set1_ps(scales[r]);
#pragma GCC unroll 2
            for (int p = 0; p < 2; ++p) {
                __m512i sum = sums[0][r][p];
#pragma GCC unroll 4
                for (int u = 1; u < kChains; ++u) sum = _mm512_add_epi32(sum, sums[u][r][p]);
                y[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, y[r][p]);
            }
        }
        scales += span_stride;
        span_sums += span_stride;
    }
    const __m512 scales0 = _mm512_loadu_ps(panel), scales1 = _mm512_loadu_ps(panel + 64);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        _mm512_storeu_ps(tile.y + r * tile.y_stride, _mm512_mul_ps(y[r][0], scales0));
        _mm512_storeu_ps(tile.y + r * tile.y_stride + 16, _mm512_mul_ps(y[r][1], scales1));
    }
}

constexpr TileKernel kAvx512Kernels[] = {nullptr, avx512<1>, avx512<2>, avx512<3>, avx512<4>, avx512<5>, avx512<6>};

CUE_TARGET_END

#endif

}  // namespace

TileKernels int8_kernels(Isa isa) {
#if CUE_X86
    if (isa == kAvx512) return {kAvx512Kernels, 6};
    if (isa == kAvx2) return {kAvx2Kernels, 2};
#endif
    (void)isa;
    return {kPortableKernels, 4};
}

}  // namespace cue
