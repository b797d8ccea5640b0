// Waves onto ranks: see place in tdp_megatron/schedule/wave_building.py.
#include <algorithm>

#include "schedule_waves.h"

namespace tdp::schedule {

Placement::Placement(const Scratch& scratch)
    : scratch_(scratch),
      loads_(static_cast<std::size_t>(scratch.problem.num_ranks), 0.0),
      taken_(static_cast<std::size_t>(scratch.problem.num_ranks)) {}

void Placement::add(const GrowingOps& ops, const std::int32_t* wave, std::size_t count, std::int64_t first_number) {
    const auto ranks = static_cast<std::size_t>(scratch_.problem.num_ranks);
    std::fill(taken_.begin(), taken_.end(), std::uint8_t{0});
    for (std::size_t level = scratch_.levels.size(); level-- > 0;) {
        const auto k = static_cast<std::size_t>(scratch_.levels[level].k);
        sorted_.clear();
        for (std::size_t at = 0; at < count; ++at) {
            const GrowingOp& op = ops[static_cast<std::size_t>(wave[at])];
            if (static_cast<std::size_t>(op.level) == level) {
                sorted_.push_back({falling(op.seconds), wave[at]});
            }
        }
        if (sorted_.empty()) continue;
        radix_.sort(sorted_);
        blocks_.clear();
        for (std::size_t first = 0; first < ranks; first += k) {
            if (taken_[first]) continue;
            const auto begin = loads_.begin() + static_cast<std::ptrdiff_t>(first);
            const double load = *std::max_element(begin, begin + static_cast<std::ptrdiff_t>(k));
            blocks_.push_back({~falling(load), static_cast<std::int64_t>(first)});
        }
        radix_.sort(blocks_);
        for (std::size_t at = 0; at < sorted_.size() && at < blocks_.size(); ++at) {
            const auto first = static_cast<std::size_t>(blocks_[at].number);
            const std::int64_t op = sorted_[at].number;
            first_rank.push_back(blocks_[at].number);
            cp_size.push_back(static_cast<std::int64_t>(k));
            number.push_back(first_number + op);
            for (std::size_t rank = first; rank < first + k; ++rank) {
                taken_[rank] = 1;
                loads_[rank] += ops[static_cast<std::size_t>(op)].seconds;
            }
        }
    }
    const auto smallest = static_cast<std::size_t>(scratch_.levels[0].k);
    for (std::size_t first = 0; first < ranks; first += smallest) {
        if (taken_[first]) continue;
        first_rank.push_back(static_cast<std::int64_t>(first));
        cp_size.push_back(static_cast<std::int64_t>(smallest));
        number.push_back(-1);
    }
}

double Placement::longest_load() const { return *std::max_element(loads_.begin(), loads_.end()); }

}  // namespace tdp::schedule
