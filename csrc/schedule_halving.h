// Bisection that looks only where the answer is not known yet.
#pragma once

#include <cmath>
#include <cstdlib>

namespace tdp::schedule {

// What is left of `high` after `halvings` halvings of [low, high] in which the upper half goes where `value(middle)`
// reaches `wanted`. `value` must rise, but for rounding: straight lines find two ends close to each other with `wanted`
// between them, and a middle outside of those needs no look. The result has the same bits as without.
template <class Value>
double halve(double low, double high, double wanted, int halvings, Value value) {
    constexpr int kLines = 8;
    constexpr double kRounding = 1e-12;
    const double close = std::ldexp(high - low, -halvings);
    const double margin = kRounding * std::abs(wanted);
    double below = low, above = high, least = value(low) - wanted, most = value(high) - wanted;
    // At an end whose value is as wanted but for rounding, only a look says what its neighbours are.
    const auto unclear = [&](double over) { return !(std::abs(over) > margin); };
    const auto plain = [&](double from, double to) {
        for (int halving = 0; halving < halvings; ++halving) {
            const double middle = (low + high) / 2.0;
            const bool reached = middle >= to || (middle > from && value(middle) >= wanted);
            (reached ? high : low) = middle;
        }
        return high;
    };
    if (unclear(least) || unclear(most)) return plain(low, high);
    if (least > 0.0) return plain(low, low);
    if (most < 0.0) return plain(high, high);
    double from = least, to = most;
    int side = 0;  // of the last line
    for (int line = 0; line < kLines && above - below > close; ++line) {
        const double share = from / (from - to);
        double at = below + share * (above - below);
        // A little past the crossing, so that the far end comes near, too.
        at += share < 0.5 ? close : -close;
        if (!(at > below && at < above)) at = (below + above) / 2.0;
        const double over = value(at) - wanted;
        if (unclear(over)) break;
        const bool reached = over > 0.0;
        (reached ? above : below) = at;
        (reached ? to : from) = over;
        // An end that stays where it is counts for less.
        if (side == (reached ? 1 : -1)) (reached ? from : to) /= 2.0;
        side = reached ? 1 : -1;
    }
    return plain(below, above);
}

}  // namespace tdp::schedule
