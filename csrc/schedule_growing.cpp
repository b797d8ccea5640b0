// Microbatches that grow: see GrowingOp, _Rooms, wide_ops and fill_lowest in tdp_megatron/schedule/wave_building.py.
#include <algorithm>

#include "schedule_waves.h"

namespace tdp::schedule {
namespace {

// With fewer ops heaps are as good.
constexpr std::size_t kFewestForBuckets = 64;

}  // namespace

std::int32_t Rooms::open(std::size_t level, std::size_t i) {
    ops_.push_back({});
    ops_.back().level = static_cast<std::int32_t>(level);
    const auto number = static_cast<std::int32_t>(ops_.size()) - 1;
    put(number, i);
    return number;
}

std::int32_t Rooms::fill(std::size_t i) {
    const auto number = static_cast<std::int32_t>(list_.take(scratch_.lengths[i]));
    if (number >= 0) put(number, i);
    return number;
}

void Rooms::put(std::int32_t number, std::size_t i) {
    GrowingOp& op = ops_[static_cast<std::size_t>(number)];
    op.add(scratch_, i);
    if (op.count >= scratch_.problem.max_sequences) return;
    const std::int64_t room = under_[static_cast<std::size_t>(op.level)].left(op.tokens, op.squares);
    if (room >= 0) list_.insert(room, number);
}

std::size_t AloneTable::choose_level(std::size_t i, double limit) {
    const std::size_t levels = scratch_.levels.size();
    for (std::size_t row = seconds_.size() / levels; row <= i; ++row) {
        for (const Level& level : scratch_.levels) seconds_.push_back(scratch_.alone(level, row));
    }
    const double* alone = seconds_.data() + i * levels;
    std::size_t best = 0;
    for (std::size_t number = 0; number < levels; ++number) {
        if (alone[number] < alone[best]) best = number;
        if (alone[best] <= limit) break;
    }
    return best;
}

void wide_ops(const Scratch& scratch, const Numbers& alive, const std::vector<std::uint8_t>& chosen, double limit,
              GrowingOps& ops, std::vector<std::int32_t>& op_of) {
    for (std::size_t level = scratch.levels.size(); level-- > 1;) {
        Rooms rooms(scratch, limit, ops);
        for (std::size_t at = 0; at < chosen.size(); ++at) {
            if (chosen[at] != level) continue;
            const auto i = static_cast<std::size_t>(alive[at]);
            const std::int32_t number = rooms.fill(i);
            op_of[i] = number >= 0 ? number : rooms.open(level, i);
        }
    }
}

void LowestFill::start(const std::vector<FreshOps>& fresh, std::size_t ops, std::size_t sequences) {
    fresh_ = &fresh;
    group_ = 0;
    within_ = 0;
    least_.clear();
    few_ = ops < kFewestForBuckets;
    parked_few_.clear();
    for (const std::size_t i : touched_) parked_[i] = -1;
    touched_.clear();
    woken_ = 0;
    next_.resize(ops);
    keys_.resize(ops);
    // Towards the end all keys are close together.
    heads_.assign(few_ ? 1 : std::max(ops, 2 * sequences), -1);
    bucket_ = 0;
    // Keys are below 0 until an op is full; what is above shares the last bucket.
    lowest_ = fresh.empty() ? 0.0 : fresh.front().key;
    scale_ = lowest_ < 0.0 ? static_cast<double>(heads_.size()) / -lowest_ : 0.0;
}

std::size_t LowestFill::bucket_of(double key) const {
    const double at = (key - lowest_) * scale_;
    if (!(at > 0.0)) return 0;
    return at < static_cast<double>(heads_.size()) ? static_cast<std::size_t>(at) : heads_.size() - 1;
}

bool LowestFill::find_top() {
    const bool has_fresh = group_ < fresh_->size();
    if (has_fresh) {
        const FreshOps& group = (*fresh_)[group_];
        top_ = {group.key, group.first + within_};
    }
    while (least_.empty() && bucket_ + 1 < heads_.size()) {
        // A fresh op before all that a bucket can hold needs no look into it.
        if (has_fresh && bucket_of(top_.first) <= bucket_) break;
        for (std::int32_t number = heads_[++bucket_]; number >= 0; number = next_[static_cast<std::size_t>(number)]) {
            least_.push({keys_[static_cast<std::size_t>(number)], number});
        }
        heads_[bucket_] = -1;
    }
    top_is_fresh_ = has_fresh && (least_.empty() || top_ < least_.top());
    if (top_is_fresh_) return true;
    if (least_.empty()) return false;
    top_ = least_.top();
    return true;
}

void LowestFill::pop() {
    if (!top_is_fresh_) {
        least_.pop();
    } else if (++within_ == (*fresh_)[group_].count) {
        ++group_;
        within_ = 0;
    }
}

void LowestFill::insert(Item item) {
    const std::size_t bucket = bucket_of(item.first);
    const auto number = static_cast<std::size_t>(item.second);
    keys_[number] = item.first;
    if (bucket <= bucket_) {
        least_.push(item);
    } else {
        next_[number] = heads_[bucket];
        heads_[bucket] = static_cast<std::int32_t>(number);
    }
}

void LowestFill::park(const Scratch& scratch, std::int64_t room) {
    const std::size_t number = static_cast<std::size_t>(top_.second);
    keys_[number] = top_.first;
    if (few_) {
        parked_few_.push({-room, top_.second});
        return;
    }
    const std::size_t i = scratch.first_not_longer(room);
    if (i == scratch.lengths.size()) return;
    if (parked_.size() != scratch.lengths.size()) parked_.resize(scratch.lengths.size(), -1);
    if (parked_[i] < 0) touched_.push_back(i);
    next_[number] = parked_[i];
    parked_[i] = static_cast<std::int32_t>(number);
}

void LowestFill::wake(std::size_t i) {
    if (touched_.empty()) {
        woken_ = i + 1;
        return;
    }
    for (; woken_ <= i; ++woken_) {
        for (std::int32_t number = parked_[woken_]; number >= 0;) {
            const std::int32_t following = next_[static_cast<std::size_t>(number)];
            insert({keys_[static_cast<std::size_t>(number)], number});
            number = following;
        }
        parked_[woken_] = -1;
    }
}

bool LowestFill::run(const Scratch& scratch, const std::int32_t* rest, std::size_t count, std::vector<FreshOps>& fresh,
                     GrowingOps& ops, std::vector<std::int32_t>& op_of) {
    const std::int64_t max_sequences = scratch.problem.max_sequences;
    std::sort(fresh.begin(), fresh.end(), [](const FreshOps& x, const FreshOps& y) {
        return x.key != y.key ? x.key < y.key : x.first < y.first;
    });
    start(fresh, ops.size(), count);
    for (std::size_t at = 0; at < count; ++at) {
        const auto i = static_cast<std::size_t>(rest[at]);
        const std::int64_t size = scratch.lengths[i];
        if (!few_) wake(i);
        while (!parked_few_.empty() && -parked_few_.top().first >= size) {
            const std::int64_t number = parked_few_.top().second;
            parked_few_.pop();
            insert({keys_[static_cast<std::size_t>(number)], number});
        }
        bool found = find_top();
        for (; found; found = find_top()) {
            const GrowingOp& op = ops[static_cast<std::size_t>(top_.second)];
            const Level& level = scratch.levels[static_cast<std::size_t>(op.level)];
            const std::int64_t room = level.token_cap - op.tokens;  // both whole pad multiples
            const bool open = op.count < max_sequences;
            if (size <= room && open) break;
            pop();
            if (open) park(scratch, room);
        }
        if (!found) return false;
        GrowingOp& op = ops[static_cast<std::size_t>(top_.second)];
        op.add(scratch, i);
        op_of[i] = static_cast<std::int32_t>(top_.second);
        pop();
        insert({op.seconds - op.target, top_.second});
    }
    return true;
}

}  // namespace tdp::schedule
