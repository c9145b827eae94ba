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
#include "each_isa.h"

namespace cue {
namespace {

decltype(&plain::peaks_row) const peaks_forms[] = CUE_FORMS(peaks_row);
decltype(&plain::weigh) const weigh_forms[] = CUE_FORMS(weigh);
decltype(&plain::sums_row) const sums_forms[] = CUE_FORMS(sums_row);
decltype(&plain::gather_row) const gather_forms[] = CUE_FORMS(gather_row);
decltype(&plain::before_row) const before_forms[] = CUE_FORMS(before_row);

constexpr int kWidest = 16;  // floats that a form may store at once
constexpr double kTemperatureLeast = 1e-36, kTemperatureMost = 1e36;  // all of Heat are ordinary floats between them
constexpr double kOctavesLeast = 200.0;  // below 2^-126 there is no weight: this is far below, and still exact

Heat heat_of(float most, double temperature) {
    const double octave = temperature * std::log(2.0);
    // 15 bits, so that its product with a number of octaves is exact.
    float high = static_cast<float>(octave);
    uint32_t bits;
    std::memcpy(&bits, &high, sizeof bits);
    bits &= ~uint32_t{0x1ff};
    std::memcpy(&high, &bits, sizeof bits);
    return {most, static_cast<float>(-kOctavesLeast * octave), static_cast<float>(1.0 / octave), high,
            static_cast<float>(octave - static_cast<double>(high))};
}

constexpr double kTiny = std::numeric_limits<double>::min();  // a target above 0, that the first token reaches
constexpr double kOctavesKept = 128.0;  // a little more than a weight may have
constexpr double kSafety = 0.99;        // far more than weights and sums are rounded by
constexpr double kTopPMost = 0.75;      // from here on it pays to suppose that the winner of all tokens is kept

// Kept, so that its vectors need not grow again.
struct Room {
    std::vector<float> peaks;
    std::vector<double> sums;
    Tokens all, some;
    std::vector<int32_t> places;
};

thread_local Room kept_room;

struct Options {
    double temperature;
    int64_t top_k;  // 0: all
    double top_p;
    Key key;
};

// The choice in one row.
class Row {
public:
    Row(const float* logits, int64_t n, const Options& options, Isa isa, Room& room)
        : logits_(logits), n_(n), options_(options), isa_(isa), room_(room) {}

    int64_t choose() {
        room_.peaks.resize(static_cast<size_t>(n_ / kGroup + 2 * kWidest));
        float most;
        peaks_ = peaks_forms[isa_](logits_, n_, room_.peaks.data(), &most);
        if (!std::isfinite(most)) return -1;
        heat_ = heat_of(most, options_.temperature);
        return options_.top_k == 0 && options_.top_p >= 1.0 ? plain_choice() : ranked_choice();
    }

private:
    double total() {
        room_.sums.resize(static_cast<size_t>((n_ + kRun - 1) / kRun));
        sums_forms[isa_](logits_, n_, heat_, room_.sums.data());
        double sum = 0.0;
        for (const double one : room_.sums) sum += one;
        return sum;
    }

    int64_t plain_choice() {
        Race race(logits_, nullptr, n_, options_.temperature, heat_, options_.key, isa_);
        return race.winner(kNowhere, room_.peaks);
    }

    int64_t ranked_choice() {
        // What is lower has no weight: nothing changes if it is left out.
        float least = lowered(kOctavesKept);
        double all = 0.0;
        if (options_.top_k > 0) {
            least = std::max(least, bound_of_largest(least));
        } else {
            all = total();
            least = std::max(least, lowered(octaves_of_nucleus(all)));
        }
        gather(logits_, n_, least);
        weigh_forms[isa_](room_.all.logits.data(), room_.all.count, heat_, room_.all.weights.data());
        if (options_.top_k == 0 && options_.top_p >= kTopPMost) {
            // Mostly the winner of all is one of those that are kept, which is sooner found out than where they end.
            const int64_t winner = race(kNowhere);
            if (weight_before(winner) < wanted(all)) return winner;
        }
        return race(end_of_kept(all));
    }

    // The sum that the kept tokens must reach.
    double wanted(double all) const { return std::max(options_.top_p * all, kTiny); }

    End end_of_kept(double all) {
        Ranking ranking(room_.all, room_.some, room_.places, isa_);
        Place end = ranking.end();
        if (options_.top_k > 0) {
            if (options_.top_k < room_.all.count) end = ranking.reach(kCount, static_cast<double>(options_.top_k));
            all = end.sums.weight;
        }
        if (options_.top_p < 1.0) end = first(end, ranking.reach(kWeight, wanted(all)));
        return end.id < 0 ? kNowhere : End{logits_[end.id], end.id};
    }

    int64_t race(const End& end) {
        const Tokens& tokens = room_.all;
        Race race(tokens.logits.data(), tokens.ids.data(), tokens.count, options_.temperature, heat_, options_.key,
                  isa_);
        return race.winner(end, room_.peaks);
    }

    double weight_before(int64_t id) const {
        const Tokens& tokens = room_.all;
        return before_forms[isa_](tokens.logits.data(), tokens.weights.data(), tokens.ids.data(), tokens.count,
                                  logits_[id], static_cast<int32_t>(id));
    }

    // A logit below that of any token that weighs 2^-octaves at least.
    float lowered(double octaves) const {
        const double least = static_cast<double>(heat_.most) - octaves / static_cast<double>(heat_.factor);
        return std::nextafter(static_cast<float>(least), -kInfinity);
    }

    // All tokens lighter than this together are outside of the smallest set that reaches top_p, and so is each alone.
    double octaves_of_nucleus(double all) const {
        const double lightest = kSafety * (1.0 - options_.top_p) * all / static_cast<double>(n_);
        return -std::log2(lightest);
    }

    // A logit that as many tokens reach as are wanted, and few more: so many groups of tokens do. Else `least`.
    float bound_of_largest(float least) {
        gather(room_.peaks.data(), peaks_, least);
        Tokens& peaks = room_.all;
        if (peaks.count <= options_.top_k) return least;
        std::fill_n(peaks.weights.begin(), peaks.count, 0.0f);
        Ranking ranking(peaks, room_.some, room_.places, isa_);
        return room_.peaks[ranking.reach(kCount, static_cast<double>(options_.top_k)).id];
    }

    void gather(const float* logits, int64_t n, float least) {
        room_.all.make_room(static_cast<size_t>(n));
        room_.some.make_room(static_cast<size_t>(n));
        room_.places.resize(std::max(room_.places.size(), static_cast<size_t>(n)));
        room_.all.count = gather_forms[isa_](logits, n, least, room_.all.logits.data(), room_.all.ids.data());
    }

    const float* const logits_;
    const int64_t n_;
    const Options& options_;
    const Isa isa_;
    Room& room_;
    int64_t peaks_ = 0;
    Heat heat_{};
};

}  // namespace
}  // namespace cue

extern "C" void cue_sample(const float* logits, int64_t stride, int64_t rows, int64_t n, const double* temperatures,
                           const int64_t* top_k, const double* top_p, const uint64_t* keys, int64_t* out) {
    const cue::Isa isa = cue::isa();
    cue::parallel(static_cast<int>(rows), [&](int row) {
        if (temperatures[row] == 0.0) return;
        const double temperature = std::min(std::max(temperatures[row], cue::kTemperatureLeast), cue::kTemperatureMost);
        const cue::Key key{static_cast<uint32_t>(keys[row]), static_cast<uint32_t>(keys[row] >> 32)};
        const cue::Options options{temperature, top_k[row], top_p[row], key};
        out[row] = cue::Row(logits + row * stride, n, options, isa, cue::kept_room).choose();
    });
}
