// Columns of microbatches for pipelines: see tdp_megatron/schedule/columns.py, which is the reference.
#include <algorithm>
#include <map>
#include <memory>

#include "schedule_waves.h"

namespace tdp::schedule {
namespace {

constexpr int kHalvings = 20, kHalvingsTogether = 10, kDoublings = 64;
constexpr double kFar = 1.02, kFewOthers = 0.2;
constexpr double kTall[] = {1.0, 0.8};
constexpr double kStretches[] = {1.0, 1.25, 1.5};
constexpr std::size_t kFewSequences = 2048, kRules = 2, kRulesOfFew = 6;
constexpr int kFills = 4, kFillsOfFew = 32, kMisses = 32, kMostSteps = 12, kPatience = 1, kPatienceOfFew = 2;
constexpr double kStart = 0.6;

struct Rule {
    double time, stretch, tall;
    bool apart;
};

struct Column {
    double seconds = 0.0, longest = 0.0;
    std::int64_t used = 0;
};

struct Loads {
    std::vector<Column> columns;
    Numbers where;  // first column of each tall op
};

struct TallOp {
    double seconds;
    std::int32_t level;
};

struct Tall {
    std::vector<TallOp> ops;
    std::vector<std::int32_t> op_of;  // of the sequences before first_rest
    std::size_t first_rest = 0;
};

struct Estimate {
    double step;
    std::int64_t count;
    std::shared_ptr<const Tall> tall;
    Loads loads;
};

std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

class Columns {
   public:
    Columns(const Scratch& scratch, double bubbles)
        : scratch_(scratch),
          bubbles_(bubbles),
          always_apart_(bubbles == 0.0),
          width_(scratch.levels[0].k),
          num_(static_cast<std::size_t>(scratch.problem.num_ranks / width_)),
          alone_(scratch) {
        const Cost& cost = scratch.problem.cost;
        overhead_ = cost.c0 + cost.a * static_cast<double>(scratch.problem.tail) / 2.0;
        empty_ = scratch.seconds(0, 0.0, width_);
        const std::size_t n = scratch.lengths.size();
        few_ = n <= kFewSequences;
        rules_ = few_ ? kRulesOfFew : kRules;
        patience_ = few_ ? kPatienceOfFew : kPatience;
        work_from_.assign(n + 1, 0.0);
        tokens_from_.assign(n + 1, 0);
        for (std::size_t i = n; i-- > 0;) {
            work_from_[i] = work_from_[i + 1] + work(i);
            tokens_from_[i] = tokens_from_[i + 1] + scratch.padded[i];
        }
        mean_work_ = work_from_[0] / static_cast<double>(num_);
        times_ = scratch.times_of_longest();
    }

    Ops search(double& best_seconds) {
        std::int64_t fewest, most, start;
        counts(fewest, most, start);
        std::vector<Rule> rules;
        for (const double tall : kTall) {
            for (const double time : times_) rules.push_back({time, 0.0, tall, false});
        }
        for (const double stretch : kStretches) rules.push_back({times_.back(), stretch, kTall[0], true});
        auto ranked = rank(rules, start);
        if (ranked.empty() && !always_apart_) {
            always_apart_ = true;
            ranked = rank(rules, start);
        }
        std::vector<std::shared_ptr<Estimate>> known;
        for (std::size_t at = 0; at < ranked.size() && at < rules_; ++at) {
            for (auto& [count, made] : climb(rules[ranked[at].second], start, fewest, most)) {
                known.push_back(std::move(made));
            }
        }
        std::stable_sort(known.begin(), known.end(), [](const auto& x, const auto& y) {
            return x->step != y->step ? x->step < y->step : x->count < y->count;
        });
        best_seconds = kInfinity;
        Ops best;
        int fills = few_ ? kFillsOfFew : kFills, misses = kMisses;
        for (const auto& chosen : known) {
            if (chosen->step >= best_seconds || fills == 0 || misses == 0) break;
            if (work_from_[chosen->tall->first_rest] < kFewOthers * work_from_[0]) estimate_apart(*chosen);
            const double seconds = fill(*chosen);
            --(seconds == kInfinity ? misses : fills);
            if (seconds < best_seconds) {
                best_seconds = seconds;
                best = ops_of(*chosen);
            }
        }
        return best;
    }

   private:
    double work(std::size_t i) const { return scratch_.work(i) / static_cast<double>(width_); }
    std::int64_t left(const Column& column, std::int64_t count) const { return count - column.used; }

    std::vector<std::pair<double, std::size_t>> rank(const std::vector<Rule>& rules, std::int64_t count) {
        std::vector<std::pair<double, std::size_t>> ranked;
        for (std::size_t number = 0; number < rules.size(); ++number) {
            const double most = ranked.size() < rules_ ? kInfinity : ranked[rules_ - 1].first;
            if (const auto made = estimate(rules[number], count, most)) {
                ranked.emplace_back(made->step, number);
                std::sort(ranked.begin(), ranked.end());
            }
        }
        return ranked;
    }

    void counts(std::int64_t& fewest, std::int64_t& most, std::int64_t& start) {
        const Problem& problem = scratch_.problem;
        const auto n = static_cast<std::int64_t>(problem.count);
        const auto columns = static_cast<std::int64_t>(num_);
        std::int64_t tokens = 0;
        for (const std::int64_t length : scratch_.lengths) tokens += length;
        const std::int64_t capacity = problem.num_ranks * problem.token_limit;
        const std::int64_t multiple = problem.microbatches_multiple;
        const std::int64_t slots = problem.max_sequences * columns;
        fewest = round_up(std::max(divide_up(tokens, capacity), divide_up(n, slots)), multiple);
        const std::int64_t wide = scratch_.levels[alone_.choose_level(0, 0.0)].k / width_;
        most = round_up(std::max(divide_up(2 * n * wide, columns), fewest), multiple);
        const double best = overhead_ > 0.0 ? (few_ ? 1.0 : kStart) * std::sqrt(bubbles_ * mean_work_ / overhead_) : kInfinity;
        const double clamped = std::min(std::max(best, static_cast<double>(fewest)), static_cast<double>(most));
        start = round_up(static_cast<std::int64_t>(clamped), multiple);
    }

    std::map<std::int64_t, std::shared_ptr<Estimate>> climb(const Rule& rule, std::int64_t start,
                                                                  std::int64_t fewest, std::int64_t most) {
        std::map<std::int64_t, std::shared_ptr<Estimate>> known;
        const std::int64_t multiple = scratch_.problem.microbatches_multiple;
        double best = kInfinity;
        for (const bool upwards : {false, true}) {
            std::int64_t at = start;
            int worse = 0;
            for (int step = 0; step < kMostSteps; ++step) {
                if (known.find(at) == known.end()) {
                    auto made = estimate(rule, at, best * kFar);
                    if (made == nullptr || made->step >= best) {
                        ++worse;
                    } else {
                        best = made->step;
                        worse = 0;
                    }
                    if (made != nullptr) known[at] = std::move(made);
                }
                std::int64_t following =
                    upwards ? std::max(at + 1, at * 5 / 4) : std::min(at - 1, at * 4 / 5);
                following = round_up(std::max(following, std::int64_t{0}), multiple);
                if (worse == patience_ || following == at || following < fewest || following > most) break;
                at = following;
            }
        }
        if (few_ && !known.empty()) climb_slowly(rule, fewest, most, known);
        return known;
    }

    void climb_slowly(const Rule& rule, std::int64_t fewest, std::int64_t most,
                      std::map<std::int64_t, std::shared_ptr<Estimate>>& known) {
        const std::int64_t multiple = scratch_.problem.microbatches_multiple;
        std::int64_t at = 0;
        double best = kInfinity;
        for (const auto& [count, made] : known) {
            if (made->step < best) {
                best = made->step;
                at = count;
            }
        }
        for (const std::int64_t direction : {-multiple, multiple}) {
            int worse = 0;
            std::int64_t count = at + direction;
            for (int step = 0; step < kMostSteps; ++step, count += direction) {
                if (count < fewest || count > most || worse == patience_) break;
                if (known.find(count) == known.end()) {
                    if (auto made = estimate(rule, count, best * kFar)) known[count] = std::move(made);
                }
                const auto found = known.find(count);
                if (found != known.end() && found->second->step < best) {
                    best = found->second->step;
                    worse = 0;
                } else {
                    ++worse;
                }
            }
        }
    }

    std::shared_ptr<Estimate> estimate(const Rule& rule, std::int64_t count, double most) {
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

    void estimate_apart(Estimate& best) {
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
        for (int halving = 0; halving < kHalvings; ++halving) {
            const double middle = (low + high) / 2.0;
            (room(spare_, count, middle) >= work ? high : low) = middle;
        }
        if (high >= best.step) return;
        best.step = high;
        std::swap(best.loads, spare_);
    }

    void estimate_together(Estimate& best) {
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

    double least(const Tall& tall, std::int64_t count) const {
        double seconds = work_from_[tall.first_rest];
        for (const TallOp& op : tall.ops) seconds += op.seconds * static_cast<double>(columns_of(op));
        const double mean = seconds / static_cast<double>(num_);
        return mean + bubbles_ * mean / static_cast<double>(count);
    }

    std::shared_ptr<const Tall> make_tall(double limit, double tall_from) {
        auto tall = std::make_shared<Tall>();
        const Level& smallest = scratch_.levels[0];
        std::size_t low = 0, high = scratch_.lengths.size();
        while (low < high) {
            const std::size_t middle = (low + high) / 2;
            if (scratch_.alone(smallest, middle) > tall_from) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        tall->first_rest = low;
        tall->op_of.resize(low);
        tall->ops.reserve(low);
        chosen_.clear();
        while (numbers_.size() < low) numbers_.push_back(static_cast<std::int32_t>(numbers_.size()));
        for (std::size_t i = 0; i < low; ++i) {
            chosen_.push_back(static_cast<std::uint8_t>(alone_.choose_level(i, limit)));
        }
        wide_ops(scratch_, numbers_, chosen_, limit, unsorted_, tall->op_of);
        order_.clear();
        for (std::size_t op = 0; op < unsorted_.size(); ++op) order_.push_back(static_cast<std::int32_t>(op));
        std::stable_sort(order_.begin(), order_.end(), [&](std::int32_t x, std::int32_t y) {
            const GrowingOp& one = unsorted_[static_cast<std::size_t>(x)];
            const GrowingOp& other = unsorted_[static_cast<std::size_t>(y)];
            return one.level != other.level ? one.level > other.level : one.seconds > other.seconds;
        });
        place_.resize(unsorted_.size());
        for (std::size_t at = 0; at < order_.size(); ++at) {
            const GrowingOp& op = unsorted_[static_cast<std::size_t>(order_[at])];
            tall->ops.push_back({op.seconds, op.level});
            place_[static_cast<std::size_t>(order_[at])] = static_cast<std::int32_t>(at);
        }
        unsorted_.clear();
        for (std::size_t i = 0; i < low; ++i) {
            if (chosen_[i] == 0) {
                tall->op_of[i] = static_cast<std::int32_t>(tall->ops.size());
                tall->ops.push_back({alone_.seconds(i, 0), 0});
            } else {
                tall->op_of[i] = place_[static_cast<std::size_t>(tall->op_of[i])];
            }
        }
        return tall;
    }

    std::size_t columns_of(const TallOp& op) const {
        return static_cast<std::size_t>(scratch_.levels[static_cast<std::size_t>(op.level)].k / width_);
    }

    void put(Loads& loads, std::size_t first, const TallOp& op, std::size_t size) const {
        for (std::size_t column = first; column < first + size; ++column) {
            Column& own = loads.columns[column];
            own.seconds += op.seconds;
            own.longest = std::max(own.longest, op.seconds);
            ++own.used;
        }
        loads.where.push_back(static_cast<std::int32_t>(first));
    }

    double value(const Column& column) const { return column.seconds + bubbles_ * column.longest; }

    bool apart(const std::vector<TallOp>& ops, std::int64_t count, Loads& loads) {
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

    bool fits(const Column& column, double seconds, std::int64_t count, double step) const {
        const double others = static_cast<double>(count - column.used - 1) * empty_;
        const double longest = std::max(column.longest, seconds);
        return column.used < count && column.seconds + seconds + bubbles_ * longest + others <= step;
    }

    bool together(const std::vector<TallOp>& ops, std::int64_t count, double step, Loads& loads) const {
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

    bool has_room(const Tall& tall, const Loads& loads, std::int64_t count) const {
        std::int64_t slots = 0;
        for (const Column& column : loads.columns) slots += left(column, count);
        const auto others = static_cast<std::int64_t>(scratch_.lengths.size() - tall.first_rest);
        return tokens_from_[tall.first_rest] <= slots * scratch_.levels[0].token_cap &&
               others <= slots * scratch_.problem.max_sequences;
    }

    double target(const Column& column, std::int64_t count, double step) const {
        const double slots = static_cast<double>(left(column, count));
        const double seconds = (step - column.seconds - bubbles_ * column.longest) / slots;
        return seconds > column.longest ? (step - column.seconds) / (slots + bubbles_) : seconds;
    }

    double room(const Loads& loads, std::int64_t count, double step) const {
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

    // The step; `op_of_` gets the microbatch of each sequence among those left free, infinite where tokens do not fit.
    double fill(const Estimate& estimate) {
        if (!split(estimate)) return kInfinity;
        const std::size_t first_rest = estimate.tall->first_rest;
        const std::size_t rest = scratch_.lengths.size() - first_rest;
        first_member_.assign(num_ + 1, 0);
        for (const std::int32_t column : column_of_) ++first_member_[static_cast<std::size_t>(column) + 1];
        for (std::size_t column = 0; column < num_; ++column) first_member_[column + 1] += first_member_[column];
        members_.resize(rest);
        Numbers next(first_member_.begin(), first_member_.end() - 1);
        for (std::size_t at = 0; at < rest; ++at) {
            auto& to = next[static_cast<std::size_t>(column_of_[at])];
            members_[static_cast<std::size_t>(to++)] = static_cast<std::int32_t>(first_rest + at);
        }
        std::int32_t first = 0;
        op_of_.resize(scratch_.lengths.size());
        GrowingOp empty;
        empty.seconds = empty_;
        double step = 0.0;
        for (std::size_t column = 0; column < num_; ++column) {
            const Column& own = estimate.loads.columns[column];
            const auto slots = static_cast<std::int32_t>(left(own, estimate.count));
            ops_.assign(static_cast<std::size_t>(slots), empty);
            fresh_.clear();
            if (slots > 0) fresh_.push_back({empty.seconds - empty.target, 0, slots});
            const std::int32_t* begin = members_.data() + first_member_[column];
            const auto count = static_cast<std::size_t>(first_member_[column + 1] - first_member_[column]);
            if (!lowest_.run(scratch_, begin, count, fresh_, ops_, op_of_)) return kInfinity;
            for (std::size_t at = 0; at < count; ++at) op_of_[static_cast<std::size_t>(begin[at])] += first;
            double seconds = own.seconds, longest = own.longest;
            for (const GrowingOp& op : ops_) {
                seconds += op.seconds;
                longest = std::max(longest, op.seconds);
            }
            first += slots;
            step = std::max(step, seconds + bubbles_ * longest);
        }
        return step;
    }

    bool split(const Estimate& estimate) {
        const Level& smallest = scratch_.levels[0];
        const std::int64_t max_sequences = scratch_.problem.max_sequences;
        column_of_.clear();
        tokens_.assign(num_, 0);
        slots_.assign(num_, 0);
        key_.assign(num_, 0.0);
        heap_.clear();
        parked_.clear();
        for (std::size_t column = 0; column < num_; ++column) {
            const Column& own = estimate.loads.columns[column];
            const std::int64_t slots = left(own, estimate.count);
            tokens_[column] = slots * smallest.token_cap;
            slots_[column] = slots * max_sequences;
            if (slots == 0) continue;
            const double budget =
                static_cast<double>(slots) * (target(own, estimate.count, estimate.step) - overhead_);
            heap_.push({-budget, static_cast<std::int64_t>(column)});
        }
        for (std::size_t i = estimate.tall->first_rest; i < scratch_.lengths.size(); ++i) {
            const std::int64_t length = scratch_.padded[i];
            while (!parked_.empty() && -parked_.top().first >= length) {
                const std::int64_t column = parked_.top().second;
                parked_.pop();
                heap_.push({key_[static_cast<std::size_t>(column)], column});
            }
            while (!heap_.empty()) {
                const auto [key, number] = heap_.top();
                const auto column = static_cast<std::size_t>(number);
                if (length <= tokens_[column] && slots_[column] > 0) break;
                heap_.pop();
                key_[column] = key;
                if (slots_[column] > 0) parked_.push({-tokens_[column], number});
            }
            if (heap_.empty()) return false;
            const auto [key, number] = heap_.top();
            tokens_[static_cast<std::size_t>(number)] -= length;
            --slots_[static_cast<std::size_t>(number)];
            column_of_.push_back(static_cast<std::int32_t>(number));
            heap_.replace_top({key + work(i), number});
        }
        return true;
    }

    // Of the last estimate that was filled.
    Ops ops_of(const Estimate& estimate) const {
        Ops ops;
        const Tall& tall = *estimate.tall;
        for (std::size_t op = 0; op < tall.ops.size(); ++op) {
            ops.first_rank.push_back(estimate.loads.where[op] * width_);
            ops.cp_size.push_back(scratch_.levels[static_cast<std::size_t>(tall.ops[op].level)].k);
        }
        for (std::size_t column = 0; column < num_; ++column) {
            const auto slots = static_cast<std::size_t>(left(estimate.loads.columns[column], estimate.count));
            ops.first_rank.insert(ops.first_rank.end(), slots, static_cast<std::int64_t>(column) * width_);
            ops.cp_size.insert(ops.cp_size.end(), slots, width_);
        }
        const auto first_rest = static_cast<std::int64_t>(tall.ops.size());
        ops.set_members(scratch_.ids, [&](std::size_t i) -> std::int64_t {
            return i < tall.first_rest ? tall.op_of[i] : first_rest + op_of_[i];
        });
        return ops;
    }

    const Scratch& scratch_;
    double bubbles_;
    bool always_apart_;
    std::int64_t width_;  // ranks of a column
    std::size_t num_;
    AloneTable alone_;
    double overhead_ = 0.0, empty_ = 0.0, mean_work_ = 0.0;
    bool few_ = false;
    std::size_t rules_ = 0;
    int patience_ = 0;
    std::vector<double> work_from_, times_;
    std::vector<std::int64_t> tokens_from_;
    // Kept from one use to the next.
    Loads spare_;
    Numbers numbers_, order_, place_, column_of_, members_, first_member_;
    std::vector<std::uint8_t> chosen_;
    GrowingOps unsorted_, ops_;
    std::vector<std::int32_t> op_of_;
    std::vector<FreshOps> fresh_;
    std::vector<std::int64_t> tokens_, slots_;
    std::vector<double> key_;
    Heap<double> heap_;
    Heap<std::int64_t> parked_;
    LowestFill lowest_;
};

}  // namespace

Ops columns(const Scratch& scratch, double bubbles, double& step) { return Columns(scratch, bubbles).search(step); }

}  // namespace tdp::schedule
