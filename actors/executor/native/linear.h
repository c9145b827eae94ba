// Matrix products y[rows][outputs] = x[rows][inputs] @ W^T with weights that were packed once. Plain pointers,
// row-major arrays, strides in values; nothing is allocated but scratch memory that each calling thread keeps.
#pragma once

#include <cstdint>

extern "C" {

// How weights are kept; the quantized ones multiply rows that are quantized to int8 in the call, a scale for each 64
// inputs. bfloat16 ones multiply rows rounded to bfloat16 where the machine does that, else rows of float32.
enum CueKind : int { CUE_F32 = 0, CUE_BF16 = 1, CUE_INT8 = 2, CUE_INT4 = 3 };
// What weights are packed from.
enum CueFloat : int { CUE_FLOAT32 = 0, CUE_BFLOAT16 = 1, CUE_FLOAT16 = 2 };

// Bytes that `cue_pack` writes; -1 if there is no such packing. `out` wants to lie on a cache line. `gated`: W is the
// gate's rows followed by as many of up's, and products make silu(gate) * up, half as many outputs.
int64_t cue_packed_bytes(int kind, int64_t outputs, int64_t inputs, int gated);
// Returns 0, or -1 as above.
int cue_pack(int kind, const void* weights, CueFloat type, int64_t stride, int64_t outputs, int64_t inputs, int gated,
             void* out);

// y = x @ W^T + bias, or y += that; `bias` may be null (and must be for gated weights, which do not add either).
// Returns 0, or -1 if `packed` is none.
int cue_linear(const void* packed, const float* x, int64_t x_stride, int64_t rows, const float* bias, int add, float* y,
               int64_t y_stride);

// Rows that several products share are quantized once, into `cue_quantized_bytes` bytes on a cache line.
int64_t cue_quantized_bytes(int64_t rows, int64_t inputs);
void cue_quantize(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized);
// As `cue_linear` for int8 and int4 weights; -1 for others.
int cue_linear_quantized(const void* packed, const void* quantized, int64_t rows, const float* bias, int add, float* y,
                         int64_t y_stride);
// Gated weights: silu(gate) * up, quantized for the next product (into memory other than the first).
int cue_gated_quantized(const void* packed, const void* quantized, int64_t rows, void* next);

}

namespace cue {

// int32 sums hold this many products of bytes.
constexpr int64_t kInputsMax = 65536;

}  // namespace cue
