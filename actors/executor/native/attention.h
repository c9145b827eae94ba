// Attention over the paged pool: one call for one layer of a whole step.
#pragma once

#include <cstdint>

#include "kv_pool.h"

extern "C" {

// The step's sequences: tokens `starts[i]` up to `stops[i]` of the step end at `context_lengths[i]` tokens of their
// text, whose keys and values lie in blocks[table_offsets[i]], blocks[table_offsets[i] + 1] and so on.
struct CueSequences {
    const int64_t* starts;
    const int64_t* stops;
    const int64_t* context_lengths;
    const int64_t* table_offsets;
    const int64_t* blocks;
    int64_t block_entries;  // entries of `blocks`
    int32_t count;
};

// out[t, h] = softmax(scale * q[t, h] . keys) . values over what token t may see: itself and all before it in its text.
// `heads` query heads, each `heads / kv_heads` neighbours share one KV head. Rows of q and out are `q_stride` and
// `out_stride` floats apart. Returns 0, or -1 and does nothing if the pool makes no sense, if it is paired and this
// machine multiplies no pairs, if a table names a block that does not exist or is too short, or if a chunk is empty or
// longer than its context.
int cue_attend(const CueKv* kv, const CueSequences* sequences, const float* q, int64_t q_stride, float* out,
               int64_t out_stride, int32_t heads, float scale);
}
