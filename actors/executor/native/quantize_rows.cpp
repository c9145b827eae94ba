// Quantization of float32 rows to int8 with a scale per span of 64 inputs, in the order in which the kernels read them
// (`ArrangedRows`).
#include "linear_kernels.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "threads.h"

namespace cue {
namespace {

constexpr float kInt8Max = 127.0f;
// Spans whose largest magnitude is below this count as zeros: 127 / magnitude would overflow.
constexpr float kQuantizedMin = FLT_MIN * 128.0f;
constexpr uint32_t kInfinityBits = 0x7f800000u;
// Up to this many values the caller quantizes all rows itself: waking the other threads takes longer.
constexpr int64_t kSingleThreadValues = 8192;

struct QuantScale {
    float scale;    // x is about value * scale
    float inverse;  // value = round(x * inverse)
};

// Scale for the largest magnitude, given as its bits. As unsigned integers these are in the order of the floats, with
// infinity and NaN above all numbers.
inline QuantScale quant_scale(uint32_t bits) {
    if (bits >= kInfinityBits) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    float max_abs;
    std::memcpy(&max_abs, &bits, sizeof max_abs);
    if (max_abs < kQuantizedMin) return {0.0f, 0.0f};
    return {max_abs / kInt8Max, kInt8Max / max_abs};
}

// Destination of one row: quads are `unit_stride` bytes apart, values per span and per group `span_stride` entries
// apart. Weights have quads only; the other pointers are null.
struct QuantizedRow {
    uint8_t* quads;
    int64_t unit_stride;
    float* scales;
    int32_t* sums;
    float* group_sums;
    int64_t span_stride;

    // Store the scale of a span and the sums of its groups' values.
    void store_span_scale(int64_t span, float scale, const int32_t (&group_sums_int)[kGroupsPerSpan]) const {
        if (!scales) return;
        scales[span * span_stride] = scale;
        int32_t sum = 0;
        for (int g = 0; g < kGroupsPerSpan; ++g) {
            sum += group_sums_int[g];
            group_sums[(span * kGroupsPerSpan + g) * span_stride] = scale * static_cast<float>(group_sums_int[g]);
        }
        sums[span * span_stride] = -128 * sum;
    }
};

inline void store_quad(const QuantizedRow& out, int64_t quad, const void* values) {
    std::memcpy(out.quads + quad * out.unit_stride, values, kQuadInputs);
}

uint32_t max_abs_bits(const float* x, int64_t count) {
    uint32_t max_bits = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    return max_bits;
}

// Each variant quantizes a row span by span, with a scale per span unless `row_scale` is given.

void row_portable(const float* x, int64_t count, const QuantizedRow& out, const QuantScale* row_scale) {
    for (int64_t span = 0; span * kSpanInputs < count; ++span, x += kSpanInputs) {
        const int64_t left = count - span * kSpanInputs, real = left < kSpanInputs ? left : kSpanInputs;
        const QuantScale quant = row_scale ? *row_scale : quant_scale(max_abs_bits(x, real));
        int8_t values[kSpanInputs] = {};
        int32_t sums[kGroupsPerSpan] = {};
        for (int64_t i = 0; i < real && quant.inverse != 0.0f; ++i) {
            values[i] = static_cast<int8_t>(lrintf(x[i] * quant.inverse));
            sums[i / kGroupInputs] += values[i];
        }
        for (int q = 0; q < kQuadsPerSpan; ++q) store_quad(out, span * kQuadsPerSpan + q, values + q * kQuadInputs);
        out.store_span_scale(span, quant.scale, sums);
    }
}

#if CUE_X86

CUE_TARGET_AVX2

inline __m256i lane_mask(int64_t lanes) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes > 8 ? 8 : lanes < 0 ? 0 : static_cast<int>(lanes)), index);
}

inline int32_t horizontal_sum(__m256i sums) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

inline uint32_t horizontal_max(__m256i lanes) {
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
}

void row_avx2(const float* x, int64_t count, const QuantizedRow& out, const QuantScale* row_scale) {
    constexpr int kSpanRegisters = kSpanInputs / 8;
    for (int64_t span = 0; span * kSpanInputs < count; ++span, x += kSpanInputs) {
        const int64_t left = count - span * kSpanInputs;
        __m256 in[kSpanRegisters];
        __m256i max_bits = _mm256_setzero_si256();
        for (int p = 0; p < kSpanRegisters; ++p) {
            in[p] = p * 8 < left ? _mm256_maskload_ps(x + p * 8, lane_mask(left - p * 8)) : _mm256_setzero_ps();
            const __m256i bits = _mm256_and_si256(_mm256_castps_si256(in[p]), _mm256_set1_epi32(0x7fffffff));
            max_bits = _mm256_max_epu32(max_bits, bits);
        }
        const QuantScale quant = row_scale ? *row_scale : quant_scale(horizontal_max(max_bits));
        const __m256 inverse = _mm256_set1_ps(quant.inverse);
        const __m256i nonzero = _mm256_set1_epi32(quant.inverse != 0.0f ? -1 : 0);
        __m256i sums[kGroupsPerSpan] = {};
        for (int p = 0; p < kSpanRegisters; ++p) {
            const __m256i wide = _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(in[p], inverse)), nonzero);
            sums[p * 8 / kGroupInputs] = _mm256_add_epi32(sums[p * 8 / kGroupInputs], wide);
            const __m128i int16 = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
            const int64_t quads = _mm_cvtsi128_si64(_mm_packs_epi16(int16, int16));
            const auto* two_quads = reinterpret_cast<const uint8_t*>(&quads);
            store_quad(out, span * kQuadsPerSpan + p * 2, two_quads);
            store_quad(out, span * kQuadsPerSpan + p * 2 + 1, two_quads + kQuadInputs);
        }
        int32_t group_sums_int[kGroupsPerSpan];
        for (int g = 0; g < kGroupsPerSpan; ++g) group_sums_int[g] = horizontal_sum(sums[g]);
        out.store_span_scale(span, quant.scale, group_sums_int);
    }
}

CUE_TARGET_END

CUE_TARGET_AVX512

inline __mmask16 tail_mask(int64_t lanes) {
    return lanes >= 16 ? 0xffff : lanes <= 0 ? 0 : static_cast<__mmask16>((1u << lanes) - 1);
}

static_assert(kSpanInputs == 64 && kGroupInputs == 32, "a span is one register of bytes, and a group half of it");

// 64 int32 values within -128..127 to bytes, in the same order.
inline __m512i narrow_to_int8(const __m512i (&wide)[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i a = _mm512_packs_epi32(wide[0], wide[1]), b = _mm512_packs_epi32(wide[2], wide[3]);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b));
}

inline void store_span(const QuantizedRow& out, int64_t span, __m512i bytes) {
    uint8_t* at = out.quads + span * kQuadsPerSpan * out.unit_stride;
    if (out.unit_stride == kQuadInputs) {
        _mm512_storeu_si512(at, bytes);
        return;
    }
    alignas(64) uint32_t quads[kQuadsPerSpan];
    _mm512_store_si512(quads, bytes);
    for (int q = 0; q < kQuadsPerSpan; ++q) std::memcpy(at + q * out.unit_stride, &quads[q], kQuadInputs);
}

// The sums of the first and of the second 32 bytes.
inline void sum_groups(__m512i bytes, int32_t (&sums)[kGroupsPerSpan]) {
    const __m512i of_quads = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    const __m256i first = _mm512_castsi512_si256(of_quads), second = _mm512_extracti64x4_epi64(of_quads, 1);
    const __m256i pairs = _mm256_hadd_epi32(first, second);
    const __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128i whole = _mm_hadd_epi32(halves, halves);
    sums[0] = _mm_cvtsi128_si32(whole);
    sums[1] = _mm_extract_epi32(whole, 1);
}

inline QuantScale span_quant_scale(const float* x, int64_t left) {
    __m512i max_bits = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int p = 0; p < kSpanInputs / 16; ++p) {
        const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(tail_mask(left - p * 16), x + p * 16));
        max_bits = _mm512_max_epu32(max_bits, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    return quant_scale(_mm512_reduce_max_epu32(max_bits));
}

inline void span_avx512(const float* x, int64_t left, const QuantizedRow& out, int64_t span, const QuantScale& quant) {
    const __m512 inverse = _mm512_set1_ps(quant.inverse);
    const __mmask16 nonzero = quant.inverse != 0.0f ? 0xffff : 0;
    __m512i wide[kSpanInputs / 16];
#pragma GCC unroll 4
    for (int p = 0; p < kSpanInputs / 16; ++p) {
        const __m512 in = _mm512_maskz_loadu_ps(tail_mask(left - p * 16), x + p * 16);
        wide[p] = _mm512_maskz_cvtps_epi32(nonzero, _mm512_mul_ps(in, inverse));
    }
    const __m512i bytes = narrow_to_int8(wide);
    store_span(out, span, bytes);
    int32_t group_sums_int[kGroupsPerSpan];
    sum_groups(bytes, group_sums_int);
    out.store_span_scale(span, quant.scale, group_sums_int);
}

// Scales of kSpansAtOnce spans first: the reductions have a long latency and overlap.
void row_avx512(const float* x, int64_t count, const QuantizedRow& out, const QuantScale* row_scale) {
    constexpr int kSpansAtOnce = 8;
    const int64_t spans = divide_up(count, kSpanInputs);
    for (int64_t first = 0; first < spans; first += kSpansAtOnce) {
        const int64_t end = first + kSpansAtOnce < spans ? first + kSpansAtOnce : spans;
        QuantScale quants[kSpansAtOnce];
        for (int64_t span = first; span < end; ++span)
            quants[span - first] =
                row_scale ? *row_scale : span_quant_scale(x + span * kSpanInputs, count - span * kSpanInputs);
        for (int64_t span = first; span < end; ++span)
            span_avx512(x + span * kSpanInputs, count - span * kSpanInputs, out, span, quants[span - first]);
    }
}

CUE_TARGET_END

#endif

void quantize_into(Isa isa, const float* x, int64_t count, const QuantizedRow& out, const QuantScale* row_scale) {
#if CUE_X86
    if (isa == kAvx512) return row_avx512(x, count, out, row_scale);
    if (isa == kAvx2) return row_avx2(x, count, out, row_scale);
#endif
    (void)isa;
    row_portable(x, count, out, row_scale);
}

// Layout of a buffer of quantized rows: values, scales, span sums, group sums, each aligned to a cache line.
struct QuantizedLayout {
    QuantizedLayout(int64_t rows, int64_t inputs)
        : spans(divide_up(inputs, kSpanInputs)),
          scales(round_up(rows * spans * kSpanInputs, 64)),
          sums(scales + round_up(rows * spans * 4, 64)),
          group_sums(sums + round_up(rows * spans * 4, 64)),
          bytes(group_sums + round_up(rows * spans * kGroupsPerSpan * 4, 64)) {}
    int64_t spans, scales, sums, group_sums, bytes;
};

}  // namespace

int64_t quantized_bytes(int64_t rows, int64_t inputs) { return QuantizedLayout(rows, inputs).bytes; }

ArrangedRows quantized_view(const void* buffer, int64_t rows, int64_t inputs) {
    const QuantizedLayout layout(rows, inputs);
    const auto* at = static_cast<const uint8_t*>(buffer);
    return {rows,
            inputs,
            layout.spans * kQuadsPerSpan,
            kQuadInputs,
            at,
            reinterpret_cast<const float*>(at + layout.scales),
            reinterpret_cast<const int32_t*>(at + layout.sums),
            reinterpret_cast<const float*>(at + layout.group_sums)};
}

void quantize_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, void* buffer) {
    const QuantizedLayout layout(rows, inputs);
    const RowBlocks blocks(rows);
    auto* at = static_cast<uint8_t*>(buffer);
    auto* scales = reinterpret_cast<float*>(at + layout.scales);
    auto* sums = reinterpret_cast<int32_t*>(at + layout.sums);
    auto* group_sums = reinterpret_cast<float*>(at + layout.group_sums);
    const Isa chosen_isa = isa();
    auto quantize_block = [&](int block) {
        const int64_t first = blocks.first(block), span = first * layout.spans;
        const int size = blocks.size(block);
        QuantizedRow out{at + span * kSpanInputs,
                         size * kQuadInputs,
                         scales + span,
                         sums + span,
                         group_sums + span * kGroupsPerSpan,
                         size};
        for (int64_t row = first; row < first + size; ++row) {
            quantize_into(chosen_isa, x + row * stride, inputs, out, nullptr);
            out.quads += kQuadInputs;
            ++out.scales;
            ++out.sums;
            ++out.group_sums;
        }
    };
    if (rows * inputs <= kSingleThreadValues)
        for (int block = 0; block < blocks.count; ++block) quantize_block(block);
    else parallel(static_cast<int>(blocks.count), quantize_block);
}

float quantize_whole_row(const float* x, int64_t count, int8_t* values) {
    const QuantScale quant = quant_scale(max_abs_bits(x, count));
    const QuantizedRow out{reinterpret_cast<uint8_t*>(values), kQuadInputs, nullptr, nullptr, nullptr, 0};
    quantize_into(isa(), x, count, out, &quant);
    return quant.scale;
}

}  // namespace cue
