// `lpt`, `dp_balanced`'s next-fit and `default_dynamic_cp`: see the references of the same names in tdp_megatron/schedule.
#include <algorithm>
#include <numeric>

#include "schedule_core.h"

namespace tdp::schedule {

Ops lpt(const Problem& problem, std::int64_t cp_size) {
    const Cost& cost = problem.cost;
    const std::size_t n = problem.count;
    const std::int64_t pad = cp_size > 1 ? 2 * cp_size : 1;
    const Level level{cp_size, pad, problem.token_limit * cp_size / pad * pad};
    const double k = static_cast<double>(cp_size);
    std::vector<std::int64_t> padded(n), order(n);
    std::vector<double> costs(n);
    for (std::size_t i = 0; i < n; ++i) {
        padded[i] = level.padded(problem.seqlens[i]);
        costs[i] = cost.a * static_cast<double>(padded[i]) / k + cost.b * cost.squares(padded[i]) / k;
    }
    std::iota(order.begin(), order.end(), std::int64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t x, std::int64_t y) {
        return costs[static_cast<std::size_t>(x)] > costs[static_cast<std::size_t>(y)];
    });
    const std::size_t blocks = static_cast<std::size_t>(problem.num_ranks / cp_size);
    std::vector<std::vector<std::int64_t>> split(blocks);
    Heap<double> heap;
    for (std::size_t block = 0; block < blocks; ++block) heap.push({0.0, static_cast<std::int64_t>(block)});
    for (const std::int64_t i : order) {
        const auto [load, block] = heap.top();
        split[static_cast<std::size_t>(block)].push_back(i);
        heap.replace_top({load + costs[static_cast<std::size_t>(i)], block});
    }
    std::vector<std::vector<std::vector<std::int64_t>>> packs(blocks);
    std::vector<std::int64_t> pack_of;
    std::size_t most = 0;
    for (std::size_t block = 0; block < blocks; ++block) {
        auto& members = split[block];
        std::sort(members.begin(), members.end(), [&](std::int64_t x, std::int64_t y) {
            const std::int64_t px = padded[static_cast<std::size_t>(x)], py = padded[static_cast<std::size_t>(y)];
            return px != py ? px > py : x < y;
        });
        const std::int64_t count = best_fit(members, padded, level.token_cap, problem.max_sequences, pack_of);
        packs[block].resize(static_cast<std::size_t>(count));
        for (std::size_t at = 0; at < members.size(); ++at) {
            packs[block][static_cast<std::size_t>(pack_of[at])].push_back(members[at]);
        }
        most = std::max(most, packs[block].size());
    }
    Ops ops;
    for (std::size_t microbatch = 0; microbatch < most; ++microbatch) {
        for (std::size_t block = 0; block < blocks; ++block) {
            if (microbatch >= packs[block].size()) continue;
            const auto& pack = packs[block][microbatch];
            ops.ids.insert(ops.ids.end(), pack.begin(), pack.end());
            ops.add(static_cast<std::int64_t>(block) * cp_size, cp_size);
        }
    }
    return ops;
}

// Packs in order; their first rank is left 0, since the caller deals them out.
Ops next_fit(const Problem& problem, std::int64_t cp_size) {
    const std::int64_t pad = cp_size > 1 ? 2 * cp_size : 1;
    const Level level{cp_size, pad, problem.token_limit * cp_size / pad * pad};
    Ops ops;
    std::int64_t tokens = 0, members = 0;
    for (std::size_t i = 0; i < problem.count; ++i) {
        const std::int64_t padded = level.padded(problem.seqlens[i]);
        if (members > 0 && (tokens + padded > level.token_cap || members == problem.max_sequences)) {
            ops.add(0, cp_size);
            tokens = members = 0;
        }
        ops.ids.push_back(static_cast<std::int64_t>(i));
        tokens += padded;
        ++members;
    }
    if (members > 0) ops.add(0, cp_size);
    return ops;
}

namespace {

struct Group {
    std::int64_t k, tokens = 0;
    double work = 0.0;
    std::vector<std::int64_t> members;
};

class DynamicCp {
   public:
    DynamicCp(const Problem& problem, std::int64_t unit) : problem_(problem), lengths_(problem.count) {
        for (std::size_t i = 0; i < problem.count; ++i) {
            lengths_[i] = (problem.seqlens[i] + unit - 1) / unit * unit;
        }
        open_.resize(problem.cp_sizes.size());
        full_.resize(problem.cp_sizes.size());
    }

    Ops run() {
        std::vector<std::int64_t> alive(problem_.count);
        std::iota(alive.begin(), alive.end(), std::int64_t{0});
        std::stable_sort(alive.begin(), alive.end(), [&](std::int64_t x, std::int64_t y) {
            return length(x) > length(y);
        });
        Ops ops;
        while (!alive.empty()) {
            fill(alive);
            give_away();
            std::stable_sort(groups_.begin(), groups_.end(), [](const Group& x, const Group& y) { return x.k > y.k; });
            std::int64_t first = 0;
            for (const Group& group : groups_) {
                ops.ids.insert(ops.ids.end(), group.members.begin(), group.members.end());
                ops.add(first, group.k);
                first += group.k;
            }
            for (; first < problem_.num_ranks; first += problem_.cp_sizes[0]) ops.add(first, problem_.cp_sizes[0]);
        }
        return ops;
    }

   private:
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
    std::vector<std::int64_t> lengths_;
    std::vector<Group> groups_;
    std::vector<Heap<double>> open_;
    std::vector<Heap<std::int64_t>> full_;
};

}  // namespace

Ops dynamic_cp(const Problem& problem, std::int64_t unit) { return DynamicCp(problem, unit).run(); }

}  // namespace tdp::schedule
