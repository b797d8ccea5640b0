// Parts of `waves`: growing microbatches, tall and even waves, columns. The reference is in tdp_megatron/schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule_core.h"
#include "schedule_sort.h"

namespace tdp::schedule {

using Numbers = std::vector<std::int32_t>;

// A microbatch that still grows; which sequences it holds is kept beside it.
struct GrowingOp {
    std::int64_t tokens = 0;
    double squares = 0.0, seconds = 0.0;
    double target = 0.0;  // seconds
    std::int32_t level = 0, count = 0;

    void add(const Scratch& scratch, std::size_t i) {
        const Level& own = scratch.levels[static_cast<std::size_t>(level)];
        const std::int64_t padded = level == 0 ? scratch.padded[i] : own.padded(scratch.lengths[i]);
        tokens += padded;
        squares += level == 0 ? scratch.squares[i] : scratch.problem.cost.squares(padded);
        ++count;
        seconds = scratch.seconds(tokens, squares, own);
    }
};

using GrowingOps = std::vector<GrowingOp>;

// Ops by the longest sequence that each can still take under a time limit; the tightest fit wins.
class Rooms {
   public:
    Rooms(const Scratch& scratch, double limit, GrowingOps& ops) : scratch_(scratch), ops_(ops) {
        for (const Level& level : scratch.levels) under_.emplace_back(scratch.problem, level, limit);
    }

    std::int64_t largest() { return list_.largest(); }
    // Starts an op with sequence i; its number.
    std::int32_t open(std::size_t level, std::size_t i);
    // Number of the op that took sequence i, or -1.
    std::int32_t fill(std::size_t i);

   private:
    void put(std::int32_t number, std::size_t i);

    const Scratch& scratch_;
    std::vector<RoomUnder> under_;  // by level
    GrowingOps& ops_;
    RoomList list_;
};

// Seconds alone of the longest sequences on every level, worked out once.
class AloneTable {
   public:
    explicit AloneTable(const Scratch& scratch) : scratch_(scratch) {}

    // As Scratch::choose_level.
    std::size_t choose_level(std::size_t i, double limit);

   private:
    const Scratch& scratch_;
    std::vector<double> seconds_;  // by sequence, then level
};

// Appends ops on more than the fewest ranks, largest CP size first; `op_of` gets the number of each sequence's op.
// `chosen` is the level of each of the first numbers of `alive`.
void wide_ops(const Scratch& scratch, const Numbers& alive, const std::vector<std::uint8_t>& chosen, double limit,
              GrowingOps& ops, std::vector<std::int32_t>& op_of);

// Ops with the same start, in a row.
struct FreshOps {
    double key;
    std::int32_t first, count;
};

// Each sequence to the op furthest below its target that has the tokens.
class LowestFill {
   public:
    // `fresh` covers all of `ops`; false where a sequence has nowhere to go.
    bool run(const Scratch& scratch, const std::int32_t* rest, std::size_t count, std::vector<FreshOps>& fresh,
             GrowingOps& ops, std::vector<std::int32_t>& op_of);

   private:
    using Item = std::pair<double, std::int64_t>;

    void start(const std::vector<FreshOps>& fresh, std::size_t ops, std::size_t sequences);
    bool find_top();
    void pop();
    void insert(Item item);
    std::size_t bucket_of(double key) const;

    // The order is one of (key, number). Keys rise from pop to pop, but for parked ones that come back, so that the
    // least are in the heap of a few and all others in lists by bucket.
    const std::vector<FreshOps>* fresh_ = nullptr;  // by key, then number
    std::size_t group_ = 0;
    std::int32_t within_ = 0;
    Heap<double> least_;
    std::vector<std::int32_t> heads_, next_;  // of the lists; -1 ends one
    std::vector<double> keys_;
    std::size_t bucket_ = 0;  // the last one that went to the heap
    double lowest_ = 0.0, scale_ = 0.0;
    Item top_{};
    bool top_is_fresh_ = false;
    // Ops too full for the current length, in lists by the first sequence that they can take.
    void park(const Scratch& scratch, std::int64_t room);
    void wake(std::size_t i);

    std::vector<std::int32_t> parked_;  // heads of the lists
    std::vector<std::size_t> touched_;  // lists in use
    std::size_t woken_ = 0;             // sequences whose lists are empty
    // The same for a few ops.
    Heap<std::int64_t> parked_few_;
    bool few_ = false;
};

// A wave as long as its longest sequence takes.
struct TallWave {
    GrowingOps ops;
    Numbers members, op_of;  // sequence members[j] is in ops[op_of[j]]
    double seconds = 0.0;
};

TallWave tall_wave(const Scratch& scratch, const Numbers& alive, double seed_limit, Numbers& left);

// Sequences still to be placed, rising, with the work of each and all after it.
class Alive {
   public:
    Numbers numbers;
    // Only after sum_up.
    std::int64_t tokens = 0;

    void sum_up(const Scratch& scratch);
    // Rank-seconds of numbers[at] and all after it; only after sum_up.
    double work_from(const Scratch& scratch, std::size_t at) const;

   private:
    // There are many of these, so only one sum in so many is kept.
    static constexpr std::size_t kEach = 64;

    std::vector<double> sums_;
};

// Waves that all take about the same time.
struct EvenWaves {
    GrowingOps ops;
    std::vector<std::int32_t> op_of;  // by sequence
    Numbers order;                    // ops by wave
    Numbers offsets;                  // of waves into `order`
};

class EvenWaveBuilder {
   public:
    explicit EvenWaveBuilder(const Scratch& scratch) : scratch_(scratch), alone_(scratch) {}

    // Fills only the ops on more than the fewest ranks; false where they do not fit into `count` waves.
    bool start(const Alive& alive, std::int64_t count, double limit, EvenWaves& made);
    // What all waves of the last start take when every op reaches its target.
    double seconds() const { return seconds_; }
    // Fills the others; false where the tokens do not fit.
    bool fill(EvenWaves& made);

   private:
    bool deal_wide(const Alive& alive, std::int64_t count, EvenWaves& made);
    double water_level(const GrowingOps& wide, double work) const;
    void deal(EvenWaves& made);

    const Scratch& scratch_;
    AloneTable alone_;
    LowestFill lowest_;
    RadixOrder radix_;
    std::vector<std::uint8_t> chosen_;
    Numbers rest_, wave_of_;
    std::vector<std::int64_t> free_;
    std::vector<double> time_;
    std::size_t used_ = 0;  // waves with a wide op
    double seconds_ = 0.0;
    std::vector<FreshOps> fresh_;
    std::vector<std::vector<RadixOrder::Entry>> queues_;
    GrowingOps sorted_;
};

// Ops of waves on aligned blocks of ranks.
class Placement {
   public:
    explicit Placement(const Scratch& scratch);

    // Places the ops numbered `wave` of `ops` and dummies on the ranks left over; numbers go on from wave to wave.
    void add(const GrowingOps& ops, const std::int32_t* wave, std::size_t count, std::int64_t first_number);
    double longest_load() const;

    std::vector<std::int64_t> first_rank, cp_size, number;  // in order; number -1 for dummies

   private:
    const Scratch& scratch_;
    std::vector<double> loads_;
    std::vector<std::uint8_t> taken_;
    std::vector<RadixOrder::Entry> sorted_, blocks_;
    RadixOrder radix_;
};

// Ops, as many on every rank, which pays their sum and `bubbles` times their longest: `step`. None where not found.
Ops columns(const Scratch& scratch, double bubbles, double& step);

}  // namespace tdp::schedule
