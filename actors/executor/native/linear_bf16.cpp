// bfloat16 weights times bfloat16 rows, summed in float32 by vdpbf16ps (AVX512-BF16): two products per lane and
// instruction.
#include "linear_kernels.h"

namespace cue {

#if CUE_X86_BF16

namespace {

CUE_TARGET_BF16

#include "linear_chains.h"

// sums += w * pair, with the pair broadcast to every lane. Inline assembly, since compilers copy the accumulator of the
// intrinsic from register to register. A memory operand with broadcast saves a register per row, which leaves more
// registers for weights.
inline void dot_accumulate(__m512& sums, __m512i w, const uint32_t& pair) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(w), "m"(pair));
}

// Up to this many rows a tile consumes a cache line before memory delivers the next, and processors drop prefetches
// meanwhile. A second prefetch of the same line is not dropped. Measured: a tenth less time for 3 and 4 rows.
constexpr int kDoublePrefetchRows = 4;

// One unit: a pair of inputs of R rows times the pairs of 32 outputs.
struct Bf16Unit {
    template <int R>
    static void prefetch(const uint8_t* address) {
        prefetch_two_lines(address);
        if (R <= kDoublePrefetchRows) prefetch_two_lines(address + 64);
    }
    template <int R>
    static void accumulate(const uint8_t* x, const uint8_t* weights, __m512 (&sums)[R][2]) {
        const __m512i w0 = _mm512_loadu_si512(weights), w1 = _mm512_loadu_si512(weights + 64);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const uint32_t& pair = reinterpret_cast<const uint32_t*>(x)[r];
            dot_accumulate(sums[r][0], w0, pair);
            dot_accumulate(sums[r][1], w1, pair);
        }
    }
};

constexpr TileKernel kAvx512Bf16Kernels[] = {nullptr,
                                             sum_units<Bf16Unit, 1>,
                                             sum_units<Bf16Unit, 2>,
                                             sum_units<Bf16Unit, 3>,
                                             sum_units<Bf16Unit, 4>,
                                             sum_units<Bf16Unit, 5>,
                                             sum_units<Bf16Unit, 6>,
                                             sum_units<Bf16Unit, 7>,
                                             sum_units<Bf16Unit, 8>,
                                             sum_units<Bf16Unit, 9>,
                                             sum_units<Bf16Unit, 10>,
                                             sum_units<Bf16Unit, 11>,
                                             sum_units<Bf16Unit, 12>};

CUE_TARGET_END

}  // namespace

TileKernels avx512_bf16_kernels() { return {kAvx512Bf16Kernels, kBlockRows}; }

#else

TileKernels avx512_bf16_kernels() { return {nullptr, 0}; }

#endif

}  // namespace cue
