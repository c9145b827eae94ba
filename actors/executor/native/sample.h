// Choosing tokens at random by their logits: all rows of a step in one call, spread over the threads.
#pragma once

#include <cstdint>

extern "C" {

// One token for each row of logits [rows, n], which are finite or -inf; rows are `stride` floats apart, 0 < n < 2^31.
// Of the tokens in descending order of logits, equals by their ids, the first `top_k` are kept (0: all), and of those
// the smallest set that reaches `top_p` of their weight, one at least (1 or more: all). A token weighs exp((logit -
// largest) / temperature) in float32, and sums are doubles. out[i] becomes the one of what is kept that has the
// largest score, the first of equals: (logit - largest) / temperature - log(-log1p(-y)) in double, where y = (bits +
// 1/2) / 2^32 and the bits are of keys[i] and the token's id.
//
// A row of temperature 0 is not looked at, and its out[i] stays. out[i] is -1 where no logit is finite. Temperatures
// outside of 1e-36..1e36 count as the nearer of the two. Each row's choice depends on that row alone, not on the other
// rows or the threads; another instruction set rounds some weights differently in the last place.
void cue_sample(const float* logits, int64_t stride, int64_t rows, int64_t n, const double* temperatures,
                const int64_t* top_k, const double* top_p, const uint64_t* keys, int64_t* out);
}
