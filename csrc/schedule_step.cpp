// How long a step takes: see simulate in tdp_megatron/schedule/simulate.py, which is the reference.
#include <algorithm>

#include "schedule_core.h"

namespace tdp::schedule {
namespace {

double lockstep_step(const PlanOps& ops, const std::vector<double>& seconds) {
    std::vector<std::int64_t> reached(static_cast<std::size_t>(ops.num_ranks), 0);
    std::vector<double> longest;
    for (std::size_t op = 0; op < ops.count; ++op) {
        const auto begin = reached.begin() + ops.first_rank[op], end = begin + ops.cp_size[op];
        const std::int64_t wave = *begin;
        if (std::any_of(begin, end, [&](std::int64_t other) { return other != wave; })) return -1.0;
        std::fill(begin, end, wave + 1);
        if (static_cast<std::size_t>(wave) == longest.size()) longest.push_back(0.0);
        double& own = longest[static_cast<std::size_t>(wave)];
        own = std::max(own, seconds[op]);
    }
    const auto waves = static_cast<std::int64_t>(longest.size());
    if (std::any_of(reached.begin(), reached.end(), [&](std::int64_t own) { return own != waves; })) return -1.0;
    double step = 0.0;
    for (const double own : longest) step += own;
    return step;
}

double pipeline_step(const PlanOps& ops, const std::vector<double>& seconds, double stages_before) {
    const auto ranks = static_cast<std::size_t>(ops.num_ranks);
    std::vector<double> busy(ranks, 0.0), longest(ranks, 0.0);
    for (std::size_t op = 0; op < ops.count; ++op) {
        const auto first = static_cast<std::size_t>(ops.first_rank[op]);
        for (std::size_t rank = first; rank < first + static_cast<std::size_t>(ops.cp_size[op]); ++rank) {
            busy[rank] += seconds[op];
            longest[rank] = std::max(longest[rank], seconds[op]);
        }
    }
    double step = 0.0;
    for (std::size_t rank = 0; rank < ranks; ++rank) step = std::max(step, busy[rank] + stages_before * longest[rank]);
    return step;
}

double barrier_step(const PlanOps& ops, const std::vector<double>& seconds) {
    double before = 0.0;
    std::vector<double> ready(static_cast<std::size_t>(ops.num_ranks), 0.0);
    for (std::size_t op = 0; op < ops.count; ++op) {
        if (op > 0 && ops.group[op] != ops.group[op - 1]) {
            before = *std::max_element(ready.begin(), ready.end());
            std::fill(ready.begin(), ready.end(), before);
        }
        const auto begin = ready.begin() + ops.first_rank[op], end = begin + ops.cp_size[op];
        std::fill(begin, end, *std::max_element(begin, end) + seconds[op]);
    }
    return *std::max_element(ready.begin(), ready.end());
}

}  // namespace

double free_step(const std::int64_t* first_rank, const std::int64_t* cp_size, const double* seconds, std::size_t count,
                 std::int64_t num_ranks) {
    std::vector<double> ready(static_cast<std::size_t>(num_ranks), 0.0);
    double step = 0.0;
    for (std::size_t op = 0; op < count; ++op) {
        const auto begin = ready.begin() + first_rank[op];
        const auto end = begin + cp_size[op];
        const double finish = *std::max_element(begin, end) + seconds[op];
        std::fill(begin, end, finish);
        step = std::max(step, finish);
    }
    return step;
}

double plan_step(const PlanOps& ops, const Cost& cost, Mode mode, double stages_before) {
    std::vector<double> seconds(ops.count);
    for (std::size_t op = 0; op < ops.count; ++op) {
        double squares = 0.0;
        for (std::int64_t at = ops.offsets[op]; at < ops.offsets[op + 1]; ++at) squares += cost.squares(ops.padded[at]);
        seconds[op] = cost.seconds(ops.tokens_per_rank[op], squares, ops.cp_size[op]);
    }
    switch (mode) {
        case Mode::kLockstep:
            return lockstep_step(ops, seconds);
        case Mode::kPipeline:
            return pipeline_step(ops, seconds, stages_before);
        case Mode::kBarrier:
            return barrier_step(ops, seconds);
        case Mode::kFree:
            break;
    }
    return free_step(ops.first_rank, ops.cp_size, seconds.data(), ops.count, ops.num_ranks);
}

}  // namespace tdp::schedule
