#include "isa.h"

#include <atomic>

namespace cue {
namespace {

Isa best() {
#if CUE_X86
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    if (avx512) return kAvx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
    return kPlain;
}

std::atomic<int>& chosen() {
    static std::atomic<int> isa{best()};
    return isa;
}

}  // namespace

Isa isa() { return static_cast<Isa>(chosen().load(std::memory_order_relaxed)); }

bool has_bf16() {
#if CUE_X86
    static const bool bf16 = (__builtin_cpu_init(), __builtin_cpu_supports("avx512bf16") != 0);
    return bf16 && isa() == kAvx512;
#else
    return false;
#endif
}

}  // namespace cue

extern "C" int cue_force_isa(int wanted) {
    const int most = cue::best();
    const int now = wanted < 0 || wanted > most ? most : wanted;
    cue::chosen().store(now, std::memory_order_relaxed);
    return now;
}
