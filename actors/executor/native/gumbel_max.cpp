#include "gumbel_max.h"

#include <algorithm>
#include <cmath>

#define CUE_KERNEL "gumbel_max_kernel.h"
#include "each_isa.h"

namespace cue {
namespace {

decltype(&plain::bounds) const bounds_forms[] = CUE_FORMS(bounds);
decltype(&plain::race_row) const race_forms[] = CUE_FORMS(race_row);

constexpr double kRounding = 1e-3;  // octaves; far more than a bound that matters is rounded by

}  // namespace

int64_t Race::winner(const End& end, std::vector<float>& peaks) {
    const size_t runs = static_cast<size_t>((n_ + kRun - 1) / kRun);
    peaks.resize(std::max(peaks.size(), runs));
    race_forms[isa_](logits_, ids_, n_, heat_, key_, peaks.data());
    const auto first = std::max_element(peaks.begin(), peaks.begin() + static_cast<int64_t>(runs)) - peaks.begin();
    search(first, end);
    for (size_t run = 0; run < runs; ++run)
        if (peaks[run] >= wanted_) search(static_cast<int64_t>(run), end);
    return winner_;
}

void Race::search(int64_t run, const End& end) {
    const int64_t begin = run * kRun, count = std::min<int64_t>(kRun, n_ - begin);
    int32_t counted[kRun];
    for (int i = 0; i < kRun; ++i) counted[i] = static_cast<int32_t>(begin) + i;
    const int32_t* ids = ids_ == nullptr ? counted : ids_ + begin;
    float bounds[kRun];
    bounds_forms[isa_](logits_ + begin, ids, count, heat_, key_, bounds);
    for (int64_t i = 0; i < count; ++i)
        if (bounds[i] >= wanted_ && end.keeps(logits_[begin + i], ids[i])) consider(logits_[begin + i], ids[i]);
}

void Race::consider(float logit, int64_t id) {
    const double y = (bits_of(key_, static_cast<uint32_t>(id)) + 0.5) * 0x1p-32;
    const double difference = static_cast<double>(logit) - static_cast<double>(heat_.most);
    const double score = difference / temperature_ - std::log(-std::log1p(-y));
    if (winner_ >= 0 && (score < best_ || (score == best_ && id > winner_))) return;
    best_ = score, winner_ = id;
    wanted_ = static_cast<float>(score / std::log(2.0) - kRounding);
}

}  // namespace cue
