// A few threads that help with one loop at a time.
#pragma once

#include <cstdint>
#include <functional>

namespace tdp {

// Runs body(i) for every i in [0, n), on up to num_threads threads, the caller's among them. body must not throw.
//
// The helpers start at the first use and sleep in between. A loop that finds them at work for another thread runs on
// its caller alone. After a fork the child starts its own: threads are not inherited. No OpenMP, whose runtime does
// not survive a fork beside torch's.
void parallel_for(int64_t n, int num_threads, const std::function<void(int64_t)>& body);

// Most threads a loop uses: set_num_threads, or the processors this process may run on, at most 4.
int num_threads();
void set_num_threads(int n);

}  // namespace tdp
