// Sequences exchanged so that tails need less padding: see tdp_megatron/schedule/tails.py, which is the reference.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "schedule_core.h"
#include "schedule_sort.h"

namespace tdp::schedule {
namespace {

constexpr double kWorthIt = 0.003, kMargin = 1e-12;
constexpr int kFillTries = 24, kFillsOfOp = 8, kSettleTries = 48, kFewestTries = 20, kMostTries = 64, kNearest = 8;
// Swaps tried for all ops of one CP size, so that planning time stays bounded.
constexpr std::int64_t kEffort = std::int64_t{1} << 18;
constexpr std::int64_t kNarrow = std::int64_t{1} << 31;

std::int64_t whole_tails(std::int64_t tokens, std::int64_t unit) {
    return std::max<std::int64_t>(divide_up(tokens, unit), 1);
}
std::int64_t hole_of(std::int64_t tokens, std::int64_t unit) { return whole_tails(tokens, unit) * unit - tokens; }

// Numbers of a rising range of lengths, those nearest to `wanted` first; of equally near ones the longer.
class Nearest {
   public:
    Nearest(const std::vector<std::int64_t>& lengths, std::int32_t low, std::int32_t high, std::int64_t wanted)
        : lengths_(lengths), low_(low), high_(high), wanted_(wanted) {
        up_ = static_cast<std::int32_t>(std::lower_bound(lengths.begin() + low, lengths.begin() + high, wanted) -
                                        lengths.begin());
        down_ = up_ - 1;
    }
    // -1 where none is left.
    std::int32_t next() {
        const bool has_longer = up_ < high_, has_shorter = down_ >= low_;
        if (!has_longer && !has_shorter) return -1;
        if (has_longer && (!has_shorter || length(up_) - wanted_ <= wanted_ - length(down_))) return up_++;
        return down_--;
    }

   private:
    std::int64_t length(std::int32_t at) const { return lengths_[static_cast<std::size_t>(at)]; }

    const std::vector<std::int64_t>& lengths_;
    std::int32_t low_, high_, up_, down_;
    std::int64_t wanted_;
};

class Tails {
   public:
    Tails(const Problem& problem, const Search& search, Ops& ops) : problem_(problem), search_(search), ops_(ops) {
        for (const std::int64_t k : problem.cp_sizes) levels_.push_back(problem.level(k));
        bubbles_ = search.pipeline ? search.stages_before : 0.0;
    }

    void run() {
        measure();
        if (!worth_it()) return;
        const double before = free_seconds();
        sort();
        fill();
        sort_by_level();
        for (std::size_t level = 0; level < levels_.size(); ++level) {
            if (!gather(level)) continue;
            settle();
            swap_all();
        }
        // Sums of ranks say nothing of those that wait for each other.
        if (free_seconds() > before) return;
        ops_.set_members(sorted_, [&](std::size_t i) -> std::int64_t { return op_of_[index(sorted_[i])]; });
    }

   private:
    struct Op {
        std::int64_t tokens = 0, hole = 0;
        double squares = 0.0, seconds = 0.0;
        std::int32_t level = 0, count = 0, wave = 0, head = -1;
    };

    static std::size_t index(std::int64_t number) { return static_cast<std::size_t>(number); }
    std::int64_t unit_of(const Op& op) const { return levels_[index(op.level)].k * problem_.tail; }

    void measure() {
        const std::size_t ranks = index(problem_.num_ranks);
        all_.resize(ops_.first_rank.size());
        op_of_.resize(problem_.count);
        loads_.assign(ranks, 0.0);
        longest_.assign(ranks, 0.0);
        std::vector<std::int32_t> numbers(ranks, 0);
        for (std::size_t j = 0; j < all_.size(); ++j) {
            Op& op = all_[j];
            const std::int64_t k = ops_.cp_size[j];
            while (levels_[index(op.level)].k != k) ++op.level;
            const Level& level = levels_[index(op.level)];
            for (std::int64_t at = ops_.offsets[j]; at < ops_.offsets[j + 1]; ++at) {
                const std::size_t id = index(ops_.ids[index(at)]);
                const std::int64_t padded = level.padded(problem_.seqlens[id]);
                op.tokens += padded;
                op.squares += problem_.cost.squares(padded);
                op_of_[id] = static_cast<std::int32_t>(j);
                ++op.count;
            }
            op.seconds = op_seconds(problem_, op.tokens, op.squares, level);
            op.hole = hole_of(op.tokens, unit_of(op));
            const std::size_t first = index(ops_.first_rank[j]);
            op.wave = numbers[first];
            if (index(op.wave) >= waves_.size()) waves_.resize(index(op.wave) + 1, 0.0);
            waves_[index(op.wave)] = std::max(waves_[index(op.wave)], op.seconds);
            for (std::size_t rank = first; rank < first + index(k); ++rank) {
                ++numbers[rank];
                loads_[rank] += op.seconds;
                longest_[rank] = std::max(longest_[rank], op.seconds);
            }
        }
        double most = 0.0;
        for (std::size_t rank = 0; rank < ranks; ++rank) most = std::max(most, loads_[rank] + bubbles_ * longest_[rank]);
        limit_ = most * (1.0 - kMargin);
    }

    bool worth_it() const {
        std::int64_t holes = 0, held = 0;
        for (const Op& op : all_) {
            if (op.count == 0) continue;
            holes += op.hole;
            held += op.tokens + op.hole;
        }
        return static_cast<double>(holes) > kWorthIt * static_cast<double>(held);
    }

    double free_seconds() const {
        if (search_.lockstep || search_.pipeline) return 0.0;
        std::vector<double> seconds;
        for (const Op& op : all_) seconds.push_back(op.seconds);
        return free_step(ops_.first_rank.data(), ops_.cp_size.data(), seconds.data(), seconds.size(),
                         problem_.num_ranks);
    }

    void sort() {
        std::vector<RadixOrder::Entry> order(problem_.count);
        for (std::size_t id = 0; id < problem_.count; ++id) {
            order[id] = {~static_cast<std::uint64_t>(problem_.seqlens[id]), static_cast<std::int64_t>(id)};
        }
        radix_.sort(order);
        for (const RadixOrder::Entry& entry : order) sorted_.push_back(entry.number);
    }

    // Whether the mode's step bears op a with `tokens_a` more tokens, and b with `tokens_b` more.
    bool bears(std::size_t a, std::int64_t tokens_a, double squares_a, std::size_t b, std::int64_t tokens_b,
               double squares_b) const {
        const Op &one = all_[a], &other = all_[b];
        const Level &level_a = levels_[index(one.level)], &level_b = levels_[index(other.level)];
        const std::int64_t held_a = one.tokens + tokens_a, held_b = other.tokens + tokens_b;
        if (held_a > level_a.token_cap || held_b > level_b.token_cap) return false;
        const double seconds_a = op_seconds(problem_, held_a, one.squares + squares_a, level_a);
        const double seconds_b = op_seconds(problem_, held_b, other.squares + squares_b, level_b);
        if (search_.lockstep) return seconds_a <= waves_[index(one.wave)] && seconds_b <= waves_[index(other.wave)];
        const double more_a = seconds_a - one.seconds, more_b = seconds_b - other.seconds;
        const std::size_t first_a = index(ops_.first_rank[a]), end_a = first_a + index(level_a.k);
        const std::size_t first_b = index(ops_.first_rank[b]), end_b = first_b + index(level_b.k);
        for (std::size_t rank = first_a; rank < end_a; ++rank) {
            const bool both = first_b <= rank && rank < end_b;
            const double load = both ? loads_[rank] + more_a + more_b : loads_[rank] + more_a;
            const double most = both ? std::max(seconds_a, seconds_b) : seconds_a;
            if (load + bubbles_ * std::max(longest_[rank], most) > limit_) return false;
        }
        for (std::size_t rank = first_b; rank < end_b; ++rank) {
            if (first_a <= rank && rank < end_a) continue;
            if (loads_[rank] + more_b + bubbles_ * std::max(longest_[rank], seconds_b) > limit_) return false;
        }
        return true;
    }

    void change(std::size_t number, std::int64_t tokens, double squares) {
        Op& op = all_[number];
        op.tokens += tokens;
        op.squares += squares;
        const Level& level = levels_[index(op.level)];
        const double seconds = op_seconds(problem_, op.tokens, op.squares, level);
        const std::size_t first = index(ops_.first_rank[number]);
        for (std::size_t rank = first; rank < first + index(level.k); ++rank) {
            loads_[rank] += seconds - op.seconds;
            longest_[rank] = std::max(longest_[rank], seconds);
        }
        op.seconds = seconds;
        op.hole = hole_of(op.tokens, unit_of(op));
    }

    void fill() {
        const Level& small = levels_[0];
        std::vector<std::int64_t> lengths, ids;
        for (const std::int64_t id : sorted_) {
            if (all_[index(op_of_[index(id)])].level != 0) continue;
            lengths.push_back(problem_.seqlens[id]);
            ids.push_back(id);
        }
        for (std::size_t a = 0; a < all_.size(); ++a) {
            Op& op = all_[a];
            const Level& level = levels_[index(op.level)];
            for (int time = 0; time < kFillsOfOp; ++time) {
                if (op.count == 0 || op.hole == 0 || op.count >= problem_.max_sequences) break;
                const auto from = std::partition_point(lengths.begin(), lengths.end(),
                                                       [&](std::int64_t length) { return length > op.hole; });
                std::int64_t most = 0, best = -1;
                const auto begin = static_cast<std::size_t>(from - lengths.begin());
                const std::size_t end = std::min(lengths.size(), begin + kFillTries);
                for (std::size_t at = begin; at < end; ++at) {
                    const std::size_t b = index(op_of_[index(ids[at])]);
                    if (b == a || all_[b].level != 0) continue;
                    const std::int64_t padded = level.padded(lengths[at]), less = small.padded(lengths[at]);
                    if (padded > op.hole) continue;
                    const std::int64_t unit = unit_of(all_[b]), held = all_[b].tokens;
                    const std::int64_t saved = (whole_tails(held, unit) - whole_tails(held - less, unit)) * unit;
                    if (saved <= most) continue;
                    if (!bears(a, padded, problem_.cost.squares(padded), b, -less, -problem_.cost.squares(less))) continue;
                    most = saved;
                    best = ids[at];
                }
                if (best < 0) break;
                const std::size_t b = index(op_of_[index(best)]);
                const std::int64_t padded = level.padded(problem_.seqlens[best]);
                const std::int64_t less = small.padded(problem_.seqlens[best]);
                change(a, padded, problem_.cost.squares(padded));
                change(b, -less, -problem_.cost.squares(less));
                ++op.count;
                --all_[b].count;
                op_of_[index(best)] = static_cast<std::int32_t>(a);
            }
        }
    }

    std::size_t bucket_of(std::int64_t tokens) const {
        if (-kNarrow < tokens && tokens < kNarrow && unit_ < kNarrow) {  // several times faster
            const auto left = static_cast<std::int32_t>(tokens) % static_cast<std::int32_t>(unit_);
            return index((left < 0 ? left + static_cast<std::int32_t>(unit_) : left) / static_cast<std::int32_t>(step_));
        }
        const std::int64_t left = tokens % unit_;
        return index((left < 0 ? left + unit_ : left) / step_);
    }

    // What fill() leaves on each CP size stays there: sequences by rising length, and ops.
    void sort_by_level() {
        first_of_level_.assign(levels_.size() + 1, 0);
        for (const Op& op : all_) first_of_level_[index(op.level) + 1] += op.count;
        for (std::size_t level = 0; level < levels_.size(); ++level) {
            first_of_level_[level + 1] += first_of_level_[level];
        }
        std::vector<std::int32_t> next(first_of_level_.begin(), first_of_level_.end() - 1);
        rising_.resize(sorted_.size());
        for (std::size_t i = sorted_.size(); i-- > 0;) {
            const std::int64_t id = sorted_[i];
            std::int32_t& at = next[index(all_[index(op_of_[index(id)])].level)];
            rising_[index(at++)] = static_cast<std::int32_t>(id);
        }
        ops_of_level_.resize(levels_.size());
        for (std::size_t j = 0; j < all_.size(); ++j) {
            if (all_[j].count > 0) ops_of_level_[index(all_[j].level)].push_back(j);
        }
    }

    // The sequences on one CP size by what their length leaves over whole tails, then by rising length; false
    // where each is alone in its op.
    bool gather(std::size_t number) {
        const Level& level = levels_[number];
        unit_ = level.k * problem_.tail;
        step_ = level.pad_multiple;
        own_.swap(ops_of_level_[number]);
        bool shares = false;
        for (const std::size_t j : own_) {
            all_[j].head = -1;
            shares = shares || all_[j].count > 1;
        }
        if (!shares) return false;
        buckets_.assign(index(unit_ / step_) + 1, 0);
        const auto begin = rising_.begin() + first_of_level_[number];
        const auto end = rising_.begin() + first_of_level_[number + 1];
        for (auto id = begin; id != end; ++id) ++buckets_[bucket_of(level.padded(problem_.seqlens[*id])) + 1];
        for (std::size_t bucket = 0; bucket + 1 < buckets_.size(); ++bucket) buckets_[bucket + 1] += buckets_[bucket];
        std::vector<std::int32_t> next(buckets_.begin(), buckets_.end() - 1);
        for (auto* numbers : {&where_, &ids_, &next_}) numbers->resize(index(buckets_.back()));
        lengths_.resize(index(buckets_.back()));
        for (auto own = begin; own != end; ++own) {
            const std::int64_t id = *own;
            const std::int64_t padded = level.padded(problem_.seqlens[id]);
            const std::int32_t at = next[bucket_of(padded)]++;
            lengths_[index(at)] = padded;
            where_[index(at)] = op_of_[index(id)];
            ids_[index(at)] = static_cast<std::int32_t>(id);
            Op& op = all_[index(op_of_[index(id)])];
            next_[index(at)] = op.head;
            op.head = at;
        }
        return true;
    }

    bool bears_swap(std::size_t a, std::int64_t x, std::size_t b, std::int64_t y) const {
        const double more = problem_.cost.squares(x) - problem_.cost.squares(y);
        return bears(a, y - x, -more, b, x - y, more);
    }

    void swap(std::int32_t at_x, std::int32_t at_y) {
        const std::size_t a = index(where_[index(at_x)]), b = index(where_[index(at_y)]);
        const std::int64_t x = lengths_[index(at_x)], y = lengths_[index(at_y)];
        const double more = problem_.cost.squares(x) - problem_.cost.squares(y);
        change(a, y - x, -more);
        change(b, x - y, more);
        std::int32_t* to_x = &all_[a].head;
        while (*to_x != at_x) to_x = &next_[index(*to_x)];
        std::int32_t* to_y = &all_[b].head;
        while (*to_y != at_y) to_y = &next_[index(*to_y)];
        *to_x = at_y;
        *to_y = at_x;
        std::swap(next_[index(at_x)], next_[index(at_y)]);
        std::swap(where_[index(at_x)], where_[index(at_y)]);
        op_of_[index(ids_[index(at_x)])] = where_[index(at_x)];
        op_of_[index(ids_[index(at_y)])] = where_[index(at_y)];
    }

    void settle() {
        order_.clear();
        for (const std::size_t op : own_) {
            if (all_[op].count != 1 || all_[op].hole == 0) continue;
            order_.push_back({static_cast<std::uint64_t>(unit_ - all_[op].hole), static_cast<std::int64_t>(op)});
        }
        radix_.sort(order_);
        std::vector<std::int64_t> shared_lengths;
        std::vector<std::int32_t> shared, first(buckets_.size(), 0);
        for (std::size_t bucket = 0; bucket + 1 < buckets_.size(); ++bucket) {
            for (std::int32_t at = buckets_[bucket]; at < buckets_[bucket + 1]; ++at) {
                if (all_[index(where_[index(at)])].count == 1) continue;
                shared.push_back(at);
                shared_lengths.push_back(lengths_[index(at)]);
            }
            first[bucket + 1] = static_cast<std::int32_t>(shared.size());
        }
        const auto sequences = static_cast<std::int64_t>(lengths_.size());
        // Each needs one that shares, so as many at most.
        const std::size_t most = std::min(order_.size(), shared.size());
        for (std::size_t i = 0; i < most; ++i) {
            const std::size_t a = index(order_[i].number);
            const Op& op = all_[a];
            const std::int32_t at_x = op.head;
            int tries = kSettleTries;
            bool found = false;
            std::int64_t left = unit_ * static_cast<std::int64_t>(i) / sequences / step_ * step_;
            for (; left < op.hole && tries > 0 && !found; left += step_, --tries) {
                const std::size_t bucket = bucket_of(-left);
                Nearest nearest(shared_lengths, first[bucket], first[bucket + 1], lengths_[index(at_x)]);
                for (int time = 0; time < kNearest; ++time) {
                    const std::int32_t next = nearest.next();
                    if (next < 0) break;
                    --tries;
                    const std::int32_t at_y = shared[index(next)];
                    const std::size_t b = index(where_[index(at_y)]);
                    if (all_[b].count == 1) continue;
                    if (!bears_swap(a, lengths_[index(at_x)], b, lengths_[index(at_y)])) continue;
                    swap(at_x, at_y);
                    found = true;
                    break;
                }
            }
        }
    }

    std::int64_t spread(std::int64_t hole) const { return hole * (unit_ - hole); }

    void swap_all() {
        order_.clear();
        for (const std::size_t op : own_) {
            // To swap one that is alone saves nothing unless the other op is not: then it is the other's turn.
            if (all_[op].count == 1) continue;
            const std::int64_t hole = all_[op].hole;
            const std::int64_t key = 2 * hole >= unit_ ? hole : 2 * unit_ - hole;
            order_.push_back({static_cast<std::uint64_t>(key), static_cast<std::int64_t>(op)});
        }
        radix_.sort(order_);
        const auto each = kEffort / std::max<std::int64_t>(static_cast<std::int64_t>(order_.size()), 1);
        const int tries = static_cast<int>(std::clamp<std::int64_t>(each, kFewestTries, kMostTries));
        for (const RadixOrder::Entry& entry : order_) swap_best(index(entry.number), tries);
    }

    // The best swap found so far in which one op gives away tokens over whole tails and another has room for them.
    struct Found {
        std::int64_t score = std::numeric_limits<std::int64_t>::min();
        std::int32_t at_x = -1, at_y = -1;
    };

    void try_swap(std::size_t a, std::int32_t at_x, std::int32_t at_y, std::int64_t moved, Found& best) const {
        const Op& op = all_[a];
        const std::size_t b = index(where_[index(at_y)]);
        const std::int64_t room = all_[b].hole, x = lengths_[index(at_x)], y = lengths_[index(at_y)];
        if (b == a || room < moved || op.tokens - x + y < 1) return;
        const std::int64_t score =
            spread(op.hole) - spread(moved + op.hole - unit_) + spread(room) - spread(room - moved);
        if (score > best.score && bears_swap(a, x, b, y)) best = {score, at_x, at_y};
    }

    void swap_best(std::size_t a, int tries) {
        const Op& op = all_[a];
        if (op.hole == 0 || op.tokens <= unit_) return;
        Found best;
        for (std::int64_t moved = unit_ - op.hole; moved < unit_ && tries > 0; moved += step_) {
            for (std::int32_t at_x = op.head; at_x >= 0 && tries > 0; at_x = next_[index(at_x)]) {
                const std::int64_t wanted = lengths_[index(at_x)] - moved;
                const std::size_t bucket = bucket_of(wanted);
                Nearest nearest(lengths_, buckets_[bucket], buckets_[bucket + 1], wanted);
                --tries;
                for (int time = 0; time < kNearest; ++time) {
                    const std::int32_t at_y = nearest.next();
                    if (at_y < 0) break;
                    --tries;
                    try_swap(a, at_x, at_y, moved, best);
                }
            }
        }
        if (best.at_x >= 0) swap(best.at_x, best.at_y);
    }

    const Problem& problem_;
    const Search& search_;
    Ops& ops_;
    std::vector<Level> levels_;
    std::vector<Op> all_;
    std::vector<std::int32_t> op_of_;   // by sequence
    std::vector<std::int64_t> sorted_;  // sequences by falling length
    // By rank, seconds; then by wave, seconds.
    std::vector<double> loads_, longest_, waves_;
    double bubbles_ = 0.0, limit_ = 0.0;
    std::vector<std::int32_t> first_of_level_, rising_;
    std::vector<std::vector<std::size_t>> ops_of_level_;
    // Of one CP size.
    std::int64_t unit_ = 1, step_ = 1;
    std::vector<std::size_t> own_;
    std::vector<std::int64_t> lengths_;
    std::vector<std::int32_t> buckets_, where_, ids_, next_;
    std::vector<RadixOrder::Entry> order_;
    RadixOrder radix_;
};

}  // namespace

void fill_tails(const Problem& problem, const Search& search, Ops& ops) {
    if (problem.tail > 1) Tails(problem, search, ops).run();
}

}  // namespace tdp::schedule
