// Sampling of one token per row: top-k, top-p, then the Gumbel-max trick over the kept tokens. Rows are spread over the
// threads.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gumbel_max.h"
#include "sample_types.h"
#include "threads.h"
#include "token_ranking.h"

#define CUE_KERNEL "sample_kernel.h"
#include "foreach_isa.h"

namespace cue {
namespace {

decltype(&portable::group_max_row) const group_max_variants[] = CUE_ISA_VARIANTS(group_max_row);
decltype(&portable::softmax_weights) const softmax_weights_variants[] = CUE_ISA_VARIANTS(softmax_weights);
decltype(&portable::run_weights_row) const run_weights_variants[] = CUE_ISA_VARIANTS(run_weights_row);
decltype(&portable::gather_row) const gather_variants[] = CUE_ISA_VARIANTS(gather_row);
decltype(&portable::weight_before_row) const weight_before_variants[] = CUE_ISA_VARIANTS(weight_before_row);

constexpr int kLanesMax = 16;                                      // floats in the widest register of all variants
constexpr double kTemperatureMin = 1e-36, kTemperatureMax = 1e36;  // SoftmaxScale has normal floats only
constexpr double kClampOctaves = 200.0;  // differences are clamped here: far below the weight 2^-126, and still exact

SoftmaxScale softmax_scale(float max_logit, double temperature) {
    const double octave_high = temperature * std::log(2.0);
    // 15 significant bits: the product with a number of octaves is exact.
    float high = static_cast<float>(octave_high);
    uint32_t bits;
    std::memcpy(&bits, &high, sizeof bits);
    bits &= ~uint32_t{0x1ff};
    std::memcpy(&high, &bits, sizeof bits);
    return {max_logit, static_cast<float>(-kClampOctaves * octave_high), static_cast<float>(1.0 / octave_high), high,
            static_cast<float>(octave_high - static_cast<double>(high))};
}

constexpr double kTargetWeightMin = std::numeric_limits<double>::min();  // positive, so that the first token reaches it
constexpr double kWeightOctaves = 128.0;  // slightly more octaves than any weight above 0 spans
constexpr double kRoundingMargin = 0.99;  // covers the rounding of weights and sums
constexpr double kOptimisticTopP = 0.75;  // from here on the winner among all tokens is most likely a kept one

// Buffers that a thread keeps between calls.
struct Scratch {
    std::vector<float> peaks;
    std::vector<double> sums;
    TokenArrays tokens, subset;
    std::vector<int32_t> positions;
};

thread_local Scratch thread_scratch;

struct RowOptions {
    double temperature;
    int64_t top_k;  // 0: all
    double top_p;
    NoiseKey key;
};

// Sampling of one row.
class RowSampler {
public:
    RowSampler(const float* logits, int64_t n, const RowOptions& options, Isa isa, Scratch& scratch)
        : logits_(logits), n_(n), options_(options), isa_(isa), scratch_(scratch) {}

    int64_t choose() {
        scratch_.peaks.resize(static_cast<size_t>(n_ / kPeakGroup + 2 * kLanesMax));
        float max_logit;
        peak_count_ = group_max_variants[isa_](logits_, n_, scratch_.peaks.data(), &max_logit);
        if (!std::isfinite(max_logit)) return -1;
        scale_ = softmax_scale(max_logit, options_.temperature);
        return options_.top_k == 0 && options_.top_p >= 1.0 ? choose_from_all() : choose_from_kept();
    }

private:
    double total_weight() {
        scratch_.sums.resize(static_cast<size_t>((n_ + kTokenRun - 1) / kTokenRun));
        run_weights_variants[isa_](logits_, n_, scale_, scratch_.sums.data());
        double sum = 0.0;
        for (const double one : scratch_.sums) sum += one;
        return sum;
    }

    int64_t choose_from_all() {
        GumbelMax search(logits_, nullptr, n_, options_.temperature, scale_, options_.key, isa_);
        return search.argmax(kNoCutoff, scratch_.peaks);
    }

    int64_t choose_from_kept() {
        // Tokens with lower logits have weight 0: leaving them out changes nothing.
        float min_logit = logit_below(kWeightOctaves);
        double weight = 0.0;
        if (options_.top_k > 0) {
            min_logit = std::max(min_logit, top_k_lower_bound(min_logit));
        } else {
            weight = total_weight();
            min_logit = std::max(min_logit, logit_below(top_p_octaves(weight)));
        }
        gather(logits_, n_, min_logit);
        softmax_weights_variants[isa_](scratch_.tokens.logits.data(), scratch_.tokens.count, scale_,
                                       scratch_.tokens.weights.data());
        if (options_.top_k == 0 && options_.top_p >= kOptimisticTopP) {
            // The winner among all tokens is mostly a kept one, and checking that is cheaper than finding the cutoff.
            const int64_t argmax = gumbel_max(kNoCutoff);
            if (weight_before(argmax) < target_weight(weight)) return argmax;
        }
        return gumbel_max(cutoff_of_kept(weight));
    }

    // The sum of weights that the kept tokens must reach.
    double target_weight(double weight) const { return std::max(options_.top_p * weight, kTargetWeightMin); }

    Cutoff cutoff_of_kept(double weight) {
        TokenRanking ranking(scratch_.tokens, scratch_.subset, scratch_.positions, isa_);
        RankedPrefix prefix = ranking.whole();
        if (options_.top_k > 0) {
            if (options_.top_k < scratch_.tokens.count)
                prefix = ranking.reach(kCount, static_cast<double>(options_.top_k));
            weight = prefix.sums.weight;
        }
        if (options_.top_p < 1.0) prefix = shorter(prefix, ranking.reach(kWeight, target_weight(weight)));
        return prefix.id < 0 ? kNoCutoff : Cutoff{logits_[prefix.id], prefix.id};
    }

    int64_t gumbel_max(const Cutoff& cutoff) {
        const TokenArrays& tokens = scratch_.tokens;
        GumbelMax search(tokens.logits.data(), tokens.ids.data(), tokens.count, options_.temperature, scale_,
                         options_.key, isa_);
        return search.argmax(cutoff, scratch_.peaks);
    }

    double weight_before(int64_t id) const {
        const TokenArrays& tokens = scratch_.tokens;
        return weight_before_variants[isa_](tokens.logits.data(), tokens.weights.data(), tokens.ids.data(),
                                            tokens.count, logits_[id], static_cast<int32_t>(id));
    }

    // A logit below that of every token whose weight is 2^-octaves or more.
    float logit_below(double octaves) const {
        const double min_logit =
            static_cast<double>(scale_.max_logit) - octaves / static_cast<double>(scale_.octaves_per_logit);
        return std::nextafter(static_cast<float>(min_logit), -kInfinity);
    }

    // Even all n tokens lighter than this together weigh less than 1 - top_p of the total: none of them is in the
    // smallest set that reaches top_p.
    double top_p_octaves(double total) const {
        const double lightest = kRoundingMargin * (1.0 - options_.top_p) * total / static_cast<double>(n_);
        return -std::log2(lightest);
    }

    // A logit that at least top_k tokens reach, and few more: the top_k-th largest group maximum, since each group has
    // a token with that logit. `min_logit` if there are no more than top_k such groups.
    float top_k_lower_bound(float min_logit) {
        gather(scratch_.peaks.data(), peak_count_, min_logit);
        TokenArrays& peaks = scratch_.tokens;
        if (peaks.count <= options_.top_k) return min_logit;
        std::fill_n(peaks.weights.begin(), peaks.count, 0.0f);
        TokenRanking ranking(peaks, scratch_.subset, scratch_.positions, isa_);
        return scratch_.peaks[ranking.reach(kCount, static_cast<double>(options_.top_k)).id];
    }

    void gather(const float* logits, int64_t n, float min_logit) {
        scratch_.tokens.grow(static_cast<size_t>(n));
        scratch_.subset.grow(static_cast<size_t>(n));
        scratch_.positions.resize(std::max(scratch_.positions.size(), static_cast<size_t>(n)));
        scratch_.tokens.count =
            gather_variants[isa_](logits, n, min_logit, scratch_.tokens.logits.data(), scratch_.tokens.ids.data());
    }

    const float* const logits_;
    const int64_t n_;
    const RowOptions& options_;
    const Isa isa_;
    Scratch& scratch_;
    int64_t peak_count_ = 0;
    SoftmaxScale scale_{};
};

}  // namespace
}  // namespace cue

extern "C" void cue_sample(const float* logits, int64_t stride, int64_t rows, int64_t n, const double* temperatures,
                           const int64_t* top_k, const double* top_p, const uint64_t* keys, int64_t* out) {
    const cue::Isa isa = cue::isa();
    cue::parallel(static_cast<int>(rows), [&](int row) {
        if (temperatures[row] == 0.0) return;
        const double temperature = std::min(std::max(temperatures[row], cue::kTemperatureMin), cue::kTemperatureMax);
        const cue::NoiseKey key{static_cast<uint32_t>(keys[row]), static_cast<uint32_t>(keys[row] >> 32)};
        const cue::RowOptions options{temperature, top_k[row], top_p[row], key};
        out[row] = cue::RowSampler(logits + row * stride, n, options, isa, cue::thread_scratch).choose();
    });
}
