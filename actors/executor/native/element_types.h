// Element types of tables and KV pools, and conversion between float32 and bfloat16.
#pragma once

#include <cstdint>
#include <cstring>

namespace cue {

struct Bf16 {
    uint16_t bits;
};
constexpr uint16_t kBf16Nan = 0x7fc0;

inline float bf16_to_float(Bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Round to nearest, ties to even. Every NaN becomes kBf16Nan.
inline Bf16 float_to_bf16(float value) {
    if (value != value) return {kBf16Nan};
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

enum ElementType { kFloat32 = 0, kBf16 = 1, kInt8 = 2 };

}  // namespace cue
