// Sampling of tokens from logits: all rows of a step in one call, spread over the threads.
#pragma once

#include <cstdint>

extern "C" {

// Sample one token for each row of logits [rows, n], which are finite or -inf. Rows are `stride` floats apart; 0 < n <
// 2^31.
//
// Tokens are ranked by descending logits, equal logits by ids. The first `top_k` are kept (0: all), and of those the
// smallest prefix whose weight reaches `top_p` of theirs, at least one token (top_p >= 1: all). The weight of a token
// is exp((logit - largest) / temperature) in float32; sums are doubles. out[i] is the kept token with the largest
// score, the first of equals: (logit - largest) / temperature - log(-log1p(-y)) in double, with y = (bits + 1/2) / 2^32
// and 32 bits hashed from keys[i] and the token's id.
//
// A row of temperature 0 is skipped and its out[i] unchanged. out[i] is -1 if no logit is finite. Temperatures are
// clamped to 1e-36..1e36. The result of a row depends on that row alone, not on other rows or the number of threads;
// another instruction set may round some weights differently in the last place.
void cue_sample(const float* logits, int64_t stride, int64_t rows, int64_t n, const double* temperatures,
                const int64_t* top_k, const double* top_p, const uint64_t* keys, int64_t* out);
}
