// A step of a Llama-like decoder in one call: from token ids to the logits of the rows that are sampled.
#pragma once

#include <cstdint>

#include "attention.h"
#include "kv_pool.h"

extern "C" {

// Packed weights (linear.h) and norms of one layer. Biases, query_norm and key_norm may be null.
struct CueLayer {
    const void* qkv;  // rows of Wq, Wk and Wv, one below the other
    const void* output;
    const void* gate_up;  // gated: rows of gate, then of up
    const void* down;
    const float* qkv_bias;
    const float* output_bias;
    const float* attention_norm;
    const float* mlp_norm;
    const float* query_norm;  // [head_dim], of each head
    const float* key_norm;
};

struct CueDecoder {
    const CueLayer* layers;
    const CueKv* pools;  // one per layer
    const void* embedding;
    const float* embedding_scales;
    const float* final_norm;
    const void* head;  // packed
    const float* cosines;
    const float* sines;  // [positions, rotary / 2], as cosines
    int64_t vocabulary, positions;
    int32_t layer_count, hidden, heads, kv_heads, head_dim, intermediate, rotary;
    int32_t embedding_type;  // ElementType, as CueKv.type
    int32_t quantized;       // whether the packed weights take quantized rows
    float epsilon, scale;
};

// A step: `slots.count` tokens. Logits are computed for the tokens at `logit_rows`, an ascending and possibly empty
// list.
struct CueStep {
    const int64_t* token_ids;
    CueSlots slots;
    CueSequences sequences;
    const int64_t* logit_rows;
    int32_t logit_row_count;
};

// Parts of a step that are timed separately.
enum CuePart { CUE_EMBED, CUE_NORM, CUE_QKV, CUE_ROPE, CUE_ATTENTION, CUE_OUTPUT, CUE_MLP, CUE_HEAD, CUE_PART_COUNT };

// Bytes of scratch memory for steps of up to `tokens` tokens.
int64_t cue_decoder_scratch_bytes(const CueDecoder* decoder, int64_t tokens);
// `logits` is [logit_row_count, vocabulary]. argmax[i] is the first position of the largest logit of row i, or -1 if a
// logit is not finite. `scratch` is aligned to a cache line. `seconds` is null or has CUE_PART_COUNT entries, to which
// the time of each part is added. Returns 0; or -1 if an id, position, slot or block table is invalid, after which the
// contents of the step's slots are undefined.
int cue_decode(const CueDecoder* decoder, const CueStep* step, void* scratch, float* logits, int64_t* argmax,
               double* seconds);
}
