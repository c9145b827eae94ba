// Types and constants that the sampling kernels and their callers share.
#pragma once

#include <cstdint>

namespace cue {

// Conversion from the logits of one row to weights.
struct SoftmaxScale {
    float max_logit;                // the largest logit
    float min_difference;           // differences to it are clamped here: their weight is 0
    float octaves_per_logit;        // log2(e) / temperature
    float octave_high, octave_low;  // their sum is the difference that halves a weight; octave_high has 15 bits
};

// Key of a row's noise.
struct NoiseKey {
    uint32_t low, high;
};

inline uint32_t lowbias32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// 32 hashed bits (lowbias32, Wellons 2018) of a key and a token id: the same as in the Python and torch samplers.
inline uint32_t noise_bits(NoiseKey key, uint32_t id) { return lowbias32(lowbias32(id + key.low) ^ key.high); }

constexpr int kPeakGroup = 16;  // values per group maximum, for the search for the k-th largest value
constexpr int kTokenRun = 256;  // tokens per pass over weights or bounds, which stay in the first-level cache
constexpr int kSumLanes = 16;   // independent sums, the same number in every variant
constexpr int kSkipBlock = 64;  // values that are skipped together if none qualifies

}  // namespace cue
