#include "attention.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "attention_task.h"

#define CUE_KERNEL "attention_kernel.h"
#include "each_isa.h"
#include "threads.h"

namespace cue {
namespace {

constexpr int kTileQueries = 32;   // query tokens per tile: keys and values are fetched once for all of them
constexpr int kTilesPerThread = 4; // fewer tiles than this and they are made smaller
constexpr int kTileQueriesMin = 4;
constexpr int64_t kPartMin = 128;  // context tokens in a part of a split decode, at least
constexpr int64_t kPartMax = 1024; // and about at most, where there are several threads
constexpr int kPartsPerThread = 4;
constexpr float kLog2E = 1.44269504088896341f;
constexpr size_t kLine = 64;

decltype(&plain::attend_one) const one_forms[] = CUE_FORMS(attend_one);
decltype(&plain::attend_tile) const tile_forms[] = CUE_FORMS(attend_tile);
decltype(&plain::scratch_one) const scratch_one_forms[] = CUE_FORMS(scratch_one);
decltype(&plain::scratch_tile) const scratch_tile_forms[] = CUE_FORMS(scratch_tile);

// Memory that a thread keeps: it grows at the first calls and is then there.
class Kept {
public:
    ~Kept() { std::free(data_); }
    float* room(size_t floats) {
        if (floats > size_) {
            std::free(data_);
            const size_t bytes = (floats * sizeof(float) + kLine - 1) / kLine * kLine;
            data_ = static_cast<float*>(std::aligned_alloc(kLine, bytes));
            size_ = data_ == nullptr ? 0 : floats;
            if (data_ == nullptr) std::abort();  // some hundred kilobytes: nothing would work any more
        }
        return data_;
    }

private:
    float* data_ = nullptr;
    size_t size_ = 0;
};

thread_local Kept scratch;

// One task: a part of a decode's context, or a tile of a chunk, each for one KV head.
struct Piece {
    int sequence, kv_head;
    int64_t begin, end;  // context tokens
    int first, queries;  // query tokens from `first` of the sequence on
    int part;            // of a split decode, counted over the call; else -1
};

// Decodes whose parts are to be put together.
struct Split {
    int sequence, kv_head, part, parts;
};

struct Plan {
    std::vector<Piece> pieces;
    std::vector<Split> splits;
    int parts = 0;
};

struct Call {
    const CueKv& kv;
    const CueSequences& sequences;
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    int heads;
    float scale;
    int group() const { return heads / kv.kv_heads; }
    int64_t count(int i) const { return sequences.stops[i] - sequences.starts[i]; }
};

bool valid(const Call& call) {
    const CueKv& kv = call.kv;
    const CueSequences& all = call.sequences;
    if (!usable(kv) || (kv.paired && !multiplies_pairs(kv.type))) return false;
    if (call.heads < 1 || call.heads % kv.kv_heads != 0) return false;
    for (int i = 0; i < all.count; ++i) {
        const int64_t length = all.context_lengths[i], at = all.table_offsets[i];
        const int64_t needed = (length + kv.block_size - 1) / kv.block_size;
        if (call.count(i) < 1 || length < call.count(i) || at < 0 || at + needed > all.block_entries) return false;
        for (int64_t entry = at; entry < at + needed; ++entry)
            if (all.blocks[entry] < 0 || all.blocks[entry] >= kv.blocks) return false;
    }
    return true;
}

// Where part `part` of a context begins: whole registers of tokens before it.
int64_t bound(int64_t length, int part, int parts) {
    return part == parts ? length : length * part / parts / kPairLanes * kPairLanes;
}

// `parts_wanted` is 0 where there is one thread.
void plan_decode(const Call& call, int i, int parts_wanted, Plan& plan) {
    const int64_t length = call.sequences.context_lengths[i];
    const int64_t most = std::max<int64_t>(1, length / kPartMin);
    // Long ones always come in parts, for even among many tasks one of them would be the last to end.
    const int64_t least = std::max<int64_t>(1, parts_wanted == 0 ? 1 : length / kPartMax);
    const int parts = static_cast<int>(std::max(least, std::min<int64_t>(parts_wanted, most)));
    for (int head = 0; head < call.kv.kv_heads; ++head) {
        if (parts > 1) plan.splits.push_back({i, head, plan.parts, parts});
        for (int part = 0; part < parts; ++part)
            plan.pieces.push_back({i, head, bound(length, part, parts), bound(length, part + 1, parts), 0, 1,
                                   parts > 1 ? plan.parts++ : -1});
    }
}

void plan_chunk(const Call& call, int i, int tile, Plan& plan) {
    const int64_t before = call.sequences.context_lengths[i] - call.count(i);
    for (int head = 0; head < call.kv.kv_heads; ++head)
        for (int64_t first = 0; first < call.count(i); first += tile) {
            const int64_t queries = std::min<int64_t>(tile, call.count(i) - first);
            plan.pieces.push_back({i, head, 0, before + first + queries, static_cast<int>(first),
                                   static_cast<int>(queries), -1});
        }
}

void make_plan(const Call& call, Plan& plan) {
    plan.pieces.clear(), plan.splits.clear(), plan.parts = 0;
    const int threads = cue_threads(), kv_heads = call.kv.kv_heads;
    int decodes = 0;
    int64_t queries = 0;
    for (int i = 0; i < call.sequences.count; ++i)
        call.count(i) == 1 ? void(++decodes) : void(queries += call.count(i));
    const int tasks = std::max(1, decodes * kv_heads);
    const int parts = threads == 1 ? 0 : queries > 0 ? 1 : (kPartsPerThread * threads + tasks - 1) / tasks;
    int tile = kTileQueries;
    while (tile > kTileQueriesMin && queries * kv_heads / tile < int64_t{kTilesPerThread} * threads) tile /= 2;
    for (int i = 0; i < call.sequences.count; ++i)
        call.count(i) == 1 ? plan_decode(call, i, parts, plan) : plan_chunk(call, i, tile, plan);
    // The longest first, so that no thread is left with a long one at the end.
    std::sort(plan.pieces.begin(), plan.pieces.end(), [](const Piece& a, const Piece& b) {
        return (a.end - a.begin) * a.queries > (b.end - b.begin) * b.queries;
    });
}

AttentionTask task_of(const Call& call, const Piece& piece) {
    const int n = call.kv.head_dim, group = call.group();
    const int64_t row = call.sequences.starts[piece.sequence] + piece.first, column = piece.kv_head * group * n;
    AttentionTask task{};
    task.kv = &call.kv;
    task.table = call.sequences.blocks + call.sequences.table_offsets[piece.sequence];
    task.q = call.q + row * call.q_stride + column, task.q_stride = call.q_stride;
    task.out = call.out + row * call.out_stride + column, task.out_stride = call.out_stride;
    task.kv_head = piece.kv_head, task.group = group;
    task.begin = piece.begin, task.end = piece.end, task.queries = piece.queries;
    task.scale = call.scale * kLog2E;
    return task;
}

void run_piece(const Call& call, const Plan& plan, int i, float* parts) {
    const Piece& piece = plan.pieces[static_cast<size_t>(i)];
    const int n = call.kv.head_dim, group = call.group();
    const auto is_decode = [&](const Piece& some) { return call.count(some.sequence) == 1; };
    AttentionTask task = task_of(call, piece), following;
    const Isa form = isa();
    if (!is_decode(piece)) {
        task.scratch = scratch.room(scratch_tile_forms[form](piece.queries * group, n));
        return tile_forms[form](task);
    }
    if (piece.part >= 0) task.partial = parts + int64_t{piece.part} * group * (n + 2);
    task.scratch = scratch.room(scratch_one_forms[form](n));
    // Threads take pieces in turns.
    const size_t then = static_cast<size_t>(i + cue_threads());
    if (then < plan.pieces.size() && is_decode(plan.pieces[then])) {
        following = task_of(call, plan.pieces[then]);
        task.following = &following;
    }
    one_forms[form](task);
}

// Each part is, per query head: its maximum, its sum of weights, and its weighted values.
void put_together(const Call& call, const Split& split, const float* parts) {
    const int n = call.kv.head_dim, group = call.group(), size = n + 2;
    float* row = call.out + call.sequences.starts[split.sequence] * call.out_stride + split.kv_head * group * n;
    for (int head = 0; head < group; ++head, row += n) {
        const auto part = [&](int i) { return parts + (int64_t{split.part + i} * group + head) * size; };
        float most = part(0)[0], total = 0.0f;
        for (int i = 1; i < split.parts; ++i) most = std::max(most, part(i)[0]);
        std::fill(row, row + n, 0.0f);
        for (int i = 0; i < split.parts; ++i) {
            const float weight = std::exp2(part(i)[0] - most);
            total += weight * part(i)[1];
            for (int d = 0; d < n; ++d) row[d] += weight * part(i)[2 + d];
        }
        for (int d = 0; d < n; ++d) row[d] /= total;
    }
}

}  // namespace
}  // namespace cue

extern "C" int cue_attend(const CueKv* kv, const CueSequences* sequences, const float* q, int64_t q_stride, float* out,
                          int64_t out_stride, int32_t heads, float scale) {
    const cue::Call call{*kv, *sequences, q, q_stride, out, out_stride, heads, scale};
    if (!cue::valid(call)) return -1;
    thread_local cue::Plan plan;  // kept, so that its vectors need not grow again
    thread_local cue::Kept kept;
    cue::make_plan(call, plan);
    float* const parts = kept.room(static_cast<size_t>(plan.parts) * call.group() * (kv->head_dim + 2));
    const cue::Plan& made = plan;
    cue::parallel(static_cast<int>(made.pieces.size()), [&](int i) { cue::run_piece(call, made, i, parts); });
    for (const cue::Split& split : made.splits) cue::put_together(call, split, parts);
    return 0;
}
