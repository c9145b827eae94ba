// Kernels that write the paged KV pool.
#pragma once

#include <cstdint>

#include "kv_pool.h"

extern "C" {

// Whether a pool of this type and size should hold VNNI pairs: the machine has the instructions, and blocks and heads
// fill whole registers.
int cue_kv_vnni_pairs(int32_t type, int32_t block_size, int32_t head_dim);

// Both functions return 0; or -1, without any effect, if the pool is invalid or a slot or position does not exist.

// Store keys and values: rows of kv_heads * head_dim floats, `stride` floats apart. `slots->positions` is not used.
int cue_write_kv(const CueKv* kv, const CueSlots* slots, const float* keys, const float* values, int64_t stride);

// Apply rotary embedding (RoPE, Su et al. 2021) to the queries, in place, and to the keys, and store keys and values. A
// row of `qkv` holds heads * head_dim queries, then kv_heads * head_dim keys, then as many values. The first `rotary`
// dimensions of a head are rotated, dimension i with dimension i + rotary / 2. `cosines` and `sines` are [table_rows,
// rotary / 2], indexed by position.
int cue_rope_write(const CueKv* kv, const CueSlots* slots, float* qkv, int32_t heads, const float* cosines,
                   const float* sines, int64_t table_rows, int32_t rotary);
}
