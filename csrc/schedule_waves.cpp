// `waves`: see tdp_megatron/schedule/waves.py and wave_building.py, which are the reference.
#include <algorithm>
#include <memory>
#include <numeric>
#include <set>
#include <tuple>

#include "schedule_core.h"

namespace tdp::schedule {
namespace {

using Numbers = std::vector<std::int64_t>;

struct GrowingOp {
    std::size_t level;
    std::int64_t tokens = 0;
    double squares = 0.0, seconds = 0.0;
    Numbers members;
};

using Wave = std::vector<GrowingOp>;

double longest(const Wave& wave) {
    double most = -kInfinity;
    for (const GrowingOp& op : wave) most = std::max(most, op.seconds);
    return most;
}

class Builder {
   public:
    explicit Builder(const Scratch& scratch) : scratch_(scratch) {}

    Wave tall_wave(const Numbers& alive, double seed_limit, Numbers& left) const;
    bool even_waves(const Numbers& alive, std::int64_t count, double limit, std::vector<Wave>& made) const;
    Ops place(const std::vector<const Wave*>& dealt, std::vector<double>& loads) const;

   private:
    std::int64_t length(std::int64_t i) const { return scratch_.lengths[static_cast<std::size_t>(i)]; }
    double alone(std::size_t level, std::int64_t i) const {
        return scratch_.alone(scratch_.levels[level], static_cast<std::size_t>(i));
    }
    void add(GrowingOp& op, std::int64_t i) const {
        const Level& level = scratch_.levels[op.level];
        const std::int64_t padded = level.padded(length(i));
        op.tokens += padded;
        op.squares += scratch_.problem.cost.squares(padded);
        op.members.push_back(i);
        op.seconds = scratch_.seconds(op.tokens, op.squares, level.k);
    }
    // Ops by the longest sequence that each can still take under a time limit.
    struct Rooms {
        const Builder& builder;
        double limit;
        RoomList list;

        void open(Wave& ops, std::size_t level, std::int64_t i) {
            ops.push_back(GrowingOp{level, 0, 0.0, 0.0, {}});
            put(ops, static_cast<std::int64_t>(ops.size()) - 1, i);
        }
        bool fill(Wave& ops, std::int64_t i) {
            const std::int64_t number = list.take(builder.length(i));
            if (number < 0) return false;
            put(ops, number, i);
            return true;
        }
        void put(Wave& ops, std::int64_t number, std::int64_t i) {
            GrowingOp& op = ops[static_cast<std::size_t>(number)];
            builder.add(op, i);
            if (static_cast<std::int64_t>(op.members.size()) >= builder.scratch_.problem.max_sequences) return;
            const Level& level = builder.scratch_.levels[op.level];
            const std::int64_t room = builder.scratch_.room(level, op.tokens, op.squares, limit);
            if (room >= 0) list.insert({room, number});
        }
    };
    double water_level(const Wave& ops, const std::vector<std::size_t>& wave_of, const std::vector<double>& time,
                       double work) const;
    bool longest_to_lowest(const Numbers& rest, Wave& ops, const std::vector<double>& targets) const;
    void deal(Wave& ops, std::vector<Wave>& dealt) const;

    const Scratch& scratch_;
};

Wave Builder::tall_wave(const Numbers& alive, double seed_limit, Numbers& left) const {
    const std::size_t levels = scratch_.levels.size();
    const std::int64_t seed = alive[0];
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
    Wave wave;
    Rooms rooms{*this, limit, {}};
    rooms.open(wave, tallest, seed);
    std::int64_t free = scratch_.problem.num_ranks - scratch_.levels[tallest].k;
    left.clear();
    std::size_t position = 1;
    while (position < alive.size()) {
        const std::int64_t i = alive[position];
        if (free > 0) {
            std::size_t level = levels;
            for (std::size_t number = 0; number < levels && scratch_.levels[number].k <= free; ++number) {
                if (alone(number, i) <= limit) {
                    level = number;
                    break;
                }
            }
            if (level < levels) {
                rooms.open(wave, level, i);
                free -= scratch_.levels[level].k;
                ++position;
                continue;
            }
        } else if (rooms.list.largest() < length(i)) {
            const std::int64_t room = rooms.list.largest();
            const auto following =
                std::partition_point(alive.begin() + static_cast<std::ptrdiff_t>(position), alive.end(),
                                     [&](std::int64_t other) { return length(other) > room; });
            left.insert(left.end(), alive.begin() + static_cast<std::ptrdiff_t>(position), following);
            position = static_cast<std::size_t>(following - alive.begin());
            continue;
        }
        if (!rooms.fill(wave, i)) left.push_back(i);
        ++position;
    }
    return wave;
}

bool Builder::even_waves(const Numbers& alive, std::int64_t count, double limit, std::vector<Wave>& made) const {
    const std::size_t levels = scratch_.levels.size();
    const Level& smallest = scratch_.levels[0];
    std::vector<Numbers> chosen(levels);
    for (const std::int64_t i : alive) chosen[scratch_.choose_level(static_cast<std::size_t>(i), limit)].push_back(i);
    Wave wide;
    for (std::size_t number = levels; number-- > 1;) {
        Wave at_level;
        Rooms rooms{*this, limit, {}};
        for (const std::int64_t i : chosen[number]) {
            if (!rooms.fill(at_level, i)) rooms.open(at_level, number, i);
        }
        std::move(at_level.begin(), at_level.end(), std::back_inserter(wide));
    }
    std::stable_sort(wide.begin(), wide.end(),
                     [](const GrowingOp& x, const GrowingOp& y) { return x.seconds > y.seconds; });
    const std::size_t waves = static_cast<std::size_t>(count);
    std::vector<std::int64_t> free(waves, scratch_.problem.num_ranks);
    std::vector<double> time(waves, 0.0);
    std::vector<std::size_t> wave_of;
    std::size_t first_open = 0;
    for (const GrowingOp& op : wide) {
        const std::int64_t k = scratch_.levels[op.level].k;
        while (first_open < waves && free[first_open] == 0) ++first_open;
        std::size_t wave = first_open;
        while (wave < waves && free[wave] < k) ++wave;
        if (wave >= waves) return false;
        free[wave] -= k;
        time[wave] = std::max(time[wave], op.seconds);
        wave_of.push_back(wave);
    }
    Wave ops = std::move(wide);
    for (std::size_t wave = 0; wave < waves; ++wave) {
        for (std::int64_t slot = 0; slot < free[wave] / smallest.k; ++slot) {
            ops.push_back(GrowingOp{0, 0, 0.0, scratch_.problem.cost.c0, {}});
            wave_of.push_back(wave);
        }
    }
    const Numbers& rest = chosen[0];
    const Cost& cost = scratch_.problem.cost;
    double work = 0.0;
    for (const std::int64_t i : rest) {
        const std::int64_t padded = smallest.padded(length(i));
        work += cost.a * static_cast<double>(padded) + cost.b * cost.squares(padded);
    }
    const double level_time = water_level(ops, wave_of, time, work);
    std::vector<double> targets(ops.size());
    for (std::size_t op = 0; op < ops.size(); ++op) targets[op] = std::max(time[wave_of[op]], level_time);
    if (!longest_to_lowest(rest, ops, targets)) return false;
    deal(ops, made);
    return true;
}

double Builder::water_level(const Wave& ops, const std::vector<std::size_t>& wave_of, const std::vector<double>& time,
                            double work) const {
    const double tallest = time.empty() ? 0.0 : *std::max_element(time.begin(), time.end());
    double low = 0.0, high = tallest + work + (ops.empty() ? 0.0 : longest(ops)) + 1.0;
    struct Filled {
        double wave_seconds, seconds, ranks;
    };
    std::vector<Filled> filled;  // close together in memory: all of it is read 40 times
    filled.reserve(ops.size());
    for (std::size_t op = 0; op < ops.size(); ++op) {
        filled.push_back({time[wave_of[op]], ops[op].seconds, static_cast<double>(scratch_.levels[ops[op].level].k)});
    }
    for (int halving = 0; halving < 40; ++halving) {
        const double middle = (low + high) / 2.0;
        double room = 0.0;
        for (const Filled& op : filled) {
            room += std::max(std::max(op.wave_seconds, middle) - op.seconds, 0.0) * op.ranks;
        }
        if (room < work) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return high;
}

bool Builder::longest_to_lowest(const Numbers& rest, Wave& ops, const std::vector<double>& targets) const {
    const std::int64_t max_sequences = scratch_.problem.max_sequences;
    Heap<double> heap;
    heap.reserve(ops.size());
    for (std::size_t op = 0; op < ops.size(); ++op) {
        heap.push({ops[op].seconds - targets[op], static_cast<std::int64_t>(op)});
    }
    // Ops too full for the current length, by the length that they can take.
    Heap<std::int64_t> parked;
    std::vector<double> parked_key(ops.size());
    for (const std::int64_t i : rest) {
        const std::int64_t size = length(i);
        while (!parked.empty() && -parked.top().first >= size) {
            const std::int64_t number = parked.top().second;
            parked.pop();
            heap.push({parked_key[static_cast<std::size_t>(number)], number});
        }
        while (!heap.empty()) {
            const auto [key, number] = heap.top();
            const GrowingOp& op = ops[static_cast<std::size_t>(number)];
            const Level& level = scratch_.levels[op.level];
            const std::int64_t room = level.token_cap - op.tokens;  // both whole pad multiples
            const bool open = static_cast<std::int64_t>(op.members.size()) < max_sequences;
            if (size <= room && open) break;
            heap.pop();
            if (open) {
                parked_key[static_cast<std::size_t>(number)] = key;
                parked.push({-room, number});
            }
        }
        if (heap.empty()) return false;
        const std::int64_t number = heap.top().second;
        GrowingOp& op = ops[static_cast<std::size_t>(number)];
        add(op, i);
        heap.replace_top({op.seconds - targets[static_cast<std::size_t>(number)], number});
    }
    return true;
}

// The reference goes through all that is left for every wave. What it skips stays too large for the rest of the wave,
// so the next op is the first one of any size that fits, and a queue for each size finds it at once.
void Builder::deal(Wave& ops, std::vector<Wave>& dealt) const {
    std::vector<std::size_t> order(ops.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t x, std::size_t y) { return ops[x].seconds > ops[y].seconds; });
    const std::size_t levels = scratch_.levels.size();
    std::vector<std::vector<std::size_t>> queues(levels);  // positions in `order`, rising
    for (std::size_t at = 0; at < order.size(); ++at) queues[ops[order[at]].level].push_back(at);
    std::vector<std::size_t> heads(levels, 0);
    for (std::size_t left = ops.size(); left > 0;) {
        std::int64_t free = scratch_.problem.num_ranks;
        Wave wave;
        for (;;) {
            std::size_t first = order.size(), from = 0;
            for (std::size_t number = 0; number < levels && scratch_.levels[number].k <= free; ++number) {
                if (heads[number] < queues[number].size() && queues[number][heads[number]] < first) {
                    first = queues[number][heads[number]];
                    from = number;
                }
            }
            if (first == order.size()) break;
            ++heads[from];
            free -= scratch_.levels[from].k;
            wave.push_back(std::move(ops[order[first]]));
            --left;
        }
        dealt.push_back(std::move(wave));
    }
}

Ops Builder::place(const std::vector<const Wave*>& dealt, std::vector<double>& loads) const {
    const std::int64_t ranks = scratch_.problem.num_ranks;
    const std::int64_t smallest = scratch_.levels[0].k;
    loads.assign(static_cast<std::size_t>(ranks), 0.0);
    Ops placed;
    for (const Wave* wave : dealt) {
        std::vector<bool> taken(static_cast<std::size_t>(ranks), false);
        for (std::size_t number = scratch_.levels.size(); number-- > 0;) {
            const std::int64_t k = scratch_.levels[number].k;
            std::vector<const GrowingOp*> ops;
            for (const GrowingOp& op : *wave) {
                if (op.level == number) ops.push_back(&op);
            }
            if (ops.empty()) continue;
            std::stable_sort(ops.begin(), ops.end(),
                             [](const GrowingOp* x, const GrowingOp* y) { return x->seconds > y->seconds; });
            std::vector<std::pair<double, std::int64_t>> blocks;
            for (std::int64_t first = 0; first < ranks; first += k) {
                if (taken[static_cast<std::size_t>(first)]) continue;
                blocks.emplace_back(*std::max_element(loads.begin() + first, loads.begin() + first + k), first);
            }
            std::sort(blocks.begin(), blocks.end());
            for (std::size_t at = 0; at < ops.size() && at < blocks.size(); ++at) {
                const std::int64_t first = blocks[at].second;
                for (const std::int64_t i : ops[at]->members) {
                    placed.ids.push_back(scratch_.ids[static_cast<std::size_t>(i)]);
                }
                placed.add(first, k);
                for (std::int64_t rank = first; rank < first + k; ++rank) {
                    taken[static_cast<std::size_t>(rank)] = true;
                    loads[static_cast<std::size_t>(rank)] += ops[at]->seconds;
                }
            }
        }
        for (std::int64_t first = 0; first < ranks; first += smallest) {
            if (!taken[static_cast<std::size_t>(first)]) placed.add(first, smallest);
        }
    }
    return placed;
}

// Many heads share their first waves.
struct Head {
    std::vector<std::shared_ptr<const Wave>> waves;
    double seconds = 0.0;
    Numbers alive;
};

constexpr std::int64_t kEffort = std::int64_t{1} << 16;
constexpr std::int64_t kFewestCandidates = 16, kFewestInPipeline = 8, kMostCandidates = 96, kThorough = 24;
constexpr double kGoodEnough = 1.002;
constexpr int kPatience = 3, kMostTallWaves = 12;
const std::vector<double> kStretches = {1.0, 1.25, 1.5};

class Searcher {
   public:
    Searcher(const Scratch& scratch, const Search& search)
        : scratch_(scratch), problem_(scratch.problem), search_(search), builder_(scratch) {
        const std::int64_t size = static_cast<std::int64_t>(problem_.count) + 4 * problem_.num_ranks;
        const std::int64_t least = search.pipeline ? kFewestInPipeline : kFewestCandidates;
        left_ = std::min(std::max(kEffort / size, least), kMostCandidates);
        good_enough_ = search.lower_bound * kGoodEnough;
        for (const Level& level : scratch.levels) {
            if (problem_.count == 0) break;
            const double time = scratch.alone(level, 0);
            if (time < kInfinity) times_.push_back(time);
        }
        std::sort(times_.begin(), times_.end(), std::greater<>());
        times_.erase(std::unique(times_.begin(), times_.end()), times_.end());
    }

    Ops run() {
        if (problem_.count == 0) return {};
        if (search_.pipeline) {
            many_even_waves();
        } else {
            tall_then_even();
        }
        return std::move(best_ops_);
    }

   private:
    bool done() const { return left_ <= 0 || best_seconds_ <= good_enough_; }

    double offer(const Head& head, const std::vector<Wave>& made) {
        std::vector<const Wave*> all;
        for (const auto& wave : head.waves) all.push_back(wave.get());
        for (const Wave& wave : made) all.push_back(&wave);
        double seconds = 0.0;
        std::vector<double> loads;
        Ops placed;
        if (search_.lockstep) {
            for (const Wave* wave : all) seconds += longest(*wave);
        } else {
            placed = builder_.place(all, loads);
            seconds = *std::max_element(loads.begin(), loads.end());
            if (search_.pipeline) {
                double most = -kInfinity;
                for (const Wave* wave : all) most = std::max(most, longest(*wave));
                seconds += search_.stages_before * most;
            }
        }
        if (seconds < best_seconds_) {
            best_seconds_ = seconds;
            best_ops_ = search_.lockstep ? builder_.place(all, loads) : std::move(placed);
        }
        return seconds;
    }

    double evenly(const Head& head, std::int64_t extra, const std::vector<double>& stretches, double floor = 0.0) {
        const std::int64_t count = fewest(head) + extra;
        const double mean = mean_seconds(head, count);
        if (head.seconds + mean * static_cast<double>(count) >= best_seconds_) return kInfinity;
        for (const double stretch : stretches) {
            if (left_ <= 0) return kInfinity;
            --left_;
            std::vector<Wave> made;
            if (builder_.even_waves(head.alive, count, std::max(stretch * mean, floor), made)) {
                const double before = best_seconds_;
                const double seconds = offer(head, made);
                if (seconds < before) {
                    best_head_ = head;
                    best_extra_ = extra;
                    has_best_ = true;
                }
                return seconds;
            }
        }
        return kInfinity;
    }

    std::int64_t fewest(const Head& head) const {
        std::int64_t tokens = 0;
        for (const std::int64_t i : head.alive) tokens += scratch_.lengths[static_cast<std::size_t>(i)];
        const std::int64_t capacity = problem_.num_ranks * problem_.token_limit;
        const std::int64_t slots = problem_.max_sequences * problem_.num_ranks;
        const std::int64_t by_count = (static_cast<std::int64_t>(head.alive.size()) + slots - 1) / slots;
        const std::int64_t count = std::max({(tokens + capacity - 1) / capacity, by_count, std::int64_t{1}});
        const std::int64_t multiple = problem_.microbatches_multiple;
        const std::int64_t over = (count + static_cast<std::int64_t>(head.waves.size())) % multiple;
        return count + (over == 0 ? 0 : multiple - over);
    }

    double mean_seconds(const Head& head, std::int64_t count) const {
        const Level& level = scratch_.levels[0];
        const Cost& cost = problem_.cost;
        double work = 0.0;
        for (const std::int64_t i : head.alive) {
            const std::int64_t padded = level.padded(scratch_.lengths[static_cast<std::size_t>(i)]);
            work += cost.a * static_cast<double>(padded) + cost.b * cost.squares(padded);
        }
        return work / static_cast<double>(problem_.num_ranks) / static_cast<double>(count) + cost.c0;
    }

    Head everything() const {
        Head head;
        head.alive.resize(problem_.count);
        std::iota(head.alive.begin(), head.alive.end(), std::int64_t{0});
        return head;
    }

    void make_taller(Head& head, double limit) const {
        Numbers left;
        Wave wave = builder_.tall_wave(head.alive, limit, left);
        head.seconds += longest(wave);
        head.waves.push_back(std::make_shared<const Wave>(std::move(wave)));
        head.alive = std::move(left);
    }

    void tall_then_even() {
        std::vector<double> limits;
        if (times_.size() > 1) limits.push_back(times_[1]);
        limits.push_back(times_[0]);
        for (std::size_t at = 2; at < times_.size() && at < 4; ++at) limits.push_back(times_[at]);
        std::set<std::tuple<std::size_t, std::size_t, double>> seen;
        for (std::size_t number = 0; number < limits.size(); ++number) {
            Head head = everything();
            double shortest = kInfinity;
            int worse = 0;
            for (int step = 0; step <= kMostTallWaves; ++step) {
                if (seen.emplace(head.waves.size(), head.alive.size(), head.seconds).second) {
                    const double seconds = evenly(head, 0, kStretches);
                    worse = seconds < shortest ? 0 : worse + 1;
                    shortest = std::min(shortest, seconds);
                }
                make_taller(head, limits[number]);
                if (head.alive.empty()) {
                    offer(head, {});
                    break;
                }
                if (head.seconds >= best_seconds_ || worse >= kPatience || done()) break;
            }
            if (done() && number > 0) break;
        }
        refine();
        if (best_ops_.first_rank.empty()) {
            Head head = everything();
            while (!head.alive.empty()) make_taller(head, times_[0]);
            offer(head, {});
        }
    }

    void refine() {
        const std::pair<std::int64_t, double> around[] = {{0, 1.25}, {1, 1.0}, {1, 1.25},
                                                          {0, 1.5},  {2, 1.0}, {3, 1.0}};
        for (const auto& [extra, stretch] : around) {
            if (done() || !has_best_) return;
            evenly(Head(best_head_), extra * problem_.microbatches_multiple, {stretch});
        }
    }

    void many_even_waves() {
        const Head head = everything();
        const std::int64_t multiple = problem_.microbatches_multiple;
        const std::int64_t least = fewest(head);
        std::int64_t count = least;
        int worse = 0;
        const bool thorough = left_ >= kThorough;
        while (worse <= kPatience && !done()) {
            const double before = best_seconds_;
            if (times_.back() > mean_seconds(head, count) || !thorough) {
                evenly(head, count - least, kStretches, times_.back());
            }
            if (thorough) {
                for (const double stretch : kStretches) evenly(head, count - least, {stretch});
            }
            worse = best_seconds_ < before ? 0 : worse + 1;
            const std::int64_t next = std::max(count + 1, thorough ? count * 5 / 4 : count * 3 / 2);
            count = (next + multiple - 1) / multiple * multiple;
        }
        std::vector<double> limits;
        if (times_.size() > 1) limits.push_back(times_[1]);
        limits.push_back(times_[0]);
        for (std::size_t at = 2; at + 1 < times_.size(); ++at) limits.push_back(times_[at]);
        for (const double limit : limits) {
            const std::int64_t extras[] = {has_best_ ? best_extra_ : 0, 0, multiple, 2 * multiple};
            for (const std::int64_t extra : extras) evenly(head, extra, {0.0}, limit);
        }
        if (best_ops_.first_rank.empty()) tall_then_even();
    }

    const Scratch& scratch_;
    const Problem& problem_;
    const Search& search_;
    Builder builder_;
    std::vector<double> times_;
    std::int64_t left_ = 0;
    double good_enough_ = 0.0, best_seconds_ = kInfinity;
    Ops best_ops_;
    Head best_head_;
    std::int64_t best_extra_ = 0;
    bool has_best_ = false;
};

}  // namespace

Ops waves(const Problem& problem, const Search& search) {
    const Scratch scratch(problem);
    return Searcher(scratch, search).run();
}

}  // namespace tdp::schedule
