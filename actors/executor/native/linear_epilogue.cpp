// The end of a tile of sums: bias, residual, or silu(gate) * up. Plain loops, compiled for each instruction set and
// vectorized by the compiler.
#include "linear_kernels.h"

#include <cstring>

namespace cue {
namespace {

#define CUE_ALWAYS_INLINE inline __attribute__((always_inline))

constexpr int kHalf = kPanelOutputs / 2;

// e^x to about 2 units in the last place, as 2^n * e^r with |r| <= ln 2 / 2. x is clamped to -87..88; NaN stays NaN.
CUE_ALWAYS_INLINE float exponential(float x) {
    constexpr float kLow = -87.0f, kHigh = 88.0f, kLog2E = 1.44269504f;
    constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
    constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    x = x < kLow ? kLow : x;
    x = x > kHigh ? kHigh : x;
    const float shifted = x * kLog2E + kRoundToInteger;
    const float whole = shifted - kRoundToInteger;
    const float r = (x - whole * kLn2High) - whole * kLn2Low;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    int32_t power, bits;
    std::memcpy(&power, &shifted, sizeof power);
    std::memcpy(&bits, &p, sizeof bits);
    bits += static_cast<int32_t>(static_cast<uint32_t>(power) << 23);
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return x != x ? x : result;
}

CUE_ALWAYS_INLINE void swiglu(const float* __restrict sums, float* __restrict y) {
    for (int c = 0; c < kHalf; ++c) y[c] = sums[c] / (1.0f + exponential(-sums[c])) * sums[c + kHalf];
}

template <bool kBias, bool kAdd>
CUE_ALWAYS_INLINE void add_bias_residual(const float* __restrict sums, const float* __restrict bias, int columns,
                                         float* __restrict y) {
    for (int c = 0; c < columns; ++c) {
        float value = sums[c];
        if (kBias) value += bias[c];
        if (kAdd) value += y[c];
        y[c] = value;
    }
}

template <bool kBias, bool kAdd>
CUE_ALWAYS_INLINE void add_bias_residual_rows(const Epilogue& epilogue, const float* sums, int rows, int64_t first,
                                              int columns) {
    const float* bias = kBias ? epilogue.bias + first : nullptr;
    for (int r = 0; r < rows; ++r) {
        float* y = epilogue.y + r * epilogue.stride + first;
        // A constant length compiles to a few vector instructions. Only the last panel is narrower.
        if (columns == kPanelOutputs) add_bias_residual<kBias, kAdd>(sums + r * kPanelOutputs, bias, kPanelOutputs, y);
        else add_bias_residual<kBias, kAdd>(sums + r * kPanelOutputs, bias, columns, y);
    }
}

CUE_ALWAYS_INLINE void swiglu_rows(const Epilogue& epilogue, const float* sums, int rows, int64_t first, int columns) {
    for (int r = 0; r < rows; ++r) {
        float* y = epilogue.y + r * epilogue.stride + first;
        if (columns == kHalf) {
            swiglu(sums + r * kPanelOutputs, y);
        } else {
            float out[kHalf];
            swiglu(sums + r * kPanelOutputs, out);
            std::memcpy(y, out, static_cast<size_t>(columns) * 4);
        }
    }
}

CUE_ALWAYS_INLINE void apply(const Epilogue& epilogue, const float* sums, int rows, int64_t panel, int columns) {
    const int64_t first = panel * (epilogue.gated ? kHalf : kPanelOutputs);
    if (epilogue.gated) swiglu_rows(epilogue, sums, rows, first, columns);
    else if (epilogue.bias && epilogue.add) add_bias_residual_rows<true, true>(epilogue, sums, rows, first, columns);
    else if (epilogue.bias) add_bias_residual_rows<true, false>(epilogue, sums, rows, first, columns);
    else if (epilogue.add) add_bias_residual_rows<false, true>(epilogue, sums, rows, first, columns);
    else add_bias_residual_rows<false, false>(epilogue, sums, rows, first, columns);
}

#if CUE_X86

CUE_TARGET_AVX2
void apply_avx2(const Epilogue& epilogue, const float* sums, int rows, int64_t panel, int columns) {
    apply(epilogue, sums, rows, panel, columns);
}
CUE_TARGET_END

CUE_TARGET_AVX512
void apply_avx512(const Epilogue& epilogue, const float* sums, int rows, int64_t panel, int columns) {
    apply(epilogue, sums, rows, panel, columns);
}
CUE_TARGET_END

#endif

}  // namespace

void apply_epilogue(Isa isa, const Epilogue& epilogue, const float* sums, int rows, int64_t panel, int columns) {
#if CUE_X86
    if (isa == kAvx512) return apply_avx512(epilogue, sums, rows, panel, columns);
    if (isa == kAvx2) return apply_avx2(epilogue, sums, rows, panel, columns);
#endif
    (void)isa;
    apply(epilogue, sums, rows, panel, columns);
}

}  // namespace cue
