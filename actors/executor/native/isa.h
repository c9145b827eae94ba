// The instruction set of the kernels. Each kernel is compiled for all of them; `isa()` selects the variant at run time.
#pragma once

#if defined(__x86_64__)
#define CUE_X86 1
#include <immintrin.h>
#else
#define CUE_X86 0
#endif

// Functions between CUE_TARGET_… and CUE_TARGET_END are compiled for that instruction set. Call them only if `isa()`
// says so.
#define CUE_STRING(text) #text
#define CUE_PRAGMA(text) _Pragma(CUE_STRING(text))
#if defined(__clang__)
#define CUE_TARGET(list) CUE_PRAGMA(clang attribute push(__attribute__((target(list))), apply_to = function))
#define CUE_TARGET_END CUE_PRAGMA(clang attribute pop)
#else
#define CUE_TARGET(list) CUE_PRAGMA(GCC push_options) CUE_PRAGMA(GCC target(list))
#define CUE_TARGET_END CUE_PRAGMA(GCC pop_options)
#endif
#define CUE_TARGET_AVX2 CUE_TARGET("avx2,fma,f16c")
#define CUE_TARGET_AVX512 CUE_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define CUE_TARGET_BF16 CUE_TARGET("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
// Older compilers do not know AVX512-BF16.
#if CUE_X86 && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 10)
#define CUE_X86_BF16 1
#else
#define CUE_X86_BF16 0
#endif

// For large functions with many callers: inlining costs seconds of compile time and gains no speed.
#define CUE_NOINLINE __attribute__((noinline))

namespace cue {

enum Isa { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };
constexpr int kIsaCount = 3;

// The variant in use. kAvx512 requires F, BW, DQ, VL and VNNI.
Isa isa();
// Whether AVX512-BF16 may be used in addition to kAvx512.
bool has_avx512_bf16();

}  // namespace cue

extern "C" {
// Select a variant, or the best that the machine has if that is lower; a negative number selects the best. The number
// above kAvx512 selects kAvx512 with AVX512-BF16. Returns the number in use.
int cue_force_isa(int isa);
}
