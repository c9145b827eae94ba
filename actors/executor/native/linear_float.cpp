// float32 and bfloat16 weights times float32 rows, summed in float32.
#include "linear_kernels.h"

#include <cstring>

namespace cue {
namespace {

// bfloat16 is the upper half of a float32. A pair holds the weights of two inputs, the first in the low half.
inline float float_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Inputs in a unit.
template <WeightKind kKind>
constexpr int kUnitInputs = kKind == kF32 ? 1 : 2;

template <int R>
void portable_f32(const TileArgs& tile, const uint8_t* weights) {
    float sums[R][kPanelOutputs] = {};
    const uint8_t* x = tile.x;
    for (int64_t unit = 0; unit < tile.units; ++unit, x += tile.unit_stride, weights += kUnitBytes) {
        float unit_weights[kPanelOutputs], values[R];
        std::memcpy(unit_weights, weights, sizeof unit_weights);
        std::memcpy(values, x, sizeof values);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < kPanelOutputs; ++c) sums[r][c] += unit_weights[c] * values[r];
    }
    for (int r = 0; r < R; ++r) std::memcpy(tile.y + r * tile.y_stride, sums[r], sizeof sums[r]);
}

template <int R>
void portable_bf16(const TileArgs& tile, const uint8_t* weights) {
    float sums[R][kPanelOutputs] = {};
    const uint8_t* x = tile.x;
    for (int64_t unit = 0; unit < tile.units; ++unit, x += tile.unit_stride, weights += kUnitBytes) {
        uint32_t pairs[kPanelOutputs];
        float first[kPanelOutputs], second[kPanelOutputs], values[R][2];
        std::memcpy(pairs, weights, sizeof pairs);
        std::memcpy(values, x, sizeof values);
        for (int c = 0; c < kPanelOutputs; ++c) first[c] = float_from_bits(pairs[c] << 16);
        for (int c = 0; c < kPanelOutputs; ++c) second[c] = float_from_bits(pairs[c] & 0xffff0000u);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < kPanelOutputs; ++c) sums[r][c] += first[c] * values[r][0] + second[c] * values[r][1];
    }
    for (int r = 0; r < R; ++r) std::memcpy(tile.y + r * tile.y_stride, sums[r], sizeof sums[r]);
}

template <WeightKind kKind>
constexpr TileKernel kPortableKernels[] = {nullptr, kKind == kF32 ? portable_f32<1> : portable_bf16<1>,
                                           kKind == kF32 ? portable_f32<2> : portable_bf16<2>};

#if CUE_X86

CUE_TARGET_AVX2

// The weights of input kInput of a unit, for outputs 8 * part to 8 * part + 7.
template <WeightKind kKind, int kInput>
inline __m256 load8(const uint8_t* weights, int part) {
    if (kKind == kF32) return _mm256_loadu_ps(reinterpret_cast<const float*>(weights) + 8 * part);
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights) + part);
    if (kInput == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

template <int R, WeightKind kKind, int kInput>
inline void accumulate_input_avx2(const uint8_t* x, const uint8_t* weights, __m256 (&sums)[R][4]) {
    __m256 values[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
        values[r] = _mm256_broadcast_ss(reinterpret_cast<const float*>(x) + r * kUnitInputs<kKind> + kInput);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
        const __m256 w = load8<kKind, kInput>(weights, p);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][p] = _mm256_fmadd_ps(w, values[r], sums[r][p]);
    }
}

// float32: 3 rows * 4 registers of sums, one of weights and one of x are 14 of 16 registers. bfloat16 has room for 2
// rows, since compilers load both inputs of a pair at once. A single row is bound by memory and needs only one chain of
// sums.
template <int R, WeightKind kKind>
void avx2(const TileArgs& tile, const uint8_t* weights) {
    constexpr int kPanelRegisters = 4;
    __m256 sums[R][kPanelRegisters];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < kPanelRegisters; ++p) sums[r][p] = _mm256_setzero_ps();
    const uint8_t* x = tile.x;
    const int64_t unit_stride = tile.unit_stride;
    for (int64_t unit = 0; unit < tile.units; ++unit, x += unit_stride, weights += kUnitBytes) {
        accumulate_input_avx2<R, kKind, 0>(x, weights, sums);
        if (kUnitInputs<kKind> == 2) accumulate_input_avx2<R, kKind, 1>(x, weights, sums);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < kPanelRegisters; ++p) _mm256_storeu_ps(tile.y + r * tile.y_stride + 8 * p, sums[r][p]);
}

template <WeightKind kKind>
constexpr TileKernel kAvx2Kernels[] = {nullptr, avx2<1, kKind>, avx2<2, kKind>,
                                       kKind == kF32 ? avx2<3, kF32> : nullptr};

CUE_TARGET_END

CUE_TARGET_AVX512

#include "linear_chains.h"

template <WeightKind kKind>
inline __m512 load16(const uint8_t* weights, int input) {
    if (kKind == kF32) return _mm512_loadu_ps(weights);
    const __m512i pairs = _mm512_loadu_si512(weights);
    if (input == 0) return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// One unit: one input (float32) or a pair of inputs (bfloat16) of R rows times the weights of 32 outputs.
template <WeightKind kKind>
struct FloatUnit {
    template <int R>
    static void prefetch(const uint8_t* address) {
        prefetch_two_lines(address);
    }
    template <int R>
    static void accumulate(const uint8_t* x, const uint8_t* weights, __m512 (&sums)[R][2]) {
#pragma GCC unroll 2
        for (int i = 0; i < kUnitInputs<kKind>; ++i) {
            const __m512 w0 = load16<kKind>(weights, i), w1 = load16<kKind>(weights + 64, i);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const __m512 value = _mm512_set1_ps(reinterpret_cast<const float*>(x)[r * kUnitInputs<kKind> + i]);
                sums[r][0] = _mm512_fmadd_ps(w0, value, sums[r][0]);
                sums[r][1] = _mm512_fmadd_ps(w1, value, sums[r][1]);
            }
        }
    }
};

template <WeightKind k>
constexpr TileKernel kAvx512Kernels[] = {nullptr,
                                         sum_units<FloatUnit<k>, 1>,
                                         sum_units<FloatUnit<k>, 2>,
                                         sum_units<FloatUnit<k>, 3>,
                                         sum_units<FloatUnit<k>, 4>,
                                         sum_units<FloatUnit<k>, 5>,
                                         sum_units<FloatUnit<k>, 6>,
                                         sum_units<FloatUnit<k>, 7>,
                                         sum_units<FloatUnit<k>, 8>,
                                         sum_units<FloatUnit<k>, 9>,
                                         sum_units<FloatUnit<k>, 10>,
                                         sum_units<FloatUnit<k>, 11>,
                                         sum_units<FloatUnit<k>, 12>};

CUE_TARGET_END

#endif

template <WeightKind kKind>
TileKernels kernels(Isa isa) {
#if CUE_X86
    if (isa == kAvx512) return {kAvx512Kernels<kKind>, kBlockRows};
    if (isa == kAvx2) return {kAvx2Kernels<kKind>, kKind == kF32 ? 3 : 2};
#endif
    (void)isa;
    return {kPortableKernels<kKind>, 2};
}

}  // namespace

TileKernels f32_kernels(Isa isa) { return kernels<kF32>(isa); }
TileKernels bf16_kernels(Isa isa) { return kernels<kBf16>(isa); }

}  // namespace cue
