// The arguments of the attention kernels for one task.
#pragma once

#include <cstdint>

#include "kv_pool.h"

namespace cue {

// One KV head of one sequence: a decode, or a tile of query tokens.
struct AttentionTask {
    const CueKv* kv;
    const int64_t* table;
    const float* q;  // first query head of the KV head, first query token
    float* out;
    int64_t q_stride, out_stride;
    int kv_head, group;  // group: query heads per KV head
    int64_t begin, end;  // context tokens to attend to; of a tile: those that its last query sees
    int queries;         // of a tile: query tokens, the last of which is context token end - 1
    float scale;         // the caller's, times log2(e)
    float* partial;      // of a part of a decode: [group, 2 + head_dim] result; else null
    float* scratch;
    const AttentionTask* likely_next;  // of a decode: a task to prefetch for, or null
};

}  // namespace cue
