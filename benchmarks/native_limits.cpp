// Ceilings of this machine for comparison with the native kernels: arithmetic and memory throughput of all threads.
#include <cstdint>
#include <cstring>

#include "isa.h"
#include "threads.h"

namespace {

// Independent sums: enough to hide the latency of the instruction on any machine.
constexpr int kChains = 12;

// Each function executes `times` rounds of kChains instructions and returns the operations of one round.
#if CUE_X86

CUE_TARGET_AVX512
int64_t int8_rounds(int64_t times) {
    __m512i sums[kChains], x = _mm512_set1_epi8(1);
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_setzero_si512();
    for (int64_t t = 0; t < times; ++t)
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(sums[i]) : "v"(x));
    return kChains * 64 * 2;
}

int64_t float_rounds_avx512(int64_t times) {
    __m512 sums[kChains], x = _mm512_set1_ps(1);
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_setzero_ps();
    for (int64_t t = 0; t < times; ++t)
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(sums[i]) : "v"(x));
    return kChains * 16 * 2;
}
CUE_TARGET_END

CUE_TARGET_AVX2
int64_t float_rounds_avx2(int64_t times) {
    __m256 sums[kChains], x = _mm256_set1_ps(1);
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = _mm256_setzero_ps();
    for (int64_t t = 0; t < times; ++t)
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(sums[i]) : "x"(x));
    return kChains * 8 * 2;
}
CUE_TARGET_END

#endif

constexpr int64_t kPrefetchBytes = 1024;

// Read memory sequentially, prefetching kPrefetchBytes ahead. The result keeps the compiler from removing the reads.
uint64_t read_portable(const uint8_t* memory, int64_t bytes) {
    uint64_t a = 0, b = 0;
    for (int64_t i = 0; i + 64 <= bytes; i += 64) {
        uint64_t line[8];
        std::memcpy(line, memory + i, sizeof line);
        __builtin_prefetch(memory + i + (i + kPrefetchBytes < bytes ? kPrefetchBytes : 0), 0, 2);
        a ^= line[0] ^ line[2] ^ line[4] ^ line[6];
        b ^= line[1] ^ line[3] ^ line[5] ^ line[7];
    }
    return a ^ b;
}

#if CUE_X86
CUE_TARGET_AVX512
uint64_t read_avx512(const uint8_t* memory, int64_t bytes) {
    __m512i all = _mm512_setzero_si512();
    for (int64_t i = 0; i + 64 <= bytes; i += 64) {
        __builtin_prefetch(memory + i + (i + kPrefetchBytes < bytes ? kPrefetchBytes : 0), 0, 2);
        all = _mm512_xor_si512(all, _mm512_loadu_si512(memory + i));
    }
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(all));
}
CUE_TARGET_END
#endif

uint64_t read(const uint8_t* memory, int64_t bytes) {
#if CUE_X86
    if (cue::isa() == cue::kAvx512) return read_avx512(memory, bytes);
#endif
    return read_portable(memory, bytes);
}

}  // namespace

extern "C" {

// Number of operations, multiplications and additions counted separately; 0 if the machine lacks the instruction.
int64_t limit_int8(int64_t times) {
    int64_t round = 0;
#if CUE_X86
    if (cue::isa() != cue::kAvx512) return 0;
    cue::parallel(cue_threads(), [&](int task) {
        const int64_t operations = int8_rounds(times);
        if (task == 0) round = operations;
    });
#endif
    return round * times * cue_threads();
}

int64_t limit_float(int64_t times) {
    int64_t round = 0;
#if CUE_X86
    if (cue::isa() == cue::kPortable) return 0;
    cue::parallel(cue_threads(), [&](int task) {
        const int64_t operations = cue::isa() == cue::kAvx512 ? float_rounds_avx512(times) : float_rounds_avx2(times);
        if (task == 0) round = operations;
    });
#endif
    return round * times * cue_threads();
}

// Read every byte once, in stretches that are divided among the threads.
uint64_t limit_read(const uint8_t* memory, int64_t bytes) {
    constexpr int64_t kStretch = 256 * 1024;
    uint64_t all = 0;
    cue::parallel(static_cast<int>(bytes / kStretch), [&](int task) {
        const uint64_t one = read(memory + task * kStretch, kStretch);
        __atomic_fetch_xor(&all, one, __ATOMIC_RELAXED);
    });
    return all;
}
}
