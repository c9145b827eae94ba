// Kernels that fill the paged KV pool.
#pragma once

#include <cstdint>

#include "kv_pool.h"

extern "C" {

// Whether a pool of this kind should be paired: this machine multiplies pairs, and the sizes are whole registers.
int cue_kv_vnni_pairs(int32_t type, int32_t block_size, int32_t head_dim);

// Both return 0, or -1 and do nothing if the pool makes no sense or a slot or a position does not exist.

// Store keys and values: rows of kv_heads * head_dim floats, `stride` floats apart. Uses no positions.
int cue_write_kv(const CueKv* kv, const CueSlots* slots, const float* keys, const float* values, int64_t stride);

// Rows of `qkv` hold heads * head_dim queries, kv_heads * head_dim keys, as many values. Turns queries (in place) and
// keys by rotary embedding and stores keys and values. The first `rotary` dimensions of a head turn, the first half of
// them against the second. `cosines` and `sines` are [table_rows, rotary / 2], indexed by position.
int cue_rope_write(const CueKv* kv, const CueSlots* slots, float* qkv, int32_t heads, const float* cosines,
                   const float* sines, int64_t table_rows, int32_t rotary);
}
