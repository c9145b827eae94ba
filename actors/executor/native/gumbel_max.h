// Sampling by the Gumbel-max trick: the token with the largest logit / temperature + Gumbel noise is a sample of the
// softmax (Gumbel 1954).
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "isa.h"
#include "sample_types.h"

namespace cue {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The last token that is kept in descending order of logits, equal logits in order of ids.
struct Cutoff {
    float logit;
    int64_t id;

    bool keeps(float x, int64_t i) const { return x > logit || (x == logit && i <= id); }
};

constexpr Cutoff kNoCutoff{-kInfinity, std::numeric_limits<int64_t>::max()};  // keeps all tokens

// Finds the token with the largest score. Upper bounds of all scores come from cheap float32 arithmetic; the exact
// score, in double, is computed only where the bound reaches the best score so far.
class GumbelMax {
public:
    // `ids` may be null: token i is then id i.
    GumbelMax(const float* logits, const int32_t* ids, int64_t n, double temperature, const SoftmaxScale& scale,
              NoiseKey key, Isa isa)
        : logits_(logits), ids_(ids), n_(n), temperature_(temperature), scale_(scale), key_(key), isa_(isa) {}

    int64_t argmax(const Cutoff& cutoff, std::vector<float>& peaks);

private:
    void search_run(int64_t run, const Cutoff& cutoff);
    void score_exactly(float logit, int64_t id);

    const float* const logits_;
    const int32_t* const ids_;
    const int64_t n_;
    const double temperature_;
    const SoftmaxScale& scale_;
    const NoiseKey key_;
    const Isa isa_;
    double best_score_ = 0.0;
    int64_t best_id_ = -1;
    float bound_threshold_ = -kInfinity;  // tokens with a lower bound cannot win
};

}  // namespace cue
