// Writing keys and values into the paged KV pool, spread over the threads by tokens.
#include <algorithm>

#include "kv.h"

#define CUE_KERNEL "kv_kernel.h"
#include "foreach_isa.h"
#include "threads.h"

namespace cue {
namespace {

// Waking another thread takes about as long as writing this many tokens.
constexpr int kTokensPerTask = 16;

decltype(&portable::write_token) const write_variants[] = CUE_ISA_VARIANTS(write_token);
decltype(&portable::rope_heads) const rope_variants[] = CUE_ISA_VARIANTS(rope_heads);

bool slots_exist(const CueKv& kv, const CueSlots& slots) {
    if (!is_valid(kv)) return false;
    for (int t = 0; t < slots.count; ++t) {
        if (slots.blocks[t] < 0 || slots.blocks[t] >= kv.blocks) return false;
        if (slots.offsets[t] < 0 || slots.offsets[t] >= kv.block_size) return false;
    }
    return true;
}

template <class Body>
void for_each_token(int count, Body&& body) {
    parallel((count + kTokensPerTask - 1) / kTokensPerTask, [&](int task) {
        const int end = std::min(count, (task + 1) * kTokensPerTask);
        for (int t = task * kTokensPerTask; t < end; ++t) body(t);
    });
}

}  // namespace
}  // namespace cue

extern "C" int cue_kv_vnni_pairs(int32_t type, int32_t block_size, int32_t head_dim) {
    return cue::has_vnni_pairs(type) && cue::fits_vnni_pairs(type, block_size, head_dim);
}

extern "C" int cue_write_kv(const CueKv* kv, const CueSlots* slots, const float* keys, const float* values,
                            int64_t stride) {
    if (!cue::slots_exist(*kv, *slots)) return -1;
    const auto write = cue::write_variants[cue::isa()];
    cue::for_each_token(slots->count, [&](int t) {
        write(*kv, slots->blocks[t], slots->offsets[t], keys + t * stride, values + t * stride);
    });
    return 0;
}

extern "C" int cue_rope_write(const CueKv* kv, const CueSlots* slots, float* qkv, int32_t heads, const float* cosines,
                              const float* sines, int64_t table_rows, int32_t rotary) {
    if (!cue::slots_exist(*kv, *slots) || rotary < 0 || rotary > kv->head_dim || rotary % 2 != 0) return -1;
    for (int t = 0; t < slots->count; ++t)
        if (slots->positions[t] < 0 || slots->positions[t] >= table_rows) return -1;
    const auto write = cue::write_variants[cue::isa()];
    const auto rope = cue::rope_variants[cue::isa()];
    const int half = rotary / 2;
    const int64_t q_size = int64_t{heads} * kv->head_dim, k_size = int64_t{kv->kv_heads} * kv->head_dim;
    cue::for_each_token(slots->count, [&](int t) {
        float* row = qkv + t * (q_size + 2 * k_size);
        const int64_t table_offset = slots->positions[t] * half;
        rope(row, heads + kv->kv_heads, kv->head_dim, half, cosines + table_offset, sines + table_offset);
        write(*kv, slots->blocks[t], slots->offsets[t], row + q_size, row + q_size + k_size);
    });
    return 0;
}
