// Waves that all take about the same time: see even_waves in tdp_megatron/schedule/wave_building.py.
#include <algorithm>
#include <numeric>

#include "schedule_halving.h"
#include "schedule_waves.h"

namespace tdp::schedule {
namespace {

constexpr int kHalvings = 32;

}  // namespace

void Alive::sum_up(const Scratch& scratch) {
    if (!sums_.empty()) return;
    sums_.resize(numbers.size() / kEach + 1);
    tokens = 0;
    double work = 0.0;
    for (std::size_t at = numbers.size(); at-- > 0;) {
        const auto i = static_cast<std::size_t>(numbers[at]);
        work += scratch.works[i];
        tokens += scratch.lengths[i];
        if (at % kEach == 0) sums_[at / kEach] = work;
    }
}

double Alive::work_from(const Scratch& scratch, std::size_t at) const {
    const std::size_t known = (at + kEach - 1) / kEach;
    const bool end = known * kEach >= numbers.size();
    double work = end ? 0.0 : sums_[known];
    for (std::size_t to = end ? numbers.size() : known * kEach; to-- > at;) {
        work += scratch.works[static_cast<std::size_t>(numbers[to])];
    }
    return work;
}

bool EvenWaveBuilder::start(const Alive& alive, std::int64_t count, double limit, EvenWaves& made) {
    const Level& smallest = scratch_.levels[0];
    const auto first_narrow =
        std::partition_point(alive.numbers.begin(), alive.numbers.end(), [&](std::int32_t i) {
            return !(scratch_.alone(smallest, static_cast<std::size_t>(i)) <= limit);
        });
    chosen_.clear();
    rest_.clear();
    for (auto at = alive.numbers.begin(); at != first_narrow; ++at) {
        const std::size_t level = alone_.choose_level(static_cast<std::size_t>(*at), limit);
        chosen_.push_back(static_cast<std::uint8_t>(level));
        if (level == 0) rest_.push_back(*at);
    }
    double work = alive.work_from(scratch_, chosen_.size());
    for (std::size_t at = rest_.size(); at-- > 0;) work += scratch_.works[static_cast<std::size_t>(rest_[at])];
    rest_.insert(rest_.end(), first_narrow, alive.numbers.end());

    made.ops.clear();
    made.op_of.resize(scratch_.lengths.size());
    wide_ops(scratch_, alive.numbers, chosen_, limit, made.ops, made.op_of);
    const std::size_t wide = made.ops.size();
    if (!deal_wide(alive, count, made)) return false;

    const double level_time = water_level(made.ops, work);
    fresh_.clear();
    for (std::size_t op = 0; op < wide; ++op) {
        GrowingOp& own = made.ops[op];
        own.target = std::max(time_[static_cast<std::size_t>(wave_of_[op])], level_time);
        fresh_.push_back({own.seconds - own.target, static_cast<std::int32_t>(op), 1});
    }
    GrowingOp empty;
    empty.seconds = scratch_.problem.cost.c0;
    for (std::size_t wave = 0; wave < free_.size(); ++wave) {
        const std::int64_t slots = free_[wave] / smallest.k;
        if (slots == 0) continue;
        empty.target = std::max(time_[wave], level_time);
        const auto first = static_cast<std::int32_t>(made.ops.size());
        fresh_.push_back({empty.seconds - empty.target, first, static_cast<std::int32_t>(slots)});
        made.ops.insert(made.ops.end(), static_cast<std::size_t>(slots), empty);
    }
    seconds_ = 0.0;
    for (const double seconds : time_) seconds_ += std::max(seconds, level_time);
    return true;
}

bool EvenWaveBuilder::fill(EvenWaves& made) {
    if (!lowest_.run(scratch_, rest_.data(), rest_.size(), fresh_, made.ops, made.op_of)) return false;
    deal(made);
    return true;
}

// Sorts the wide ops by falling time and gives each the first wave with ranks left.
bool EvenWaveBuilder::deal_wide(const Alive& alive, std::int64_t count, EvenWaves& made) {
    const std::size_t wide = made.ops.size();
    const auto waves = static_cast<std::size_t>(count);
    std::vector<RadixOrder::Entry> order(wide);
    for (std::size_t op = 0; op < wide; ++op) {
        order[op] = {falling(made.ops[op].seconds), static_cast<std::int64_t>(op)};
    }
    radix_.sort(order);
    sorted_.clear();
    Numbers place(wide);
    for (std::size_t at = 0; at < wide; ++at) {
        sorted_.push_back(made.ops[static_cast<std::size_t>(order[at].number)]);
        place[static_cast<std::size_t>(order[at].number)] = static_cast<std::int32_t>(at);
    }
    made.ops.swap(sorted_);
    free_.assign(waves, scratch_.problem.num_ranks);
    time_.assign(waves, 0.0);
    wave_of_.clear();
    used_ = 0;
    std::size_t first_open = 0;
    for (const GrowingOp& op : made.ops) {
        const std::int64_t k = scratch_.levels[static_cast<std::size_t>(op.level)].k;
        while (first_open < waves && free_[first_open] == 0) ++first_open;
        std::size_t wave = first_open;
        while (wave < waves && free_[wave] < k) ++wave;
        if (wave >= waves) return false;
        free_[wave] -= k;
        time_[wave] = std::max(time_[wave], op.seconds);
        wave_of_.push_back(static_cast<std::int32_t>(wave));
        used_ = std::max(used_, wave + 1);
    }
    for (std::size_t at = 0; at < chosen_.size(); ++at) {
        if (chosen_[at] == 0) continue;
        std::int32_t& op = made.op_of[static_cast<std::size_t>(alive.numbers[at])];
        op = place[static_cast<std::size_t>(op)];
    }
    return true;
}

double EvenWaveBuilder::water_level(const GrowingOps& wide, double work) const {
    const double c0 = scratch_.problem.cost.c0;
    const double empty =
        static_cast<double>(static_cast<std::int64_t>(free_.size() - used_) * scratch_.problem.num_ranks);
    const auto used = time_.begin() + static_cast<std::ptrdiff_t>(used_);
    const double high = (used_ == 0 ? 0.0 : *std::max_element(time_.begin(), used)) + work + c0 + 1.0;
    return halve(0.0, high, work, kHalvings, [&](double middle) {
        double room = std::max(middle - c0, 0.0) * empty;
        for (std::size_t op = 0; op < wide.size(); ++op) {
            const double top = std::max(time_[static_cast<std::size_t>(wave_of_[op])], middle);
            const std::int64_t k = scratch_.levels[static_cast<std::size_t>(wide[op].level)].k;
            room += std::max(top - wide[op].seconds, 0.0) * static_cast<double>(k);
        }
        for (std::size_t wave = 0; wave < used_; ++wave) {
            room += std::max(std::max(time_[wave], middle) - c0, 0.0) * static_cast<double>(free_[wave]);
        }
        return room;
    });
}

// The reference goes through all that is left for every wave. What it skips stays too large for the rest of the wave,
// so the next op is the first one of any size that fits, and a queue for each size finds it at once.
void EvenWaveBuilder::deal(EvenWaves& made) {
    const std::size_t levels = scratch_.levels.size();
    queues_.resize(levels);
    for (auto& queue : queues_) queue.clear();
    for (std::size_t op = 0; op < made.ops.size(); ++op) {
        const auto level = static_cast<std::size_t>(made.ops[op].level);
        queues_[level].push_back({falling(made.ops[op].seconds), static_cast<std::int64_t>(op)});
    }
    for (auto& queue : queues_) radix_.sort(queue);
    std::vector<std::size_t> heads(levels, 0), open;
    for (std::size_t level = 0; level < levels; ++level) {
        if (!queues_[level].empty()) open.push_back(level);
    }
    made.order.clear();
    made.offsets.assign(1, 0);
    while (made.order.size() < made.ops.size()) {
        std::int64_t free = scratch_.problem.num_ranks;
        for (;;) {
            const RadixOrder::Entry* first = nullptr;
            std::size_t from = 0;
            for (const std::size_t level : open) {
                if (scratch_.levels[level].k > free) break;
                if (heads[level] == queues_[level].size()) continue;
                const RadixOrder::Entry& head = queues_[level][heads[level]];
                if (first == nullptr || head.key < first->key ||
                    (head.key == first->key && head.number < first->number)) {
                    first = &head;
                    from = level;
                }
            }
            if (first == nullptr) break;
            made.order.push_back(static_cast<std::int32_t>(first->number));
            free -= scratch_.levels[from].k;
            if (++heads[from] == queues_[from].size()) open.erase(std::find(open.begin(), open.end(), from));
        }
        made.offsets.push_back(static_cast<std::int32_t>(made.order.size()));
    }
}

}  // namespace tdp::schedule
