// The paged KV pool of one layer: memory layout, slots of a step's tokens, validation.
#pragma once

#include <cstdint>

#include "element_types.h"
#include "isa.h"

extern "C" {

// One layer's pool. `keys` and `values` are [blocks, kv_heads, block_size, head_dim] of `type`. With int8, a value is
// the stored number times the scale of its (block, head, token): scales are [blocks, kv_heads, block_size], else null.
// Blocks are `block_stride` tokens of one head apart, at least kv_heads * block_size: other layers may lie between.
//
// With `vnni_pairs`, keys are [blocks, kv_heads, head_dim / 2, block_size, 2], pairs of dimensions, and values are
// [blocks, kv_heads, block_size / 2, head_dim, 2], pairs of tokens: the operands of instructions that add two products
// per lane.
struct CueKv {
    void* keys;
    void* values;
    float* key_scales;
    float* value_scales;
    int64_t blocks, block_stride;
    int32_t type, kv_heads, block_size, head_dim;
    int32_t vnni_pairs;
};

// Positions and slots of a step's tokens: token t has position positions[t] in its sequence, and its keys and values go
// to slot offsets[t] of block blocks[t].
struct CueSlots {
    const int64_t* positions;
    const int64_t* blocks;
    const int64_t* offsets;
    int32_t count;
};
}

namespace cue {

// Pairs of 16-bit values in a register: pairs of keys of as many tokens, or pairs of values of as many dimensions.
constexpr int kPairsPerRegister = 16;
// Limit for the products of an int16 and an int8 in an int32 sum.
constexpr int kVnniInt8HeadDimMax = 256;

// Whether the machine has instructions for VNNI pairs of this element type.
inline bool has_vnni_pairs(int type) { return type == kBf16 ? has_avx512_bf16() : type == kInt8 && isa() == kAvx512; }

inline bool fits_vnni_pairs(int type, int block_size, int head_dim) {
    return (type == kBf16 || (type == kInt8 && head_dim <= kVnniInt8HeadDimMax)) &&
           block_size % kPairsPerRegister == 0 && head_dim % (2 * kPairsPerRegister) == 0;
}

// Position of the first token of a head of a block, counted in tokens: head_dim values each, or one scale.
inline int64_t head_tokens_begin(const CueKv& kv, int64_t block, int head) {
    return block * kv.block_stride + int64_t{head} * kv.block_size;
}

// Whether the sizes, strides and pointers are consistent.
inline bool is_valid(const CueKv& kv) {
    if (kv.blocks < 0 || kv.kv_heads < 1 || kv.block_size < 1 || kv.head_dim < 1) return false;
    if (kv.block_stride < int64_t{kv.kv_heads} * kv.block_size) return false;
    const bool has_scales = kv.key_scales != nullptr && kv.value_scales != nullptr;
    if (kv.vnni_pairs && !fits_vnni_pairs(kv.type, kv.block_size, kv.head_dim)) return false;
    return kv.type == kFloat32 || kv.type == kBf16 || (kv.type == kInt8 && has_scales);
}

}  // namespace cue
