// Rows that are not quantized, in the order in which kernels read them: float32 as it is, or rounded to bfloat16.
#include "panels.h"

#include <cstring>

#include "threads.h"

namespace cue {
namespace {

// Fewer values than this are arranged sooner by the caller than by waking the others.
constexpr int64_t kAloneValues = 8192;

// In a unit kEach values of every row of a block lie together, zeros behind the last ones.
template <int kEach>
void arrange_block(const float* x, int64_t stride, int size, int64_t inputs, void* block) {
    const int64_t whole = inputs / kEach, rest = inputs % kEach;
    for (int r = 0; r < size; ++r, x += stride) {
        float* out = static_cast<float*>(block) + r * kEach;
        for (int64_t unit = 0; unit < whole; ++unit, out += size * kEach)
            std::memcpy(out, x + unit * kEach, sizeof(float) * kEach);
        for (int i = 0; rest > 0 && i < kEach; ++i) out[i] = i < rest ? x[whole * kEach + i] : 0.0f;
    }
}

#if CUE_X86_BF16

CUE_TARGET_BF16

// As above, pairs rounded to the nearest bfloat16, ties to even.
void narrow_block(const float* x, int64_t stride, int size, int64_t inputs, void* block) {
    constexpr int kAtOnce = 32;
    for (int r = 0; r < size; ++r, x += stride) {
        uint8_t* out = static_cast<uint8_t*>(block) + r * kPairBytes;
        for (int64_t i = 0; i < inputs; i += kAtOnce) {
            const float* from = x + i;
            const int count = static_cast<int>(inputs - i < kAtOnce ? inputs - i : kAtOnce);
            float last[kAtOnce] = {};
            if (count < kAtOnce) {
                std::memcpy(last, from, sizeof(float) * static_cast<size_t>(count));
                from = last;
            }
            alignas(64) uint32_t pairs[kAtOnce / 2];
            const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kAtOnce / 2), _mm512_loadu_ps(from));
            std::memcpy(pairs, &both, sizeof pairs);
            for (int p = 0; p < (count + 1) / 2; ++p, out += size * kPairBytes) std::memcpy(out, pairs + p, kPairBytes);
        }
    }
}

CUE_TARGET_END

#endif

}  // namespace

int64_t arranged_bytes(int64_t rows, int64_t inputs) { return rows * round_up(inputs, 2) * 4; }

Rows arrange_rows(Kind kind, const float* x, int64_t stride, int64_t rows, int64_t inputs, void* buffer) {
    const int each = kind == kBf16 ? 2 : 1;
    Rows view{rows, inputs, unit_count(kind, inputs), each * 4, static_cast<const uint8_t*>(buffer), nullptr, nullptr,
              nullptr};
    auto arrange = each == 1 ? arrange_block<1> : arrange_block<2>;
#if CUE_X86_BF16
    const bool narrow = kind == kBf16 && has_bf16();
    if (narrow) arrange = narrow_block, view.unit_bytes = kPairBytes;
#else
    constexpr bool narrow = false;
#endif
    if (rows == 1 && inputs % each == 0 && !narrow) {
        view.data = reinterpret_cast<const uint8_t*>(x);
        return view;
    }
    const Blocks blocks(rows);
    auto one = [&](int block) {
        const int64_t first = blocks.first(block);
        uint8_t* out = static_cast<uint8_t*>(buffer) + first * view.units * view.unit_bytes;
        arrange(x + first * stride, stride, blocks.size(block), inputs, out);
    };
    if (rows * inputs <= kAloneValues)
        for (int block = 0; block < blocks.count; ++block) one(block);
    else
        parallel(static_cast<int>(blocks.count), one);
    return view;
}

}  // namespace cue
