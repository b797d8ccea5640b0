// Columns of microbatches for pipelines: see tdp_megatron/schedule/columns.py, which is the reference.
#include "schedule_columns.h"

#include <algorithm>
#include <map>

namespace tdp::schedule {
namespace {

constexpr double kFar = 1.02, kFewOthers = 0.2;
constexpr double kTall[] = {1.0, 0.8};
constexpr double kStretches[] = {1.0, 1.25, 1.5};
constexpr std::size_t kFewSequences = 2048, kRules = 2, kRulesOfFew = 6;
constexpr int kFills = 4, kFillsOfFew = 32, kMisses = 32, kMostSteps = 12, kPatience = 1, kPatienceOfFew = 2;
constexpr double kStart = 0.6;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

class Columns : ColumnEstimates {
   public:
    Columns(const Scratch& scratch, double bubbles) : ColumnEstimates(scratch, bubbles) {
        few_ = scratch.lengths.size() <= kFewSequences;
        rules_ = few_ ? kRulesOfFew : kRules;
        patience_ = few_ ? kPatienceOfFew : kPatience;
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
        double best = kInfinity;
        if (overhead_ > 0.0) best = (few_ ? 1.0 : kStart) * std::sqrt(bubbles_ * mean_work_ / overhead_);
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

    bool few_ = false;
    std::size_t rules_ = 0;
    int patience_ = 0;
    // Kept from one use to the next.
    Numbers column_of_, members_, first_member_;
    GrowingOps ops_;
    std::vector<std::int32_t> op_of_;
    std::vector<FreshOps> fresh_;
    std::vector<std::int64_t> tokens_, slots_;
    std::vector<double> key_;
    Heap<std::int64_t> parked_;
    LowestFill lowest_;
};

}  // namespace

Ops columns(const Scratch& scratch, double bubbles, double& step) { return Columns(scratch, bubbles).search(step); }

}  // namespace tdp::schedule
