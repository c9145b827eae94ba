#include "token_ranking.h"

#include "sample_types.h"

#define CUE_KERNEL "token_ranking_kernel.h"
#include "each_isa.h"

namespace cue {
namespace {

decltype(&plain::ends_row) const ends_forms[] = CUE_FORMS(ends_row);
decltype(&plain::members_row) const members_forms[] = CUE_FORMS(members_row);
decltype(&plain::bins_row) const bins_forms[] = CUE_FORMS(bins_row);

constexpr int kTurns = 4;  // sums of a bin side by side, since neighbours are often in one bin
constexpr int64_t kFew = 32;  // sorted by insertion

// Few tokens: in descending order of logits, equals as they were.
void sort(Tokens& tokens) {
    for (int64_t i = 1; i < tokens.count; ++i) {
        const float logit = tokens.logits[i], weight = tokens.weights[i];
        const int32_t id = tokens.ids[i];
        int64_t to = i;
        for (; to > 0 && tokens.logits[to - 1] < logit; --to) {
            tokens.logits[to] = tokens.logits[to - 1], tokens.weights[to] = tokens.weights[to - 1];
            tokens.ids[to] = tokens.ids[to - 1];
        }
        tokens.logits[to] = logit, tokens.weights[to] = weight, tokens.ids[to] = id;
    }
}

Place walk(const Tokens& tokens, Measure measure, double target, const Sums& before) {
    Place place{before, -1};
    for (int64_t i = 0; i < tokens.count && place.sums.in(measure) < target; ++i) {
        const Sums one{static_cast<double>(tokens.weights[i]), 1.0};
        if (one.in(measure) == 0.0) continue;
        place.sums.add(one);
        place.id = tokens.ids[i];
    }
    return place;
}

}  // namespace

Bins::Bins(Tokens& tokens, Isa isa) {
    float low, high;
    ends_forms[isa](tokens.logits.data(), tokens.count, &low, &high);
    is_flat_ = low == high;
    if (is_flat_) {
        const double count = static_cast<double>(tokens.count);
        sums_[0] = {count * static_cast<double>(tokens.weights[0]), count};
        return;
    }
    const double scale = (kBins - 1) / (static_cast<double>(high) - static_cast<double>(low));
    bins_forms[isa](tokens.logits.data(), tokens.count, static_cast<double>(high), scale, tokens.bins.data());
    Sums turns[kTurns][kBins] = {};
    for (int64_t i = 0; i < tokens.count; ++i)
        turns[i % kTurns][tokens.bins[i]].add({static_cast<double>(tokens.weights[i]), 1.0});
    for (const auto& turn : turns)
        for (int bin = 0; bin < kBins; ++bin) sums_[bin].add(turn[bin]);
}

Sums Bins::all() const {
    Sums sums{};
    for (const Sums& bin : sums_) sums.add(bin);
    return sums;
}

int Bins::reach(Measure measure, double target, Sums& before) const {
    int last = 0;
    Sums here = before;
    for (int bin = 0; bin < kBins && here.in(measure) < target; ++bin) {
        if (sums_[bin].in(measure) == 0.0) continue;
        last = bin, before = here;
        here.add(sums_[bin]);
    }
    return last;
}

Place Ranking::reach(Measure measure, double target) {
    Sums before{};
    if (bins_.is_flat()) return walk(all_, measure, target, before);
    take(all_, bins_.reach(measure, target, before));
    while (some_.count > kFew) {
        const Bins finer(some_, isa_);
        if (finer.is_flat()) break;
        take(some_, finer.reach(measure, target, before));
    }
    if (some_.count <= kFew) sort(some_);
    return walk(some_, measure, target, before);
}

void Ranking::take(const Tokens& from, int bin) {
    some_.count = members_forms[isa_](from.bins.data(), from.count, bin, places_.data());
    for (int64_t to = 0; to < some_.count; ++to) {
        const int32_t i = places_[to];
        some_.logits[to] = from.logits[i], some_.weights[to] = from.weights[i], some_.ids[to] = from.ids[i];
    }
}

}  // namespace cue
