#include "schedule_core.h"

#include <algorithm>
#include <functional>

#include "schedule_sort.h"

namespace tdp::schedule {
namespace {

constexpr std::int64_t kLengthClasses = 4096;

}  // namespace

Scratch::Scratch(const Problem& p)
    : problem(p), ids(p.count), lengths(p.count), padded(p.count), squares(p.count), works(p.count) {
    std::vector<RadixOrder::Entry> order(p.count);
    for (std::size_t i = 0; i < p.count; ++i) {
        order[i] = {~static_cast<std::uint64_t>(p.seqlens[i]), static_cast<std::int64_t>(i)};
    }
    // The buffer of a stream comes sorted.
    if (!std::is_sorted(p.seqlens, p.seqlens + p.count, std::greater<>())) RadixOrder().sort(order);
    for (const std::int64_t k : p.cp_sizes) levels.push_back(p.level(k));
    for (std::size_t i = 0; i < p.count; ++i) {
        ids[i] = order[i].number;
        lengths[i] = p.seqlens[order[i].number];
        padded[i] = levels[0].padded(lengths[i]);
        squares[i] = p.cost.squares(padded[i]);
        works[i] = p.cost.a * static_cast<double>(padded[i]) + p.cost.b * squares[i];
    }
    const std::int64_t longest = p.count == 0 ? 0 : lengths[0];
    while (longest >> shift_ >= kLengthClasses) ++shift_;
    first_.assign(static_cast<std::size_t>(longest >> shift_) + 1, 0);
    std::size_t number = first_.size();
    for (std::size_t i = 0; i < p.count; ++i) {
        const auto own = static_cast<std::size_t>(lengths[i] >> shift_);
        while (number > own) first_[--number] = static_cast<std::int32_t>(i);
    }
    while (number > 0) first_[--number] = static_cast<std::int32_t>(p.count);
}

std::size_t Scratch::first_not_longer(std::int64_t length) const {
    if (length < 0) return lengths.size();
    const auto number = static_cast<std::size_t>(length >> shift_);
    if (number >= first_.size()) return 0;
    const auto begin = lengths.begin() + first_[number];
    const auto end = number == 0 ? lengths.end() : lengths.begin() + first_[number - 1];
    const auto at = std::partition_point(begin, end, [&](std::int64_t other) { return other > length; });
    return static_cast<std::size_t>(at - lengths.begin());
}

std::vector<double> Scratch::times_of_longest() const {
    std::vector<double> times;
    for (const Level& level : levels) {
        if (problem.count == 0) break;
        const double time = alone(level, 0);
        if (time < kInfinity) times.push_back(time);
    }
    std::sort(times.begin(), times.end(), std::greater<>());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    return times;
}

RoomUnder::RoomUnder(const Problem& problem, const Level& level, double limit) : cost_(problem.cost), level_(level) {
    const double k = static_cast<double>(level.k);
    slack_ = (limit - cost_.c0) * k;
    if (level.k > 1 && cost_.layers != 0) {
        const double steps = 3.0 * static_cast<double>(cost_.layers) * (k - 1.0);
        const double per_token = cost_.a + steps * cost_.kv_bytes / cost_.link(level.k);
        if (per_token > 0.0) most_ = (limit - cost_.c0 - steps * cost_.latency) / per_token * k;
    }
}

std::int64_t RoomUnder::left(std::int64_t tokens, double squares) const {
    const Cost& cost = cost_;
    const double held = static_cast<double>(tokens);
    const double slack = slack_ - cost.a * held - cost.b * squares;
    if (slack < 0.0) return -1;
    double longest = static_cast<double>(level_.token_cap - tokens);
    if (cost.b > 0.0) {
        double by_attention = (std::sqrt(cost.a * cost.a + 4.0 * cost.b * slack) - cost.a) / (2.0 * cost.b);
        const double reach = 2.0 * static_cast<double>(cost.window);
        if (cost.window != 0 && by_attention > reach) {
            by_attention = slack / (cost.a + cost.b * 2.0 * static_cast<double>(cost.window));
        }
        longest = std::min(longest, by_attention);
    } else if (cost.a > 0.0) {
        longest = std::min(longest, slack / cost.a);
    }
    if (most_ < kInfinity) longest = std::min(longest, most_ - held);
    const std::int64_t total = tokens + static_cast<std::int64_t>(std::max(longest, -1.0));
    if (total < 0) return -1;
    const std::int64_t whole = level_.unit.down(total) * level_.unit.by() - tokens;
    return whole >= 0 ? level_.pad.down(whole) * level_.pad_multiple : -1;
}

void RoomList::close_hole() {
    if (hole_ == kNone) return;
    items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(hole_));
    hole_ = kNone;
}

void RoomList::insert(std::int64_t room, std::int64_t number) {
    const Item item{room, number};
    if (hole_ == kNone) {
        items_.insert(std::upper_bound(items_.begin(), items_.end(), item), item);
        return;
    }
    const auto hole = items_.begin() + static_cast<std::ptrdiff_t>(hole_);
    const auto before = std::upper_bound(items_.begin(), hole, item);
    if (before != hole) {
        std::move_backward(before, hole, hole + 1);
        *before = item;
    } else {
        const auto after = std::upper_bound(hole + 1, items_.end(), item);
        std::move(hole + 1, after, hole);
        *(after - 1) = item;
    }
    hole_ = kNone;
}

std::int64_t RoomList::take(std::int64_t length, std::int64_t* room) {
    close_hole();
    const auto at = std::lower_bound(items_.begin(), items_.end(), Item{length, -1});
    if (at == items_.end()) return -1;
    hole_ = static_cast<std::size_t>(at - items_.begin());
    if (room != nullptr) *room = at->room;
    return at->number;
}

std::int64_t best_fit_packs(const std::vector<std::int64_t>& members, const std::vector<std::int64_t>& padded,
                            std::int64_t cap, std::int64_t max_sequences, std::vector<std::int64_t>& pack_of) {
    RoomList open;
    std::vector<std::int64_t> sizes;
    pack_of.clear();
    for (const std::int64_t i : members) {
        const std::int64_t length = padded[static_cast<std::size_t>(i)];
        std::int64_t room = cap;
        std::int64_t number = open.take(length, &room);
        if (number < 0) {
            number = static_cast<std::int64_t>(sizes.size());
            sizes.push_back(0);
        }
        pack_of.push_back(number);
        if (++sizes[static_cast<std::size_t>(number)] < max_sequences) open.insert(room - length, number);
    }
    return static_cast<std::int64_t>(sizes.size());
}

}  // namespace tdp::schedule
