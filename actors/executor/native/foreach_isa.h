// Compiles CUE_KERNEL once for each instruction set, as cue::plain, cue::avx2 and cue::avx512. A source file defines
// CUE_KERNEL as the name of a header written with the types of simd_*.h, includes this once, and then picks one of the
// forms with CUE_FORMS. The headers have no include guards of their own: they are text for here alone.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "element_types.h"
#include "isa.h"

// One entry of each form, to be indexed by `isa()`.
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
}  // namespace plain

#if CUE_X86
CUE_TARGET_AVX2
namespace avx2 {
#include "simd_avx2.h"
#include "simd_common.h"
#include CUE_KERNEL
}  // namespace avx2
CUE_TARGET_END

// This form has registers of words.
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
