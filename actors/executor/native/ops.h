// The operations between the matrix products. Many rows are spread over the threads.
#pragma once

#include <cstdint>

extern "C" {

// x += delta, unless delta is null; y = x / sqrt(mean(x^2) + epsilon) * weight, row by row of [rows, n] (RMSNorm, Zhang
// and Sennrich 2019). y may be x or delta.
void cue_add_rmsnorm(float* x, const float* delta, const float* weight, float* y, int64_t rows, int64_t n,
                     float epsilon);

// out = silu(gate) * up for [rows, n], with silu(g) = g * sigmoid(g). Rows of gate and up are `stride` floats apart,
// rows of out n. out may be gate or up only if stride is n.
void cue_silu_mul(const float* gate, const float* up, int64_t stride, float* out, int64_t rows, int64_t n);

// out[i] = table[ids[i]] as floats, for `count` ids. `type` is an ElementType; int8 rows are multiplied by scales[id],
// else scales is null. Returns 0; or -1, without any effect, if an id is not in 0..table_rows - 1.
int cue_embed(const int64_t* ids, int64_t count, const void* table, const float* scales, int32_t type,
              int64_t table_rows, int64_t n, float* out);

// out[i] = the first position of the largest value of row i of logits [rows, n], or -1 if a value of the row is not
// finite. Rows are `stride` floats apart; n > 0.
void cue_argmax(const float* logits, int64_t stride, int64_t rows, int64_t n, int64_t* out);
}
