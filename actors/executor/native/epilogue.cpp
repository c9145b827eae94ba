// What becomes of a tile of sums: bias, residual, or silu(gate) * up. Loops that compilers vectorize, once per form.
#include "panels.h"

#include <cstring>

namespace cue {
namespace {

#define CUE_INLINE inline __attribute__((always_inline))

constexpr int kHalf = kPanel / 2;

// e^x to about 2 units in the last place: 2^n * e^r with |r| <= ln 2 / 2. Below -87 it ends at e^-87, NaN stays NaN.
CUE_INLINE float exponential(float x) {
    constexpr float kLow = -87.0f, kHigh = 88.0f, kLog2E = 1.44269504f;
    constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    x = x < kLow ? kLow : x;
    x = x > kHigh ? kHigh : x;
    const float shifted = x * kLog2E + kRounder;
    const float whole = shifted - kRounder;
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

CUE_INLINE void gate(const float* __restrict sums, float* __restrict y) {
    for (int c = 0; c < kHalf; ++c) y[c] = sums[c] / (1.0f + exponential(-sums[c])) * sums[c + kHalf];
}

template <bool kBias, bool kAdd>
CUE_INLINE void combine(const float* __restrict sums, const float* __restrict bias, int columns, float* __restrict y) {
    for (int c = 0; c < columns; ++c) {
        float value = sums[c];
        if (kBias) value += bias[c];
        if (kAdd) value += y[c];
        y[c] = value;
    }
}

template <bool kBias, bool kAdd>
CUE_INLINE void combine_rows(const Finish& f, const float* sums, int rows, int64_t first, int columns) {
    const float* bias = kBias ? f.bias + first : nullptr;
    for (int r = 0; r < rows; ++r) {
        float* y = f.y + r * f.stride + first;
        // Of known length it becomes a few vector instructions; only the last panel is narrower.
        if (columns == kPanel)
            combine<kBias, kAdd>(sums + r * kPanel, bias, kPanel, y);
        else
            combine<kBias, kAdd>(sums + r * kPanel, bias, columns, y);
    }
}

CUE_INLINE void gate_rows(const Finish& f, const float* sums, int rows, int64_t first, int columns) {
    for (int r = 0; r < rows; ++r) {
        float* y = f.y + r * f.stride + first;
        if (columns == kHalf) {
            gate(sums + r * kPanel, y);
        } else {
            float out[kHalf];
            gate(sums + r * kPanel, out);
            std::memcpy(y, out, static_cast<size_t>(columns) * 4);
        }
    }
}

CUE_INLINE void finish(const Finish& f, const float* sums, int rows, int64_t panel, int columns) {
    const int64_t first = panel * (f.gated ? kHalf : kPanel);
    if (f.gated)
        gate_rows(f, sums, rows, first, columns);
    else if (f.bias && f.add)
        combine_rows<true, true>(f, sums, rows, first, columns);
    else if (f.bias)
        combine_rows<true, false>(f, sums, rows, first, columns);
    else if (f.add)
        combine_rows<false, true>(f, sums, rows, first, columns);
    else
        combine_rows<false, false>(f, sums, rows, first, columns);
}

#if CUE_X86

CUE_TARGET_AVX2
void finish_avx2(const Finish& f, const float* sums, int rows, int64_t panel, int columns) {
    finish(f, sums, rows, panel, columns);
}
CUE_TARGET_END

CUE_TARGET_AVX512
void finish_avx512(const Finish& f, const float* sums, int rows, int64_t panel, int columns) {
    finish(f, sums, rows, panel, columns);
}
CUE_TARGET_END

#endif

}  // namespace

void finish_tile(Isa isa, const Finish& f, const float* sums, int rows, int64_t panel, int columns) {
#if CUE_X86
    if (isa == kAvx512) return finish_avx512(f, sums, rows, panel, columns);
    if (isa == kAvx2) return finish_avx2(f, sums, rows, panel, columns);
#endif
    (void)isa;
    finish(f, sums, rows, panel, columns);
}

}  // namespace cue
