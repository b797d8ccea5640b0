// `lpt` and the next-fit of `dp_balanced`: see the references of the same names in tdp_megatron/schedule.
#include <algorithm>

#include "schedule_core.h"
#include "schedule_sort.h"

namespace tdp::schedule {

Ops lpt(const Problem& problem, std::int64_t cp_size) {
    const Cost& cost = problem.cost;
    const std::size_t n = problem.count;
    const std::int64_t pad = cp_size > 1 ? 2 * cp_size : 1;
    const Level level{cp_size, pad, problem.token_limit * cp_size / pad * pad};
    const double k = static_cast<double>(cp_size);
    std::vector<std::int64_t> padded(n);
    std::vector<RadixOrder::Entry> order(n);
    std::vector<double> costs(n);
    for (std::size_t i = 0; i < n; ++i) {
        padded[i] = level.padded(problem.seqlens[i]);
        costs[i] = cost.a * static_cast<double>(padded[i]) / k + cost.b * cost.squares(padded[i]) / k;
    }
    for (std::size_t i = 0; i < n; ++i) order[i] = {falling(costs[i]), static_cast<std::int64_t>(i)};
    RadixOrder().sort(order);
    const std::size_t blocks = static_cast<std::size_t>(problem.num_ranks / cp_size);
    std::vector<std::vector<std::int64_t>> split(blocks);
    Heap<double> heap;
    for (std::size_t block = 0; block < blocks; ++block) heap.push({0.0, static_cast<std::int64_t>(block)});
    for (const RadixOrder::Entry& entry : order) {
        const std::int64_t i = entry.number;
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

}  // namespace tdp::schedule
