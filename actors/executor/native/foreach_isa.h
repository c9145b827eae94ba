// Compiles the header CUE_KERNEL once for each instruction set, in cue::portable, cue::avx2 and cue::avx512 (as
// Highway's foreach_target.h). A source file includes what the header requires, defines CUE_KERNEL as its name,
// includes this file once, and selects variants with CUE_ISA_VARIANTS. Kernel headers are written with the types of
// simd_*.h, have no include guard, and are included here only.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "element_types.h"
#include "isa.h"

// The variants of a function, indexed by `isa()`.
#if CUE_X86
#define CUE_ISA_VARIANTS(name) {portable::name, avx2::name, avx512::name}
#else
#define CUE_ISA_VARIANTS(name) {portable::name, portable::name, portable::name}
#endif

namespace cue {
namespace {

namespace portable {
#include "simd_portable.h"
#include "simd_common.h"
#include CUE_KERNEL
}  // namespace portable

#if CUE_X86
CUE_TARGET_AVX2
namespace avx2 {
#include "simd_avx2.h"
#include "simd_common.h"
#include CUE_KERNEL
}  // namespace avx2
CUE_TARGET_END

// AVX512-VNNI multiplies pairs of 16-bit lanes.
#define CUE_VNNI 1
CUE_TARGET_AVX512
namespace avx512 {
#include "simd_avx512.h"
#include "simd_common.h"
#include CUE_KERNEL
}  // namespace avx512
CUE_TARGET_END
#undef CUE_VNNI
#endif

}  // namespace
}  // namespace cue
