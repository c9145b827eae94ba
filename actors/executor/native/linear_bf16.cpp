// bfloat16 weights times bfloat16 rows by AVX512-BF16: two products a lane and instruction, summed in float32.
#include "linear_kernels.h"

namespace cue {

#if CUE_X86_BF16

namespace {

CUE_TARGET_BF16

// Into the second-level cache: the first has no room for it.
inline void prefetch(const uint8_t* address) {
    _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(address) + 64, _MM_HINT_T1);
}

// sums += w * the pair, in every lane. Not the intrinsic: compilers copy its sums from register to register. The
// instruction itself repeats the pair: a register less under way for each row, so that more weights are.
inline void dot_accumulate(__m512& sums, __m512i w, const uint32_t& pair) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(w), "m"(pair));
}

// So few rows are done with a line sooner than memory brings the next one, and processors drop what they are asked for
// meanwhile. Asked twice they do not: measured, a tenth less time for 3 and 4 rows.
constexpr int kDoublePrefetchRows = 4;

// One unit of x: R pairs, each times the pairs of 32 outputs.
template <int R>
inline void accumulate_unit(const uint8_t* x, const uint8_t* weights, __m512 (&sums)[R][2]) {
    const __m512i w0 = _mm512_loadu_si512(weights), w1 = _mm512_loadu_si512(weights + 64);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const uint32_t& pair = reinterpret_cast<const uint32_t*>(x)[r];
        dot_accumulate(sums[r][0], w0, pair);
        dot_accumulate(sums[r][1], w1, pair);
    }
}

// vdpbf16ps takes 6 cycles: with few rows several units are summed apart, to have 8 sums under way or more.
template <int R>
void avx512_bf16(const TileArgs& tile, const uint8_t* weights) {
    constexpr int kChains = R == 1 ? 4 : R <= 3 ? 2 : 1;
    __m512 sums[kChains][R][2];
#pragma GCC unroll 4
    for (int u = 0; u < kChains; ++u)
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) sums[u][r][0] = sums[u][r][1] = _mm512_setzero_ps();
    const uint8_t* x = tile.x;
    const uint8_t* prefetch_at = tile.prefetch_at;
    const int64_t unit_stride = tile.unit_stride, prefetch_step = tile.prefetch_step;
    const int64_t unrolled_units = tile.units - tile.units % kChains;
    for (int64_t unit = 0; unit < unrolled_units; unit += kChains) {
#pragma GCC unroll 4
        for (int u = 0; u < kChains; ++u) {
            prefetch(prefetch_at);
            if (R <= kDoublePrefetchRows) prefetch(prefetch_at + 64);
            accumulate_unit<R>(x, weights, sums[u]);
            x += unit_stride;
            weights += kPanelPairBytes;
            prefetch_at += prefetch_step;
        }
    }
    if (kChains > 1)
        for (int64_t unit = unrolled_units; unit < tile.units; ++unit, x += unit_stride, weights += kPanelPairBytes)
            accumulate_unit<R>(x, weights, sums[0]);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int u = 1; u < kChains; ++u)
            for (int p = 0; p < 2; ++p) sums[0][r][p] = _mm512_add_ps(sums[0][r][p], sums[u][r][p]);
        _mm512_storeu_ps(tile.y + r * tile.y_stride, sums[0][r][0]);
        _mm512_storeu_ps(tile.y + r * tile.y_stride + 16, sums[0][r][1]);
    }
}

constexpr TileKernel kAvx512Bf16Kernels[] = {nullptr,      avx512_bf16<1>, avx512_bf16<2>,  avx512_bf16<3>, avx512_bf16<4>,
                               avx512_bf16<5>,  avx512_bf16<6>, avx512_bf16<7>,  avx512_bf16<8>, avx512_bf16<9>,
                               avx512_bf16<10>, avx512_bf16<11>, avx512_bf16<12>};

CUE_TARGET_END

}  // namespace

TileKernels avx512_bf16_kernels() { return {kAvx512Bf16Kernels, kBlockRows}; }

#else

TileKernels avx512_bf16_kernels() { return {nullptr, 0}; }

#endif

}  // namespace cue
