// Attention over the paged pool: one call for one layer of a whole step.
#pragma once

#include <cstdint>

#include "kv.h"

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

namespace cue {

// What a form's kernels need of one task; `table` is the sequence's own.
struct AttentionTask {
    const CueKv* kv;
    const int64_t* table;
    const float* q;  // of the first query head of the KV head, at the first query token
    float* out;
    int64_t q_stride, out_stride;
    int kv_head, group;              // group: query heads per KV head
    int64_t begin, end;              // context tokens to attend to (tiles: as the last query sees)
    int queries;                     // tiles: query tokens, of which the last sees up to `end`
    float scale;                     // log2(e) times the caller's
    float* partial;                  // decodes of a part of the context: where its result goes, else null
    float* scratch;
    const AttentionTask* following;  // of a decode: perhaps this thread's next one, or null
};

}  // namespace cue
