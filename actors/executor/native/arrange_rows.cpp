// Rows of x in the order in which the kernels for float weights read them: blocks of up to 12 rows, unit after unit,
// row after row within a unit (`ArrangedRows`). Values stay float32, or become pairs of bfloat16 where AVX512-BF16
// multiplies them.
#include "linear_kernels.h"

#include <cstring>

#include "threads.h"

namespace cue {
namespace {

// Up to this many values the caller arranges all rows itself: waking the other threads takes longer.
constexpr int64_t kSingleThreadValues = 8192;

// One block as float32: each unit holds kUnitInputs values of each of `size` rows, and zeros pad the last unit.
template <int kUnitInputs>
void arrange_block(const float* x, int64_t stride, int size, int64_t inputs, void* block) {
    const int64_t whole = inputs / kUnitInputs, rest = inputs % kUnitInputs;
    for (int r = 0; r < size; ++r, x += stride) {
        float* out = static_cast<float*>(block) + r * kUnitInputs;
        for (int64_t unit = 0; unit < whole; ++unit, out += size * kUnitInputs)
            std::memcpy(out, x + unit * kUnitInputs, sizeof(float) * kUnitInputs);
        for (int i = 0; rest > 0 && i < kUnitInputs; ++i) out[i] = i < rest ? x[whole * kUnitInputs + i] : 0.0f;
    }
}

#if CUE_X86_BF16

CUE_TARGET_BF16

// One block as bfloat16: as `arrange_block<2>`, with values rounded to nearest, ties to even.
void arrange_block_bf16(const float* x, int64_t stride, int size, int64_t inputs, void* block) {
    constexpr int kInputsAtOnce = 32;
    for (int r = 0; r < size; ++r, x += stride) {
        uint8_t* out = static_cast<uint8_t*>(block) + r * kBf16PairBytes;
        for (int64_t i = 0; i < inputs; i += kInputsAtOnce) {
            const float* from = x + i;
            const int count = static_cast<int>(inputs - i < kInputsAtOnce ? inputs - i : kInputsAtOnce);
            float last[kInputsAtOnce] = {};
            if (count < kInputsAtOnce) {
                std::memcpy(last, from, sizeof(float) * static_cast<size_t>(count));
                from = last;
            }
            alignas(64) uint32_t pairs[kInputsAtOnce / 2];
            const __m512bh packed =
                _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kInputsAtOnce / 2), _mm512_loadu_ps(from));
            std::memcpy(pairs, &packed, sizeof pairs);
            for (int p = 0; p < (count + 1) / 2; ++p, out += size * kBf16PairBytes)
                std::memcpy(out, pairs + p, kBf16PairBytes);
        }
    }
}

CUE_TARGET_END

#endif

}  // namespace

int64_t arranged_bytes(int64_t rows, int64_t inputs) { return rows * round_up(inputs, 2) * 4; }

ArrangedRows arrange_rows(WeightKind kind, const float* x, int64_t stride, int64_t rows, int64_t inputs, void* buffer) {
    const int unit_inputs = kind == kBf16 ? 2 : 1;
    ArrangedRows view{
        rows,    inputs, unit_count(kind, inputs), unit_inputs * 4, static_cast<const uint8_t*>(buffer), nullptr,
        nullptr, nullptr};
    auto arrange = unit_inputs == 1 ? arrange_block<1> : arrange_block<2>;
#if CUE_X86_BF16
    const bool to_bf16 = kind == kBf16 && has_avx512_bf16();
    if (to_bf16) arrange = arrange_block_bf16, view.unit_bytes = kBf16PairBytes;
#else
    constexpr bool to_bf16 = false;
#endif
    if (rows == 1 && inputs % unit_inputs == 0 && !to_bf16) {
        view.data = reinterpret_cast<const uint8_t*>(x);
        return view;
    }
    const RowBlocks blocks(rows);
    auto arrange_one = [&](int block) {
        const int64_t first = blocks.first(block);
        uint8_t* out = static_cast<uint8_t*>(buffer) + first * view.units * view.unit_bytes;
        arrange(x + first * stride, stride, blocks.size(block), inputs, out);
    };
    if (rows * inputs <= kSingleThreadValues)
        for (int block = 0; block < blocks.count; ++block) arrange_one(block);
    else parallel(static_cast<int>(blocks.count), arrange_one);
    return view;
}

}  // namespace cue
