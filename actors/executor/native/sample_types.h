// Constants and small types that the sampling kernels and their callers share.
#pragma once

#include <cstdint>

namespace cue {

// What turns logits of one row into weights.
struct Heat {
    float most;                 // the largest logit
    float least;                // differences to it below this have no weight
    float factor;               // log2(e) / temperature
    float octave, octave_rest;  // together the difference that halves a weight; the first has few bits
};

// What makes the noise of one row its own.
struct Key {
    uint32_t low, high;
};

inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// As in chance.py.
inline uint32_t bits_of(Key key, uint32_t id) { return mixed(mixed(id + key.low) ^ key.high); }

constexpr int kGroup = 16;  // numbers of which the largest is kept, to find the k-th largest of all
constexpr int kRun = 256;   // tokens that are weighed or bounded in one go: they stay in the first cache
constexpr int kLanes = 16;  // sums side by side, the same in every form
constexpr int kLook = 64;   // numbers that are passed over together

}  // namespace cue
