// Blends whose weights change from sample to sample.
#pragma once

#include <cstdint>
#include <vector>

#include "poll.h"

namespace tdp {

// In every draw each source's weight is added to its target, and the source furthest behind its target, the first one
// on ties, gives the sample. Offered are active sources of positive weight, all active ones where none has any.
class ChangingBlend {
public:
    // targets double[k]; counts int64[k], below 2^53 to the end; active bool[k], at least one true.
    ChangingBlend(int64_t k, const double* targets, const int64_t* counts, const bool* active);

    // weights: double[padded()], zero behind the first k. Returns the source and adds its draw.
    int64_t draw(const double* weights);

    int64_t padded() const { return static_cast<int64_t>(targets_.size()); }
    int64_t count(int64_t source) const { return static_cast<int64_t>(counts_[source]); }
    void write_back(int64_t k, double* targets, int64_t* counts) const;

private:
    std::vector<double> targets_, counts_, closed_, deficits_;
};

// The next n draws with weights double[n, k].
void blend_weighted(const double* weights, int64_t k, double* targets, int64_t* counts, const bool* active, int64_t n,
                    int32_t* dataset_index, int64_t* sample_index, const Poll& poll);

// The next n draws, from sample `position` on, with weights on straight lines between points and constant outside.
//
// points double[p], sample numbers, rising; rows double[p, k], the weights there.
void blend_linear(const double* points, const double* rows, int64_t p, int64_t k, double* targets, int64_t* counts,
                  const bool* active, int64_t position, int64_t n, int32_t* dataset_index, int64_t* sample_index,
                  const Poll& poll);

}  // namespace tdp
