// The small operations between the matrix products. Rows are spread over the threads if they are many.
#pragma once

#include <cstdint>

extern "C" {

// x += delta (unless null); y = x / sqrt(mean(x^2) + epsilon) * weight, row by row of [rows, n]. y may be x or delta.
void cue_add_rmsnorm(float* x, const float* delta, const float* weight, float* y, int64_t rows, int64_t n,
                     float epsilon);

// out = gate * sigmoid(gate) * up for [rows, n]; rows of gate and up are `stride` floats apart, rows of out n.
// out may be gate or up only where stride is n.
void cue_silu_mul(const float* gate, const float* up, int64_t stride, float* out, int64_t rows, int64_t n);

// out[i] = table[ids[i]] as floats, for `count` ids. `type` as in CueKv; int8 rows are multiplied by scales[id], else
// scales is null. Returns 0, or -1 and does nothing if an id is not below `table_rows`.
int cue_embed(const int64_t* ids, int64_t count, const void* table, const float* scales, int32_t type,
              int64_t table_rows, int64_t n, float* out);

// out[i] = where row i of logits [rows, n] is largest, the first such place; -1 if any number of it is not finite.
// Rows are `stride` floats apart; n > 0.
void cue_argmax(const float* logits, int64_t stride, int64_t rows, int64_t n, int64_t* out);
}
