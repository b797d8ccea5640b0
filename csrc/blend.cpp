#include "blend.h"

#include <algorithm>

namespace tdp {

void blend_continue(const double* weights, int64_t k, int64_t* counts, int64_t position, int64_t n,
                    int32_t* dataset_index, int64_t* sample_index) {
    for (int64_t j = 0; j < n; ++j) {
        const double drawn = static_cast<double>(std::max<int64_t>(position + j, 1));
        int64_t chosen = 0;
        double largest = weights[0] * drawn - static_cast<double>(counts[0]);
        for (int64_t i = 1; i < k; ++i) {
            const double deficit = weights[i] * drawn - static_cast<double>(counts[i]);
            if (deficit > largest) {
                largest = deficit;
                chosen = i;
            }
        }
        dataset_index[j] = static_cast<int32_t>(chosen);
        sample_index[j] = counts[chosen]++;
    }
}

}  // namespace tdp
