// Rows of float32 to int8 with a scale each, in the order in which kernels read them.
#include "panels.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "threads.h"

namespace cue {
namespace {

constexpr float kLimit = 127.0f;
// Below this, 127 / largest overflows; such a row counts as zeros.
constexpr float kSmallest = FLT_MIN * 128.0f;
constexpr uint32_t kInfinityBits = 0x7f800000u;
// Fewer values than this are quantized sooner by the caller than by waking the others.
constexpr int64_t kAloneValues = 8192;

struct Factor {
    float scale;    // of the values
    float inverse;  // x * inverse is rounded
};

// `bits` of the largest magnitude: as integers they order as the floats do, infinities and NaN above all numbers.
inline Factor factor_of(uint32_t bits) {
    if (bits >= kInfinityBits) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    if (largest < kSmallest) return {0.0f, 0.0f};
    return {largest / kLimit, kLimit / largest};
}

// Where values go: quad after quad, `step` bytes apart; sums of groups where wanted.
struct Target {
    uint8_t* quads;
    int64_t step;
    int32_t* sums_of_groups;
};

inline void store_quad(const Target& target, int64_t quad, const void* four) {
    std::memcpy(target.quads + quad * target.step, four, kQuad);
}

inline uint32_t largest_plain(const float* x, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// Returns the sum of all values.
int32_t row_plain(const float* x, int64_t count, const Target& target, float* scale) {
    const Factor factor = factor_of(largest_plain(x, count));
    *scale = factor.scale;
    int32_t sum = 0;
    for (int64_t group = 0; group * kGroup < count; ++group) {
        int8_t values[kGroup] = {};
        int32_t sum_of_group = 0;
        for (int64_t i = 0; i < kGroup && group * kGroup + i < count && factor.inverse != 0.0f; ++i) {
            values[i] = static_cast<int8_t>(lrintf(x[group * kGroup + i] * factor.inverse));
            sum_of_group += values[i];
        }
        for (int q = 0; q < kGroupQuads; ++q) store_quad(target, group * kGroupQuads + q, values + q * kQuad);
        if (target.sums_of_groups) target.sums_of_groups[group] = -8 * sum_of_group;
        sum += sum_of_group;
    }
    return sum;
}

#if CUE_X86

CUE_TARGET_AVX2

inline __m256i lane_mask(int64_t lanes) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes > 8 ? 8 : lanes < 0 ? 0 : static_cast<int>(lanes)), index);
}

inline int32_t sum_of(__m256i sums) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

int32_t row_avx2(const float* x, int64_t count, const Target& target, float* scale) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += 8) {
        const __m256i bits = _mm256_castps_si256(_mm256_maskload_ps(x + i, lane_mask(count - i)));
        largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    uint32_t most = 0;
    for (const uint32_t lane : lanes) most = lane > most ? lane : most;
    const Factor factor = factor_of(most);
    *scale = factor.scale;
    const __m256 inverse = _mm256_set1_ps(factor.inverse);
    const bool finite = most < kInfinityBits;
    __m256i sums = _mm256_setzero_si256();
    for (int64_t group = 0; group * kGroup < count; ++group) {
        __m256i sums_of_group = _mm256_setzero_si256();
        for (int part = 0; part < kGroup / 8; ++part) {
            const int64_t i = group * kGroup + part * 8;
            const __m256i mask = lane_mask(finite ? count - i : 0);
            const __m256 in = i < count ? _mm256_maskload_ps(x + i, mask) : _mm256_setzero_ps();
            const __m256i wide = _mm256_cvtps_epi32(_mm256_mul_ps(in, inverse));
            sums_of_group = _mm256_add_epi32(sums_of_group, wide);
            const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
            const __m128i bytes = _mm_packs_epi16(narrow, narrow);
            const int64_t quads = _mm_cvtsi128_si64(bytes);
            const auto* four = reinterpret_cast<const uint8_t*>(&quads);
            store_quad(target, i / kQuad, four);
            store_quad(target, i / kQuad + 1, four + kQuad);
        }
        sums = _mm256_add_epi32(sums, sums_of_group);
        if (target.sums_of_groups) target.sums_of_groups[group] = -8 * sum_of(sums_of_group);
    }
    return sum_of(sums);
}

CUE_TARGET_END

CUE_TARGET_AVX512

inline __mmask16 tail_mask(int64_t lanes) {
    return lanes >= 16 ? 0xffff : lanes <= 0 ? 0 : static_cast<__mmask16>((1u << lanes) - 1);
}

inline void store_quads(const Target& target, int64_t quad, __m128i values) {
    if (target.step == kQuad) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target.quads + quad * kQuad), values);
        return;
    }
    uint8_t* at = target.quads + quad * target.step;
    const int32_t four[4] = {_mm_extract_epi32(values, 0), _mm_extract_epi32(values, 1), _mm_extract_epi32(values, 2),
                             _mm_extract_epi32(values, 3)};
    for (int q = 0; q < 4; ++q) std::memcpy(at + q * target.step, &four[q], kQuad);
}

int32_t row_avx512(const float* x, int64_t count, const Target& target, float* scale) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i largest0 = _mm512_setzero_si512(), largest1 = largest0;
    for (int64_t i = 0; i < count; i += 32) {
        const __m512i a = _mm512_castps_si512(_mm512_maskz_loadu_ps(tail_mask(count - i), x + i));
        const __m512i b = _mm512_castps_si512(_mm512_maskz_loadu_ps(tail_mask(count - i - 16), x + i + 16));
        largest0 = _mm512_max_epu32(largest0, _mm512_and_si512(a, magnitude));
        largest1 = _mm512_max_epu32(largest1, _mm512_and_si512(b, magnitude));
    }
    const uint32_t most = _mm512_reduce_max_epu32(_mm512_max_epu32(largest0, largest1));
    const Factor factor = factor_of(most);
    *scale = factor.scale;
    const __m512 inverse = _mm512_set1_ps(factor.inverse);
    const int64_t usable = most < kInfinityBits ? count : 0;
    __m512i sums = _mm512_setzero_si512();
    for (int64_t group = 0; group * kGroup < count; ++group) {
        const int64_t i = group * kGroup;
        const __m512 a = _mm512_maskz_loadu_ps(tail_mask(usable - i), x + i);
        const __m512 b = _mm512_maskz_loadu_ps(tail_mask(usable - i - 16), x + i + 16);
        const __m512i wide_a = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
        const __m512i wide_b = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        store_quads(target, i / kQuad, _mm512_cvtsepi32_epi8(wide_a));
        store_quads(target, i / kQuad + 4, _mm512_cvtsepi32_epi8(wide_b));
        const __m512i sums_of_group = _mm512_add_epi32(wide_a, wide_b);
        sums = _mm512_add_epi32(sums, sums_of_group);
        if (target.sums_of_groups) target.sums_of_groups[group] = -8 * _mm512_reduce_add_epi32(sums_of_group);
    }
    return _mm512_reduce_add_epi32(sums);
}

CUE_TARGET_END

#endif

int32_t quantize_into(Isa isa, const float* x, int64_t count, const Target& target, float* scale) {
#if CUE_X86
    if (isa == kAvx512) return row_avx512(x, count, target, scale);
    if (isa == kAvx2) return row_avx2(x, count, target, scale);
#endif
    (void)isa;
    return row_plain(x, count, target, scale);
}

// A buffer of quantized rows: values, scales, sums, sums of groups, each on a cache line of its own.
struct Layout {
    Layout(int64_t rows, int64_t inputs)
        : groups(divide_up(inputs, kGroup)),
          scales(round_up(rows * groups * kGroup, 64)),
          sums(scales + round_up(rows * 4, 64)),
          sums_of_groups(sums + round_up(rows * 4, 64)),
          bytes(sums_of_groups + round_up(rows * groups * 4, 64)) {}
    int64_t groups, scales, sums, sums_of_groups, bytes;
};

}  // namespace

int64_t quantized_bytes(int64_t rows, int64_t inputs) { return Layout(rows, inputs).bytes; }

Rows quantized_view(const void* buffer, int64_t rows, int64_t inputs) {
    const Layout layout(rows, inputs);
    const auto* at = static_cast<const uint8_t*>(buffer);
    return {rows,
            inputs,
            layout.groups * kGroupQuads,
            at,
            reinterpret_cast<const float*>(at + layout.scales),
            reinterpret_cast<const int32_t*>(at + layout.sums),
            reinterpret_cast<const int32_t*>(at + layout.sums_of_groups)};
}

void quantize_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, void* buffer) {
    const Layout layout(rows, inputs);
    const Blocks blocks(rows);
    auto* at = static_cast<uint8_t*>(buffer);
    auto* scales = reinterpret_cast<float*>(at + layout.scales);
    auto* sums = reinterpret_cast<int32_t*>(at + layout.sums);
    auto* sums_of_groups = reinterpret_cast<int32_t*>(at + layout.sums_of_groups);
    const Isa form = isa();
    auto quantize_block = [&](int block) {
        const int64_t first = blocks.first(block);
        const int size = blocks.size(block);
        for (int64_t row = first; row < first + size; ++row) {
            uint8_t* quads = at + first * layout.groups * kGroup + (row - first) * kQuad;
            const Target target{quads, size * kQuad, sums_of_groups + row * layout.groups};
            sums[row] = -128 * quantize_into(form, x + row * stride, inputs, target, &scales[row]);
        }
    };
    if (rows * inputs <= kAloneValues)
        for (int block = 0; block < blocks.count; ++block) quantize_block(block);
    else
        parallel(static_cast<int>(blocks.count), quantize_block);
}

Rows arrange_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, float* buffer) {
    Rows view{rows, inputs, inputs, reinterpret_cast<const uint8_t*>(x), nullptr, nullptr, nullptr};
    if (rows == 1) return view;
    const Blocks blocks(rows);
    auto arrange_block = [&](int block) {
        const int64_t first = blocks.first(block);
        const int size = blocks.size(block);
        float* out = buffer + first * inputs;
        for (int r = 0; r < size; ++r) {
            const float* in = x + (first + r) * stride;
            for (int64_t i = 0; i < inputs; ++i) out[i * size + r] = in[i];
        }
    };
    if (rows * inputs <= kAloneValues)
        for (int block = 0; block < blocks.count; ++block) arrange_block(block);
    else
        parallel(static_cast<int>(blocks.count), arrange_block);
    view.data = reinterpret_cast<const uint8_t*>(buffer);
    return view;
}

float quantize_row(const float* x, int64_t count, int8_t* values) {
    float scale;
    quantize_into(isa(), x, count, {reinterpret_cast<uint8_t*>(values), kQuad, nullptr}, &scale);
    return scale;
}

}  // namespace cue
