// Microbatches that grow: see GrowingOp, _Rooms, wide_ops and fill_lowest in tdp_megatron/schedule/wave_building.py.
#include <algorithm>

#include "schedule_waves.h"

namespace tdp::schedule {

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
    const Level& level = scratch_.levels[static_cast<std::size_t>(op.level)];
    const std::int64_t room = scratch_.room(level, op.tokens, op.squares, limit_);
    if (room >= 0) list_.insert({room, number});
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

void LowestFill::find_top() {
    source_ = Source::none;
    if (group_ < fresh_->size()) {
        const FreshOps& group = (*fresh_)[group_];
        top_ = {group.key, group.first + within_};
        source_ = Source::fresh;
    }
    if (!stack_.empty() && (source_ == Source::none || stack_.back() < top_)) {
        top_ = stack_.back();
        source_ = Source::stack;
    }
    if (!heap_.empty() && (source_ == Source::none || heap_.top() < top_)) {
        top_ = heap_.top();
        source_ = Source::heap;
    }
}

void LowestFill::pop() {
    if (source_ == Source::heap) {
        heap_.pop();
    } else if (source_ == Source::stack) {
        stack_.pop_back();
    } else if (++within_ == (*fresh_)[group_].count) {
        ++group_;
        within_ = 0;
    }
}

void LowestFill::insert(Item item) {
    if (stack_.empty() || item < stack_.back()) {
        stack_.push_back(item);
    } else {
        heap_.push(item);
    }
}

void LowestFill::replace_top(Item item) {
    if (source_ == Source::heap && !stack_.empty() && stack_.back() < item) {
        heap_.replace_top(item);
    } else {
        pop();
        insert(item);
    }
}

bool LowestFill::run(const Scratch& scratch, const std::int32_t* rest, std::size_t count, std::vector<FreshOps>& fresh,
                     GrowingOps& ops, std::vector<std::int32_t>& op_of) {
    const std::int64_t max_sequences = scratch.problem.max_sequences;
    std::sort(fresh.begin(), fresh.end(), [](const FreshOps& x, const FreshOps& y) {
        return x.key != y.key ? x.key < y.key : x.first < y.first;
    });
    fresh_ = &fresh;
    group_ = 0;
    within_ = 0;
    stack_.clear();
    heap_.clear();
    parked_.clear();
    parked_key_.resize(ops.size());
    for (std::size_t at = 0; at < count; ++at) {
        const auto i = static_cast<std::size_t>(rest[at]);
        const std::int64_t size = scratch.lengths[i];
        while (!parked_.empty() && -parked_.top().first >= size) {
            const std::int64_t number = parked_.top().second;
            parked_.pop();
            insert({parked_key_[static_cast<std::size_t>(number)], number});
        }
        for (find_top(); source_ != Source::none; find_top()) {
            const GrowingOp& op = ops[static_cast<std::size_t>(top_.second)];
            const Level& level = scratch.levels[static_cast<std::size_t>(op.level)];
            const std::int64_t room = level.token_cap - op.tokens;  // both whole pad multiples
            const bool open = op.count < max_sequences;
            if (size <= room && open) break;
            pop();
            if (open) {
                parked_key_[static_cast<std::size_t>(top_.second)] = top_.first;
                parked_.push({-room, top_.second});
            }
        }
        if (source_ == Source::none) return false;
        GrowingOp& op = ops[static_cast<std::size_t>(top_.second)];
        op.add(scratch, i);
        op_of[i] = static_cast<std::int32_t>(top_.second);
        replace_top({op.seconds - op.target, top_.second});
    }
    return true;
}

}  // namespace tdp::schedule
