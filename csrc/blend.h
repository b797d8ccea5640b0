// Which dataset each sample of a blend comes from.
#pragma once

#include <cstdint>

#include "poll.h"

namespace tdp {

// Continues a blend from `position` for `n` samples: draws from the dataset with the largest deficit
// weights[i] * max(position, 1) - counts[i], the first one on ties, and counts the draw.
//
// weights double[k]; counts int64[k], updated; dataset_index int32[n] and sample_index int64[n] (the dataset's own
// running number) are written. Doubles without contraction, as Megatron computes them.
void blend_continue(const double* weights, int64_t k, int64_t* counts, int64_t position, int64_t n,
                    int32_t* dataset_index, int64_t* sample_index, const Poll& poll);

// Draws every sample of every dataset once: weights sizes[i] / total, the same rule among datasets with samples left.
//
// sizes int64[k], none negative, their sum total < 2^53; dataset_index int32[total] and sample_index int64[total] are
// written.
void blend_exhaustive(const int64_t* sizes, int64_t k, int64_t total, int32_t* dataset_index, int64_t* sample_index,
                      const Poll& poll);

}  // namespace tdp
