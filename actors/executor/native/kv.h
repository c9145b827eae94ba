// The paged pool of keys and values as the kernels see it, and the kernels that fill it.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace cue {

struct Bf16 {
    uint16_t bits;
};
constexpr uint16_t kBf16Nan = 0x7fc0;

inline float widened(Bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// To the nearest, ties to even.
inline Bf16 narrowed(float value) {
    if (value != value) return {kBf16Nan};
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

enum Type { kFloat32 = 0, kBf16 = 1, kInt8 = 2 };

}  // namespace cue

extern "C" {

// One layer's pool. `keys` and `values` are [blocks, kv_heads, block_size, head_dim] of `type`; for int8 the value is
// the number times the scale of its (block, head, token): scales are [blocks, kv_heads, block_size], else null. From
// block to block it is `block_stride` tokens of one head, kv_heads * block_size at least: other layers may lie between.
// Where the pool is `paired`, keys are [blocks, kv_heads, head_dim / 2, block_size, 2], pairs of dimensions, and values
// [blocks, kv_heads, block_size / 2, head_dim, 2], pairs of tokens: what instructions that add two products multiply.
struct CueKv {
    void* keys;
    void* values;
    float* key_scales;
    float* value_scales;
    int64_t blocks, block_stride;
    int32_t type, kv_heads, block_size, head_dim;
    int32_t paired;
};

// Where the tokens of a step stand: token t of T has position `positions[t]` in its text and its keys and values go to
// slot `offsets[t]` of block `blocks[t]`.
struct CueSlots {
    const int64_t* positions;
    const int64_t* blocks;
    const int64_t* offsets;
    int32_t count;
};

// Whether a pool of this kind should be paired: this machine multiplies pairs, and the sizes are whole registers.
int cue_pairs(int32_t type, int32_t block_size, int32_t head_dim);

// Both return 0, or -1 and do nothing if the pool makes no sense or a slot or a position does not exist.

// Store keys and values: rows of kv_heads * head_dim floats, `stride` floats apart. Uses no positions.
int cue_write_kv(const CueKv* kv, const CueSlots* slots, const float* keys, const float* values, int64_t stride);

// Rows of `qkv` hold heads * head_dim queries, kv_heads * head_dim keys, as many values. Turns queries (in place) and
// keys by rotary embedding and stores keys and values. The first `rotary` dimensions of a head turn, the first half of
// them against the second. `cosines` and `sines` are [table_rows, rotary / 2], indexed by position.
int cue_rope_write(const CueKv* kv, const CueSlots* slots, float* qkv, int32_t heads, const float* cosines,
                   const float* sines, int64_t table_rows, int32_t rotary);
}

namespace cue {

// Tokens whose keys fill a register with their pairs, and dimensions whose pairs of values do.
constexpr int kPairLanes = 16;
// At most so many products of a word and a byte meet in an int32 sum.
constexpr int kPairedHeadMax = 256;

// Whether this machine has instructions for pairs of what is stored.
inline bool multiplies_pairs(int type) { return type == kBf16 ? has_bf16() : type == kInt8 && isa() == kAvx512; }

inline bool fits_pairs(int type, int block_size, int head_dim) {
    return (type == kBf16 || (type == kInt8 && head_dim <= kPairedHeadMax)) && block_size % kPairLanes == 0 &&
           head_dim % (2 * kPairLanes) == 0;
}

// Where the tokens of a head of a block begin, in tokens: head_dim numbers each, or one scale.
inline int64_t run_of(const CueKv& kv, int64_t block, int head) {
    return block * kv.block_stride + int64_t{head} * kv.block_size;
}

// Whether the numbers of a pool make sense.
inline bool usable(const CueKv& kv) {
    if (kv.blocks < 0 || kv.kv_heads < 1 || kv.block_size < 1 || kv.head_dim < 1) return false;
    if (kv.block_stride < int64_t{kv.kv_heads} * kv.block_size) return false;
    const bool scaled = kv.key_scales != nullptr && kv.value_scales != nullptr;
    if (kv.paired && !fits_pairs(kv.type, kv.block_size, kv.head_dim)) return false;
    return kv.type == kFloat32 || kv.type == kBf16 || (kv.type == kInt8 && scaled);
}

}  // namespace cue
