// `waves`: see tdp_megatron/schedule/waves.py, which is the reference.
#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <tuple>

#include "schedule_waves.h"

namespace tdp::schedule {
namespace {

// Tall waves made so far, and what they leave; many heads share their first waves.
struct Head {
    std::vector<std::shared_ptr<const TallWave>> waves;
    double seconds = 0.0;
    std::shared_ptr<Alive> alive;
};

struct Candidate {
    Head head;
    EvenWaves even;
};

constexpr std::int64_t kEffort = std::int64_t{1} << 16;
constexpr std::int64_t kFewestCandidates = 10, kMostCandidates = 96, kThorough = 16;
constexpr double kGoodEnough = 1.002, kLeastGap = 0.5;
constexpr std::size_t kMostTallWaves = 12, kProbes[] = {8, 12, 4, 2, 1, 0}, kAroundOfLarge = 2;
const std::vector<double> kStretches = {1.0, 1.25, 1.5};
constexpr std::pair<std::int64_t, double> kAround[] = {{1, 1.0}, {2, 1.0}, {0, 1.25}, {1, 1.25}, {0, 1.5}, {3, 1.0}};

class Searcher {
   public:
    Searcher(const Scratch& scratch, const Search& search)
        : scratch_(scratch), problem_(scratch.problem), search_(search), even_(scratch) {
        const std::int64_t size = static_cast<std::int64_t>(problem_.count) + 4 * problem_.num_ranks;
        thorough_ = kEffort / size >= kThorough;
        left_ = thorough_ ? std::min(kEffort / size, kMostCandidates) : kFewestCandidates;
        good_enough_ = search.lower_bound * kGoodEnough;
        times_ = scratch.times_of_longest();
    }

    Ops run() {
        if (problem_.count == 0) return {};
        double seconds = kInfinity;
        Ops ops;
        if (search_.pipeline) ops = columns(scratch_, search_.stages_before, seconds);
        if (ops.first_rank.empty() || thorough_) {
            tall_then_even();
            if (best_seconds_ < seconds) return ops_of(best_);
        }
        return ops;
    }

   private:
    bool done() const { return left_ <= 0 || best_seconds_ <= good_enough_; }

    // Seconds of the step that `tried_` gives in the mode; kept if it is the best so far.
    double offer() {
        double seconds = 0.0;
        if (search_.lockstep) {
            for (const auto& wave : tried_.head.waves) seconds += wave->seconds;
            const EvenWaves& even = tried_.even;
            for (std::size_t wave = 0; wave + 1 < even.offsets.size(); ++wave) {
                const auto first = static_cast<std::size_t>(even.offsets[wave]);
                seconds += even.ops[static_cast<std::size_t>(even.order[first])].seconds;
            }
        } else {
            seconds = place(tried_).longest_load();
            if (search_.pipeline) {
                double most = 0.0;
                for (const auto& wave : tried_.head.waves) most = std::max(most, wave->seconds);
                for (const GrowingOp& op : tried_.even.ops) most = std::max(most, op.seconds);
                seconds += search_.stages_before * most;
            }
        }
        if (seconds < best_seconds_) {
            best_seconds_ = seconds;
            std::swap(best_, tried_);
            has_best_ = true;
        }
        return seconds;
    }

    Placement place(const Candidate& candidate) const {
        Placement placement(scratch_);
        std::int64_t first = 0;
        Numbers all;
        for (const auto& wave : candidate.head.waves) {
            while (all.size() < wave->ops.size()) all.push_back(static_cast<std::int32_t>(all.size()));
            placement.add(wave->ops, all.data(), wave->ops.size(), first);
            first += static_cast<std::int64_t>(wave->ops.size());
        }
        const EvenWaves& even = candidate.even;
        for (std::size_t wave = 0; wave + 1 < even.offsets.size(); ++wave) {
            const std::int32_t begin = even.offsets[wave], end = even.offsets[wave + 1];
            placement.add(even.ops, even.order.data() + begin, static_cast<std::size_t>(end - begin), first);
        }
        return placement;
    }

    Ops ops_of(const Candidate& candidate) const {
        Placement placement = place(candidate);
        std::vector<std::int32_t> op_of(problem_.count);
        std::int32_t first = 0;
        for (const auto& wave : candidate.head.waves) {
            for (std::size_t at = 0; at < wave->members.size(); ++at) {
                op_of[static_cast<std::size_t>(wave->members[at])] = first + wave->op_of[at];
            }
            first += static_cast<std::int32_t>(wave->ops.size());
        }
        std::size_t numbers = static_cast<std::size_t>(first);
        if (!candidate.even.ops.empty()) {
            for (const std::int32_t i : candidate.head.alive->numbers) {
                op_of[static_cast<std::size_t>(i)] = first + candidate.even.op_of[static_cast<std::size_t>(i)];
            }
            numbers += candidate.even.ops.size();
        }
        Numbers place_of(numbers);
        for (std::size_t at = 0; at < placement.number.size(); ++at) {
            const std::int64_t number = placement.number[at];
            if (number >= 0) place_of[static_cast<std::size_t>(number)] = static_cast<std::int32_t>(at);
        }
        Ops ops;
        ops.first_rank = std::move(placement.first_rank);
        ops.cp_size = std::move(placement.cp_size);
        ops.set_members(scratch_.ids, [&](std::size_t i) -> std::int64_t {
            return place_of[static_cast<std::size_t>(op_of[i])];
        });
        return ops;
    }

    double evenly(const Head& head, std::int64_t extra, const std::vector<double>& stretches) {
        head.alive->sum_up(scratch_);
        const std::int64_t count = fewest(head) + extra;
        const double mean = mean_seconds(head, count);
        if (head.seconds + mean * static_cast<double>(count) >= best_seconds_) return kInfinity;
        for (const double stretch : stretches) {
            if (left_ <= 0) return kInfinity;
            if (!even_.start(*head.alive, count, stretch * mean, tried_.even)) continue;
            const double hoped = head.seconds + even_.seconds();
            if (hoped + gap(head.waves.size()) >= best_seconds_) return kInfinity;
            --left_;
            if (!even_.fill(tried_.even)) continue;
            tried_.head = head;
            const double before = best_seconds_, seconds = offer();
            if (seconds < before) best_head_ = head;
            if (!thorough_) gaps_.emplace_back(head.waves.size(), std::max(seconds - hoped, 0.0));
            return seconds;
        }
        return kInfinity;
    }

    double gap(std::size_t tall_waves) const {
        double most = -1.0, least = kInfinity;
        for (const auto& [number, gap] : gaps_) {
            if (number > tall_waves) most = std::max(most, gap);
            least = std::min(least, gap);
        }
        if (most >= 0.0) return most;
        return gaps_.empty() ? 0.0 : least * kLeastGap;
    }

    std::int64_t fewest(const Head& head) const {
        const std::int64_t capacity = problem_.num_ranks * problem_.token_limit;
        const std::int64_t slots = problem_.max_sequences * problem_.num_ranks;
        const std::int64_t by_count = (static_cast<std::int64_t>(head.alive->numbers.size()) + slots - 1) / slots;
        const std::int64_t count =
            std::max({(head.alive->tokens + capacity - 1) / capacity, by_count, std::int64_t{1}});
        const std::int64_t multiple = problem_.microbatches_multiple;
        const std::int64_t over = (count + static_cast<std::int64_t>(head.waves.size())) % multiple;
        return count + (over == 0 ? 0 : multiple - over);
    }

    double mean_seconds(const Head& head, std::int64_t count) const {
        const double ranks = static_cast<double>(problem_.num_ranks);
        return head.alive->work_from(scratch_, 0) / ranks / static_cast<double>(count) + problem_.cost.c0;
    }

    Head everything() const {
        auto alive = std::make_shared<Alive>();
        alive->numbers.resize(problem_.count);
        std::iota(alive->numbers.begin(), alive->numbers.end(), std::int32_t{0});
        return {{}, 0.0, alive};
    }

    void make_taller(Head& head, double limit) const {
        auto left = std::make_shared<Alive>();
        auto wave = std::make_shared<const TallWave>(tall_wave(scratch_, head.alive->numbers, limit, left->numbers));
        head.seconds += wave->seconds;
        head.waves.push_back(std::move(wave));
        head.alive = std::move(left);
    }

    void offer_tall(const Head& head) {
        tried_.head = head;
        tried_.even.ops.clear();
        tried_.even.order.clear();
        tried_.even.offsets.assign(1, 0);
        offer();
    }

    // One more tall wave after the last of `heads`; a plan of its own where it takes the last sequences.
    void grow(std::vector<Head>& heads, double limit) {
        Head head = heads.back();
        make_taller(head, limit);
        if (head.alive->numbers.empty()) offer_tall(head);
        heads.push_back(std::move(head));
    }

    // Seconds that even waves after many tall ones should take, without filling them.
    double hoped(std::vector<Head>& heads, double limit) {
        while (heads.size() <= kProbes[0] && !heads.back().alive->numbers.empty()) grow(heads, limit);
        const Head& head = heads.back().alive->numbers.empty() ? heads[heads.size() - 2] : heads.back();
        head.alive->sum_up(scratch_);
        const std::int64_t count = fewest(head);
        const double mean = mean_seconds(head, count);
        for (const double stretch : kStretches) {
            if (even_.start(*head.alive, count, stretch * mean, tried_.even)) return head.seconds + even_.seconds();
        }
        return kInfinity;
    }

    // Fills up `number` tall waves with even ones, unless they alone take too long.
    void probe(std::vector<Head>& heads, std::size_t number, double limit) {
        while (heads.size() <= number) {
            const Head& last = heads.back();
            if (last.alive->numbers.empty() || last.seconds >= best_seconds_ || done()) return;
            grow(heads, limit);
        }
        const Head& head = heads[number];
        if (head.alive->numbers.empty() || done()) return;
        if (!seen_.emplace(head.waves.size(), head.alive->numbers.size(), head.seconds).second) return;
        results_[number] = evenly(head, 0, kStretches);
    }

    void tall_then_even() {
        const Head all = everything();
        std::vector<double> limits;
        if (times_.size() > 1) limits.push_back(times_[1]);
        limits.push_back(times_[0]);
        for (std::size_t at = 2; at < times_.size() && at < 4; ++at) limits.push_back(times_[at]);
        std::vector<std::vector<Head>> heads(limits.size(), {all});
        if (!thorough_ && limits.size() > 1 && hoped(heads[0], limits[0]) > hoped(heads[1], limits[1])) {
            std::swap(limits[0], limits[1]);
            std::swap(heads[0], heads[1]);
        }
        for (std::size_t at = 0; at < limits.size(); ++at) {
            const double limit = limits[at];
            results_.clear();
            if (thorough_) {
                for (std::size_t number = 0; number <= kMostTallWaves; ++number) probe(heads[at], number, limit);
            } else {
                for (const std::size_t number : kProbes) probe(heads[at], number, limit);
            }
            std::int64_t start = -1;
            double least = kInfinity;
            for (const auto& [number, seconds] : results_) {
                if (start < 0 || seconds < least) {
                    start = static_cast<std::int64_t>(number);
                    least = seconds;
                }
            }
            for (const std::int64_t direction : {1, -1}) {
                for (std::int64_t number = start + direction; number >= 0; number += direction) {
                    const auto own = static_cast<std::size_t>(number);
                    if (results_.find(own) != results_.end()) break;
                    probe(heads[at], own, limit);
                    const auto found = results_.find(own);
                    if (found == results_.end() || found->second >= least) break;
                    least = found->second;
                }
            }
            if (done()) break;
        }
        refine();
        if (!has_best_) {
            Head head = all;
            while (!head.alive->numbers.empty()) make_taller(head, times_[0]);
            offer_tall(head);
        }
    }

    void refine() {
        for (std::size_t at = 0; at < (thorough_ ? std::size(kAround) : kAroundOfLarge); ++at) {
            const auto& [extra, stretch] = kAround[at];
            if (done() || best_head_.alive == nullptr) return;
            evenly(Head(best_head_), extra * problem_.microbatches_multiple, {stretch});
        }
    }

    const Scratch& scratch_;
    const Problem& problem_;
    const Search& search_;
    EvenWaveBuilder even_;
    std::vector<double> times_;
    std::int64_t left_ = 0;
    double good_enough_ = 0.0, best_seconds_ = kInfinity;
    Candidate tried_, best_;
    Head best_head_;  // of even waves
    bool has_best_ = false, thorough_ = false;
    // Numbers of tall waves, and by how much the step was longer than hoped for.
    std::vector<std::pair<std::size_t, double>> gaps_;
    // Steps found with one time limit of tall waves, by their number.
    std::map<std::size_t, double> results_;
    std::set<std::tuple<std::size_t, std::size_t, double>> seen_;
};

}  // namespace

Ops waves(const Problem& problem, const Search& search) {
    const Scratch scratch(problem);
    return Searcher(scratch, search).run();
}

}  // namespace tdp::schedule
