#include "isa.h"

#include <atomic>

namespace cue {
namespace {

// Above kAvx512: the same and AVX512-BF16.
constexpr int kWithBf16 = kAvx512 + 1;

int best() {
#if CUE_X86
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
#if CUE_X86_BF16
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return kWithBf16;
#endif
    if (avx512) return kAvx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
    return kPlain;
}

std::atomic<int>& chosen() {
    static std::atomic<int> now{best()};
    return now;
}

int step() { return chosen().load(std::memory_order_relaxed); }

}  // namespace

Isa isa() { return step() < kAvx512 ? static_cast<Isa>(step()) : kAvx512; }

bool has_bf16() { return step() == kWithBf16; }

}  // namespace cue

extern "C" int cue_force_isa(int wanted) {
    const int most = cue::best();
    const int now = wanted < 0 || wanted > most ? most : wanted;
    cue::chosen().store(now, std::memory_order_relaxed);
    return now;
}
