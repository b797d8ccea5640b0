// The first largest of many deficits: the inner loop of a blend.
#pragma once

#include <cstdint>
#include <limits>

namespace tdp {

struct Largest {
    double deficit;
    int64_t index;
};

// Arrays handed to largest_deficit are padded to a multiple of this with weight 0 and count kNeverChosen.
constexpr int64_t kDeficitLanes = 16;
constexpr double kNeverChosen = std::numeric_limits<double>::infinity();

// First maximum of weights[i] * drawn - counts[i] over i in [0, padded); products and differences are rounded one by
// one, as a plain loop rounds them. Uses AVX2 where the processor has it.
Largest largest_deficit(const double* weights, const double* counts, int64_t padded, double drawn);

}  // namespace tdp
