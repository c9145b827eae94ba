// Matrix products in tiles: panels of weights are divided among the threads, and rows pass through a panel while it is
// in the cache.
#include "linear.h"

#include <cstdlib>
#include <new>

#include "linear_kernels.h"
#include "threads.h"

namespace cue {
namespace {

// Maximum bytes of the rows that a thread multiplies by each of its panels: they stay in the second-level cache beside
// a panel.
constexpr int64_t kRowBytesMax = 384 * 1024;
// Tasks per thread: enough to balance threads of different speed, few enough for long stretches of sequential reads.
constexpr int kTasksPerThread = 8;
// Up to this many bytes of weights one thread does the whole product: waking another takes longer.
constexpr int64_t kSingleThreadBytes = 64 * 1024;

// Up to this many rows a product is bound by memory, not arithmetic, and prefetches kNearPrefetchBytes ahead.
constexpr int memory_bound_rows(WeightKind kind) { return kind == kBf16 ? 2 : kind == kInt4 ? 6 : 5; }
constexpr int64_t kNearPrefetchBytes = 1024;

// A buffer that grows and never shrinks, one per thread and use.
class ScratchBuffer {
public:
    ~ScratchBuffer() { std::free(at_); }
    void* reserve(int64_t bytes) {
        if (bytes <= bytes_) return at_;
        std::free(at_);
        bytes_ = round_up(bytes + bytes / 4, 4096);
        at_ = std::aligned_alloc(64, static_cast<size_t>(bytes_));
        if (!at_) throw std::bad_alloc();
        return at_;
    }

private:
    void* at_ = nullptr;
    int64_t bytes_ = 0;
};

thread_local ScratchBuffer rows_scratch, gated_scratch;

TileKernels select_kernels(WeightKind kind, const ArrangedRows& rows, Isa isa) {
    switch (kind) {
        case kF32: return f32_kernels(isa);
        case kBf16: return rows.unit_bytes == kBf16PairBytes ? avx512_bf16_kernels() : bf16_kernels(isa);
        case kInt8: return int8_kernels(isa);
        case kInt4: return int4_kernels(isa);
    }
    return {nullptr, 0};
}

class MatrixProduct {
public:
    MatrixProduct(const PackedWeights& packed, const ArrangedRows& rows, const Epilogue& epilogue)
        : packed_(packed), rows_(rows), epilogue_(epilogue), blocks_(rows.count), isa_(isa()) {
        kernels_ = select_kernels(packed.kind, rows, isa_);
        spans_ = divide_up(packed.inputs, kSpanInputs);
        panel_bytes_ = panel_bytes(packed.kind, packed.inputs);
        outputs_ = packed.gated ? packed.outputs / 2 : packed.outputs;
        columns_ = packed.gated ? kPanelOutputs / 2 : kPanelOutputs;
        panels_ = divide_up(outputs_, columns_);
        direct_ = !packed.gated && !epilogue.bias && !epilogue.add;
        blocks_at_once_ = kRowBytesMax / (kBlockRows * rows.unit_bytes * rows.units);
        if (blocks_at_once_ < 1) blocks_at_once_ = 1;
    }

    void run() {
        const int64_t row_strips = divide_up(blocks_.count, blocks_at_once_);
        const bool single_thread = panels_ * panel_bytes_ <= kSingleThreadBytes && rows_.count <= kBlockRows;
        const int64_t panels_per_task = panels_ / (static_cast<int64_t>(cue_threads()) * kTasksPerThread);
        const int64_t panels_in_chunk = single_thread ? panels_ : panels_per_task > 1 ? panels_per_task : 1;
        const int64_t chunks = divide_up(panels_, panels_in_chunk);
        parallel(static_cast<int>(row_strips * chunks), [&](int task) {
            const int64_t first = task % chunks * panels_in_chunk,
                          last = first + panels_in_chunk < panels_ ? first + panels_in_chunk : panels_;
            for (int64_t panel = first; panel < last; ++panel) compute_panel(panel, task / chunks * blocks_at_once_);
        });
    }

private:
    // Weights to prefetch: address, end, and bytes to advance per unit.
    struct PrefetchCursor {
        const uint8_t *at, *end;
        int64_t step;
    };

    // With few rows memory is the limit, and a tile prefetches a little ahead of itself. With more rows there is time
    // to prefetch the whole next panel, by the only tile or by the first two. Measured: each policy is up to a third
    // slower in the other case.
    PrefetchCursor prefetch_from(const uint8_t* weights, int64_t panel, int64_t rows) const {
        const int64_t step = panel_bytes_ / rows_.units;
        if (rows <= memory_bound_rows(packed_.kind))
            return {weights + kNearPrefetchBytes, weights + kNearPrefetchBytes + panel_bytes_, step};
        const uint8_t* next = weights + panel_bytes_;
        return {next, panel + 1 < panels_ ? next + panel_bytes_ : next, rows <= kernels_.rows_max ? step : step / 2};
    }

    // The outputs of one panel for the blocks of one strip, from `block` on.
    void compute_panel(int64_t panel, int64_t block) const {
        const int64_t end = block + blocks_at_once_ < blocks_.count ? block + blocks_at_once_ : blocks_.count;
        const uint8_t* weights = packed_.panels() + panel * panel_bytes_;
        PrefetchCursor cursor = prefetch_from(weights, panel, blocks_.first(end) - blocks_.first(block));
        for (; block < end; ++block) {
            const int size = blocks_.size(block);
            const int tiles = static_cast<int>(divide_up(size, kernels_.rows_max));
            for (int tile = 0; tile < tiles; ++tile) {
                const int from = size * tile / tiles, rows = size * (tile + 1) / tiles - from;
                if (cursor.at >= cursor.end) cursor = {weights, weights, 0};
                compute_tile(panel, weights, block, from, rows, cursor);
                cursor.at += rows_.units * cursor.step;
            }
        }
    }

    // The outputs of one panel for `rows` rows of a block, from row `from` on.
    void compute_tile(int64_t panel, const uint8_t* weights, int64_t block, int from, int rows,
                      const PrefetchCursor& cursor) const {
        const int64_t first = blocks_.first(block), row = first + from;
        const int64_t left = outputs_ - panel * columns_;
        const int columns = static_cast<int>(left < columns_ ? left : columns_);
        Epilogue epilogue = epilogue_;
        epilogue.y += row * epilogue.stride;
        prefetch_result(epilogue.y + panel * columns_, rows, columns);

        const bool direct = direct_ && columns == kPanelOutputs;
        alignas(64) float sums[kBlockRows * kPanelOutputs];
        TileArgs tile{};
        tile.x = rows_.data + (first * rows_.units + from) * rows_.unit_bytes;
        tile.unit_stride = blocks_.size(block) * rows_.unit_bytes;
        tile.units = rows_.units;
        if (is_quantized(packed_.kind)) {
            tile.scales = rows_.scales + first * spans_ + from;
            tile.span_sums = rows_.span_sums + first * spans_ + from;
            tile.group_sums = rows_.group_sums + first * spans_ * kGroupsPerSpan + from;
            tile.span_stride = blocks_.size(block);
            tile.spans = spans_;
        }
        tile.y = direct ? epilogue.y + panel * kPanelOutputs : sums;
        tile.y_stride = direct ? epilogue.stride : kPanelOutputs;
        tile.prefetch_at = cursor.at;
        tile.prefetch_step = cursor.step;
        kernels_.by_rows[rows](tile, weights);
        if (!direct) apply_epilogue(isa_, epilogue, sums, rows, panel, columns);
    }

    // Prefetch the result for writing while its sums are computed.
    void prefetch_result(const float* y, int rows, int columns) const {
        for (int r = 0; r < rows; ++r, y += epilogue_.stride) {
            __builtin_prefetch(y, 1);
            if (columns > kPanelOutputs / 2) __builtin_prefetch(y + kPanelOutputs / 2, 1);
        }
    }

    const PackedWeights& packed_;
    const ArrangedRows& rows_;
    const Epilogue& epilogue_;
    const RowBlocks blocks_;
    const Isa isa_;
    TileKernels kernels_;
    int64_t spans_, panel_bytes_, outputs_, panels_, blocks_at_once_;
    int columns_;
    bool direct_;
};

const PackedWeights* checked_header(const void* packed) {
    const auto* header = static_cast<const PackedWeights*>(packed);
    return header && header->magic == kMagic ? header : nullptr;
}

}  // namespace
}  // namespace cue

using namespace cue;

extern "C" int cue_linear(const void* packed, const float* x, int64_t x_stride, int64_t rows, const float* bias,
                          int add, float* y, int64_t y_stride) {
    const PackedWeights* weights = checked_header(packed);
    if (!weights || (weights->gated && (bias || add))) return -1;
    if (rows <= 0) return 0;
    const int64_t inputs = weights->inputs;
    if (is_quantized(weights->kind)) {
        void* quantized = rows_scratch.reserve(quantized_bytes(rows, inputs));
        quantize_rows(x, x_stride, rows, inputs, quantized);
        return cue_linear_quantized(packed, quantized, rows, bias, add, y, y_stride);
    }
    void* arranged = rows_scratch.reserve(arranged_bytes(rows, inputs));
    const ArrangedRows view = arrange_rows(weights->kind, x, x_stride, rows, inputs, arranged);
    MatrixProduct(*weights, view, {y, y_stride, bias, add != 0, weights->gated != 0}).run();
    return 0;
}

extern "C" int64_t cue_quantized_bytes(int64_t rows, int64_t inputs) { return quantized_bytes(rows, inputs); }

extern "C" void cue_quantize(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized) {
    if (rows > 0) quantize_rows(x, x_stride, rows, inputs, quantized);
}

extern "C" int cue_linear_quantized(const void* packed, const void* quantized, int64_t rows, const float* bias, int add,
                                    float* y, int64_t y_stride) {
    const PackedWeights* weights = checked_header(packed);
    if (!weights || !is_quantized(weights->kind) || (weights->gated && (bias || add))) return -1;
    if (rows <= 0) return 0;
    const ArrangedRows view = quantized_view(quantized, rows, weights->inputs);
    MatrixProduct(*weights, view, {y, y_stride, bias, add != 0, weights->gated != 0}).run();
    return 0;
}

extern "C" int cue_gated_quantized(const void* packed, const void* quantized, int64_t rows, void* next) {
    const PackedWeights* weights = checked_header(packed);
    if (!weights || !weights->gated) return -1;
    if (rows <= 0) return 0;
    const int64_t outputs = weights->outputs / 2;
    auto* y = static_cast<float*>(gated_scratch.reserve(rows * outputs * 4));
    const int failed = cue_linear_quantized(packed, quantized, rows, nullptr, 0, y, outputs);
    if (!failed) quantize_rows(y, outputs, rows, outputs, next);
    return failed;
}
