#include "blend.h"

#include <algorithm>
#include <vector>

#include "deficit.h"

namespace tdp {

namespace {

// From this many datasets on the vectorised scan wins over the plain loop.
constexpr int64_t kScanFrom = 28;

// The scan keeps counts as doubles, which count exactly up to here.
constexpr int64_t kExact = int64_t{1} << 53;

inline double drawn_at(int64_t position) { return static_cast<double>(std::max<int64_t>(position, 1)); }

// A draw looks at every dataset.
inline int64_t draws_per_poll(int64_t k) { return std::max<int64_t>(kStepsPerPoll / (k + 8), 1); }

// For few datasets a branch: their order repeats, so the processor guesses it and works on several draws at once.
constexpr int64_t kBranchFrom = 4, kBranchBelow = 8;

template <bool kBranch>
void continue_plainly(const double* weights, int64_t k, int64_t* counts, int64_t position, int64_t n,
                      int32_t* dataset_index, int64_t* sample_index, const Poll& poll) {
    Countdown turn(draws_per_poll(k));
    for (int64_t j = 0; j < n; ++j) {
        if (turn.is_over()) poll();
        const double drawn = drawn_at(position + j);
        int64_t chosen = 0;
        double largest = weights[0] * drawn - static_cast<double>(counts[0]);
        for (int64_t i = 1; i < k; ++i) {
            const double deficit = weights[i] * drawn - static_cast<double>(counts[i]);
            if constexpr (kBranch) {
                if (deficit > largest) {
                    largest = deficit;
                    chosen = i;
                }
            } else {
                const bool larger = deficit > largest;
                largest = larger ? deficit : largest;
                chosen = larger ? i : chosen;
            }
        }
        dataset_index[j] = static_cast<int32_t>(chosen);
        sample_index[j] = counts[chosen]++;
    }
}

struct Padded {
    std::vector<double> weights, counts;

    explicit Padded(int64_t k)
        : weights((k + kDeficitLanes - 1) / kDeficitLanes * kDeficitLanes, 0.0), counts(weights.size(), kNeverChosen) {}

    int64_t first_largest(int64_t position) const {
        return largest_deficit(weights.data(), counts.data(), static_cast<int64_t>(weights.size()),
                               drawn_at(position))
            .index;
    }
};

}  // namespace

void blend_continue(const double* weights, int64_t k, int64_t* counts, int64_t position, int64_t n,
                    int32_t* dataset_index, int64_t* sample_index, const Poll& poll) {
    const bool exact = position + n < kExact && *std::max_element(counts, counts + k) < kExact - n;
    // Copying into the padded arrays costs about as much as one plain step.
    if (k < kScanFrom || n < 4 || !exact) {
        const bool branch = k >= kBranchFrom && k < kBranchBelow;
        (branch ? continue_plainly<true> : continue_plainly<false>)(weights, k, counts, position, n, dataset_index,
                                                                    sample_index, poll);
        return;
    }
    Padded padded(k);
    std::copy(weights, weights + k, padded.weights.begin());
    std::copy(counts, counts + k, padded.counts.begin());
    Countdown turn(draws_per_poll(k));
    for (int64_t j = 0; j < n; ++j) {
        if (turn.is_over()) poll();
        const int64_t chosen = padded.first_largest(position + j);
        padded.counts[chosen] += 1.0;
        dataset_index[j] = static_cast<int32_t>(chosen);
        sample_index[j] = counts[chosen]++;
    }
}

void blend_exhaustive(const int64_t* sizes, int64_t k, int64_t total, int32_t* dataset_index, int64_t* sample_index,
                      const Poll& poll) {
    Padded padded(k);
    for (int64_t i = 0; i < k; ++i) {
        padded.weights[i] = static_cast<double>(sizes[i]) / static_cast<double>(total);
        padded.counts[i] = sizes[i] ? 0.0 : kNeverChosen;
    }
    Countdown turn(draws_per_poll(k));
    for (int64_t j = 0; j < total; ++j) {
        if (turn.is_over()) poll();
        const int64_t chosen = padded.first_largest(j);
        double& count = padded.counts[chosen];
        dataset_index[j] = static_cast<int32_t>(chosen);
        sample_index[j] = static_cast<int64_t>(count);
        count += 1.0;
        if (count == static_cast<double>(sizes[chosen])) count = kNeverChosen;
    }
}

}  // namespace tdp
