// The paged KV pool as the kernels see it: its layout and the slots of a step's tokens.
#pragma once

#include <cstdint>

#include "element_types.h"
#include "isa.h"

extern "C" {

// One layer's pool. `keys` and `values` are [blocks, kv_heads, block_size, head_dim] of `type`; for int8 the value is
// the number times the scale of its (block, head, token): scales are [blocks, kv_heads, block_size], else null. From
// block to block it is `block_stride` tokens of one head, kv_heads * block_size at least: other layers may lie between.
// Where the pool is `vnni_pairs`, keys are [blocks, kv_heads, head_dim / 2, block_size, 2], pairs of dimensions, and values
// [blocks, kv_heads, block_size / 2, head_dim, 2], pairs of tokens: what instructions that add two products multiply.
struct CueKv {
    void* keys;
    void* values;
    float* key_scales;
    float* value_scales;
    int64_t blocks, block_stride;
    int32_t type, kv_heads, block_size, head_dim;
    int32_t vnni_pairs;
};

// Where the tokens of a step stand: token t of T has position `positions[t]` in its text and its keys and values go to
// slot `offsets[t]` of block `blocks[t]`.
struct CueSlots {
    const int64_t* positions;
    const int64_t* blocks;
    const int64_t* offsets;
    int32_t count;
};
}

namespace cue {

// Tokens whose keys fill a register with their pairs, and dimensions whose pairs of values do.
constexpr int kPairsPerRegister = 16;
// At most so many products of a word and a byte meet in an int32 sum.
constexpr int kVnniInt8HeadDimMax = 256;

// Whether this machine has instructions for pairs of what is stored.
inline bool has_vnni_pairs(int type) { return type == kBf16 ? has_avx512_bf16() : type == kInt8 && isa() == kAvx512; }

inline bool fits_vnni_pairs(int type, int block_size, int head_dim) {
    return (type == kBf16 || (type == kInt8 && head_dim <= kVnniInt8HeadDimMax)) && block_size % kPairsPerRegister == 0 &&
           head_dim % (2 * kPairsPerRegister) == 0;
}

// Where the tokens of a head of a block begin, in tokens: head_dim numbers each, or one scale.
inline int64_t head_tokens_begin(const CueKv& kv, int64_t block, int head) {
    return block * kv.block_stride + int64_t{head} * kv.block_size;
}

// Whether the numbers of a pool make sense.
inline bool is_valid(const CueKv& kv) {
    if (kv.blocks < 0 || kv.kv_heads < 1 || kv.block_size < 1 || kv.head_dim < 1) return false;
    if (kv.block_stride < int64_t{kv.kv_heads} * kv.block_size) return false;
    const bool has_scales = kv.key_scales != nullptr && kv.value_scales != nullptr;
    if (kv.vnni_pairs && !fits_vnni_pairs(kv.type, kv.block_size, kv.head_dim)) return false;
    return kv.type == kFloat32 || kv.type == kBf16 || (kv.type == kInt8 && has_scales);
}

}  // namespace cue
