// `buddy`: see tdp_megatron/schedule/buddy.py, which is the reference.
#include <algorithm>

#include "schedule_core.h"

namespace tdp::schedule {
namespace {

constexpr double kThetas[] = {1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1};
constexpr double kGoodEnough = 1.002;
constexpr int kPatience = 2;

class Buddy {
   public:
    explicit Buddy(const Scratch& scratch) : scratch_(scratch), by_level_(scratch.levels.size()) {}

    // Places every sequence on its level; the largest work of a rank, seconds.
    double place(const std::vector<std::uint8_t>& chosen, Ops& ops) {
        const Problem& problem = scratch_.problem;
        const std::size_t ranks = static_cast<std::size_t>(problem.num_ranks);
        std::vector<double> loads(ranks, 0.0);
        for (auto& members : by_level_) members.clear();
        for (std::size_t i = 0; i < chosen.size(); ++i) by_level_[chosen[i]].push_back(static_cast<std::int64_t>(i));
        padded_.resize(scratch_.lengths.size());
        for (std::size_t number = scratch_.levels.size(); number-- > 0;) {
            const auto& members = by_level_[number];
            if (members.empty()) continue;
            const Level& level = scratch_.levels[number];
            split(level, members, loads);
            for (std::size_t block = 0; block < in_block_.size(); ++block) {
                if (!in_block_[block].empty()) pack(level, block, loads, ops);
            }
        }
        return *std::max_element(loads.begin(), loads.end());
    }

   private:
    void split(const Level& level, const std::vector<std::int64_t>& members, const std::vector<double>& loads) {
        const Cost& cost = scratch_.problem.cost;
        const std::size_t k = static_cast<std::size_t>(level.k);
        const double ranks = static_cast<double>(level.k);
        in_block_.assign(loads.size() / k, {});
        heap_.clear();
        heap_.reserve(in_block_.size());
        for (std::size_t block = 0; block < in_block_.size(); ++block) {
            heap_.push({loads[block * k], static_cast<std::int64_t>(block)});
        }
        for (const std::int64_t i : members) {
            const std::int64_t padded = level.padded(scratch_.lengths[static_cast<std::size_t>(i)]);
            padded_[static_cast<std::size_t>(i)] = padded;
            const auto [load, block] = heap_.top();
            in_block_[static_cast<std::size_t>(block)].push_back(i);
            const double added = (cost.a * static_cast<double>(padded) + cost.b * cost.squares(padded)) / ranks;
            heap_.replace_top({load + added, block});
        }
    }

    void pack(const Level& level, std::size_t block, std::vector<double>& loads, Ops& ops) {
        const auto& members = in_block_[block];
        const std::size_t first = block * static_cast<std::size_t>(level.k);
        const std::int64_t packs =
            best_fit_packs(members, padded_, level.token_cap, scratch_.problem.max_sequences, pack_of_);
        grouped_.assign(static_cast<std::size_t>(packs), {});
        for (std::size_t at = 0; at < members.size(); ++at) {
            grouped_[static_cast<std::size_t>(pack_of_[at])].push_back(members[at]);
        }
        double load = loads[first];
        for (const auto& group : grouped_) {
            std::int64_t tokens = 0;
            double squares = 0.0;
            for (const std::int64_t i : group) {
                const std::int64_t padded = padded_[static_cast<std::size_t>(i)];
                tokens += padded;
                squares += scratch_.problem.cost.squares(padded);
                ops.ids.push_back(scratch_.ids[static_cast<std::size_t>(i)]);
            }
            ops.add(static_cast<std::int64_t>(first), level.k);
            load += scratch_.seconds(tokens, squares, level);
        }
        std::fill_n(loads.begin() + static_cast<std::ptrdiff_t>(first), level.k, load);
    }

    const Scratch& scratch_;
    std::vector<std::vector<std::int64_t>> by_level_, in_block_, grouped_;
    std::vector<std::int64_t> padded_, pack_of_;
    Heap<double> heap_;
};

}  // namespace

Ops buddy(const Problem& problem, double lower_bound) {
    const Scratch scratch(problem);
    Buddy placer(scratch);
    std::vector<std::vector<std::uint8_t>> seen;
    Ops best;
    double best_seconds = kInfinity;
    int worse = 0;
    for (const double theta : kThetas) {
        std::vector<std::uint8_t> chosen(problem.count);
        for (std::size_t i = 0; i < problem.count; ++i) {
            chosen[i] = static_cast<std::uint8_t>(scratch.choose_level(i, theta * lower_bound));
        }
        if (std::find(seen.begin(), seen.end(), chosen) != seen.end()) continue;
        Ops ops;
        const double seconds = placer.place(chosen, ops);
        seen.push_back(std::move(chosen));
        if (seconds < best_seconds) {
            best_seconds = seconds;
            best = std::move(ops);
            worse = 0;
        } else {
            ++worse;
        }
        if (best_seconds <= lower_bound * kGoodEnough || worse >= kPatience) break;
    }
    return best;
}

}  // namespace tdp::schedule
