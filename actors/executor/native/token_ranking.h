// Prefixes of the descending order of tokens by logit, found without sorting all tokens. Used for top-k and top-p
// (nucleus sampling, Holtzman et al. 2019).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa.h"

namespace cue {

// Tokens in ascending order of ids.
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

// A prefix of the descending order of tokens: its sums, and the id of its last token.
struct RankedPrefix {
    RankSums sums;
    int64_t id;
};

// The shorter prefix; `b` if they are equal.
inline RankedPrefix shorter(const RankedPrefix& a, const RankedPrefix& b) {
    return b.sums.count <= a.sums.count ? b : a;
}

// Weight and number of tokens in bins of logits, the largest logits first. The constructor assigns each token its bin.
class LogitHistogram {
public:
    LogitHistogram(TokenArrays& tokens, Isa isa);

    RankSums all() const;

    // Whether all tokens have the same logit.
    bool is_flat() const { return is_flat_; }

    // The bin in which the sum reaches the target, or the last bin that adds to it. Adds the bins before that one to
    // `preceding`.
    int reach(Measure measure, double target, RankSums& preceding) const;

private:
    static constexpr int kBins = 256;
    RankSums sums_[kBins] = {};
    bool is_flat_;
};

// Finds prefixes of the descending order of many tokens. Only the bin that holds the end of the prefix is examined
// further, in finer bins, until it has few tokens or equal ones.
class TokenRanking {
public:
    TokenRanking(TokenArrays& all, TokenArrays& subset, std::vector<int32_t>& positions, Isa isa)
        : all_(all), subset_(subset), positions_(positions), isa_(isa), histogram_(all, isa) {}

    // All tokens.
    RankedPrefix whole() const { return {histogram_.all(), -1}; }

    // The shortest prefix whose sum reaches the target, which is above 0; or else the prefix up to the last token that
    // adds to the sum.
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
