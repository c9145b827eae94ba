// Detection of the instruction set, and the level in use.
#include "isa.h"

#include <atomic>

namespace cue {
namespace {

// kAvx512 with AVX512-BF16.
constexpr int kAvx512Bf16Level = kAvx512 + 1;

int best_level() {
#if CUE_X86
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
#if CUE_X86_BF16
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return kAvx512Bf16Level;
#endif
    if (avx512) return kAvx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
    return kPortable;
}

std::atomic<int>& chosen_level() {
    static std::atomic<int> level{best_level()};
    return level;
}

int level() { return chosen_level().load(std::memory_order_relaxed); }

}  // namespace

Isa isa() { return level() < kAvx512 ? static_cast<Isa>(level()) : kAvx512; }

bool has_avx512_bf16() { return level() == kAvx512Bf16Level; }

}  // namespace cue

extern "C" int cue_force_isa(int level_wanted) {
    const int level_max = cue::best_level();
    const int level = level_wanted < 0 || level_wanted > level_max ? level_max : level_wanted;
    cue::chosen_level().store(level, std::memory_order_relaxed);
    return level;
}
