// How matrix products y = x @ W^T see their operands. Weights lie in panels of 32 outputs, rows of x in blocks of up to
// 12 rows whose values are interleaved, so that a kernel walks through both with one pointer each, front to back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace cue {

// Outputs in a panel: two zmm registers of int32 or float32.
constexpr int kPanelOutputs = 32;
// Rows in a block. 12 rows x 2 registers of sums, and 8 registers left for weights, x and constants.
constexpr int kBlockRows = 12;
// Inputs that share a scale in int4 weights.
constexpr int kGroupInputs = 32;
// Inputs that share a scale in a quantized row. Measured: one scale for a whole row put a model's predictions six times
// as far from those of float32 rows, for a sixteenth less time.
constexpr int kSpanInputs = 64;
constexpr int kGroupsPerSpan = kSpanInputs / kGroupInputs;
// Inputs in a unit: the four bytes that VNNI multiplies at once. Of float32 a unit is one value, of bfloat16 two.
constexpr int kQuadInputs = 4;
// Bytes of a row's two bfloat16 values, and of those of a panel.
constexpr int kBf16PairBytes = 4;
constexpr int kPanelPairBytes = kPanelOutputs * kBf16PairBytes;
constexpr int kUnitBytes = kPanelPairBytes;
constexpr int kQuadsPerGroup = kGroupInputs / kQuadInputs;
constexpr int kQuadsPerSpan = kSpanInputs / kQuadInputs;

enum WeightKind : int32_t { kF32 = 0, kBf16 = 1, kInt8 = 2, kInt4 = 3 };
constexpr int kWeightKindCount = 4;

// What a packed weight begins with; the panels follow.
//   f32   panel: [n_in][32] float32
//   bf16  panel: [n_in / 2][32] pairs of inputs, the first one in the low half; zeros pad the last
//   int8  panel: 32 float32 scales, then [quads][32][4] bytes of value + 128
//   int4  panel: per group of 32 inputs [4][2][64] bytes, the low halves of one quad and the high halves of the next,
//         then 16 pairs of bf16 scales (output i, output i + 16) and as many of middles: a code stands for
//         (code - 8) * scale + middle. The middle is small beside the least value, so bf16 rounds it less
struct alignas(64) PackedWeights {
    uint32_t magic;
    WeightKind kind;
    int64_t outputs;
    int64_t inputs;
    int32_t gated;  // a panel holds 16 outputs of the first half of the rows, then their partners of the second
    int32_t reserved[7];

    const uint8_t* panels() const { return reinterpret_cast<const uint8_t*>(this + 1); }
    uint8_t* panels() { return reinterpret_cast<uint8_t*>(this + 1); }
};
static_assert(sizeof(PackedWeights) == 64, "panels begin on a cache line");
constexpr uint32_t kMagic = 0x43554501;

constexpr int kInt8ScaleBytes = kPanelOutputs * 4;
constexpr int kPanelQuadBytes = kPanelOutputs * kQuadInputs;
constexpr int kInt4CodeBytes = kPanelOutputs * kGroupInputs / 2;
constexpr int kInt4ScaleBytes = kPanelOutputs * 2;
constexpr int kInt4GroupBytes = kInt4CodeBytes + 2 * kInt4ScaleBytes;
constexpr int kInt4MidCode = 8;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

inline bool is_quantized(WeightKind kind) { return kind == kInt8 || kind == kInt4; }
inline int64_t panel_count(int64_t outputs) { return divide_up(outputs, kPanelOutputs); }
// Units of a row: quantized rows, and the weights they meet, are padded to whole spans with zeros.
inline int64_t unit_count(WeightKind kind, int64_t inputs) {
    if (kind == kBf16) return divide_up(inputs, 2);
    return is_quantized(kind) ? divide_up(inputs, kSpanInputs) * kQuadsPerSpan : inputs;
}
inline int64_t panel_bytes(WeightKind kind, int64_t inputs) {
    switch (kind) {
        case kF32: return inputs * kPanelOutputs * 4;
        case kBf16: return unit_count(kind, inputs) * kPanelPairBytes;
        case kInt8: return kInt8ScaleBytes + unit_count(kind, inputs) * kPanelQuadBytes;
        case kInt4: return divide_up(inputs, kSpanInputs) * kGroupsPerSpan * kInt4GroupBytes;
    }
    return 0;
}

// Rows fall into as few blocks as possible, of sizes as equal as possible, larger ones first.
struct RowBlocks {
    explicit RowBlocks(int64_t all) : count(divide_up(all, kBlockRows)), rows(all) {}
    int64_t first(int64_t block) const {
        const int64_t larger = rows % count;
        return block * (rows / count) + (block < larger ? block : larger);
    }
    int size(int64_t block) const { return static_cast<int>(first(block + 1) - first(block)); }

    int64_t count, rows;
};

// Rows of x as kernels want them: block after block, in a block unit after unit, in a unit row after row. Quantized: x
// is about value * the scale of its span. What there is for each span or group lies like the units: block after block,
// in a block span after span, in a span row after row.
struct ArrangedRows {
    int64_t count, inputs, units;
    int unit_bytes;  // of one row: 8 for a pair of float32 values, 4 for all other units
    const uint8_t* data;
    const float* scales;      // of spans
    const int32_t* span_sums;      // of the values of spans, times -128: what takes the + 128 of int8 weights out again
    const float* group_sums;  // of the values of groups, times their scale: what the middles of int4 weights multiply
};

// Bytes of a buffer that holds quantized rows, and the view of one.
int64_t quantized_bytes(int64_t rows, int64_t inputs);
ArrangedRows quantized_view(const void* buffer, int64_t rows, int64_t inputs);
// Fill the buffer; `stride` in floats. A span with a value that is not finite gets the scale NaN.
void quantize_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, void* buffer);
// The same layout for weights that are not quantized: rows stay float32, or are rounded to bfloat16 if the weights are
// and this machine multiplies that. `buffer` has room for `arranged_bytes`; the view may be of x itself.
int64_t arranged_bytes(int64_t rows, int64_t inputs);
ArrangedRows arrange_rows(WeightKind kind, const float* x, int64_t stride, int64_t rows, int64_t inputs, void* buffer);

// Values of one row to int8 with one scale for all, round to nearest even. Returns the scale.
float quantize_whole_row(const float* x, int64_t count, int8_t* values);

// Some rows of one block, at the beginning of x.
struct TileArgs {
    const uint8_t* x;
    int64_t unit_stride;  // bytes from unit to unit
    int64_t units;
    const float* scales;      // of the first span,
    const int32_t* span_sums;      // of the first span
    const float* group_sums;  // and of the first group, as in `ArrangedRows`;
    int64_t span_stride;            // so many values from span to span and from group to group
    int64_t spans;
    float* y;  // [rows][32] is written, whatever was there
    int64_t y_stride;
    const uint8_t* prefetch_at;  // memory wanted next: with every unit two cache lines are prefetched there,
    int64_t prefetch_step;    // so many bytes further each time
};

#if CUE_X86
// Prefetch two cache lines into the second-level cache: the first-level cache has no room for them.
inline void prefetch_two_lines(const uint8_t* address) {
    _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(address) + 64, _MM_HINT_T1);
}
#endif

using TileKernel = void (*)(const TileArgs& tile, const uint8_t* panel);

// The kernels of one kind of weights and form: `by_rows[n]` makes n rows, 1 <= n <= rows_max.
struct TileKernels {
    const TileKernel* by_rows;
    int rows_max;
};

TileKernels f32_kernels(Isa isa);
TileKernels bf16_kernels(Isa isa);
TileKernels avx512_bf16_kernels();  // for rows of bfloat16
TileKernels int8_kernels(Isa isa);
TileKernels int4_kernels(Isa isa);

// What becomes of a tile of sums [rows][32]; `columns` of them are real.
struct Epilogue {
    float* y;
    int64_t stride;
    const float* bias;  // or null
    bool add;           // y += sums rather than y = sums
    bool gated;         // y[16] = silu(sums[0..16]) * sums[16..32]
};
void apply_epilogue(Isa isa, const Epilogue& epilogue, const float* sums, int rows, int64_t panel, int columns);

}  // namespace cue
