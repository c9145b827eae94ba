// Causal attention over the paged KV pool (PagedAttention, Kwon et al. 2023): one call per layer and step.
#pragma once

#include <cstdint>

#include "kv_pool.h"

extern "C" {

// The step's sequences. Sequence i has the tokens starts[i] to stops[i] - 1 of the step, which are the last of its
// context of context_lengths[i] tokens. Keys and values of the context lie in blocks[table_offsets[i]],
// blocks[table_offsets[i] + 1] and so on.
struct CueSequences {
    const int64_t* starts;
    const int64_t* stops;
    const int64_t* context_lengths;
    const int64_t* table_offsets;
    const int64_t* blocks;
    int64_t block_entries;  // length of `blocks`
    int32_t count;
};

// out[t, h] = softmax(scale * q[t, h] . keys) . values over the context up to and including token t. Query heads in
// groups of `heads / kv_heads` neighbours share a KV head. Rows of q and out are `q_stride` and `out_stride` floats
// apart. Returns 0; or -1, without any effect, if the pool is invalid, if it holds VNNI pairs and the machine lacks the
// instructions, if a block table is too short or names a block that does not exist, or if a sequence has no tokens or
// more than its context.
int cue_attend(const CueKv* kv, const CueSequences* sequences, const float* q, int64_t q_stride, float* out,
               int64_t out_stride, int32_t heads, float scale);
}
