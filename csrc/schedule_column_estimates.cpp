// How long a step with columns should take: see tdp_megatron/schedule/column_estimates.py, which is the reference.
#include <algorithm>

#include "schedule_columns.h"
#include "schedule_halving.h"

namespace tdp::schedule {
namespace {

constexpr int kHalvings = 20, kHalvingsTogether = 10, kDoublings = 64;

}  // namespace

ColumnEstimates::ColumnEstimates(const Scratch& scratch, double bubbles)
    : scratch_(scratch),
      bubbles_(bubbles),
      always_apart_(bubbles == 0.0),
      width_(scratch.levels[0].k),
      num_(static_cast<std::size_t>(scratch.problem.num_ranks / width_)),
      alone_(scratch) {
    const Cost& cost = scratch.problem.cost;
    overhead_ = cost.c0 + cost.a * static_cast<double>(scratch.problem.tail) / 2.0;
    empty_ = scratch.seconds(0, 0.0, scratch.levels[0]);
    const std::size_t n = scratch.lengths.size();
    work_from_.assign(n + 1, 0.0);
    tokens_from_.assign(n + 1, 0);
    for (std::size_t i = n; i-- > 0;) {
        work_from_[i] = work_from_[i + 1] + work(i);
        tokens_from_[i] = tokens_from_[i + 1] + scratch.padded[i];
    }
    mean_work_ = work_from_[0] / static_cast<double>(num_);
    times_ = scratch.times_of_longest();
}

std::shared_ptr<Estimate> ColumnEstimates::estimate(const Rule& rule, std::int64_t count, double most) {
    const double mean = mean_work_ / static_cast<double>(count) + scratch_.problem.cost.c0;
    const double limit = std::max(rule.time, rule.stretch * mean);
    double longest = kInfinity;
    for (const Level& level : scratch_.levels) {
        const double time = scratch_.alone(level, 0);
        if (time <= std::max(limit, times_.back())) longest = std::min(longest, time);
    }
    if (longest * (1.0 + bubbles_) >= most) return nullptr;
    const auto tall = make_tall(limit, std::min(rule.tall * mean, limit));
    if (least(*tall, count) >= most) return nullptr;
    auto best = std::make_shared<Estimate>();
    best->step = most;
    best->count = count;
    best->tall = tall;
    if (rule.apart || always_apart_ || tall->ops.empty()) {
        estimate_apart(*best);
    } else {
        estimate_together(*best);
    }
    return best->step < most ? best : nullptr;
}

void ColumnEstimates::estimate_apart(Estimate& best) {
    const double work = work_from_[best.tall->first_rest];
    const std::int64_t count = best.count;
    if (!apart(best.tall->ops, count, spare_) || !has_room(*best.tall, spare_, count)) return;
    double low = 0.0;
    for (const Column& column : spare_.columns) {
        low = std::max(low, value(column) + static_cast<double>(left(column, count)) * empty_);
    }
    if (low >= best.step || room(spare_, count, best.step) < work) return;
    double high = low + (mean_work_ + static_cast<double>(count) * overhead_) * (1.0 + bubbles_);
    for (int doubling = 0; room(spare_, count, high) < work; ++doubling) {
        if (doubling == kDoublings) return;
        low = high;
        high = 2.0 * high;
    }
    high = halve(low, high, work, kHalvings, [&](double middle) { return room(spare_, count, middle); });
    if (high >= best.step) return;
    best.step = high;
    std::swap(best.loads, spare_);
}

void ColumnEstimates::estimate_together(Estimate& best) {
    const double work = work_from_[best.tall->first_rest];
    const std::int64_t count = best.count;
    double longest = 0.0;
    for (const TallOp& op : best.tall->ops) longest = std::max(longest, op.seconds);
    const double evenly = mean_work_ + static_cast<double>(count) * overhead_;
    double low = std::max(longest * (1.0 + bubbles_), mean_work_);
    double high = std::min(best.step, 2.0 * (longest * (1.0 + bubbles_) + evenly));
    if (low >= high) return;
    for (int halving = -1; halving < kHalvingsTogether; ++halving) {
        // The longest step that would do is tried first.
        const double middle = halving < 0 ? high : (low + high) / 2.0;
        if (together(best.tall->ops, count, middle, spare_) && has_room(*best.tall, spare_, count) &&
            room(spare_, count, middle) >= work) {
            high = middle;
            best.step = middle;
            std::swap(best.loads, spare_);
        } else if (halving < 0) {
            return;
        } else {
            low = middle;
        }
    }
}

double ColumnEstimates::least(const Tall& tall, std::int64_t count) const {
    double seconds = work_from_[tall.first_rest];
    for (const TallOp& op : tall.ops) seconds += op.seconds * static_cast<double>(columns_of(op));
    const double mean = seconds / static_cast<double>(num_);
    return mean + bubbles_ * mean / static_cast<double>(count);
}

// How many sequences take longer alone on the fewest ranks.
std::size_t ColumnEstimates::first_within(double seconds) const {
    std::size_t low = 0, high = scratch_.lengths.size();
    while (low < high) {
        const std::size_t middle = (low + high) / 2;
        if (scratch_.alone(scratch_.levels[0], middle) > seconds) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

const WideOps& ColumnEstimates::wide_under(double limit) {
    const auto [found, is_new] = wide_.try_emplace(limit);
    WideOps& wide = found->second;
    if (!is_new) return wide;
    const std::size_t count = first_within(limit);
    Numbers numbers(count), order, place;
    for (std::size_t i = 0; i < count; ++i) {
        numbers[i] = static_cast<std::int32_t>(i);
        wide.chosen.push_back(static_cast<std::uint8_t>(alone_.choose_level(i, limit)));
    }
    wide.op_of.resize(count);
    GrowingOps unsorted;
    wide_ops(scratch_, numbers, wide.chosen, limit, unsorted, wide.op_of);
    for (std::size_t op = 0; op < unsorted.size(); ++op) order.push_back(static_cast<std::int32_t>(op));
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t x, std::int32_t y) {
        const GrowingOp& one = unsorted[static_cast<std::size_t>(x)];
        const GrowingOp& other = unsorted[static_cast<std::size_t>(y)];
        return one.level != other.level ? one.level > other.level : one.seconds > other.seconds;
    });
    place.resize(unsorted.size());
    for (std::size_t at = 0; at < order.size(); ++at) {
        const GrowingOp& op = unsorted[static_cast<std::size_t>(order[at])];
        wide.ops.push_back({op.seconds, op.level});
        place[static_cast<std::size_t>(order[at])] = static_cast<std::int32_t>(at);
    }
    for (std::size_t i = 0; i < count; ++i) {
        if (wide.chosen[i] != 0) wide.op_of[i] = place[static_cast<std::size_t>(wide.op_of[i])];
    }
    return wide;
}

std::shared_ptr<const Tall> ColumnEstimates::make_tall(double limit, double tall_from) {
    const WideOps& wide = wide_under(limit);
    auto tall = std::make_shared<Tall>();
    const std::size_t count = first_within(tall_from);  // tall_from is at most limit
    tall->first_rest = count;
    tall->ops.reserve(wide.ops.size() + count);
    tall->ops = wide.ops;
    tall->op_of = wide.op_of;
    tall->op_of.resize(count);
    while (narrow_alone_.size() < count) {
        narrow_alone_.push_back(scratch_.alone(scratch_.levels[0], narrow_alone_.size()));
    }
    for (std::size_t i = 0; i < count; ++i) {
        if (i < wide.chosen.size() && wide.chosen[i] != 0) continue;
        tall->op_of[i] = static_cast<std::int32_t>(tall->ops.size());
        tall->ops.push_back({narrow_alone_[i], 0});
    }
    return tall;
}

std::size_t ColumnEstimates::columns_of(const TallOp& op) const {
    return static_cast<std::size_t>(scratch_.levels[static_cast<std::size_t>(op.level)].k / width_);
}

void ColumnEstimates::put(Loads& loads, std::size_t first, const TallOp& op, std::size_t size) const {
    for (std::size_t column = first; column < first + size; ++column) {
        Column& own = loads.columns[column];
        own.seconds += op.seconds;
        own.longest = std::max(own.longest, op.seconds);
        ++own.used;
    }
    loads.where.push_back(static_cast<std::int32_t>(first));
}

bool ColumnEstimates::apart(const std::vector<TallOp>& ops, std::int64_t count, Loads& loads) {
    loads.columns.assign(num_, {});
    loads.where.clear();
    std::int32_t level = -1;
    std::size_t size = 0;
    for (const TallOp& op : ops) {
        if (op.level != level) {
            level = op.level;
            size = columns_of(op);
            heap_.clear();
            for (std::size_t first = 0; first < num_; first += size) {
                const Column& column = loads.columns[first];
                if (column.used < count) heap_.push({value(column), static_cast<std::int64_t>(first)});
            }
        }
        if (heap_.empty()) return false;
        const std::int64_t first = heap_.top().second;
        put(loads, static_cast<std::size_t>(first), op, size);
        const Column& column = loads.columns[static_cast<std::size_t>(first)];
        if (column.used < count) {
            heap_.replace_top({value(column), first});
        } else {
            heap_.pop();
        }
    }
    return true;
}

bool ColumnEstimates::fits(const Column& column, double seconds, std::int64_t count, double step) const {
    const double others = static_cast<double>(count - column.used - 1) * empty_;
    const double longest = std::max(column.longest, seconds);
    return column.used < count && column.seconds + seconds + bubbles_ * longest + others <= step;
}

bool ColumnEstimates::together(const std::vector<TallOp>& ops, std::int64_t count, double step, Loads& loads) const {
    loads.columns.assign(num_, {});
    loads.where.resize(ops.size());
    std::int32_t* where = loads.where.data();
    std::size_t first = 0, size = 0;
    std::int32_t level = -1;
    Column own;  // of all columns from `first` on for `size`
    const auto leave = [&] { std::fill_n(loads.columns.begin() + static_cast<std::ptrdiff_t>(first), size, own); };
    for (const TallOp& op : ops) {
        if (op.level != level) {
            leave();
            level = op.level;
            size = columns_of(op);
            own = loads.columns[first];
        }
        while (!fits(own, op.seconds, count, step)) {
            leave();
            first += size;
            if (first >= num_) return false;
            own = loads.columns[first];
        }
        own.seconds += op.seconds;
        own.longest = std::max(own.longest, op.seconds);
        ++own.used;
        *where++ = static_cast<std::int32_t>(first);
    }
    leave();
    return true;
}

bool ColumnEstimates::has_room(const Tall& tall, const Loads& loads, std::int64_t count) const {
    std::int64_t slots = 0;
    for (const Column& column : loads.columns) slots += left(column, count);
    const auto others = static_cast<std::int64_t>(scratch_.lengths.size() - tall.first_rest);
    return tokens_from_[tall.first_rest] <= slots * scratch_.levels[0].token_cap &&
           others <= slots * scratch_.problem.max_sequences;
}

double ColumnEstimates::target(const Column& column, std::int64_t count, double step) const {
    const double slots = static_cast<double>(left(column, count));
    const double seconds = (step - column.seconds - bubbles_ * column.longest) / slots;
    return seconds > column.longest ? (step - column.seconds) / (slots + bubbles_) : seconds;
}

double ColumnEstimates::room(const Loads& loads, std::int64_t count, double step) const {
    double room = 0.0, own = 0.0;
    const Column* before = nullptr;
    for (const Column& column : loads.columns) {
        const std::int64_t slots = left(column, count);
        if (slots == 0) continue;
        // Neighbours often have the same.
        if (before == nullptr || column.seconds != before->seconds || column.longest != before->longest ||
            column.used != before->used) {
            own = static_cast<double>(slots) * std::max(target(column, count, step) - overhead_, 0.0);
        }
        before = &column;
        room += own;
    }
    return room;
}

}  // namespace tdp::schedule
