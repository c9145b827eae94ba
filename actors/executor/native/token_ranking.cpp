// Histograms of logits, refined around the wanted rank.
#include "token_ranking.h"

#include "sample_types.h"

#define CUE_KERNEL "token_ranking_kernel.h"
#include "foreach_isa.h"

namespace cue {
namespace {

decltype(&portable::min_max_row) const min_max_variants[] = CUE_ISA_VARIANTS(min_max_row);
decltype(&portable::bin_members_row) const bin_members_variants[] = CUE_ISA_VARIANTS(bin_members_row);
decltype(&portable::assign_bins_row) const assign_bins_variants[] = CUE_ISA_VARIANTS(assign_bins_row);

constexpr int kReplicas = 4;               // independent sums per bin: neighbouring tokens are often in one bin
constexpr int64_t kInsertionSortMax = 32;  // up to this many tokens are sorted by insertion

// Sort a few tokens by descending logits; equal logits keep their order.
void sort(TokenArrays& tokens) {
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

RankedPrefix scan(const TokenArrays& tokens, Measure measure, double target, const RankSums& preceding) {
    RankedPrefix prefix{preceding, -1};
    for (int64_t i = 0; i < tokens.count && prefix.sums.of(measure) < target; ++i) {
        const RankSums one{static_cast<double>(tokens.weights[i]), 1.0};
        if (one.of(measure) == 0.0) continue;
        prefix.sums.add(one);
        prefix.id = tokens.ids[i];
    }
    return prefix;
}

}  // namespace

LogitHistogram::LogitHistogram(TokenArrays& tokens, Isa isa) {
    float low, high;
    min_max_variants[isa](tokens.logits.data(), tokens.count, &low, &high);
    is_flat_ = low == high;
    if (is_flat_) {
        const double count = static_cast<double>(tokens.count);
        sums_[0] = {count * static_cast<double>(tokens.weights[0]), count};
        return;
    }
    const double scale = (kBins - 1) / (static_cast<double>(high) - static_cast<double>(low));
    assign_bins_variants[isa](tokens.logits.data(), tokens.count, static_cast<double>(high), scale, tokens.bins.data());
    RankSums replicas[kReplicas][kBins] = {};
    for (int64_t i = 0; i < tokens.count; ++i)
        replicas[i % kReplicas][tokens.bins[i]].add({static_cast<double>(tokens.weights[i]), 1.0});
    for (const auto& replica : replicas)
        for (int bin = 0; bin < kBins; ++bin) sums_[bin].add(replica[bin]);
}

RankSums LogitHistogram::all() const {
    RankSums sums{};
    for (const RankSums& bin : sums_) sums.add(bin);
    return sums;
}

int LogitHistogram::reach(Measure measure, double target, RankSums& preceding) const {
    int last = 0;
    RankSums reached = preceding;
    for (int bin = 0; bin < kBins && reached.of(measure) < target; ++bin) {
        if (sums_[bin].of(measure) == 0.0) continue;
        last = bin, preceding = reached;
        reached.add(sums_[bin]);
    }
    return last;
}

RankedPrefix TokenRanking::reach(Measure measure, double target) {
    RankSums preceding{};
    if (histogram_.is_flat()) return scan(all_, measure, target, preceding);
    select_bin(all_, histogram_.reach(measure, target, preceding));
    while (subset_.count > kInsertionSortMax) {
        const LogitHistogram finer(subset_, isa_);
        if (finer.is_flat()) break;
        select_bin(subset_, finer.reach(measure, target, preceding));
    }
    if (subset_.count <= kInsertionSortMax) sort(subset_);
    return scan(subset_, measure, target, preceding);
}

void TokenRanking::select_bin(const TokenArrays& from, int bin) {
    subset_.count = bin_members_variants[isa_](from.bins.data(), from.count, bin, positions_.data());
    for (int64_t to = 0; to < subset_.count; ++to) {
        const int32_t i = positions_[to];
        subset_.logits[to] = from.logits[i], subset_.weights[to] = from.weights[i], subset_.ids[to] = from.ids[i];
    }
}

}  // namespace cue
