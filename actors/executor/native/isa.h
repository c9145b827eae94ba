// Which instruction set the kernels use. Each kernel has a form for every one of them; the choice is made at run time.
#pragma once

#if defined(__x86_64__)
#define CUE_X86 1
#include <immintrin.h>
#else
#define CUE_X86 0
#endif

// Code between CUE_TARGET_… and CUE_TARGET_END may use those instructions; `isa()` says whether it may be called.
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
// Older compilers do not know the instructions of AVX512-BF16.
#if CUE_X86 && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 10)
#define CUE_X86_BF16 1
#else
#define CUE_X86_BF16 0
#endif

// A function compiled by itself, where inlining it everywhere would cost seconds of compile time and gain nothing.
#define CUE_NOINLINE __attribute__((noinline))

namespace cue {

enum Isa { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };
constexpr int kIsaCount = 3;

// The form to use now. kAvx512 means F, BW, DQ, VL and VNNI together.
Isa isa();
// Whether AVX512-BF16 may be used beside kAvx512: one more step of the ladder, for what multiplies bfloat16.
bool has_avx512_bf16();

}  // namespace cue

extern "C" {
// Use this form from now on, or the best one this machine has if it lacks it; any negative number: the best. One above
// the last form is that one with AVX512-BF16. Returns the form in use.
int cue_force_isa(int isa);
}
