// One wave of `stream`: see stream_wave_reference in tdp_megatron/schedule/stream.py.
#include <algorithm>
#include <numeric>

#include "schedule_waves.h"

namespace tdp::schedule {
namespace {

constexpr std::size_t kSeeds = 8, kLimits = 3;
constexpr double kUsefulEnough = 0.97;

// Members of each op in order: those of op j are members[offsets[j]] to members[offsets[j + 1]].
struct ByOp {
    Numbers offsets, members;

    explicit ByOp(const TallWave& wave) : offsets(wave.ops.size() + 1, 0), members(wave.members.size()) {
        for (const std::int32_t op : wave.op_of) ++offsets[static_cast<std::size_t>(op) + 1];
        std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
        Numbers next(offsets.begin(), offsets.end() - 1);
        for (std::size_t at = 0; at < wave.members.size(); ++at) {
            members[static_cast<std::size_t>(next[static_cast<std::size_t>(wave.op_of[at])]++)] = wave.members[at];
        }
    }
};

// Work of the sequences alone over what the wave costs on all ranks.
double useful_share(const Scratch& scratch, const TallWave& wave) {
    if (!(wave.seconds > 0.0)) return 1.0;
    const Cost& cost = scratch.problem.cost;
    const ByOp by_op(wave);
    double work = 0.0;
    for (std::size_t op = 0; op < wave.ops.size(); ++op) {
        const Level& level = scratch.levels[static_cast<std::size_t>(wave.ops[op].level)];
        for (std::int32_t at = by_op.offsets[op]; at < by_op.offsets[op + 1]; ++at) {
            const std::int64_t length =
                scratch.lengths[static_cast<std::size_t>(by_op.members[static_cast<std::size_t>(at)])];
            work += cost.a * static_cast<double>(length) + cost.b * cost.squares(level.padded(length));
        }
    }
    return work / (wave.seconds * static_cast<double>(scratch.problem.num_ranks));
}

}  // namespace

Ops stream_wave(const Problem& problem, std::int64_t leader) {
    const Scratch scratch(problem);
    const std::size_t count = problem.count;
    std::vector<std::size_t> seeds;
    if (leader >= 0) {
        const auto at = std::find(scratch.ids.begin(), scratch.ids.end(), leader);
        seeds.push_back(static_cast<std::size_t>(at - scratch.ids.begin()));
    } else {
        for (std::size_t step = 0; step < kSeeds; ++step) seeds.push_back(count * step / (2 * kSeeds));
        seeds.erase(std::unique(seeds.begin(), seeds.end()), seeds.end());
    }
    TallWave best;
    double best_useful = -1.0;
    Numbers alive, left;
    for (const std::size_t seed : seeds) {
        alive.resize(count - seed);
        std::iota(alive.begin(), alive.end(), static_cast<std::int32_t>(seed));
        std::size_t limits = 0;
        for (const Level& level : scratch.levels) {
            const double limit = scratch.alone(level, seed);
            if (!(limit < kInfinity)) continue;
            TallWave wave = tall_wave(scratch, alive, limit, left);
            const double useful = useful_share(scratch, wave);
            if (useful > best_useful) {
                best = std::move(wave);
                best_useful = useful;
            }
            if (++limits == kLimits) break;
        }
        if (best_useful >= kUsefulEnough) break;
    }
    const ByOp by_op(best);
    Numbers all(best.ops.size());
    std::iota(all.begin(), all.end(), 0);
    Placement placement(scratch);
    placement.add(best.ops, all.data(), all.size(), 0);
    Ops ops;
    for (std::size_t at = 0; at < placement.number.size(); ++at) {
        if (placement.number[at] >= 0) {
            const auto op = static_cast<std::size_t>(placement.number[at]);
            for (std::int32_t member = by_op.offsets[op]; member < by_op.offsets[op + 1]; ++member) {
                const auto i = static_cast<std::size_t>(by_op.members[static_cast<std::size_t>(member)]);
                ops.ids.push_back(scratch.ids[i]);
            }
        }
        ops.add(placement.first_rank[at], placement.cp_size[at]);
    }
    return ops;
}

}  // namespace tdp::schedule
