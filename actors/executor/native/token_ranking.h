// Places in the descending order of tokens by logit, found without sorting all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa.h"

namespace cue {

// Tokens in the order of their ids.
struct TokenArrays {
    std::vector<float> logits, weights;
    std::vector<int32_t> ids, bins;
    int64_t count = 0;

    void grow(size_t n) {
        if (n <= ids.size()) return;
        for (auto* floats : {&logits, &weights}) floats->resize(n);
        for (auto* numbers : {&ids, &bins}) numbers->resize(n);
    }
};

enum Measure { kWeight, kCount };

struct RankSums {
    double weight, count;

    double of(Measure measure) const { return measure == kWeight ? weight : count; }
    void add(const RankSums& more) { weight += more.weight, count += more.count; }
};

// A place in the descending order of tokens: the sums of all up to `id`, that one included.
struct RankedPrefix {
    RankSums sums;
    int64_t id;
};

// The one that comes first; `b` if they are the same.
inline RankedPrefix shorter(const RankedPrefix& a, const RankedPrefix& b) { return b.sums.count <= a.sums.count ? b : a; }

// Weight and number of tokens by bins of their logits, the largest first; gives each token its bin.
class LogitHistogram {
public:
    LogitHistogram(TokenArrays& tokens, Isa isa);

    RankSums all() const;

    // Whether all tokens have the same logit.
    bool is_flat() const { return is_flat_; }

    // The bin in which the target is reached, or the last that measures anything; `preceding` grows by the bins before it.
    int reach(Measure measure, double target, RankSums& preceding) const;

private:
    static constexpr int kBins = 256;
    RankSums sums_[kBins] = {};
    bool is_flat_;
};

// Finds places in the descending order of many tokens without sorting them: only the bin where a place must lie is
// looked at again, in finer bins, until it has few tokens or equal ones.
class TokenRanking {
public:
    TokenRanking(TokenArrays& all, TokenArrays& subset, std::vector<int32_t>& positions, Isa isa)
        : all_(all), subset_(subset), positions_(positions), isa_(isa), histogram_(all, isa) {}

    // After all tokens.
    RankedPrefix whole() const { return {histogram_.all(), -1}; }

    // The first place that reaches the target, which is above 0; or the last that adds to the measure.
    RankedPrefix reach(Measure measure, double target);

private:
    void select_bin(const TokenArrays& from, int bin);

    TokenArrays& all_;
    TokenArrays& subset_;
    std::vector<int32_t>& positions_;
    const Isa isa_;
    const LogitHistogram histogram_;
};

}  // namespace cue
