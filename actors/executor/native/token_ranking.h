// Places in the descending order of tokens by logit, found without sorting all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "isa.h"

namespace cue {

// Tokens in the order of their ids.
struct Tokens {
    std::vector<float> logits, weights;
    std::vector<int32_t> ids, bins;
    int64_t count = 0;

    void make_room(size_t n) {
        if (n <= ids.size()) return;
        for (auto* floats : {&logits, &weights}) floats->resize(n);
        for (auto* numbers : {&ids, &bins}) numbers->resize(n);
    }
};

enum Measure { kWeight, kCount };

struct Sums {
    double weight, count;

    double in(Measure measure) const { return measure == kWeight ? weight : count; }
    void add(const Sums& more) { weight += more.weight, count += more.count; }
};

// A place in the descending order of tokens: the sums of all up to `id`, that one included.
struct Place {
    Sums sums;
    int64_t id;
};

// The one that comes first; `b` if they are the same.
inline Place first(const Place& a, const Place& b) { return b.sums.count <= a.sums.count ? b : a; }

// Weight and number of tokens by bins of their logits, the largest first; gives each token its bin.
class Bins {
public:
    Bins(Tokens& tokens, Isa isa);

    Sums all() const;

    // Whether all tokens have the same logit.
    bool is_flat() const { return is_flat_; }

    // The bin in which the target is reached, or the last that measures anything; `before` grows by the bins before it.
    int reach(Measure measure, double target, Sums& before) const;

private:
    static constexpr int kBins = 256;
    Sums sums_[kBins] = {};
    bool is_flat_;
};

// Finds places in the descending order of many tokens without sorting them: only the bin where a place must lie is
// looked at again, in finer bins, until it has few tokens or equal ones.
class Ranking {
public:
    Ranking(Tokens& all, Tokens& some, std::vector<int32_t>& places, Isa isa)
        : all_(all), some_(some), places_(places), isa_(isa), bins_(all, isa) {}

    // After all tokens.
    Place end() const { return {bins_.all(), -1}; }

    // The first place that reaches the target, which is above 0; or the last that adds to the measure.
    Place reach(Measure measure, double target);

private:
    void take(const Tokens& from, int bin);

    Tokens& all_;
    Tokens& some_;
    std::vector<int32_t>& places_;
    const Isa isa_;
    const Bins bins_;
};

}  // namespace cue
