// RMSNorm, SwiGLU, embedding and argmax: rows are spread over the threads.
#include "ops.h"

#include <algorithm>

#define CUE_KERNEL "ops_kernel.h"
#include "foreach_isa.h"
#include "threads.h"

namespace cue {
namespace {

// Fewer values than this are computed before another thread could have begun.
constexpr int64_t kValuesPerTask = 16384;

decltype(&portable::rmsnorm_row) const rmsnorm_variants[] = CUE_ISA_VARIANTS(rmsnorm_row);
decltype(&portable::silu_mul_row) const silu_mul_variants[] = CUE_ISA_VARIANTS(silu_mul_row);
decltype(&portable::embed_row) const embed_variants[] = CUE_ISA_VARIANTS(embed_row);
decltype(&portable::argmax_row) const argmax_variants[] = CUE_ISA_VARIANTS(argmax_row);

template <class Body>
void for_each_row(int64_t rows, int64_t n, Body&& body) {
    const int64_t per_task = std::max<int64_t>(1, kValuesPerTask / std::max<int64_t>(1, n));
    parallel(static_cast<int>((rows + per_task - 1) / per_task), [&](int task) {
        const int64_t end = std::min(rows, (task + 1) * per_task);
        for (int64_t row = task * per_task; row < end; ++row) body(row);
    });
}

}  // namespace
}  // namespace cue

extern "C" void cue_add_rmsnorm(float* x, const float* delta, const float* weight, float* y, int64_t rows, int64_t n,
                                float epsilon) {
    const auto kernel = cue::rmsnorm_variants[cue::isa()];
    cue::for_each_row(rows, n, [&](int64_t row) {
        const float* delta_row = delta == nullptr ? nullptr : delta + row * n;
        kernel(x + row * n, delta_row, weight, y + row * n, static_cast<int>(n), epsilon);
    });
}

extern "C" void cue_silu_mul(const float* gate, const float* up, int64_t stride, float* out, int64_t rows, int64_t n) {
    const auto kernel = cue::silu_mul_variants[cue::isa()];
    cue::for_each_row(rows, n, [&](int64_t row) {
        kernel(gate + row * stride, up + row * stride, out + row * n, static_cast<int>(n));
    });
}

extern "C" int cue_embed(const int64_t* ids, int64_t count, const void* table, const float* scales, int32_t type,
                         int64_t table_rows, int64_t n, float* out) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= table_rows) return -1;
    const auto kernel = cue::embed_variants[cue::isa()];
    cue::for_each_row(count, n,
                      [&](int64_t i) { kernel(table, scales, type, ids[i], static_cast<int>(n), out + i * n); });
    return 0;
}

extern "C" void cue_argmax(const float* logits, int64_t stride, int64_t rows, int64_t n, int64_t* out) {
    const auto kernel = cue::argmax_variants[cue::isa()];
    cue::for_each_row(rows, n, [&](int64_t row) { out[row] = kernel(logits + row * stride, n); });
}
