// `default_dynamic_cp`: see tdp_megatron/schedule/dynamic_cp.py, which is the reference.
#include <algorithm>

#include "schedule_core.h"
#include "schedule_sort.h"

namespace tdp::schedule {
namespace {

struct Group {
    std::int64_t k, tokens = 0;
    double work = 0.0;
    std::vector<std::int64_t> members;
};
using Groups = std::vector<Group>;

constexpr double kWorkSlack = 1.05;

// Groups of one CP size by age, found by their tokens and work: the least of both is kept over each half, quarter...
class GroupTree {
   public:
    explicit GroupTree(std::size_t most) {
        while (leaves_ < most) leaves_ *= 2;
        nodes_.resize(2 * leaves_);
        groups_.resize(leaves_);
    }
    void clear() {
        std::fill(nodes_.begin(), nodes_.end(), Node{});
        count_ = 0;
    }
    // Leaf of a new group, which is closed until set.
    std::size_t add(std::int64_t group) {
        groups_[count_] = group;
        return count_++;
    }
    void set(std::size_t leaf, std::int64_t tokens, double work) {
        std::size_t node = leaf + leaves_;
        nodes_[node] = {tokens, work};
        while (node > 1) {
            node /= 2;
            const Node &x = nodes_[2 * node], &y = nodes_[2 * node + 1];
            nodes_[node] = {std::min(x.tokens, y.tokens), std::min(x.work, y.work)};
        }
    }
    // A group that may take no more sequences.
    void close(std::size_t leaf) { set(leaf, kFull, kInfinity); }
    std::int64_t group(std::size_t leaf) const { return groups_[leaf]; }

    // Leaf of the oldest group of at most `tokens` that `added` does not bring above `work`, or `none()`.
    std::size_t oldest(std::int64_t tokens, double added, double work) const { return oldest(1, tokens, added, work); }
    // Leaf of the group of at most `tokens` that `added` brings to the least work, if that is below `best`, which it
    // becomes; or `none()`.
    std::size_t least(std::int64_t tokens, double added, double& best) const {
        std::size_t leaf = none();
        least(1, tokens, added, best, leaf);
        return leaf;
    }
    std::size_t none() const { return leaves_; }

   private:
    static constexpr std::int64_t kFull = std::numeric_limits<std::int64_t>::max();
    struct Node {
        std::int64_t tokens = kFull;
        double work = kInfinity;
    };

    std::size_t oldest(std::size_t node, std::int64_t tokens, double added, double work) const {
        if (nodes_[node].tokens > tokens || nodes_[node].work + added > work) return none();
        if (node >= leaves_) return node - leaves_;
        const std::size_t leaf = oldest(2 * node, tokens, added, work);
        return leaf != none() ? leaf : oldest(2 * node + 1, tokens, added, work);
    }
    void least(std::size_t node, std::int64_t tokens, double added, double& best, std::size_t& leaf) const {
        if (nodes_[node].tokens > tokens || nodes_[node].work + added >= best) return;
        if (node >= leaves_) {
            best = nodes_[node].work + added;
            leaf = node - leaves_;
            return;
        }
        least(2 * node, tokens, added, best, leaf);
        least(2 * node + 1, tokens, added, best, leaf);
    }

    std::size_t leaves_ = 1, count_ = 0;
    std::vector<Node> nodes_;
    std::vector<std::int64_t> groups_;
};

class DynamicCp {
   public:
    DynamicCp(const Problem& problem, std::int64_t unit, const Search* search, double at_most)
        : problem_(problem), search_(search), at_most_(at_most), lengths_(problem.count) {
        for (std::size_t i = 0; i < problem.count; ++i) {
            lengths_[i] = divide_up(problem.seqlens[i], unit) * unit;
        }
        for (const std::int64_t k : problem.cp_sizes) trees_.emplace_back(static_cast<std::size_t>(problem.num_ranks / k));
        // Halves of a microbatch are other microbatches: nothing is certain before all are made.
        if (problem.microbatches_multiple > 1) search_ = nullptr;
    }

    // False where the step would be longer than it may be.
    bool run(Ops& ops) {
        std::vector<RadixOrder::Entry> order;
        for (std::size_t i = 0; i < problem_.count; ++i) {
            order.push_back({~static_cast<std::uint64_t>(lengths_[i]), static_cast<std::int64_t>(i)});
        }
        RadixOrder().sort(order);
        std::vector<std::int64_t> alive;
        for (const RadixOrder::Entry& entry : order) alive.push_back(entry.number);
        if (search_ != nullptr) longest_.assign(static_cast<std::size_t>(problem_.num_ranks), 0.0);
        const auto& sizes = problem_.cp_sizes;
        const bool all_ranks = std::find(sizes.begin(), sizes.end(), problem_.num_ranks) != sizes.end();
        std::vector<Groups> made;
        while (!alive.empty()) {
            Groups groups;
            left_.clear();
            fill(alive, groups);
            if (!spread(groups) && all_ranks) on_all_ranks(alive, groups);
            alive.swap(left_);
            if (search_ != nullptr && bound(groups, alive) > at_most_ * (1.0 + 1e-9)) return false;
            made.push_back(std::move(groups));
        }
        part(made);
        for (const Groups& groups : made) {
            std::int64_t first = 0;
            for (const Group& group : groups) {
                ops.ids.insert(ops.ids.end(), group.members.begin(), group.members.end());
                ops.add(first, group.k);
                first += group.k;
            }
            for (; first < problem_.num_ranks; first += sizes[0]) ops.add(first, sizes[0]);
        }
        return true;
    }

   private:
    // The step cannot be shorter: what has been placed, and all else spread evenly without padding.
    double bound(const Groups& groups, const std::vector<std::int64_t>& alive) {
        const Cost& cost = problem_.cost;
        std::int64_t first = 0;
        double wave = 0.0;
        for (const Group& group : groups) {
            std::int64_t tokens = 0;
            double squares = 0.0;
            for (const std::int64_t i : group.members) {
                const std::int64_t own = padded(length(i), group.k);
                tokens += own;
                squares += cost.squares(own);
            }
            const double seconds = op_seconds(problem_, tokens, squares, problem_.level(group.k));
            wave = std::max(wave, seconds);
            busy_ += seconds * static_cast<double>(group.k);
            for (std::int64_t rank = first; rank < first + group.k; ++rank) {
                double& longest = longest_[static_cast<std::size_t>(rank)];
                sum_of_longest_ += std::max(seconds - longest, 0.0);
                longest = std::max(longest, seconds);
            }
            first += group.k;
        }
        double work = 0.0;
        for (const std::int64_t i : alive) {
            work += cost.a * static_cast<double>(length(i)) + cost.b * cost.squares(length(i));
        }
        const double ranks = static_cast<double>(problem_.num_ranks);
        waves_ += wave;
        if (search_->lockstep) return waves_ + work / ranks;
        const double bubbles = search_->pipeline ? search_->stages_before * sum_of_longest_ : 0.0;
        return (busy_ + work + bubbles) / ranks;
    }

    std::int64_t length(std::int64_t i) const { return lengths_[static_cast<std::size_t>(i)]; }
    static std::int64_t padded(std::int64_t length, std::int64_t k) {
        const std::int64_t unit = k > 1 ? 2 * k : 1;
        return divide_up(length, unit) * unit;
    }
    std::int64_t padded(const std::vector<std::int64_t>& members, std::int64_t k) const {
        std::int64_t tokens = 0;
        for (const std::int64_t i : members) tokens += padded(length(i), k);
        return tokens;
    }

    // Groups of one microbatch; what finds no place goes to left_.
    void fill(const std::vector<std::int64_t>& alive, Groups& groups) {
        const auto& sizes = problem_.cp_sizes;
        for (GroupTree& tree : trees_) tree.clear();
        free_ = problem_.num_ranks;
        busiest_ = 0.0;
        cap_ = kInfinity;
        for (const std::int64_t i : alive) {
            const Place place = find(i, groups.empty());
            if (place.level == sizes.size()) {
                left_.push_back(i);
                continue;
            }
            const std::int64_t k = sizes[place.level];
            GroupTree& tree = trees_[place.level];
            const auto size = static_cast<double>(length(i));
            std::size_t leaf = place.leaf;
            if (groups.empty()) cap_ = size * static_cast<double>(problem_.token_limit) * kWorkSlack;
            if (leaf == tree.none()) {
                leaf = tree.add(static_cast<std::int64_t>(groups.size()));
                groups.push_back(Group{k, 0, 0.0, {}});
                free_ -= k;
            }
            Group& group = groups[static_cast<std::size_t>(tree.group(leaf))];
            group.tokens += padded(length(i), k);
            group.work += size * size / static_cast<double>(k);
            group.members.push_back(i);
            busiest_ = std::max(busiest_, group.work);
            if (static_cast<std::int64_t>(group.members.size()) < problem_.max_sequences) {
                tree.set(leaf, group.tokens, group.work);
            } else {
                tree.close(leaf);
            }
        }
    }

    struct Place {
        std::size_t level, leaf;  // all levels for nowhere, no leaf for a new group
    };

    Place find(std::int64_t i, bool seed) const {
        const auto& sizes = problem_.cp_sizes;
        const auto size = static_cast<double>(length(i));
        const auto room = [&](std::size_t level) {
            return problem_.token_limit * sizes[level] - padded(length(i), sizes[level]);
        };
        const auto added = [&](std::size_t level) { return size * size / static_cast<double>(sizes[level]); };
        // The first place that leaves the busiest group the busiest is as good as any.
        for (std::size_t level = 0; level < sizes.size(); ++level) {
            const std::int64_t tokens = room(level);
            if (tokens < 0) continue;
            const std::size_t leaf = trees_[level].oldest(tokens, added(level), busiest_);
            if (leaf != trees_[level].none()) return {level, leaf};
            if (seed || (free_ >= sizes[level] && added(level) <= busiest_)) return {level, leaf};
        }
        Place place{sizes.size(), 0};
        double best = std::nextafter(cap_, kInfinity);
        for (std::size_t level = 0; level < sizes.size(); ++level) {
            const std::int64_t tokens = room(level);
            if (tokens < 0) continue;
            const std::size_t leaf = trees_[level].least(tokens, added(level), best);
            if (leaf != trees_[level].none()) place = {level, leaf};
            if (free_ >= sizes[level] && added(level) < best) {
                best = added(level);
                place = {level, trees_[level].none()};
            }
        }
        return place;
    }

    // Widens groups until they have all ranks; whether they do.
    bool spread(Groups& groups) const {
        const auto& sizes = problem_.cp_sizes;
        std::int64_t free = problem_.num_ranks;
        for (const Group& group : groups) free -= group.k;
        while (free > 0) {
            const std::int64_t narrowest = groups.back().k;
            const auto next = std::upper_bound(sizes.begin(), sizes.end(), narrowest);
            if (next == sizes.end() || *next - narrowest > free) return false;
            const std::int64_t wider = *next;
            const auto first = std::partition_point(groups.begin(), groups.end(),
                                                    [&](const Group& group) { return group.k > narrowest; });
            const auto at = std::find_if(first, groups.end(), [&](const Group& group) {
                return padded(group.members, wider) <= problem_.token_limit * wider;
            });
            if (at == groups.end()) return false;
            // Falling sizes are aligned ones.
            at->k = wider;
            std::rotate(first, at, at + 1);
            free -= wider - narrowest;
        }
        return true;
    }

    // All that fits as one group of all ranks, if anything does; what does not goes to left_.
    void on_all_ranks(const std::vector<std::int64_t>& alive, Groups& groups) {
        Group whole{problem_.num_ranks, 0, 0.0, {}};
        std::vector<std::int64_t> left;
        for (const std::int64_t i : alive) {
            const std::int64_t tokens = padded(length(i), whole.k);
            const bool fits = whole.tokens + tokens <= problem_.token_limit * whole.k;
            if (fits && static_cast<std::int64_t>(whole.members.size()) < problem_.max_sequences) {
                whole.tokens += tokens;
                whole.members.push_back(i);
            } else {
                left.push_back(i);
            }
        }
        if (whole.members.empty()) return;
        groups.assign(1, std::move(whole));
        left_.swap(left);
    }

    // Halves microbatches, from the last to the first and again, until their number is a multiple.
    void part(std::vector<Groups>& made) const {
        const auto multiple = static_cast<std::size_t>(problem_.microbatches_multiple);
        std::size_t missing = (multiple - made.size() % multiple) % multiple;
        std::size_t at = made.size(), failed = 0;
        while (missing > 0 && failed < made.size()) {
            at = (at > 0 ? at : made.size()) - 1;
            Groups first, second;
            if (halves(made[at], first, second)) {
                made[at] = std::move(second);
                made.push_back(std::move(first));
                --missing;
                failed = 0;
            } else {
                ++failed;
            }
        }
    }

    bool halves(const Groups& groups, Groups& first, Groups& second) const {
        std::int64_t ranks = 0;
        for (const Group& group : groups) ranks += group.k;
        if (groups.size() < 2 || ranks < problem_.num_ranks) return false;
        ranks = 0;
        for (const Group& group : groups) {
            (ranks < problem_.num_ranks / 2 ? first : second).push_back(group);
            ranks += group.k;
        }
        return spread(first) && spread(second);
    }

    const Problem& problem_;
    const Search* search_;
    double at_most_;
    double waves_ = 0.0, busy_ = 0.0, sum_of_longest_ = 0.0;
    std::vector<double> longest_;  // by rank
    std::vector<std::int64_t> lengths_, left_;
    std::vector<GroupTree> trees_;  // by CP size
    // Of the microbatch being filled.
    std::int64_t free_ = 0;
    double busiest_ = 0.0, cap_ = 0.0;
};

}  // namespace

Ops dynamic_cp(const Problem& problem, std::int64_t unit) {
    Ops ops;
    DynamicCp(problem, unit, nullptr, kInfinity).run(ops);
    return ops;
}

bool dynamic_cp_within(const Problem& problem, const Search& search, double seconds, Ops& ops) {
    return DynamicCp(problem, 1, &search, seconds).run(ops);
}

}  // namespace tdp::schedule
