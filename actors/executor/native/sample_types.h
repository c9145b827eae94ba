// Constants and small types that the sampling kernels and their callers share.
#pragma once

#include <cstdint>

namespace cue {

// What turns logits of one row into weights.
struct SoftmaxScale {
    float max_logit;                 // the largest logit
    float min_difference;                // differences to it below this have no weight
    float octaves_per_logit;               // log2(e) / temperature
    float octave_high, octave_low;  // together the difference that halves a weight; the first has few bits
};

// What makes the noise of one row its own.
struct NoiseKey {
    uint32_t low, high;
};

inline uint32_t lowbias32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// As in chance.py.
inline uint32_t noise_bits(NoiseKey key, uint32_t id) { return lowbias32(lowbias32(id + key.low) ^ key.high); }

constexpr int kPeakGroup = 16;  // numbers of which the largest is kept, to find the k-th largest of all
constexpr int kTokenRun = 256;   // tokens that are weighed or bounded in one go: they stay in the first cache
constexpr int kSumLanes = 16;  // sums side by side, the same in every form
constexpr int kSkipBlock = 64;   // numbers that are passed over together

}  // namespace cue
