// Search for the largest score by bounds of the scores, run by run of kTokenRun tokens.
#include "gumbel_max.h"

#include <algorithm>
#include <cmath>

#define CUE_KERNEL "gumbel_max_kernel.h"
#include "foreach_isa.h"

namespace cue {
namespace {

decltype(&portable::score_bounds) const bounds_variants[] = CUE_ISA_VARIANTS(score_bounds);
decltype(&portable::peak_bounds_row) const peak_bounds_variants[] = CUE_ISA_VARIANTS(peak_bounds_row);

constexpr double kBoundSlack = 1e-3;  // octaves; far above the rounding error of any bound that matters

}  // namespace

int64_t GumbelMax::argmax(const Cutoff& cutoff, std::vector<float>& peaks) {
    const size_t runs = static_cast<size_t>((n_ + kTokenRun - 1) / kTokenRun);
    peaks.resize(std::max(peaks.size(), runs));
    peak_bounds_variants[isa_](logits_, ids_, n_, scale_, key_, peaks.data());
    const auto first = std::max_element(peaks.begin(), peaks.begin() + static_cast<int64_t>(runs)) - peaks.begin();
    search_run(first, cutoff);
    for (size_t run = 0; run < runs; ++run)
        if (peaks[run] >= bound_threshold_) search_run(static_cast<int64_t>(run), cutoff);
    return best_id_;
}

void GumbelMax::search_run(int64_t run, const Cutoff& cutoff) {
    const int64_t begin = run * kTokenRun, count = std::min<int64_t>(kTokenRun, n_ - begin);
    int32_t sequential_ids[kTokenRun];
    for (int i = 0; i < kTokenRun; ++i) sequential_ids[i] = static_cast<int32_t>(begin) + i;
    const int32_t* ids = ids_ == nullptr ? sequential_ids : ids_ + begin;
    float bounds[kTokenRun];
    bounds_variants[isa_](logits_ + begin, ids, count, scale_, key_, bounds);
    for (int64_t i = 0; i < count; ++i)
        if (bounds[i] >= bound_threshold_ && cutoff.keeps(logits_[begin + i], ids[i]))
            score_exactly(logits_[begin + i], ids[i]);
}

void GumbelMax::score_exactly(float logit, int64_t id) {
    const double y = (noise_bits(key_, static_cast<uint32_t>(id)) + 0.5) * 0x1p-32;
    const double difference = static_cast<double>(logit) - static_cast<double>(scale_.max_logit);
    const double score = difference / temperature_ - std::log(-std::log1p(-y));
    if (best_id_ >= 0 && (score < best_score_ || (score == best_score_ && id > best_id_))) return;
    best_score_ = score, best_id_ = id;
    bound_threshold_ = static_cast<float>(score / std::log(2.0) - kBoundSlack);
}

}  // namespace cue
