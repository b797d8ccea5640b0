// How long loops are given up: they call a Poll now and then.
#pragma once

#include <cstdint>
#include <functional>

namespace tdp {

// Throws to end the loop that calls it.
using Poll = std::function<void()>;

// Steps between two calls, so that one comes several times a second and costs nothing.
constexpr int64_t kStepsPerPoll = int64_t{1} << 22;

// Says every n-th time that the turn is over, without a division.
class Countdown {
public:
    explicit Countdown(int64_t n) : n_(n), left_(n) {}
    bool is_over() {
        if (--left_ > 0) return false;
        left_ = n_;
        return true;
    }

private:
    int64_t n_, left_;
};

}  // namespace tdp
