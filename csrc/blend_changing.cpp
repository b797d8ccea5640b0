#include "blend_changing.h"

#include <algorithm>
#include <limits>

#include "multiversion.h"

namespace tdp {

namespace {

constexpr int64_t kLanes = 8;
constexpr double kNever = std::numeric_limits<double>::infinity();

inline int64_t padded_size(int64_t k) { return (k + kLanes - 1) / kLanes * kLanes; }

inline double largest_of(const double* lanes) { return *std::max_element(lanes, lanes + kLanes); }

// Adds the weights to the targets, writes the deficits of the sources that are offered, and gives the largest.
TDP_MULTIVERSION double advance(const double* __restrict weights, const double* __restrict counts,
                                const double* __restrict closed, int64_t padded, double* __restrict targets,
                                double* __restrict deficits) {
    double largest[kLanes];
    std::fill(largest, largest + kLanes, -kNever);
    for (int64_t i = 0; i < padded; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const int64_t at = i + lane;
            targets[at] += weights[at];
            const double deficit = (weights[at] > 0 ? targets[at] - counts[at] : -kNever) - closed[at];
            deficits[at] = deficit;
            largest[lane] = deficit > largest[lane] ? deficit : largest[lane];
        }
    return largest_of(largest);
}

// weights[i] = slopes[i] * distance + begin[i], each rounding by itself.
TDP_MULTIVERSION void on_line(const double* __restrict slopes, const double* __restrict begin, double distance,
                              int64_t padded, double* __restrict weights) {
    for (int64_t i = 0; i < padded; ++i) weights[i] = slopes[i] * distance + begin[i];
}

// A draw looks at every source a few times.
inline int64_t draws_per_poll(int64_t padded) { return std::max<int64_t>(kStepsPerPoll / (padded + 8), 1); }

}  // namespace

ChangingBlend::ChangingBlend(int64_t k, const double* targets, const int64_t* counts, const bool* active)
    : targets_(padded_size(k), 0.0), counts_(targets_.size(), 0.0), closed_(targets_.size(), kNever),
      deficits_(targets_.size()) {
    std::copy(targets, targets + k, targets_.begin());
    std::copy(counts, counts + k, counts_.begin());
    for (int64_t i = 0; i < k; ++i)
        if (active[i]) closed_[i] = 0.0;
}

int64_t ChangingBlend::draw(const double* weights) {
    double largest = advance(weights, counts_.data(), closed_.data(), padded(), targets_.data(), deficits_.data());
    if (largest == -kNever)  // no active source has any weight here
        for (int64_t i = 0; i < padded(); ++i) {
            deficits_[i] = targets_[i] - counts_[i] - closed_[i];
            largest = std::max(largest, deficits_[i]);
        }
    const int64_t chosen = std::find(deficits_.begin(), deficits_.end(), largest) - deficits_.begin();
    counts_[chosen] += 1.0;
    return chosen;
}

void ChangingBlend::write_back(int64_t k, double* targets, int64_t* counts) const {
    std::copy(targets_.begin(), targets_.begin() + k, targets);
    for (int64_t i = 0; i < k; ++i) counts[i] = count(i);
}

void blend_weighted(const double* weights, int64_t k, double* targets, int64_t* counts, const bool* active, int64_t n,
                    int32_t* dataset_index, int64_t* sample_index, const Poll& poll) {
    ChangingBlend blend(k, targets, counts, active);
    std::vector<double> row(blend.padded(), 0.0);
    Countdown turn(draws_per_poll(blend.padded()));
    for (int64_t j = 0; j < n; ++j) {
        if (turn.is_over()) poll();
        std::copy(weights + j * k, weights + (j + 1) * k, row.begin());
        const int64_t chosen = blend.draw(row.data());
        dataset_index[j] = static_cast<int32_t>(chosen);
        sample_index[j] = blend.count(chosen) - 1;
    }
    blend.write_back(k, targets, counts);
}

void blend_linear(const double* points, const double* rows, int64_t p, int64_t k, double* targets, int64_t* counts,
                  const bool* active, int64_t position, int64_t n, int32_t* dataset_index, int64_t* sample_index,
                  const Poll& poll) {
    ChangingBlend blend(k, targets, counts, active);
    std::vector<double> begin(blend.padded(), 0.0), slopes(begin.size(), 0.0), weights(begin.size());
    Countdown turn(draws_per_poll(blend.padded()));
    for (int64_t j = 0; j < n;) {
        // One stretch: before the first point, between two, or from the last one on.
        const double at = static_cast<double>(position + j);
        const int64_t next = std::upper_bound(points, points + p, at) - points;
        const int64_t here = std::max<int64_t>(next - 1, 0);
        const bool sloped = 0 < next && next < p;
        const double first = points[here];
        std::copy(rows + here * k, rows + (here + 1) * k, begin.begin());
        for (int64_t i = 0; i < k; ++i)
            slopes[i] = sloped ? (rows[next * k + i] - rows[here * k + i]) / (points[next] - first) : 0.0;
        const int64_t end = next < p ? std::min(n, static_cast<int64_t>(points[next]) - position) : n;
        if (!sloped) weights = begin;
        for (; j < end; ++j) {
            if (turn.is_over()) poll();
            if (sloped)
                on_line(slopes.data(), begin.data(), static_cast<double>(position + j) - first, blend.padded(),
                        weights.data());
            const int64_t chosen = blend.draw(weights.data());
            dataset_index[j] = static_cast<int32_t>(chosen);
            sample_index[j] = blend.count(chosen) - 1;
        }
    }
    blend.write_back(k, targets, counts);
}

}  // namespace tdp
