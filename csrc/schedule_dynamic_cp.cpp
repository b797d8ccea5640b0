// `default_dynamic_cp`: see tdp_megatron/schedule/dynamic_cp.py, which is the reference.
#include <algorithm>

#include "schedule_core.h"
#include "schedule_sort.h"

namespace tdp::schedule {
namespace {

struct Group {
    std::int64_t k, tokens = 0;
    double work = 0.0;
    std::vector<std::int64_t> members;
};

class DynamicCp {
   public:
    DynamicCp(const Problem& problem, std::int64_t unit, const Search* search, double at_most)
        : problem_(problem), search_(search), at_most_(at_most), lengths_(problem.count) {
        for (std::size_t i = 0; i < problem.count; ++i) {
            lengths_[i] = (problem.seqlens[i] + unit - 1) / unit * unit;
        }
        open_.resize(problem.cp_sizes.size());
        full_.resize(problem.cp_sizes.size());
    }

    // False where the step would be longer than it may be.
    bool run(Ops& ops) {
        std::vector<RadixOrder::Entry> order;
        for (std::size_t i = 0; i < problem_.count; ++i) {
            order.push_back({~static_cast<std::uint64_t>(lengths_[i]), static_cast<std::int64_t>(i)});
        }
        RadixOrder().sort(order);
        std::vector<std::int64_t> alive;
        for (const RadixOrder::Entry& entry : order) alive.push_back(entry.number);
        if (search_ != nullptr) longest_.assign(static_cast<std::size_t>(problem_.num_ranks), 0.0);
        while (!alive.empty()) {
            fill(alive);
            give_away();
            std::stable_sort(groups_.begin(), groups_.end(), [](const Group& x, const Group& y) { return x.k > y.k; });
            std::int64_t first = 0;
            for (const Group& group : groups_) {
                ops.ids.insert(ops.ids.end(), group.members.begin(), group.members.end());
                ops.add(first, group.k);
                if (search_ != nullptr) count_seconds(group, first);
                first += group.k;
            }
            if (search_ != nullptr && bound(alive) > at_most_ * (1.0 + 1e-9)) return false;
            wave_ = 0.0;
            for (; first < problem_.num_ranks; first += problem_.cp_sizes[0]) ops.add(first, problem_.cp_sizes[0]);
        }
        return true;
    }

   private:
    void count_seconds(const Group& group, std::int64_t first) {
        const Cost& cost = problem_.cost;
        std::int64_t tokens = 0;
        double squares = 0.0;
        for (const std::int64_t i : group.members) {
            const std::int64_t own = padded(length(i), group.k);
            tokens += own;
            squares += cost.squares(own);
        }
        const double seconds = op_seconds(problem_, tokens, squares, group.k);
        wave_ = std::max(wave_, seconds);
        busy_ += seconds * static_cast<double>(group.k);
        for (std::int64_t rank = first; rank < first + group.k; ++rank) {
            double& longest = longest_[static_cast<std::size_t>(rank)];
            sum_of_longest_ += std::max(seconds - longest, 0.0);
            longest = std::max(longest, seconds);
        }
    }

    // The step cannot be shorter: what has been placed, and all else spread evenly without padding.
    double bound(const std::vector<std::int64_t>& alive) {
        const Cost& cost = problem_.cost;
        double work = 0.0;
        for (const std::int64_t i : alive) {
            work += cost.a * static_cast<double>(length(i)) + cost.b * cost.squares(length(i));
        }
        const double ranks = static_cast<double>(problem_.num_ranks);
        waves_ += wave_;
        if (search_->lockstep) return waves_ + work / ranks;
        const double bubbles = search_->pipeline ? search_->stages_before * sum_of_longest_ : 0.0;
        return (busy_ + work + bubbles) / ranks;
    }

    std::int64_t length(std::int64_t i) const { return lengths_[static_cast<std::size_t>(i)]; }
    static std::int64_t padded(std::int64_t length, std::int64_t k) {
        const std::int64_t unit = k > 1 ? 2 * k : 1;
        return (length + unit - 1) / unit * unit;
    }

    void fill(std::vector<std::int64_t>& alive) {
        const std::int64_t limit = problem_.token_limit;
        std::int64_t free = problem_.num_ranks;
        double cap = kInfinity;
        groups_.clear();
        for (auto& heap : open_) heap.clear();
        for (auto& heap : full_) heap.clear();
        std::size_t left = 0;
        for (const std::int64_t i : alive) {
            const std::int64_t size = length(i);
            double best_work = cap;
            std::int64_t best_group = -1;
            std::size_t best_level = problem_.cp_sizes.size();
            const std::size_t none = best_level;
            for (std::size_t number = 0; number < problem_.cp_sizes.size(); ++number) {
                const std::int64_t k = problem_.cp_sizes[number];
                const std::int64_t tokens = padded(size, k);
                if (tokens > limit * k) continue;
                const double added = static_cast<double>(size) * static_cast<double>(size) / static_cast<double>(k);
                if (best_level == none && free >= k && added <= best_work) {
                    best_work = added;
                    best_group = -1;
                    best_level = number;
                }
                auto& open = open_[number];
                auto& full = full_[number];
                while (!full.empty() && -full.top().first >= tokens) {
                    const std::int64_t group = full.top().second;
                    full.pop();
                    open.push({groups_[static_cast<std::size_t>(group)].work, group});
                }
                while (!open.empty()) {
                    const std::int64_t group = open.top().second;
                    const std::int64_t held = groups_[static_cast<std::size_t>(group)].tokens;
                    if (held + tokens <= limit * k) break;
                    open.pop();
                    full.push({held - limit * k, group});
                }
                if (!open.empty() && open.top().first + added <= cap &&
                    (best_level == none || open.top().first + added < best_work)) {
                    best_work = open.top().first + added;
                    best_group = open.top().second;
                    best_level = number;
                }
            }
            if (best_level == none) {
                alive[left++] = i;
                continue;
            }
            const std::int64_t k = problem_.cp_sizes[best_level];
            if (best_group < 0) {
                best_group = static_cast<std::int64_t>(groups_.size());
                groups_.push_back(Group{k, 0, 0.0, {}});
                free -= k;
            } else {
                open_[best_level].pop();
            }
            Group& group = groups_[static_cast<std::size_t>(best_group)];
            group.tokens += padded(size, k);
            group.work = best_work;
            group.members.push_back(i);
            if (static_cast<std::int64_t>(group.members.size()) < problem_.max_sequences) {
                open_[best_level].push({group.work, best_group});
            }
            if (groups_.size() == 1 && group.members.size() == 1) cap = 1.05 * group.work;
        }
        alive.resize(left);
    }

    void give_away() {
        std::int64_t free = problem_.num_ranks;
        Heap<double> heap;
        for (std::size_t number = 0; number < groups_.size(); ++number) {
            free -= groups_[number].k;
            heap.push({-groups_[number].work, static_cast<std::int64_t>(number)});
        }
        while (free > 0 && !heap.empty()) {
            const std::int64_t number = heap.top().second;
            heap.pop();
            Group& group = groups_[static_cast<std::size_t>(number)];
            const std::int64_t doubled = 2 * group.k;
            const auto& sizes = problem_.cp_sizes;
            if (group.k > free || std::find(sizes.begin(), sizes.end(), doubled) == sizes.end()) continue;
            std::int64_t tokens = 0;
            for (const std::int64_t i : group.members) tokens += padded(length(i), doubled);
            if (tokens > problem_.token_limit * doubled) continue;
            free -= group.k;
            group.k = doubled;
            group.tokens = tokens;
            group.work = group.work / 2;
            heap.push({-group.work, number});
        }
    }

    const Problem& problem_;
    const Search* search_;
    double at_most_;
    double wave_ = 0.0, waves_ = 0.0, busy_ = 0.0, sum_of_longest_ = 0.0;
    std::vector<double> longest_;  // by rank
    std::vector<std::int64_t> lengths_;
    std::vector<Group> groups_;
    std::vector<Heap<double>> open_;
    std::vector<Heap<std::int64_t>> full_;
};

}  // namespace

Ops dynamic_cp(const Problem& problem, std::int64_t unit) {
    Ops ops;
    DynamicCp(problem, unit, nullptr, kInfinity).run(ops);
    return ops;
}

bool dynamic_cp_within(const Problem& problem, const Search& search, double seconds, Ops& ops) {
    return DynamicCp(problem, 1, &search, seconds).run(ops);
}

}  // namespace tdp::schedule
