// Operands and kernels of the matrix products y = x @ W^T. Weights lie in panels of 32 outputs, rows of x in blocks of
// up to 12 rows with interleaved values, so that a kernel reads both sequentially through one pointer each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace cue {

// Outputs in a panel: two 512-bit registers of int32 or float32.
constexpr int kPanelOutputs = 32;
// Maximum rows in a block: 12 rows * 2 registers of sums leave 8 registers for weights, x and constants.
constexpr int kBlockRows = 12;
// Inputs that share a scale in int4 weights.
constexpr int kGroupInputs = 32;
// Inputs that share a scale in a quantized row. Measured: with one scale per row, a model's predictions were six times
// as far from those of float32 rows, for a sixteenth less time.
constexpr int kSpanInputs = 64;
constexpr int kGroupsPerSpan = kSpanInputs / kGroupInputs;
// Inputs in a unit of int8 and int4: the four bytes per lane of a VNNI instruction. A unit of float32 is one input, of
// bfloat16 two.
constexpr int kQuadInputs = 4;
// Bytes of a pair of bfloat16 values, and of the pairs of a panel.
constexpr int kBf16PairBytes = 4;
constexpr int kPanelPairBytes = kPanelOutputs * kBf16PairBytes;
// Bytes of a panel per unit of float32 or bfloat16 weights.
constexpr int kUnitBytes = kPanelPairBytes;
constexpr int kQuadsPerGroup = kGroupInputs / kQuadInputs;
constexpr int kQuadsPerSpan = kSpanInputs / kQuadInputs;

enum WeightKind : int32_t { kF32 = 0, kBf16 = 1, kInt8 = 2, kInt4 = 3 };
constexpr int kWeightKindCount = 4;

// Header of packed weights. The panels follow:
//   f32   [inputs][32] float32
//   bf16  [inputs / 2][32] pairs of inputs, the first in the low half; zeros pad the last
//   int8  32 float32 scales, then [quads][32][4] bytes of value + 128
//   int4  per group of 32 inputs [4][2][64] bytes: low nibbles are one quad, high nibbles the next; then 16 pairs of
//         bf16 scales (output i, output i + 16) and as many pairs of midpoints. A code stands for
//         (code - 8) * scale + midpoint: the midpoint is small beside the minimum, so bf16 rounds it by less
struct alignas(64) PackedWeights {
    uint32_t magic;
    WeightKind kind;
    int64_t outputs;
    int64_t inputs;
    int32_t gated;  // a panel has 16 outputs of gate, then the same 16 of up
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
// Units of a row. Quantized rows, and their weights, are padded with zeros to whole spans.
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

// Division of rows into as few blocks as possible, of nearly equal size, larger ones first.
struct RowBlocks {
    explicit RowBlocks(int64_t all) : count(divide_up(all, kBlockRows)), rows(all) {}
    int64_t first(int64_t block) const {
        const int64_t larger = rows % count;
        return block * (rows / count) + (block < larger ? block : larger);
    }
    int size(int64_t block) const { return static_cast<int>(first(block + 1) - first(block)); }

    int64_t count, rows;
};

// Rows of x in the order of the kernels: block after block; in a block, unit after unit; in a unit, row after row.
// Values per span or group are in the same order: block after block, span after span, row after row. If quantized, x is
// about value * scale of the span.
struct ArrangedRows {
    int64_t count, inputs, units;
    int unit_bytes;  // per row: 8 for a pair of float32 values, 4 for all other units
    const uint8_t* data;
    const float* scales;       // per span
    const int32_t* span_sums;  // per span: -128 * sum of values, which removes the + 128 of int8 weights
    const float* group_sums;   // per group: scale * sum of values, the factor of the midpoints of int4 weights
};

// Bytes of a buffer of quantized rows, and the view of such a buffer.
int64_t quantized_bytes(int64_t rows, int64_t inputs);
ArrangedRows quantized_view(const void* buffer, int64_t rows, int64_t inputs);
// Fill the buffer from rows that are `stride` floats apart. A span with a value that is not finite gets the scale NaN.
void quantize_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, void* buffer);
// Arrange rows for weights that are not quantized: float32, or rounded to bfloat16 if the weights are bfloat16 and the
// machine has AVX512-BF16. `buffer` has `arranged_bytes` bytes; the view may refer to x itself.
int64_t arranged_bytes(int64_t rows, int64_t inputs);
ArrangedRows arrange_rows(WeightKind kind, const float* x, int64_t stride, int64_t rows, int64_t inputs, void* buffer);

// Quantize one row to int8 with a single scale, round to nearest even. Returns the scale.
float quantize_whole_row(const float* x, int64_t count, int8_t* values);

// Arguments of a kernel: some rows of one block, whose first values are at x.
struct TileArgs {
    const uint8_t* x;
    int64_t unit_stride;  // bytes between units
    int64_t units;
    const float* scales;       // of the first span, as in `ArrangedRows`
    const int32_t* span_sums;  // of the first span
    const float* group_sums;   // of the first group
    int64_t span_stride;       // distance in values between spans, and between groups
    int64_t spans;
    float* y;  // [rows][32], overwritten
    int64_t y_stride;
    const uint8_t* prefetch_at;  // weights to prefetch: two cache lines per unit,
    int64_t prefetch_step;       // advancing by this many bytes per unit
};

#if CUE_X86
// Prefetch two cache lines into the second-level cache: they would not fit the first level.
inline void prefetch_two_lines(const uint8_t* address) {
    _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(address) + 64, _MM_HINT_T1);
}
#endif

using TileKernel = void (*)(const TileArgs& tile, const uint8_t* panel);

// The kernels for one kind of weights and instruction set: by_rows[n] computes n rows, 1 <= n <= rows_max.
struct TileKernels {
    const TileKernel* by_rows;
    int rows_max;
};

TileKernels f32_kernels(Isa isa);
TileKernels bf16_kernels(Isa isa);
TileKernels avx512_bf16_kernels();  // for rows of bfloat16
TileKernels int8_kernels(Isa isa);
TileKernels int4_kernels(Isa isa);

// Destination of a tile of sums [rows][32], of which `columns` columns exist, and what is added or multiplied.
struct Epilogue {
    float* y;
    int64_t stride;
    const float* bias;  // or null
    bool add;           // y += sums instead of y = sums
    bool gated;         // y[c] = silu(sums[c]) * sums[c + 16] for 16 columns
};
void apply_epilogue(Isa isa, const Epilogue& epilogue, const float* sums, int rows, int64_t panel, int columns);

}  // namespace cue
