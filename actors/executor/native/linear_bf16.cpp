// bfloat16 weights times bfloat16 rows by AVX512-BF16: two products a lane and instruction, summed in float32.
#include "panels.h"

namespace cue {

#if CUE_X86_BF16

namespace {

CUE_TARGET_BF16

// Into the second-level cache: the first has no room for it.
inline void prefetch(const uint8_t* at) {
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(at) + 64, _MM_HINT_T1);
}

// sums += w * the pair, in every lane. Not the intrinsic: compilers copy its sums from register to register. The
// instruction itself repeats the pair: a register less under way for each row, so that more weights are.
inline void add_products(__m512& sums, __m512i w, const uint32_t& pair) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(w), "m"(pair));
}

// So few rows are done with a line sooner than memory brings the next one, and processors drop what they are asked for
// meanwhile. Asked twice they do not: measured, a tenth less time for 3 and 4 rows.
constexpr int kHastyRows = 4;

// One unit of x: R pairs, each times the pairs of 32 outputs.
template <int R>
inline void add_unit(const uint8_t* x, const uint8_t* weights, __m512 (&sums)[R][2]) {
    const __m512i w0 = _mm512_loadu_si512(weights), w1 = _mm512_loadu_si512(weights + 64);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const uint32_t& pair = reinterpret_cast<const uint32_t*>(x)[r];
        add_products(sums[r][0], w0, pair);
        add_products(sums[r][1], w1, pair);
    }
}

// vdpbf16ps takes 6 cycles: with few rows several units are summed apart, to have 8 sums under way or more.
template <int R>
void multiply(const Tile& tile, const uint8_t* weights) {
    constexpr int kChains = R == 1 ? 4 : R <= 3 ? 2 : 1;
    __m512 sums[kChains][R][2];
#pragma GCC unroll 4
    for (int u = 0; u < kChains; ++u)
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) sums[u][r][0] = sums[u][r][1] = _mm512_setzero_ps();
    const uint8_t* x = tile.x;
    const uint8_t* ahead = tile.ahead;
    const int64_t step = tile.step, ahead_step = tile.ahead_step;
    const int64_t even = tile.units - tile.units % kChains;
    for (int64_t unit = 0; unit < even; unit += kChains) {
#pragma GCC unroll 4
        for (int u = 0; u < kChains; ++u) {
            prefetch(ahead);
            if (R <= kHastyRows) prefetch(ahead + 64);
            add_unit<R>(x, weights, sums[u]);
            x += step;
            weights += kPairsBytes;
            ahead += ahead_step;
        }
    }
    if (kChains > 1)
        for (int64_t unit = even; unit < tile.units; ++unit, x += step, weights += kPairsBytes)
            add_unit<R>(x, weights, sums[0]);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int u = 1; u < kChains; ++u)
            for (int p = 0; p < 2; ++p) sums[0][r][p] = _mm512_add_ps(sums[0][r][p], sums[u][r][p]);
        _mm512_storeu_ps(tile.y + r * tile.y_stride, sums[0][r][0]);
        _mm512_storeu_ps(tile.y + r * tile.y_stride + 16, sums[0][r][1]);
    }
}

constexpr Kernel kKernels[] = {nullptr,      multiply<1>, multiply<2>,  multiply<3>, multiply<4>,
                               multiply<5>,  multiply<6>, multiply<7>,  multiply<8>, multiply<9>,
                               multiply<10>, multiply<11>, multiply<12>};

CUE_TARGET_END

}  // namespace

Kernels bf16_row_kernels() { return {kKernels, kBlockRows}; }

#else

Kernels bf16_row_kernels() { return {nullptr, 0}; }

#endif

}  // namespace cue
