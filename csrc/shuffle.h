// NumPy's legacy shuffle, draw for draw.
#pragma once

#include <cstdint>

#include "mt19937.h"
#include "poll.h"

namespace tdp {

// Shuffles values[n] as numpy.random.RandomState.shuffle does: Fisher-Yates from the top, each place drawn by masked
// rejection (the smallest mask of ones that covers the bound, 32-bit words up to 2^32 - 1, pairs of words above).
template <typename T>
void legacy_shuffle(Mt19937& random, T* values, int64_t n, const Poll& poll);

}  // namespace tdp
