// One tall wave: see tall_wave in tdp_megatron/schedule/wave_building.py.
#include <algorithm>

#include "schedule_waves.h"

namespace tdp::schedule {

TallWave tall_wave(const Scratch& scratch, const Numbers& alive, double seed_limit, Numbers& left) {
    const std::size_t levels = scratch.levels.size();
    const auto alone = [&](std::size_t level, std::int32_t i) {
        return scratch.alone(scratch.levels[level], static_cast<std::size_t>(i));
    };
    const auto length = [&](std::int32_t i) { return scratch.lengths[static_cast<std::size_t>(i)]; };
    const std::int32_t seed = alive[0];
    std::size_t tallest = levels;
    for (std::size_t number = 0; number < levels && tallest == levels; ++number) {
        if (alone(number, seed) <= seed_limit) tallest = number;
    }
    if (tallest == levels) {
        tallest = 0;
        for (std::size_t number = 1; number < levels; ++number) {
            if (alone(number, seed) < alone(tallest, seed)) tallest = number;
        }
    }
    const double limit = alone(tallest, seed) * (1.0 + 1e-4);
    TallWave wave;
    const auto take = [&](std::int32_t i, std::int32_t op) {
        wave.members.push_back(i);
        wave.op_of.push_back(op);
    };
    Rooms rooms(scratch, limit, wave.ops);
    take(seed, rooms.open(tallest, static_cast<std::size_t>(seed)));
    std::int64_t free = scratch.problem.num_ranks - scratch.levels[tallest].k;
    left.clear();
    std::size_t position = 1;
    while (position < alive.size()) {
        const std::int32_t i = alive[position];
        if (free > 0) {
            std::size_t level = levels;
            for (std::size_t number = 0; number < levels && scratch.levels[number].k <= free; ++number) {
                if (alone(number, i) <= limit) {
                    level = number;
                    break;
                }
            }
            if (level < levels) {
                take(i, rooms.open(level, static_cast<std::size_t>(i)));
                free -= scratch.levels[level].k;
                ++position;
                continue;
            }
        } else if (rooms.largest() < length(i)) {
            const std::int64_t room = rooms.largest();
            const auto following =
                std::partition_point(alive.begin() + static_cast<std::ptrdiff_t>(position), alive.end(),
                                     [&](std::int32_t other) { return length(other) > room; });
            left.insert(left.end(), alive.begin() + static_cast<std::ptrdiff_t>(position), following);
            position = static_cast<std::size_t>(following - alive.begin());
            continue;
        }
        const std::int32_t op = rooms.fill(static_cast<std::size_t>(i));
        if (op >= 0) {
            take(i, op);
        } else {
            left.push_back(i);
        }
        ++position;
    }
    for (const GrowingOp& op : wave.ops) wave.seconds = std::max(wave.seconds, op.seconds);
    return wave;
}

}  // namespace tdp::schedule
