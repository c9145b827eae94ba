// Weights into panels: quantized where wanted, from float32, bfloat16 or float16 rows. Runs once per model.
#include "linear.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "panels.h"
#include "threads.h"

namespace cue {
namespace {

static_assert(kF32 == static_cast<int>(CUE_F32) && kBf16 == static_cast<int>(CUE_BF16), "one numbering");
static_assert(kInt8 == static_cast<int>(CUE_INT8) && kInt4 == static_cast<int>(CUE_INT4), "one numbering");

float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = half >> 10 & 31u, fraction = half & 1023u;
    if (exponent == 0) return std::copysign(std::ldexp(static_cast<float>(fraction), -24), sign ? -1.0f : 1.0f);
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Round to nearest even; NaN stays one.
uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 64u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float from_bf16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The weights as given, [outputs][inputs].
struct Source {
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
                for (int64_t i = 0; i < inputs; ++i) out[i] = from_bf16(half[i]);
                break;
            case CUE_FLOAT16:
                for (int64_t i = 0; i < inputs; ++i) out[i] = from_half(half[i]);
                break;
        }
    }
};

// The row of W that stands at a place of a panel, or -1: padding.
int64_t row_at(const Packed& packed, int64_t panel, int place) {
    if (!packed.gated) {
        const int64_t row = panel * kPanel + place;
        return row < packed.outputs ? row : -1;
    }
    const int64_t half = packed.outputs / 2, pair = panel * (kPanel / 2) + place % (kPanel / 2);
    if (pair >= half) return -1;
    return place < kPanel / 2 ? pair : half + pair;
}

void put_int8(const float* row, int64_t inputs, int place, int8_t* values, uint8_t* panel) {
    const float scale = quantize_row(row, inputs, values);
    std::memcpy(panel + place * 4, &scale, 4);
    uint8_t* out = panel + kInt8ScaleBytes + place * kQuad;
    const int64_t quads = unit_count(kInt8, inputs);
    for (int64_t quad = 0; quad < quads; ++quad) {
        uint32_t four;
        std::memcpy(&four, values + quad * kQuad, sizeof four);
        four ^= 0x80808080u;
        std::memcpy(out + quad * kQuadBytes, &four, sizeof four);
    }
}

// The least and the greatest value, and 0, or NaN if any is not finite.
struct Range {
    explicit Range(const float* values) {
        constexpr int kLanes = 8;
        float low[kLanes], high[kLanes], odd[kLanes] = {};
        for (int l = 0; l < kLanes; ++l) low[l] = high[l] = values[l];
        for (int i = 0; i < kGroup; i += kLanes)
            for (int l = 0; l < kLanes; ++l) {
                const float value = values[i + l];
                low[l] = value < low[l] ? value : low[l];
                high[l] = value > high[l] ? value : high[l];
                odd[l] += value * 0.0f;
            }
        for (int l = 0; l < kLanes; ++l) {
            least = l == 0 || low[l] < least ? low[l] : least;
            most = l == 0 || high[l] > most ? high[l] : most;
            not_finite += odd[l];
        }
    }
    float least = 0, most = 0, not_finite = 0;
};

inline float code_of(float value) {
    const float shifted = value + 0.5f;
    return static_cast<float>(static_cast<int>(shifted < 0.0f ? 0.0f : shifted > 15.0f ? 15.0f : shifted));
}

// How codes become values.
struct Line {
    uint16_t scale, middle;
};

// Evenly spaced codes from the least value to the greatest, then the scale and middle that come nearest to the values
// with these codes (least squares, in steps from the least value), and last the nearest codes. Values that had been 4
// bits with a scale and a minimum before get the codes they had. Values that are not finite make the scale so.
Line quantize_group(const float* values, uint8_t* codes) {
    constexpr float kStepsMax = 15.0f, kCount = kGroup;
    const Range range(values);
    const float step = range.most / kStepsMax - range.least / kStepsMax;
    const float inverse = 1.0f / step;
    std::memset(codes, kInt4Middle, kGroup);
    if (range.not_finite != 0.0f) return {to_bf16(range.not_finite), 0};
    if (!std::isfinite(inverse)) return {0, to_bf16(range.least)};
    float steps[kGroup], first[kGroup], sum = 0, sum_of_codes = 0, squares = 0, products = 0;
    for (int i = 0; i < kGroup; ++i) {
        steps[i] = (values[i] - range.least) * inverse;
        first[i] = code_of(steps[i]);
    }
    for (int i = 0; i < kGroup; ++i) {
        sum += steps[i];
        sum_of_codes += first[i];
        squares += first[i] * first[i];
        products += first[i] * steps[i];
    }
    const float mean = sum / kCount, mean_of_codes = sum_of_codes / kCount;
    const float slope = (products - sum * mean_of_codes) / (squares - sum_of_codes * mean_of_codes);
    const Line line{to_bf16(step * slope), 0};
    const float scale = from_bf16(line.scale);
    const uint16_t middle = to_bf16(range.least + step * mean - scale * (mean_of_codes - kInt4Middle));
    const float divisor = 1.0f / scale, zero = kInt4Middle - from_bf16(middle) * divisor;
    for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<uint8_t>(code_of(values[i] * divisor + zero));
    return {line.scale, middle};
}

void put_int4(const float* row, int64_t groups, int place, uint8_t* panel) {
    const int half = place / 16, lane = place % 16;
    for (int64_t group = 0; group < groups; ++group, panel += kInt4GroupBytes) {
        uint8_t codes[kGroup];
        const Line line = quantize_group(row + group * kGroup, codes);
        for (int pair = 0; pair < kGroupQuads / 2; ++pair) {
            uint32_t even, odd;
            std::memcpy(&even, codes + 2 * pair * kQuad, sizeof even);
            std::memcpy(&odd, codes + (2 * pair + 1) * kQuad, sizeof odd);
            even |= odd << 4;
            std::memcpy(panel + pair * kQuadBytes + half * 64 + lane * kQuad, &even, sizeof even);
        }
        uint8_t* scales = panel + kInt4CodeBytes + lane * 4 + half * 2;
        std::memcpy(scales, &line.scale, sizeof line.scale);
        std::memcpy(scales + kInt4ScaleBytes, &line.middle, sizeof line.middle);
    }
}

// What pads a group that a row ends in: a value of its own, which leaves the range as it is.
void fill_group(float* row, int64_t inputs) {
    const int64_t first = inputs / kGroup * kGroup;
    for (int64_t i = inputs; i < round_up(inputs, kGroup); ++i) row[i] = row[first];
}

void put_f32(const float* row, int64_t inputs, int place, uint8_t* panel) {
    for (int64_t i = 0; i < inputs; ++i) std::memcpy(panel + (i * kPanel + place) * 4, row + i, 4);
}

void put_bf16(const float* row, int64_t inputs, int place, uint8_t* panel) {
    for (int64_t i = 0; i < round_up(inputs, 2); i += 2) {
        const uint16_t pair[] = {to_bf16(row[i]), to_bf16(row[i + 1])};
        std::memcpy(panel + i / 2 * kPairsBytes + place * kPairBytes, pair, sizeof pair);
    }
}

void pack_panel(const Packed& packed, const Source& source, int64_t panel, uint8_t* out) {
    const int64_t padded = round_up(packed.inputs, kSpan);
    const std::unique_ptr<float[]> row(new float[static_cast<size_t>(padded)]);
    const std::unique_ptr<int8_t[]> values(new int8_t[static_cast<size_t>(padded)]);
    for (int place = 0; place < kPanel; ++place) {
        std::memset(row.get(), 0, static_cast<size_t>(padded) * 4);
        const int64_t index = row_at(packed, panel, place);
        if (index >= 0) source.row(index, row.get());
        switch (packed.kind) {
            case kF32: put_f32(row.get(), packed.inputs, place, out); break;
            case kBf16: put_bf16(row.get(), packed.inputs, place, out); break;
            case kInt8: put_int8(row.get(), packed.inputs, place, values.get(), out); break;
            case kInt4:
                fill_group(row.get(), packed.inputs);
                put_int4(row.get(), padded / kGroup, place, out);
                break;
        }
    }
}

bool fits(int kind, int64_t outputs, int64_t inputs, int gated) {
    const bool known = kind >= 0 && kind < kKinds;
    return known && outputs > 0 && inputs > 0 && inputs <= kInputsMax && (!gated || outputs % 2 == 0);
}

}  // namespace
}  // namespace cue

using namespace cue;

extern "C" int64_t cue_packed_bytes(int kind, int64_t outputs, int64_t inputs, int gated) {
    if (!fits(kind, outputs, inputs, gated)) return -1;
    const int64_t panels = gated ? divide_up(outputs / 2, kPanel / 2) : panel_count(outputs);
    return static_cast<int64_t>(sizeof(Packed)) + panels * panel_bytes(static_cast<Kind>(kind), inputs);
}

extern "C" int cue_pack(int kind, const void* weights, CueFloat type, int64_t stride, int64_t outputs, int64_t inputs,
                        int gated, void* out) {
    if (!fits(kind, outputs, inputs, gated) || type < CUE_FLOAT32 || type > CUE_FLOAT16) return -1;
    auto* packed = new (out) Packed{kMagic, static_cast<Kind>(kind), outputs, inputs, gated ? 1 : 0, {}};
    const Source source{weights, type, stride, inputs};
    const int64_t bytes = panel_bytes(packed->kind, inputs);
    const int64_t panels = (cue_packed_bytes(kind, outputs, inputs, gated) - 64) / bytes;
    parallel(static_cast<int>(panels),
             [&](int panel) { pack_panel(*packed, source, panel, packed->panels() + panel * bytes); });
    return 0;
}
