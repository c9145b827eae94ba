// Packing of weights into panels, from float32, bfloat16 or float16, with quantization to int8 or int4. Runs once per
// model.
#include "linear.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "linear_kernels.h"
#include "threads.h"

namespace cue {
namespace {

static_assert(kF32 == static_cast<int>(CUE_F32) && kBf16 == static_cast<int>(CUE_BF16), "one numbering");
static_assert(kInt8 == static_cast<int>(CUE_INT8) && kInt4 == static_cast<int>(CUE_INT4), "one numbering");

float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = half >> 10 & 31u, fraction = half & 1023u;
    if (exponent == 0) return std::copysign(std::ldexp(static_cast<float>(fraction), -24), sign ? -1.0f : 1.0f);
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Round to nearest, ties to even. NaN stays NaN.
uint16_t float_to_bf16_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 64u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float bf16_bits_to_float(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Weights before packing, [outputs][inputs].
struct WeightSource {
    const void* data;
    CueFloat type;
    int64_t stride, inputs;

    void row(int64_t index, float* out) const {
        const auto* half = static_cast<const uint16_t*>(data) + index * stride;
        switch (type) {
            case CUE_FLOAT32:
                std::memcpy(out, static_cast<const float*>(data) + index * stride, static_cast<size_t>(inputs) * 4);
                break;
            case CUE_BFLOAT16:
                for (int64_t i = 0; i < inputs; ++i) out[i] = bf16_bits_to_float(half[i]);
                break;
            case CUE_FLOAT16:
                for (int64_t i = 0; i < inputs; ++i) out[i] = half_to_float(half[i]);
                break;
        }
    }
};

// The row of W at row `panel_row` of a panel, or -1 for padding.
int64_t source_row(const PackedWeights& packed, int64_t panel, int panel_row) {
    if (!packed.gated) {
        const int64_t row = panel * kPanelOutputs + panel_row;
        return row < packed.outputs ? row : -1;
    }
    const int64_t half = packed.outputs / 2, pair = panel * (kPanelOutputs / 2) + panel_row % (kPanelOutputs / 2);
    if (pair >= half) return -1;
    return panel_row < kPanelOutputs / 2 ? pair : half + pair;
}

void pack_int8(const float* row, int64_t inputs, int panel_row, int8_t* values, uint8_t* panel) {
    const float scale = quantize_whole_row(row, inputs, values);
    std::memcpy(panel + panel_row * 4, &scale, 4);
    uint8_t* out = panel + kInt8ScaleBytes + panel_row * kQuadInputs;
    const int64_t quads = unit_count(kInt8, inputs);
    for (int64_t quad = 0; quad < quads; ++quad) {
        uint32_t quad_bytes;
        std::memcpy(&quad_bytes, values + quad * kQuadInputs, sizeof quad_bytes);
        quad_bytes ^= 0x80808080u;
        std::memcpy(out + quad * kPanelQuadBytes, &quad_bytes, sizeof quad_bytes);
    }
}

// Minimum and maximum of a group; `nonfinite` is 0, or NaN if a value is not finite.
struct Range {
    explicit Range(const float* values) {
        constexpr int kLanes = 8;
        float low[kLanes], high[kLanes], nonfinite_lanes[kLanes] = {};
        for (int l = 0; l < kLanes; ++l) low[l] = high[l] = values[l];
        for (int i = 0; i < kGroupInputs; i += kLanes)
            for (int l = 0; l < kLanes; ++l) {
                const float value = values[i + l];
                low[l] = value < low[l] ? value : low[l];
                high[l] = value > high[l] ? value : high[l];
                nonfinite_lanes[l] += value * 0.0f;
            }
        for (int l = 0; l < kLanes; ++l) {
            minimum = l == 0 || low[l] < minimum ? low[l] : minimum;
            maximum = l == 0 || high[l] > maximum ? high[l] : maximum;
            nonfinite += nonfinite_lanes[l];
        }
    }
    float minimum = 0, maximum = 0, nonfinite = 0;
};

inline float to_code(float value) {
    const float shifted = value + 0.5f;
    return static_cast<float>(static_cast<int>(shifted < 0.0f ? 0.0f : shifted > 15.0f ? 15.0f : shifted));
}

// Scale and midpoint of a group, as bfloat16 bits.
struct CodeScale {
    uint16_t scale, midpoint;
};

// Quantize a group in three steps: evenly spaced codes from the minimum to the maximum; the scale and midpoint that fit
// the values best for these codes (least squares, in steps from the minimum); the nearest codes for that scale and
// midpoint. Values that were already 4 bits with a scale and a minimum keep their codes. Values that are not finite
// make the scale NaN.
CodeScale quantize_group(const float* values, uint8_t* codes) {
    constexpr float kStepsMax = 15.0f, kCount = kGroupInputs;
    const Range range(values);
    const float step = range.maximum / kStepsMax - range.minimum / kStepsMax;
    const float inverse = 1.0f / step;
    std::memset(codes, kInt4MidCode, kGroupInputs);
    if (range.nonfinite != 0.0f) return {float_to_bf16_bits(range.nonfinite), 0};
    if (!std::isfinite(inverse)) return {0, float_to_bf16_bits(range.minimum)};
    float steps[kGroupInputs], rounded[kGroupInputs], sum = 0, sum_of_codes = 0, squares = 0, products = 0;
    for (int i = 0; i < kGroupInputs; ++i) {
        steps[i] = (values[i] - range.minimum) * inverse;
        rounded[i] = to_code(steps[i]);
    }
    for (int i = 0; i < kGroupInputs; ++i) {
        sum += steps[i];
        sum_of_codes += rounded[i];
        squares += rounded[i] * rounded[i];
        products += rounded[i] * steps[i];
    }
    const float mean = sum / kCount, mean_of_codes = sum_of_codes / kCount;
    const float slope = (products - sum * mean_of_codes) / (squares - sum_of_codes * mean_of_codes);
    const CodeScale code_scale{float_to_bf16_bits(step * slope), 0};
    const float scale = bf16_bits_to_float(code_scale.scale);
    const uint16_t midpoint = float_to_bf16_bits(range.minimum + step * mean - scale * (mean_of_codes - kInt4MidCode));
    const float inverse_scale = 1.0f / scale, zero_code = kInt4MidCode - bf16_bits_to_float(midpoint) * inverse_scale;
    for (int i = 0; i < kGroupInputs; ++i)
        codes[i] = static_cast<uint8_t>(to_code(values[i] * inverse_scale + zero_code));
    return {code_scale.scale, midpoint};
}

void pack_int4(const float* row, int64_t groups, int panel_row, uint8_t* panel) {
    const int half = panel_row / 16, lane = panel_row % 16;
    for (int64_t group = 0; group < groups; ++group, panel += kInt4GroupBytes) {
        uint8_t codes[kGroupInputs];
        const CodeScale code_scale = quantize_group(row + group * kGroupInputs, codes);
        for (int pair = 0; pair < kQuadsPerGroup / 2; ++pair) {
            uint32_t even, odd;
            std::memcpy(&even, codes + 2 * pair * kQuadInputs, sizeof even);
            std::memcpy(&odd, codes + (2 * pair + 1) * kQuadInputs, sizeof odd);
            even |= odd << 4;
            std::memcpy(panel + pair * kPanelQuadBytes + half * 64 + lane * kQuadInputs, &even, sizeof even);
        }
        uint8_t* scales = panel + kInt4CodeBytes + lane * 4 + half * 2;
        std::memcpy(scales, &code_scale.scale, sizeof code_scale.scale);
        std::memcpy(scales + kInt4ScaleBytes, &code_scale.midpoint, sizeof code_scale.midpoint);
    }
}

// Pad the last group of a row with one of its own values, which leaves its range as it is.
void pad_group(float* row, int64_t inputs) {
    const int64_t first = inputs / kGroupInputs * kGroupInputs;
    for (int64_t i = inputs; i < round_up(inputs, kGroupInputs); ++i) row[i] = row[first];
}

void pack_f32(const float* row, int64_t inputs, int panel_row, uint8_t* panel) {
    for (int64_t i = 0; i < inputs; ++i) std::memcpy(panel + (i * kPanelOutputs + panel_row) * 4, row + i, 4);
}

void pack_bf16(const float* row, int64_t inputs, int panel_row, uint8_t* panel) {
    for (int64_t i = 0; i < round_up(inputs, 2); i += 2) {
        const uint16_t pair[] = {float_to_bf16_bits(row[i]), float_to_bf16_bits(row[i + 1])};
        std::memcpy(panel + i / 2 * kPanelPairBytes + panel_row * kBf16PairBytes, pair, sizeof pair);
    }
}

void pack_panel(const PackedWeights& packed, const WeightSource& source, int64_t panel, uint8_t* out) {
    const int64_t padded = round_up(packed.inputs, kSpanInputs);
    const std::unique_ptr<float[]> row(new float[static_cast<size_t>(padded)]);
    const std::unique_ptr<int8_t[]> values(new int8_t[static_cast<size_t>(padded)]);
    for (int panel_row = 0; panel_row < kPanelOutputs; ++panel_row) {
        std::memset(row.get(), 0, static_cast<size_t>(padded) * 4);
        const int64_t index = source_row(packed, panel, panel_row);
        if (index >= 0) source.row(index, row.get());
        switch (packed.kind) {
            case kF32: pack_f32(row.get(), packed.inputs, panel_row, out); break;
            case kBf16: pack_bf16(row.get(), packed.inputs, panel_row, out); break;
            case kInt8: pack_int8(row.get(), packed.inputs, panel_row, values.get(), out); break;
            case kInt4:
                pad_group(row.get(), packed.inputs);
                pack_int4(row.get(), padded / kGroupInputs, panel_row, out);
                break;
        }
    }
}

bool is_packable(int kind, int64_t outputs, int64_t inputs, int gated) {
    const bool known = kind >= 0 && kind < kWeightKindCount;
    return known && outputs > 0 && inputs > 0 && inputs <= kInputsMax && (!gated || outputs % 2 == 0);
}

}  // namespace
}  // namespace cue

using namespace cue;

extern "C" int64_t cue_packed_bytes(int kind, int64_t outputs, int64_t inputs, int gated) {
    if (!is_packable(kind, outputs, inputs, gated)) return -1;
    const int64_t panels = gated ? divide_up(outputs / 2, kPanelOutputs / 2) : panel_count(outputs);
    return static_cast<int64_t>(sizeof(PackedWeights)) + panels * panel_bytes(static_cast<WeightKind>(kind), inputs);
}

extern "C" int cue_pack(int kind, const void* weights, CueFloat type, int64_t stride, int64_t outputs, int64_t inputs,
                        int gated, void* out) {
    if (!is_packable(kind, outputs, inputs, gated) || type < CUE_FLOAT32 || type > CUE_FLOAT16) return -1;
    auto* packed = new (out) PackedWeights{kMagic, static_cast<WeightKind>(kind), outputs, inputs, gated ? 1 : 0, {}};
    const WeightSource source{weights, type, stride, inputs};
    const int64_t bytes = panel_bytes(packed->kind, inputs);
    const int64_t panels = (cue_packed_bytes(kind, outputs, inputs, gated) - 64) / bytes;
    parallel(static_cast<int>(panels),
             [&](int panel) { pack_panel(*packed, source, panel, packed->panels() + panel * bytes); });
    return 0;
}
