// The token with the largest score: logit / temperature + Gumbel noise (the Gumbel-max trick).
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "isa.h"
#include "sample_types.h"

namespace cue {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Where the kept tokens end: at this logit, and among its equals after this id.
struct Cutoff {
    float logit;
    int64_t id;

    bool keeps(float x, int64_t i) const { return x > logit || (x == logit && i <= id); }
};

constexpr Cutoff kNoCutoff{-kInfinity, std::numeric_limits<int64_t>::max()};  // all are kept

// Finds the token with the largest score. Bounds of all scores are quickly had, and nearly none reaches the best score:
// only what does is computed as it is defined.
class GumbelMax {
public:
    // Without ids these are 0, 1, 2 and so on.
    GumbelMax(const float* logits, const int32_t* ids, int64_t n, double temperature, const SoftmaxScale& scale, NoiseKey key, Isa isa)
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
    float bound_threshold_ = -kInfinity;  // what a bound must reach
};

}  // namespace cue
