// Columns of microbatches for pipelines, before most sequences are placed; the reference is column_estimates.py in
// tdp_megatron/schedule.
#pragma once

#include <map>
#include <memory>

#include "schedule_waves.h"

namespace tdp::schedule {

struct Rule {
    double time, stretch, tall;
    bool apart;
};

struct Column {
    double seconds = 0.0, longest = 0.0;
    std::int64_t used = 0;
};

struct Loads {
    std::vector<Column> columns;
    Numbers where;  // first column of each tall op
};

struct TallOp {
    double seconds;
    std::int32_t level;
};

struct Tall {
    std::vector<TallOp> ops;
    std::vector<std::int32_t> op_of;  // of the sequences before first_rest
    std::size_t first_rest = 0;
};

// Of sequences that would take too long on the fewest ranks, those before which all do: ops on more ranks.
struct WideOps {
    std::vector<TallOp> ops;            // by falling CP size, then time
    std::vector<std::uint8_t> chosen;   // level of each sequence
    std::vector<std::int32_t> op_of;    // of each sequence on more ranks
};

struct Estimate {
    double step;
    std::int64_t count;
    std::shared_ptr<const Tall> tall;
    Loads loads;
};

class ColumnEstimates {
   public:
    ColumnEstimates(const Scratch& scratch, double bubbles);

    std::shared_ptr<Estimate> estimate(const Rule& rule, std::int64_t count, double most);
    void estimate_apart(Estimate& best);

   protected:
    double work(std::size_t i) const { return scratch_.works[i] / static_cast<double>(width_); }
    double value(const Column& column) const { return column.seconds + bubbles_ * column.longest; }
    std::int64_t left(const Column& column, std::int64_t count) const { return count - column.used; }
    void estimate_together(Estimate& best);
    double least(const Tall& tall, std::int64_t count) const;
    std::shared_ptr<const Tall> make_tall(double limit, double tall_from);
    const WideOps& wide_under(double limit);
    std::size_t first_within(double seconds) const;
    std::size_t columns_of(const TallOp& op) const;
    void put(Loads& loads, std::size_t first, const TallOp& op, std::size_t size) const;
    bool apart(const std::vector<TallOp>& ops, std::int64_t count, Loads& loads);
    bool fits(const Column& column, double seconds, std::int64_t count, double step) const;
    bool together(const std::vector<TallOp>& ops, std::int64_t count, double step, Loads& loads) const;
    bool has_room(const Tall& tall, const Loads& loads, std::int64_t count) const;
    double target(const Column& column, std::int64_t count, double step) const;
    double room(const Loads& loads, std::int64_t count, double step) const;

    const Scratch& scratch_;
    double bubbles_;
    bool always_apart_;
    std::int64_t width_;  // ranks of a column
    std::size_t num_;
    AloneTable alone_;
    double overhead_ = 0.0, empty_ = 0.0, mean_work_ = 0.0;
    std::vector<double> work_from_, times_;
    std::vector<std::int64_t> tokens_from_;
    Heap<double> heap_;

   private:
    // Kept from one use to the next.
    Loads spare_;
    std::map<double, WideOps> wide_;    // by time limit
    std::vector<double> narrow_alone_;  // on the fewest ranks, of the longest sequences
};

}  // namespace tdp::schedule
