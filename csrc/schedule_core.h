// What the packing algorithms share: cost of a microbatch, sequences by falling length, ops as flat arrays.
//
// Every sum and product is in the order of the numpy reference in tdp_megatron/schedule, so that plans are equal bit
// for bit; build with -ffp-contract=off.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace tdp::schedule {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Division of non-negative numbers; 32-bit division is several times faster where it suffices.
inline std::int64_t divide_down(std::int64_t value, std::int64_t by) {
    if (static_cast<std::uint64_t>(value | by) >> 32 == 0) {
        return static_cast<std::int64_t>(static_cast<std::uint32_t>(value) / static_cast<std::uint32_t>(by));
    }
    return value / by;
}
inline std::int64_t divide_up(std::int64_t value, std::int64_t by) { return divide_down(value + by - 1, by); }

struct Cost {
    double a, b, c0;
    std::int64_t window, layers;
    double kv_bytes, latency, node_ranks, bandwidth, internode_bandwidth;

    double squares(std::int64_t padded) const {
        const double length = static_cast<double>(padded);
        if (window == 0) return length * length;
        const double reach = 2.0 * static_cast<double>(window);
        return length * (length < reach ? length : reach);
    }
    double link(std::int64_t k) const {
        return static_cast<double>(k) <= node_ranks ? bandwidth : internode_bandwidth;
    }
    double comm(std::int64_t k, std::int64_t tokens) const {
        const double moved = static_cast<double>(tokens) * kv_bytes / link(k);
        return 3.0 * static_cast<double>(layers) * (static_cast<double>(k) - 1.0) * (latency + moved);
    }
    // Of a microbatch of `tokens` per rank, tail included; `share` is 1 / k where that is exact, or else 0.
    double seconds(std::int64_t tokens, double squares, std::int64_t k, double share = 0.0) const {
        double attention = share != 0.0 ? b * squares * share : b * squares / static_cast<double>(k);
        if (k > 1 && layers != 0) {
            const double exchange = comm(k, tokens);
            if (exchange > attention) attention = exchange;
        }
        return c0 + a * static_cast<double>(tokens) + attention;
    }
};

// What non-negative numbers are divided by again and again; most often a power of two.
class Divisor {
   public:
    explicit Divisor(std::int64_t by) : by_(by) {
        while (std::int64_t{1} << shift_ < by) ++shift_;
        is_power_ = std::int64_t{1} << shift_ == by;
    }
    std::int64_t up(std::int64_t value) const {
        return is_power_ ? (value + by_ - 1) >> shift_ : divide_up(value, by_);
    }
    std::int64_t down(std::int64_t value) const { return is_power_ ? value >> shift_ : divide_down(value, by_); }
    std::int64_t by() const { return by_; }
    bool is_power() const { return is_power_; }

   private:
    std::int64_t by_;
    int shift_ = 0;
    bool is_power_;
};

// One CP size.
struct Level {
    Level(std::int64_t ranks, std::int64_t token_limit, std::int64_t tail)
        : k(ranks),
          pad_multiple(k > 1 ? 2 * k : 1),
          token_cap(token_limit * k / pad_multiple * pad_multiple),
          pad(pad_multiple),
          unit(k * tail),
          share(Divisor(k).is_power() ? 1.0 / static_cast<double>(k) : 0.0) {}

    std::int64_t k, pad_multiple, token_cap;
    Divisor pad, unit;  // unit: tokens of a tail multiple on all ranks
    double share;       // 1 / k where that is exact, or else 0

    std::int64_t padded(std::int64_t length) const { return pad.up(length) * pad_multiple; }
};

struct Problem {
    const std::int64_t* seqlens;
    std::size_t count;
    std::vector<std::int64_t> cp_sizes;  // rising
    std::int64_t num_ranks, token_limit, tail, max_sequences, microbatches_multiple;
    Cost cost;

    Level level(std::int64_t k) const { return {k, token_limit, tail}; }
};

// Seconds of an op of `tokens` padded tokens.
inline double op_seconds(const Problem& problem, std::int64_t tokens, double squares, const Level& level) {
    std::int64_t tails = level.unit.up(tokens);
    if (tails < 1) tails = 1;
    return problem.cost.seconds(tails * problem.tail, squares, level.k, level.share);
}

// Ops in executable order; op j holds ids[offsets[j]] to ids[offsets[j + 1]].
struct Ops {
    std::vector<std::int64_t> first_rank, cp_size, offsets{0}, ids;

    void add(std::int64_t first, std::int64_t k) {
        first_rank.push_back(first);
        cp_size.push_back(k);
        offsets.push_back(static_cast<std::int64_t>(ids.size()));
    }
    // The members of all ops at once, for ops whose ranks are known: `member_of(i)` is the op of the i-th longest
    // sequence, which has the number sample_ids[i].
    template <class MemberOf>
    void set_members(const std::vector<std::int64_t>& sample_ids, MemberOf member_of) {
        offsets.assign(first_rank.size() + 1, 0);
        for (std::size_t i = 0; i < sample_ids.size(); ++i) ++offsets[static_cast<std::size_t>(member_of(i)) + 1];
        for (std::size_t op = 0; op < first_rank.size(); ++op) offsets[op + 1] += offsets[op];
        std::vector<std::int64_t> next(offsets.begin(), offsets.end() - 1);
        ids.resize(sample_ids.size());
        for (std::size_t i = 0; i < sample_ids.size(); ++i) {
            ids[static_cast<std::size_t>(next[static_cast<std::size_t>(member_of(i))]++)] = sample_ids[i];
        }
    }
};

// The longest sequence, tokens, that an op on `level` can still take in `limit` seconds; -1 for none. See Scratch.room of
// tdp_megatron/schedule/dynamic.py.
class RoomUnder {
   public:
    RoomUnder(const Problem& problem, const Level& level, double limit);

    std::int64_t left(std::int64_t tokens, double squares) const;

   private:
    const Cost& cost_;
    const Level& level_;
    double slack_, most_ = kInfinity;  // rank-seconds; padded tokens that K and V can be exchanged of
};

// The sequences in order of falling length, ties by id, seen on every allowed CP size.
class Scratch {
   public:
    explicit Scratch(const Problem& problem);

    const Problem& problem;
    std::vector<std::int64_t> ids, lengths;
    std::vector<Level> levels;
    // On the smallest level; works are rank-seconds without c0, communication and tail.
    std::vector<std::int64_t> padded;
    std::vector<double> squares, works;

    double seconds(std::int64_t tokens, double squares, const Level& level) const {
        return op_seconds(problem, tokens, squares, level);
    }
    // Distinct times of the longest sequence alone, falling.
    std::vector<double> times_of_longest() const;
    // Seconds of a sequence alone, infinite where it does not fit.
    double alone(const Level& level, std::size_t i) const {
        const std::int64_t padded = level.padded(lengths[i]);
        if (padded > level.token_cap) return kInfinity;
        return seconds(padded, problem.cost.squares(padded), level);
    }
    // Number of the smallest level on which it takes at most `limit` seconds, else of the fastest.
    std::size_t choose_level(std::size_t i, double limit) const {
        std::size_t best = 0;
        double best_seconds = kInfinity;
        for (std::size_t number = 0; number < levels.size(); ++number) {
            const double time = alone(levels[number], i);
            if (time < best_seconds) {
                best = number;
                best_seconds = time;
                if (time <= limit) break;
            }
        }
        return best;
    }
    // The first sequence of at most `length` tokens, or how many there are.
    std::size_t first_not_longer(std::int64_t length) const;

   private:
    // first_[b]: the first sequence with (length >> shift_) <= b.
    std::vector<std::int32_t> first_;
    int shift_ = 0;
};

// A binary heap of (key, number) pairs whose least can be replaced in one go. Pairs are distinct, so the order in which
// they leave does not depend on how the heap is built.
template <class Key>
class Heap {
   public:
    using Item = std::pair<Key, std::int64_t>;

    bool empty() const { return items_.empty(); }
    const Item& top() const { return items_.front(); }
    void reserve(std::size_t n) { items_.reserve(n); }
    void clear() { items_.clear(); }
    void push(Item item) {
        items_.push_back(item);
        std::size_t child = items_.size() - 1;
        while (child > 0) {
            const std::size_t parent = (child - 1) / 2;
            if (!less(item, items_[parent])) break;
            items_[child] = items_[parent];
            child = parent;
        }
        items_[child] = item;
    }
    void replace_top(Item item) { sift(item, items_.size()); }
    void pop() {
        const Item last = items_.back();
        items_.pop_back();
        if (!items_.empty()) sift(last, items_.size());
    }

   private:
    void sift(Item item, std::size_t size) {
        std::size_t hole = 0;
        for (;;) {
            std::size_t child = 2 * hole + 1;
            if (child >= size) break;
            if (child + 1 < size) child += static_cast<std::size_t>(less(items_[child + 1], items_[child]));
            if (!less(items_[child], item)) break;
            items_[hole] = items_[child];
            hole = child;
        }
        items_[hole] = item;
    }
    // Without branches: which child is less is anyone's guess.
    static bool less(const Item& x, const Item& y) {
        return (x.first < y.first) | ((x.first == y.first) & (x.second < y.second));
    }
    std::vector<Item> items_;
};

// (room, number) in rising order; small enough that moving entries beats a tree.
class RoomList {
   public:
    void clear() {
        items_.clear();
        hole_ = kNone;
    }
    std::int64_t largest() {
        close_hole();
        return items_.empty() ? -1 : items_.back().room;
    }
    void insert(std::int64_t room, std::int64_t number);
    // Takes out the entry with the least room that is at least `length`; its number, or -1.
    std::int64_t take(std::int64_t length, std::int64_t* room = nullptr);

   private:
    static constexpr std::size_t kNone = ~std::size_t{0};
    struct Item {
        std::int64_t room, number;
        bool operator<(const Item& other) const {
            return room != other.room ? room < other.room : number < other.number;
        }
    };
    void close_hole();

    std::vector<Item> items_;
    // What has been taken out mostly comes back a little further down: only what lies between has to move.
    std::size_t hole_ = kNone;
};

// Each of `members` (indices of `padded`) in the order given into the fullest pack that holds it; returns how many packs,
// and writes the pack of each member.
std::int64_t best_fit_packs(const std::vector<std::int64_t>& members, const std::vector<std::int64_t>& padded,
                            std::int64_t cap, std::int64_t max_sequences, std::vector<std::int64_t>& pack_of);

// The sequences of a problem on one CP size.
class StaticCp {
    const Problem& problem_;
    Level level_;

   public:
    StaticCp(const Problem& problem, std::int64_t cp_size);

    std::vector<std::int64_t> padded;
    std::vector<double> costs;        // seconds
    std::vector<std::int64_t> order;  // by falling cost, ties by id

    // Best-fit by falling length; `members` is left in that order.
    std::vector<std::vector<std::int64_t>> packs(std::vector<std::int64_t>& members) const;
    // The packs of each block's sequences.
    Ops pack(std::vector<std::vector<std::int64_t>> split) const;
};

struct Search {
    double stages_before;  // (stages - 1) / virtual stages
    bool lockstep, pipeline;
    double lower_bound;
};

Ops buddy(const Problem& problem, double lower_bound);
Ops waves(const Problem& problem, const Search& search);
Ops lpt(const Problem& problem, std::int64_t cp_size);
Ops kk(const Problem& problem, std::int64_t cp_size);
// The next wave out of a buffer, led by sequence `leader` unless that is -1.
Ops stream_wave(const Problem& problem, std::int64_t leader);
// Exchanges sequences between ops so that fewer tokens are padding and the step takes no longer.
void fill_tails(const Problem& problem, const Search& search, Ops& ops);
Ops dynamic_cp(const Problem& problem, std::int64_t unit);
// Without padding before; false as soon as the step must be longer than `seconds`.
bool dynamic_cp_within(const Problem& problem, const Search& search, double seconds, Ops& ops);
// Packs in order; their first rank is left 0, since the caller deals them out.
Ops best_fit(const Problem& problem, std::int64_t cp_size);
Ops next_fit(const Problem& problem, std::int64_t cp_size);

double free_step(const std::int64_t* first_rank, const std::int64_t* cp_size, const double* seconds, std::size_t count,
                 std::int64_t num_ranks);

// The ops of a plan in order, each inside the ranks.
struct PlanOps {
    std::size_t count;
    std::int64_t num_ranks;
    const std::int64_t *first_rank, *cp_size, *offsets, *padded, *tokens_per_rank, *group;
};
enum class Mode { kFree, kLockstep, kBarrier, kPipeline };
// As simulate in tdp_megatron/schedule/simulate.py without noise; -1 where ranks in lockstep do not meet.
double plan_step(const PlanOps& ops, const Cost& cost, Mode mode, double stages_before);

}  // namespace tdp::schedule
