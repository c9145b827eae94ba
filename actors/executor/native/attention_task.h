// One task of an attention call, as the kernels of every instruction set take it.
#pragma once

#include <cstdint>

#include "kv_pool.h"

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
    const AttentionTask* likely_next;  // of a decode: perhaps this thread's next one, or null
};

}  // namespace cue
