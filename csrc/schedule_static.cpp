// Static CP: `lpt`, `best_fit` and the next-fit of `dp_balanced`; see the references of the same names in
// tdp_megatron/schedule.
#include <algorithm>

#include "schedule_core.h"
#include "schedule_sort.h"

namespace tdp::schedule {
namespace {

// Packs in order; their first rank is left 0, since the caller deals them out.
Ops packs_in_order(const std::vector<std::vector<std::int64_t>>& packs, std::int64_t cp_size) {
    Ops ops;
    for (const auto& pack : packs) {
        ops.ids.insert(ops.ids.end(), pack.begin(), pack.end());
        ops.add(0, cp_size);
    }
    return ops;
}

}  // namespace

StaticCp::StaticCp(const Problem& problem, std::int64_t cp_size)
    : problem_(problem), level_(problem.level(cp_size)), padded(problem.count), costs(problem.count) {
    const Cost& cost = problem.cost;
    const double k = static_cast<double>(cp_size);
    std::vector<RadixOrder::Entry> entries(problem.count);
    for (std::size_t i = 0; i < problem.count; ++i) {
        padded[i] = level_.padded(problem.seqlens[i]);
        costs[i] = cost.a * static_cast<double>(padded[i]) / k + cost.b * cost.squares(padded[i]) / k;
        entries[i] = {falling(costs[i]), static_cast<std::int64_t>(i)};
    }
    RadixOrder().sort(entries);
    order.reserve(problem.count);
    for (const RadixOrder::Entry& entry : entries) order.push_back(entry.number);
}

std::vector<std::vector<std::int64_t>> StaticCp::packs(std::vector<std::int64_t>& members) const {
    std::sort(members.begin(), members.end(), [&](std::int64_t x, std::int64_t y) {
        const std::int64_t px = padded[static_cast<std::size_t>(x)], py = padded[static_cast<std::size_t>(y)];
        return px != py ? px > py : x < y;
    });
    std::vector<std::int64_t> pack_of;
    const std::int64_t count = best_fit_packs(members, padded, level_.token_cap, problem_.max_sequences, pack_of);
    std::vector<std::vector<std::int64_t>> made(static_cast<std::size_t>(count));
    for (std::size_t at = 0; at < members.size(); ++at) {
        made[static_cast<std::size_t>(pack_of[at])].push_back(members[at]);
    }
    return made;
}

Ops StaticCp::pack(std::vector<std::vector<std::int64_t>> split) const {
    std::vector<std::vector<std::vector<std::int64_t>>> by_block;
    std::size_t most = 0;
    for (auto& members : split) {
        by_block.push_back(packs(members));
        most = std::max(most, by_block.back().size());
    }
    Ops ops;
    for (std::size_t microbatch = 0; microbatch < most; ++microbatch) {
        for (std::size_t block = 0; block < by_block.size(); ++block) {
            if (microbatch >= by_block[block].size()) continue;
            const auto& pack = by_block[block][microbatch];
            ops.ids.insert(ops.ids.end(), pack.begin(), pack.end());
            ops.add(static_cast<std::int64_t>(block) * level_.k, level_.k);
        }
    }
    return ops;
}

Ops lpt(const Problem& problem, std::int64_t cp_size) {
    const StaticCp sequences(problem, cp_size);
    const std::size_t blocks = static_cast<std::size_t>(problem.num_ranks / cp_size);
    std::vector<std::vector<std::int64_t>> split(blocks);
    Heap<double> heap;
    for (std::size_t block = 0; block < blocks; ++block) heap.push({0.0, static_cast<std::int64_t>(block)});
    for (const std::int64_t i : sequences.order) {
        const auto [load, block] = heap.top();
        split[static_cast<std::size_t>(block)].push_back(i);
        heap.replace_top({load + sequences.costs[static_cast<std::size_t>(i)], block});
    }
    return sequences.pack(std::move(split));
}

Ops best_fit(const Problem& problem, std::int64_t cp_size) {
    std::vector<std::int64_t> members(problem.count);
    for (std::size_t i = 0; i < problem.count; ++i) members[i] = static_cast<std::int64_t>(i);
    return packs_in_order(StaticCp(problem, cp_size).packs(members), cp_size);
}

Ops next_fit(const Problem& problem, std::int64_t cp_size) {
    const Level level = problem.level(cp_size);
    std::vector<std::vector<std::int64_t>> packs;
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i < problem.count; ++i) {
        const std::int64_t padded = level.padded(problem.seqlens[i]);
        const bool full = !packs.empty() && (tokens + padded > level.token_cap ||
                                             static_cast<std::int64_t>(packs.back().size()) == problem.max_sequences);
        if (packs.empty() || full) {
            packs.emplace_back();
            tokens = 0;
        }
        packs.back().push_back(static_cast<std::int64_t>(i));
        tokens += padded;
    }
    return packs_in_order(packs, cp_size);
}

}  // namespace tdp::schedule
