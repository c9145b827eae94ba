// Attention over the paged pool: splits a step into tasks for the threads and combines what split decodes return.
//
// A decode (one query token) is one task per KV head, or several that each read a part of the context (as in
// Flash-Decoding). A chunk of prefill is one task per KV head and tile of query tokens.
#include "attention.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "attention_task.h"

#define CUE_KERNEL "attention_kernel.h"
#include "foreach_isa.h"
#include "threads.h"

namespace cue {
namespace {

constexpr int kTileQueries = 32;    // query tokens per tile: keys and values are read once for all of them
constexpr int kTilesPerThread = 4;  // below this many tiles per thread, tiles are halved
constexpr int kTileQueriesMin = 4;
constexpr int64_t kPartTokensMin = 128;   // minimum context tokens in a part of a split decode
constexpr int64_t kPartTokensMax = 1024;  // and the approximate maximum, where there are several threads
constexpr int kPartsPerThread = 4;
constexpr float kLog2E = 1.44269504088896341f;
constexpr size_t kCacheLine = 64;

decltype(&portable::attend_decode) const decode_variants[] = CUE_ISA_VARIANTS(attend_decode);
decltype(&portable::attend_tile) const tile_variants[] = CUE_ISA_VARIANTS(attend_tile);
decltype(&portable::decode_scratch_floats) const decode_scratch_variants[] = CUE_ISA_VARIANTS(decode_scratch_floats);
decltype(&portable::tile_scratch_floats) const tile_scratch_variants[] = CUE_ISA_VARIANTS(tile_scratch_floats);

// A buffer that grows and never shrinks, one per thread and use.
class ScratchBuffer {
public:
    ~ScratchBuffer() { std::free(data_); }
    float* reserve(size_t floats) {
        if (floats > size_) {
            std::free(data_);
            const size_t bytes = (floats * sizeof(float) + kCacheLine - 1) / kCacheLine * kCacheLine;
            data_ = static_cast<float*>(std::aligned_alloc(kCacheLine, bytes));
            size_ = data_ == nullptr ? 0 : floats;
            if (data_ == nullptr) std::abort();  // a few hundred kilobytes: no later call could work either
        }
        return data_;
    }

private:
    float* data_ = nullptr;
    size_t size_ = 0;
};

thread_local ScratchBuffer kernel_scratch;

// One task: a part of a decode's context, or a tile of a chunk's query tokens, for one KV head.
struct WorkItem {
    int sequence, kv_head;
    int64_t begin, end;  // context tokens
    int first, queries;  // query tokens, `first` counted from the sequence's own first one
    int part;            // of a split decode: index among all parts of the call; else -1
};

// A decode in `parts` parts, whose results begin at index `part`.
struct SplitDecode {
    int sequence, kv_head, part, parts;
};

struct Plan {
    std::vector<WorkItem> items;
    std::vector<SplitDecode> splits;
    int parts = 0;
};

struct AttentionCall {
    const CueKv& kv;
    const CueSequences& sequences;
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    int heads;
    float scale;
    int group() const { return heads / kv.kv_heads; }
    int64_t query_count(int i) const { return sequences.stops[i] - sequences.starts[i]; }
};

bool is_valid_call(const AttentionCall& call) {
    const CueKv& kv = call.kv;
    const CueSequences& sequences = call.sequences;
    if (!is_valid(kv) || (kv.vnni_pairs && !has_vnni_pairs(kv.type))) return false;
    if (call.heads < 1 || call.heads % kv.kv_heads != 0) return false;
    for (int i = 0; i < sequences.count; ++i) {
        const int64_t length = sequences.context_lengths[i], table_begin = sequences.table_offsets[i];
        const int64_t needed = (length + kv.block_size - 1) / kv.block_size;
        if (call.query_count(i) < 1 || length < call.query_count(i) || table_begin < 0 ||
            table_begin + needed > sequences.block_entries)
            return false;
        for (int64_t entry = table_begin; entry < table_begin + needed; ++entry)
            if (sequences.blocks[entry] < 0 || sequences.blocks[entry] >= kv.blocks) return false;
    }
    return true;
}

// First context token of `part`: a multiple of kPairsPerRegister, except for the end of the last part.
int64_t part_begin(int64_t length, int part, int parts) {
    return part == parts ? length : length * part / parts / kPairsPerRegister * kPairsPerRegister;
}

// `parts_wanted` is 0 with one thread.
void plan_decode(const AttentionCall& call, int i, int parts_wanted, Plan& plan) {
    const int64_t length = call.sequences.context_lengths[i];
    const int64_t parts_max = std::max<int64_t>(1, length / kPartTokensMin);
    // Long contexts are split even among many tasks: an unsplit one would be the last task to end.
    const int64_t parts_min = std::max<int64_t>(1, parts_wanted == 0 ? 1 : length / kPartTokensMax);
    const int parts = static_cast<int>(std::max(parts_min, std::min<int64_t>(parts_wanted, parts_max)));
    for (int head = 0; head < call.kv.kv_heads; ++head) {
        if (parts > 1) plan.splits.push_back({i, head, plan.parts, parts});
        for (int part = 0; part < parts; ++part)
            plan.items.push_back({i, head, part_begin(length, part, parts), part_begin(length, part + 1, parts), 0, 1,
                                  parts > 1 ? plan.parts++ : -1});
    }
}

void plan_chunk(const AttentionCall& call, int i, int tile, Plan& plan) {
    const int64_t before = call.sequences.context_lengths[i] - call.query_count(i);
    for (int head = 0; head < call.kv.kv_heads; ++head)
        for (int64_t first = 0; first < call.query_count(i); first += tile) {
            const int64_t queries = std::min<int64_t>(tile, call.query_count(i) - first);
            plan.items.push_back(
                {i, head, 0, before + first + queries, static_cast<int>(first), static_cast<int>(queries), -1});
        }
}

void make_plan(const AttentionCall& call, Plan& plan) {
    plan.items.clear(), plan.splits.clear(), plan.parts = 0;
    const int threads = cue_threads(), kv_heads = call.kv.kv_heads;
    int decodes = 0;
    int64_t queries = 0;
    for (int i = 0; i < call.sequences.count; ++i)
        call.query_count(i) == 1 ? void(++decodes) : void(queries += call.query_count(i));
    const int tasks = std::max(1, decodes * kv_heads);
    const int parts = threads == 1 ? 0 : queries > 0 ? 1 : (kPartsPerThread * threads + tasks - 1) / tasks;
    int tile = kTileQueries;
    while (tile > kTileQueriesMin && queries * kv_heads / tile < int64_t{kTilesPerThread} * threads) tile /= 2;
    for (int i = 0; i < call.sequences.count; ++i)
        call.query_count(i) == 1 ? plan_decode(call, i, parts, plan) : plan_chunk(call, i, tile, plan);
    // Longest tasks first, so that no thread begins a long one at the end.
    std::sort(plan.items.begin(), plan.items.end(), [](const WorkItem& a, const WorkItem& b) {
        return (a.end - a.begin) * a.queries > (b.end - b.begin) * b.queries;
    });
}

AttentionTask make_task(const AttentionCall& call, const WorkItem& item) {
    const int n = call.kv.head_dim, group = call.group();
    const int64_t row = call.sequences.starts[item.sequence] + item.first, column = item.kv_head * group * n;
    AttentionTask task{};
    task.kv = &call.kv;
    task.table = call.sequences.blocks + call.sequences.table_offsets[item.sequence];
    task.q = call.q + row * call.q_stride + column, task.q_stride = call.q_stride;
    task.out = call.out + row * call.out_stride + column, task.out_stride = call.out_stride;
    task.kv_head = item.kv_head, task.group = group;
    task.begin = item.begin, task.end = item.end, task.queries = item.queries;
    task.scale = call.scale * kLog2E;
    return task;
}

void run_item(const AttentionCall& call, const Plan& plan, int i, float* parts) {
    const WorkItem& item = plan.items[static_cast<size_t>(i)];
    const int n = call.kv.head_dim, group = call.group();
    const auto is_decode = [&](const WorkItem& other) { return call.query_count(other.sequence) == 1; };
    AttentionTask task = make_task(call, item), likely_next;
    const Isa chosen_isa = isa();
    if (!is_decode(item)) {
        task.scratch = kernel_scratch.reserve(tile_scratch_variants[chosen_isa](item.queries * group, n));
        return tile_variants[chosen_isa](task);
    }
    if (item.part >= 0) task.partial = parts + int64_t{item.part} * group * (n + 2);
    task.scratch = kernel_scratch.reserve(decode_scratch_variants[chosen_isa](n));
    // With similar tasks a thread's next item is about `cue_threads()` items further on.
    const size_t next = static_cast<size_t>(i + cue_threads());
    if (next < plan.items.size() && is_decode(plan.items[next])) {
        likely_next = make_task(call, plan.items[next]);
        task.likely_next = &likely_next;
    }
    decode_variants[chosen_isa](task);
}

// Write the output of a split decode. Per query head a part is: maximum score, sum of weights, weighted sum of values.
void combine_parts(const AttentionCall& call, const SplitDecode& split, const float* parts) {
    const int n = call.kv.head_dim, group = call.group(), size = n + 2;
    float* row = call.out + call.sequences.starts[split.sequence] * call.out_stride + split.kv_head * group * n;
    for (int head = 0; head < group; ++head, row += n) {
        const auto part = [&](int i) { return parts + (int64_t{split.part + i} * group + head) * size; };
        float max_score = part(0)[0], weight_sum = 0.0f;
        for (int i = 1; i < split.parts; ++i) max_score = std::max(max_score, part(i)[0]);
        std::fill(row, row + n, 0.0f);
        for (int i = 0; i < split.parts; ++i) {
            const float weight = std::exp2(part(i)[0] - max_score);
            weight_sum += weight * part(i)[1];
            for (int d = 0; d < n; ++d) row[d] += weight * part(i)[2 + d];
        }
        for (int d = 0; d < n; ++d) row[d] /= weight_sum;
    }
}

}  // namespace
}  // namespace cue

extern "C" int cue_attend(const CueKv* kv, const CueSequences* sequences, const float* q, int64_t q_stride, float* out,
                          int64_t out_stride, int32_t heads, float scale) {
    const cue::AttentionCall call{*kv, *sequences, q, q_stride, out, out_stride, heads, scale};
    if (!cue::is_valid_call(call)) return -1;
    thread_local cue::Plan plan;  // keeps the capacity of its vectors between calls
    thread_local cue::ScratchBuffer partials_buffer;
    cue::make_plan(call, plan);
    float* const parts = partials_buffer.reserve(static_cast<size_t>(plan.parts) * call.group() * (kv->head_dim + 2));
    const cue::Plan& ready = plan;
    cue::parallel(static_cast<int>(ready.items.size()), [&](int i) { cue::run_item(call, ready, i, parts); });
    for (const cue::SplitDecode& split : ready.splits) cue::combine_parts(call, split, parts);
    return 0;
}
