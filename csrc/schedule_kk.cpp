// `kk`: see the reference in tdp_megatron/schedule/lpt.py.
#include <algorithm>

#include "schedule_core.h"

namespace tdp::schedule {
namespace {

// Sequences in a chain, so that two sets are joined at once.
struct Set {
    double sum;
    std::int64_t first, last;
};
using Split = std::vector<Set>;  // by falling sum; sets that are still empty are not stored

bool falls(const Set& x, const Set& y) { return x.sum > y.sum; }

class Differencing {
   public:
    Differencing(const std::vector<double>& costs, std::size_t blocks)
        : blocks_(blocks), next_(costs.size(), -1), nodes_(costs.size()) {
        for (std::size_t i = 0; i < costs.size(); ++i) {
            const auto number = static_cast<std::int64_t>(i);
            nodes_[i] = {Set{costs[i], number, number}};
        }
    }

    // The sequences of every block. `order`: by falling cost.
    std::vector<std::vector<std::int64_t>> run(const std::vector<std::int64_t>& order, const std::vector<double>& costs) {
        std::vector<std::vector<std::int64_t>> split(blocks_);
        Heap<double> heap;
        // Nodes are told apart by age; the first ones are single sequences by falling cost.
        std::vector<std::int64_t> node_of(order);
        heap.reserve(order.size());
        for (std::size_t number = 0; number < order.size(); ++number) {
            heap.push({-costs[static_cast<std::size_t>(order[number])], static_cast<std::int64_t>(number)});
        }
        for (std::size_t left = order.size(); left > 1; --left) {
            const auto one = static_cast<std::size_t>(node_of[static_cast<std::size_t>(heap.top().second)]);
            heap.pop();
            const auto other = static_cast<std::size_t>(node_of[static_cast<std::size_t>(heap.top().second)]);
            join(nodes_[one], nodes_[other]);
            nodes_[other] = Split();
            const Split& joined = nodes_[one];
            const double least = joined.size() == blocks_ ? joined.back().sum : 0.0;
            heap.replace_top({-(joined.front().sum - least), static_cast<std::int64_t>(node_of.size())});
            node_of.push_back(static_cast<std::int64_t>(one));
        }
        if (heap.empty()) return split;
        const Split& last = nodes_[static_cast<std::size_t>(node_of[static_cast<std::size_t>(heap.top().second)])];
        for (std::size_t block = 0; block < last.size(); ++block) {
            for (std::int64_t i = last[block].first; i >= 0; i = next_[static_cast<std::size_t>(i)]) {
                split[block].push_back(i);
            }
        }
        return split;
    }

   private:
    // Largest sums with smallest; the result takes the place of `one`.
    void join(Split& one, const Split& other) {
        const std::size_t stored = one.size() + other.size();
        const std::size_t overlap = stored > blocks_ ? stored - blocks_ : 0;
        const std::size_t keep = one.size() - overlap, alone = other.size() - overlap;
        for (std::size_t at = 0; at < overlap; ++at) {
            Set& set = one[keep + at];
            const Set& partner = other[other.size() - 1 - at];
            set.sum += partner.sum;
            next_[static_cast<std::size_t>(set.last)] = partner.first;
            set.last = partner.last;
        }
        // Three runs, of which the first and the last fall already.
        const auto paired = one.begin() + static_cast<std::ptrdiff_t>(keep);
        std::stable_sort(paired, one.end(), falls);
        std::inplace_merge(one.begin(), paired, one.end(), falls);
        merged_.clear();
        std::merge(one.begin(), one.end(), other.begin(), other.begin() + static_cast<std::ptrdiff_t>(alone),
                   std::back_inserter(merged_), falls);
        one.swap(merged_);
        if (one.size() < blocks_) return;
        // Only differences matter; small numbers keep them exact.
        const double least = one.back().sum;
        for (Set& set : one) set.sum -= least;
    }

    std::size_t blocks_;
    std::vector<std::int64_t> next_;
    std::vector<Split> nodes_;
    Split merged_;
};

}  // namespace

Ops kk(const Problem& problem, std::int64_t cp_size) {
    const StaticCp sequences(problem, cp_size);
    Differencing differencing(sequences.costs, static_cast<std::size_t>(problem.num_ranks / cp_size));
    return sequences.pack(differencing.run(sequences.order, sequences.costs));
}

}  // namespace tdp::schedule
