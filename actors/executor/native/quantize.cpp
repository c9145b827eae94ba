// Rows of float32 to int8 with a scale for each span of inputs, in the order in which kernels read them.
#include "panels.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "threads.h"

namespace cue {
namespace {

constexpr float kLimit = 127.0f;
// Below this, 127 / largest overflows; such a span counts as zeros.
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

// Where values go: quad after quad, `step` bytes apart, and what spans and groups have, `apart` values apart; weights
// have nothing of that.
struct Target {
    uint8_t* quads;
    int64_t step;
    float* scales;
    int32_t* sums;
    float* group_sums;
    int64_t apart;

    // A span's scale, and the sums of its groups' values.
    void store(int64_t span, float scale, const int32_t (&of_groups)[kSpanGroups]) const {
        if (!scales) return;
        scales[span * apart] = scale;
        int32_t sum = 0;
        for (int g = 0; g < kSpanGroups; ++g) {
            sum += of_groups[g];
            group_sums[(span * kSpanGroups + g) * apart] = scale * static_cast<float>(of_groups[g]);
        }
        sums[span * apart] = -128 * sum;
    }
};

inline void store_quad(const Target& target, int64_t quad, const void* four) {
    std::memcpy(target.quads + quad * target.step, four, kQuad);
}

uint32_t largest_of(const float* x, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// Each form takes a row span by span, with a factor of each span's own unless one is `given`.

void row_plain(const float* x, int64_t count, const Target& target, const Factor* given) {
    for (int64_t span = 0; span * kSpan < count; ++span, x += kSpan) {
        const int64_t left = count - span * kSpan, real = left < kSpan ? left : kSpan;
        const Factor factor = given ? *given : factor_of(largest_of(x, real));
        int8_t values[kSpan] = {};
        int32_t sums[kSpanGroups] = {};
        for (int64_t i = 0; i < real && factor.inverse != 0.0f; ++i) {
            values[i] = static_cast<int8_t>(lrintf(x[i] * factor.inverse));
            sums[i / kGroup] += values[i];
        }
        for (int q = 0; q < kSpanQuads; ++q) store_quad(target, span * kSpanQuads + q, values + q * kQuad);
        target.store(span, factor.scale, sums);
    }
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

inline uint32_t largest_lane(__m256i lanes) {
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
}

void row_avx2(const float* x, int64_t count, const Target& target, const Factor* given) {
    constexpr int kParts = kSpan / 8;
    for (int64_t span = 0; span * kSpan < count; ++span, x += kSpan) {
        const int64_t left = count - span * kSpan;
        __m256 in[kParts];
        __m256i largest = _mm256_setzero_si256();
        for (int p = 0; p < kParts; ++p) {
            in[p] = p * 8 < left ? _mm256_maskload_ps(x + p * 8, lane_mask(left - p * 8)) : _mm256_setzero_ps();
            const __m256i bits = _mm256_and_si256(_mm256_castps_si256(in[p]), _mm256_set1_epi32(0x7fffffff));
            largest = _mm256_max_epu32(largest, bits);
        }
        const Factor factor = given ? *given : factor_of(largest_lane(largest));
        const __m256 inverse = _mm256_set1_ps(factor.inverse);
        const __m256i used = _mm256_set1_epi32(factor.inverse != 0.0f ? -1 : 0);
        __m256i sums[kSpanGroups] = {};
        for (int p = 0; p < kParts; ++p) {
            const __m256i wide = _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(in[p], inverse)), used);
            sums[p * 8 / kGroup] = _mm256_add_epi32(sums[p * 8 / kGroup], wide);
            const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
            const int64_t quads = _mm_cvtsi128_si64(_mm_packs_epi16(narrow, narrow));
            const auto* four = reinterpret_cast<const uint8_t*>(&quads);
            store_quad(target, span * kSpanQuads + p * 2, four);
            store_quad(target, span * kSpanQuads + p * 2 + 1, four + kQuad);
        }
        int32_t of_groups[kSpanGroups];
        for (int g = 0; g < kSpanGroups; ++g) of_groups[g] = sum_of(sums[g]);
        target.store(span, factor.scale, of_groups);
    }
}

CUE_TARGET_END

CUE_TARGET_AVX512

inline __mmask16 tail_mask(int64_t lanes) {
    return lanes >= 16 ? 0xffff : lanes <= 0 ? 0 : static_cast<__mmask16>((1u << lanes) - 1);
}

static_assert(kSpan == 64 && kGroup == 32, "a span is one register of bytes, and a group half of it");

// Four registers of values that fit int8 as bytes, in their order.
inline __m512i narrow(const __m512i (&wide)[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i a = _mm512_packs_epi32(wide[0], wide[1]), b = _mm512_packs_epi32(wide[2], wide[3]);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b));
}

inline void store_span(const Target& target, int64_t span, __m512i bytes) {
    uint8_t* at = target.quads + span * kSpanQuads * target.step;
    if (target.step == kQuad) {
        _mm512_storeu_si512(at, bytes);
        return;
    }
    alignas(64) uint32_t quads[kSpanQuads];
    _mm512_store_si512(quads, bytes);
    for (int q = 0; q < kSpanQuads; ++q) std::memcpy(at + q * target.step, &quads[q], kQuad);
}

// Sums of the first and of the second 32 bytes.
inline void sum_groups(__m512i bytes, int32_t (&sums)[kSpanGroups]) {
    const __m512i of_quads = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    const __m256i first = _mm512_castsi512_si256(of_quads), second = _mm512_extracti64x4_epi64(of_quads, 1);
    const __m256i pairs = _mm256_hadd_epi32(first, second);
    const __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128i whole = _mm_hadd_epi32(halves, halves);
    sums[0] = _mm_cvtsi128_si32(whole);
    sums[1] = _mm_extract_epi32(whole, 1);
}

inline Factor factor_of_span(const float* x, int64_t left) {
    __m512i largest = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int p = 0; p < kSpan / 16; ++p) {
        const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(tail_mask(left - p * 16), x + p * 16));
        largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    return factor_of(_mm512_reduce_max_epu32(largest));
}

inline void span_avx512(const float* x, int64_t left, const Target& target, int64_t span, const Factor& factor) {
    const __m512 inverse = _mm512_set1_ps(factor.inverse);
    const __mmask16 used = factor.inverse != 0.0f ? 0xffff : 0;
    __m512i wide[kSpan / 16];
#pragma GCC unroll 4
    for (int p = 0; p < kSpan / 16; ++p) {
        const __m512 in = _mm512_maskz_loadu_ps(tail_mask(left - p * 16), x + p * 16);
        wide[p] = _mm512_maskz_cvtps_epi32(used, _mm512_mul_ps(in, inverse));
    }
    const __m512i bytes = narrow(wide);
    store_span(target, span, bytes);
    int32_t of_groups[kSpanGroups];
    sum_groups(bytes, of_groups);
    target.store(span, factor.scale, of_groups);
}

// The factors of several spans first: each takes long to come, but they can come at the same time.
void row_avx512(const float* x, int64_t count, const Target& target, const Factor* given) {
    constexpr int kAtOnce = 8;
    const int64_t spans = divide_up(count, kSpan);
    for (int64_t first = 0; first < spans; first += kAtOnce) {
        const int64_t end = first + kAtOnce < spans ? first + kAtOnce : spans;
        Factor factors[kAtOnce];
        for (int64_t span = first; span < end; ++span)
            factors[span - first] = given ? *given : factor_of_span(x + span * kSpan, count - span * kSpan);
        for (int64_t span = first; span < end; ++span)
            span_avx512(x + span * kSpan, count - span * kSpan, target, span, factors[span - first]);
    }
}

CUE_TARGET_END

#endif

void quantize_into(Isa isa, const float* x, int64_t count, const Target& target, const Factor* given) {
#if CUE_X86
    if (isa == kAvx512) return row_avx512(x, count, target, given);
    if (isa == kAvx2) return row_avx2(x, count, target, given);
#endif
    (void)isa;
    row_plain(x, count, target, given);
}

// A buffer of quantized rows: values, scales, sums, sums of groups, each on a cache line of its own.
struct Layout {
    Layout(int64_t rows, int64_t inputs)
        : spans(divide_up(inputs, kSpan)),
          scales(round_up(rows * spans * kSpan, 64)),
          sums(scales + round_up(rows * spans * 4, 64)),
          group_sums(sums + round_up(rows * spans * 4, 64)),
          bytes(group_sums + round_up(rows * spans * kSpanGroups * 4, 64)) {}
    int64_t spans, scales, sums, group_sums, bytes;
};

}  // namespace

int64_t quantized_bytes(int64_t rows, int64_t inputs) { return Layout(rows, inputs).bytes; }

Rows quantized_view(const void* buffer, int64_t rows, int64_t inputs) {
    const Layout layout(rows, inputs);
    const auto* at = static_cast<const uint8_t*>(buffer);
    return {rows,
            inputs,
            layout.spans * kSpanQuads,
            kQuad,
            at,
            reinterpret_cast<const float*>(at + layout.scales),
            reinterpret_cast<const int32_t*>(at + layout.sums),
            reinterpret_cast<const float*>(at + layout.group_sums)};
}

void quantize_rows(const float* x, int64_t stride, int64_t rows, int64_t inputs, void* buffer) {
    const Layout layout(rows, inputs);
    const Blocks blocks(rows);
    auto* at = static_cast<uint8_t*>(buffer);
    auto* scales = reinterpret_cast<float*>(at + layout.scales);
    auto* sums = reinterpret_cast<int32_t*>(at + layout.sums);
    auto* group_sums = reinterpret_cast<float*>(at + layout.group_sums);
    const Isa form = isa();
    auto quantize_block = [&](int block) {
        const int64_t first = blocks.first(block), span = first * layout.spans;
        const int size = blocks.size(block);
        Target target{at + span * kSpan, size * kQuad, scales + span, sums + span, group_sums + span * kSpanGroups,
                      size};
        for (int64_t row = first; row < first + size; ++row) {
            quantize_into(form, x + row * stride, inputs, target, nullptr);
            target.quads += kQuad;
            ++target.scales;
            ++target.sums;
            ++target.group_sums;
        }
    };
    if (rows * inputs <= kAloneValues)
        for (int block = 0; block < blocks.count; ++block) quantize_block(block);
    else
        parallel(static_cast<int>(blocks.count), quantize_block);
}

float quantize_row(const float* x, int64_t count, int8_t* values) {
    const Factor factor = factor_of(largest_of(x, count));
    const Target target{reinterpret_cast<uint8_t*>(values), kQuad, nullptr, nullptr, nullptr, 0};
    quantize_into(isa(), x, count, target, &factor);
    return factor.scale;
}

}  // namespace cue
