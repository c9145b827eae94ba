// A whole step of a Llama-like decoder in one call: from token ids to the logits of those that are sampled after.
#pragma once

#include <cstdint>

#include "attention.h"
#include "kv_pool.h"

extern "C" {

// Packed weights (see linear.h) and norms of one layer; biases and the norms of queries and keys may be null.
struct CueLayer {
    const void* qkv;      // queries, keys and values below each other
    const void* output;
    const void* gate_up;  // gated
    const void* down;
    const float* qkv_bias;
    const float* output_bias;
    const float* attention_norm;
    const float* mlp_norm;
    const float* query_norm;  // [head_dim], over each head
    const float* key_norm;
};

struct CueDecoder {
    const CueLayer* layers;
    const CueKv* pools;  // one a layer
    const void* embedding;
    const float* embedding_scales;
    const float* final_norm;
    const void* head;  // packed
    const float* cosines;
    const float* sines;  // [positions, rotary / 2]
    int64_t vocabulary, positions;
    int32_t layer_count, hidden, heads, kv_heads, head_dim, intermediate, rotary;
    int32_t embedding_type;  // as CueKv's
    int32_t quantized;       // whether the packed weights multiply quantized rows
    float epsilon, scale;
};

// What a step computes: `slots.count` tokens, and logits after those at `logit_rows`, which may be none.
struct CueStep {
    const int64_t* token_ids;
    CueSlots slots;
    CueSequences sequences;
    const int64_t* logit_rows;
    int32_t logit_row_count;
};

// The parts of a step whose time is told.
enum CuePart { CUE_EMBED, CUE_NORM, CUE_QKV, CUE_ROPE, CUE_ATTENTION, CUE_OUTPUT, CUE_MLP, CUE_HEAD, CUE_PART_COUNT };

// Bytes of scratch memory for steps of up to so many tokens.
int64_t cue_decoder_scratch_bytes(const CueDecoder* decoder, int64_t tokens);
// `logits` is [draws, vocabulary]; `argmax` the first largest of each row, or -1 where one is not finite. `scratch` lies
// on a cache line. `seconds` has CUE_PARTS entries, to which the time of each part is added, or is null. Returns 0, or
// -1 where an id, a position, a slot or a table does not exist; then what the step's slots hold is not defined.
int cue_decode(const CueDecoder* decoder, const CueStep* step, void* scratch, float* logits, int64_t* argmax,
               double* seconds);
}
