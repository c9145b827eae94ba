// Matrix products y[rows][outputs] = x[rows][inputs] @ W^T with packed weights. Arrays are row-major and strides are in
// values. No memory is allocated except scratch that each calling thread keeps.
#pragma once

#include <cstdint>

extern "C" {

// How weights are stored. int8 and int4 weights multiply rows that are quantized to int8 in the call, with a scale per
// 64 inputs. bfloat16 weights multiply rows rounded to bfloat16 where the machine has AVX512-BF16, else float32 rows.
enum CueKind : int { CUE_F32 = 0, CUE_BF16 = 1, CUE_INT8 = 2, CUE_INT4 = 3 };
// Element type of the weights before packing.
enum CueFloat : int { CUE_FLOAT32 = 0, CUE_BFLOAT16 = 1, CUE_FLOAT16 = 2 };

// Bytes that `cue_pack` writes, or -1 if such weights cannot be packed. `out` must be aligned to a cache line. `gated`:
// W has the rows of gate followed by as many rows of up, and a product is silu(gate) * up, with half as many outputs
// (SwiGLU, Shazeer 2020).
int64_t cue_packed_bytes(int kind, int64_t outputs, int64_t inputs, int gated);
// Returns 0, or -1 as `cue_packed_bytes`.
int cue_pack(int kind, const void* weights, CueFloat type, int64_t stride, int64_t outputs, int64_t inputs, int gated,
             void* out);

// y = x @ W^T + bias, or y += that with `add`. `bias` may be null. Gated weights take neither bias nor add. Returns 0,
// or -1 if `packed` holds no packed weights.
int cue_linear(const void* packed, const float* x, int64_t x_stride, int64_t rows, const float* bias, int add, float* y,
               int64_t y_stride);

// Quantize rows once for several products. The result takes `cue_quantized_bytes` bytes, aligned to a cache line.
int64_t cue_quantized_bytes(int64_t rows, int64_t inputs);
void cue_quantize(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized);
// As `cue_linear`, for int8 and int4 weights only; -1 for others.
int cue_linear_quantized(const void* packed, const void* quantized, int64_t rows, const float* bias, int add, float* y,
                         int64_t y_stride);
// Gated weights: silu(gate) * up, quantized for the next product. `next` must not overlap `quantized`.
int cue_gated_quantized(const void* packed, const void* quantized, int64_t rows, void* next);
}

namespace cue {

// An int32 sum holds this many products of bytes.
constexpr int64_t kInputsMax = 65536;

}  // namespace cue
