// Packing algorithms and the event model of tdp_megatron/schedule.
#include <algorithm>

#include <pybind11/stl.h>

#include "arrays.h"
#include "schedule_core.h"

namespace tdp {
namespace {

using schedule::Cost;
using schedule::Ops;
using schedule::Problem;
using schedule::Search;

// The arguments that every algorithm shares; keeps the array of lengths alive.
struct Input {
    Array<int64_t> seqlens;
    Problem problem;
};

Cost to_cost(const std::vector<double>& cost) {
    if (cost.size() != 10) throw std::invalid_argument("cost must have 10 numbers");
    return {cost[0], cost[1], cost[2], static_cast<int64_t>(cost[3]), static_cast<int64_t>(cost[4]),
            cost[5], cost[6], cost[7], cost[8], cost[9]};
}

schedule::Mode to_mode(const std::string& name) {
    if (name == "free") return schedule::Mode::kFree;
    if (name == "lockstep") return schedule::Mode::kLockstep;
    if (name == "barrier") return schedule::Mode::kBarrier;
    if (name == "pipeline") return schedule::Mode::kPipeline;
    throw std::invalid_argument("mode must be free, lockstep, barrier or pipeline");
}

// Number of ops, all of which must lie inside the ranks.
int64_t check_ranks(const Array<int64_t>& first_rank, const Array<int64_t>& cp_size, int64_t num_ranks) {
    const int64_t count = size_1d(first_rank, "first_rank");
    require_size(cp_size, "cp_size", count);
    if (num_ranks < 1) throw std::invalid_argument("num_ranks must be at least 1");
    for (int64_t op = 0; op < count; ++op) {
        const int64_t first = first_rank.data()[op], k = cp_size.data()[op];
        if (first < 0 || k < 1 || first > num_ranks - k)
            throw std::invalid_argument("op " + std::to_string(op) + " lies outside the ranks");
    }
    return count;
}

Input make_input(const Array<int64_t>& seqlens, const std::vector<int64_t>& cp_sizes, int64_t num_ranks,
                 int64_t token_limit, int64_t tail, int64_t max_sequences, int64_t microbatches_multiple,
                 const std::vector<double>& cost) {
    if (cp_sizes.empty() || num_ranks < 1 || token_limit < 1 || tail < 1 || max_sequences < 1 ||
        microbatches_multiple < 1)
        throw std::invalid_argument("layout and limits must be at least 1");
    for (const int64_t k : cp_sizes) {
        if (k < 1 || num_ranks % k != 0) throw std::invalid_argument("cp_sizes must divide the ranks");
    }
    const int64_t n = size_1d(seqlens, "seqlens");
    int64_t longest = 0;
    for (const int64_t k : cp_sizes) {
        const int64_t pad = k > 1 ? 2 * k : 1;
        longest = std::max(longest, token_limit * k / pad * pad);
    }
    for (int64_t i = 0; i < n; ++i) {
        if (seqlens.data()[i] < 0 || seqlens.data()[i] > longest)
            throw std::invalid_argument("seqlens must be in [0, " + std::to_string(longest) + "], got " +
                                        std::to_string(seqlens.data()[i]) + " at " + std::to_string(i));
    }
    Problem problem{seqlens.data(), static_cast<size_t>(n), cp_sizes, num_ranks, token_limit, tail, max_sequences,
                    microbatches_multiple,
                    to_cost(cost)};
    return {seqlens, std::move(problem)};
}

py::tuple to_python(const Ops& ops) {
    return py::make_tuple(to_array(ops.first_rank), to_array(ops.cp_size), to_array(ops.offsets), to_array(ops.ids));
}

// Refuses what would reach outside of an array.
Ops from_python(const Problem& problem, const Array<int64_t>& first_rank, const Array<int64_t>& cp_size,
                const Array<int64_t>& offsets, const Array<int64_t>& sample_ids) {
    const int64_t count = size_1d(first_rank, "first_rank"), n = static_cast<int64_t>(problem.count);
    require_size(cp_size, "cp_size", count);
    require_size(offsets, "offsets", count + 1);
    require_size(sample_ids, "sample_ids", n);
    Ops ops;
    ops.first_rank.assign(first_rank.data(), first_rank.data() + count);
    ops.cp_size.assign(cp_size.data(), cp_size.data() + count);
    ops.offsets.assign(offsets.data(), offsets.data() + count + 1);
    ops.ids.assign(sample_ids.data(), sample_ids.data() + n);
    for (size_t op = 0; op < ops.first_rank.size(); ++op) {
        const int64_t first = ops.first_rank[op], k = ops.cp_size[op];
        if (std::find(problem.cp_sizes.begin(), problem.cp_sizes.end(), k) == problem.cp_sizes.end())
            throw std::invalid_argument("cp_size " + std::to_string(k) + " must be allowed");
        if (first < 0 || first > problem.num_ranks - k)
            throw std::invalid_argument("op " + std::to_string(op) + " must lie inside the ranks");
        if (ops.offsets[op] > ops.offsets[op + 1]) throw std::invalid_argument("offsets must rise");
    }
    if (ops.offsets.front() != 0 || ops.offsets.back() != n)
        throw std::invalid_argument("offsets must end with " + std::to_string(n));
    std::vector<bool> seen(problem.count, false);
    for (const int64_t id : ops.ids) {
        if (id < 0 || id >= n || seen[static_cast<size_t>(id)])
            throw std::invalid_argument("sample_ids must hold each number once, got " + std::to_string(id));
        seen[static_cast<size_t>(id)] = true;
    }
    return ops;
}

template <class Run>
py::tuple without_gil(Run run) {
    Ops ops;
    {
        py::gil_scoped_release release;
        ops = run();
    }
    return to_python(ops);
}

}  // namespace

void register_schedule(py::module_& m) {
    py::class_<Input>(m, "ScheduleInput", "Lengths, layout, limits and cost of one global batch, for schedule_*.")
        .def(py::init(&make_input), py::arg("seqlens").noconvert(), py::arg("cp_sizes"), py::arg("num_ranks"),
             py::arg("token_limit"), py::arg("tail"), py::arg("max_sequences"), py::arg("microbatches_multiple"),
             py::arg("cost"));
    m.def(
        "schedule_buddy",
        [](const Input& input, double lower_bound) {
            return without_gil([&] { return schedule::buddy(input.problem, lower_bound); });
        },
        py::arg("input"), py::arg("lower_bound"), "Ops as (first_rank, cp_size, offsets, sample_ids), int64.");
    m.def(
        "schedule_waves",
        [](const Input& input, double lower_bound, bool lockstep, bool pipeline, double stages_before) {
            const Search search{stages_before, lockstep, pipeline, lower_bound};
            return without_gil([&] { return schedule::waves(input.problem, search); });
        },
        py::arg("input"), py::arg("lower_bound"), py::arg("lockstep"), py::arg("pipeline"), py::arg("stages_before"),
        "Ops as (first_rank, cp_size, offsets, sample_ids), int64.");
    const auto def_static = [&m](const char* name, Ops (*algorithm)(const Problem&, int64_t), const char* doc) {
        m.def(
            name,
            [algorithm](const Input& input, int64_t cp_size) {
                if (cp_size < 1 || input.problem.num_ranks % cp_size != 0)
                    throw std::invalid_argument("cp_size must divide the ranks");
                return without_gil([&] { return algorithm(input.problem, cp_size); });
            },
            py::arg("input"), py::arg("cp_size"), doc);
    };
    def_static("schedule_lpt", schedule::lpt, "Ops as (first_rank, cp_size, offsets, sample_ids), int64.");
    def_static("schedule_kk", schedule::kk, "Ops as (first_rank, cp_size, offsets, sample_ids), int64.");
    def_static("schedule_best_fit", schedule::best_fit, "Packs as (zeros, cp_size, offsets, sample_ids), int64.");
    def_static("schedule_next_fit", schedule::next_fit, "Packs as (zeros, cp_size, offsets, sample_ids), int64.");
    m.def(
        "schedule_fill_tails",
        [](const Input& input, bool lockstep, bool pipeline, double stages_before, const Array<int64_t>& first_rank,
           const Array<int64_t>& cp_size, const Array<int64_t>& offsets, const Array<int64_t>& sample_ids) {
            Ops ops = from_python(input.problem, first_rank, cp_size, offsets, sample_ids);
            const Search search{stages_before, lockstep, pipeline, 0.0};
            return without_gil([&] {
                schedule::fill_tails(input.problem, search, ops);
                return std::move(ops);
            });
        },
        py::arg("input"), py::arg("lockstep"), py::arg("pipeline"), py::arg("stages_before"),
        py::arg("first_rank").noconvert(), py::arg("cp_size").noconvert(), py::arg("offsets").noconvert(),
        py::arg("sample_ids").noconvert(), "Ops as (first_rank, cp_size, offsets, sample_ids), int64.");
    m.def(
        "schedule_stream_wave",
        [](const Input& input, int64_t leader) {
            const auto count = static_cast<int64_t>(input.problem.count);
            if (count < 1 || leader < -1 || leader >= count)
                throw std::invalid_argument("leader must be -1 or one of the sequences, of which there must be some");
            return without_gil([&] { return schedule::stream_wave(input.problem, leader); });
        },
        py::arg("input"), py::arg("leader"), "Ops of one wave as (first_rank, cp_size, offsets, sample_ids), int64.");
    m.def(
        "schedule_dynamic_cp",
        [](const Input& input, int64_t unit) {
            if (unit < 1) throw std::invalid_argument("unit must be at least 1");
            return without_gil([&] { return schedule::dynamic_cp(input.problem, unit); });
        },
        py::arg("input"), py::arg("unit"), "Ops as (first_rank, cp_size, offsets, sample_ids), int64.");
    m.def(
        "schedule_dynamic_cp_within",
        [](const Input& input, double seconds, bool lockstep, bool pipeline, double stages_before) -> py::object {
            const Search search{stages_before, lockstep, pipeline, 0.0};
            Ops ops;
            bool within;
            {
                py::gil_scoped_release release;
                within = schedule::dynamic_cp_within(input.problem, search, seconds, ops);
            }
            if (!within) return py::none();
            return to_python(ops);
        },
        py::arg("input"), py::arg("seconds"), py::arg("lockstep"), py::arg("pipeline"), py::arg("stages_before"),
        "Ops as (first_rank, cp_size, offsets, sample_ids), int64, or None where the step takes longer than seconds.");
    m.def(
        "schedule_free_step",
        [](const Array<int64_t>& first_rank, const Array<int64_t>& cp_size, const Array<double>& seconds,
           int64_t num_ranks) {
            const int64_t count = check_ranks(first_rank, cp_size, num_ranks);
            require_size(seconds, "seconds", count);
            py::gil_scoped_release release;
            return schedule::free_step(first_rank.data(), cp_size.data(), seconds.data(), static_cast<size_t>(count),
                                       num_ranks);
        },
        py::arg("first_rank").noconvert(), py::arg("cp_size").noconvert(), py::arg("seconds").noconvert(),
        py::arg("num_ranks"), "Seconds from the first start to the last end when ranks run free.");
    m.def(
        "schedule_step",
        [](const Array<int64_t>& first_rank, const Array<int64_t>& cp_size, const Array<int64_t>& offsets,
           const Array<int64_t>& padded_lengths, const Array<int64_t>& tokens_per_rank, const Array<int64_t>& group,
           int64_t num_ranks, const std::vector<double>& cost, const std::string& mode, double stages_before) {
            const int64_t count = check_ranks(first_rank, cp_size, num_ranks);
            const int64_t n = size_1d(padded_lengths, "padded_lengths");
            require_size(offsets, "offsets", count + 1);
            require_size(tokens_per_rank, "tokens_per_rank", count);
            require_size(group, "group", count);
            const int64_t* at = offsets.data();
            if (at[0] != 0 || at[count] != n || !std::is_sorted(at, at + count + 1))
                throw std::invalid_argument("offsets must rise from 0 to the number of padded_lengths");
            const schedule::PlanOps ops{static_cast<size_t>(count), num_ranks, first_rank.data(), cp_size.data(), at,
                                        padded_lengths.data(), tokens_per_rank.data(), group.data()};
            const Cost known = to_cost(cost);
            const schedule::Mode how = to_mode(mode);
            py::gil_scoped_release release;
            return schedule::plan_step(ops, known, how, stages_before);
        },
        py::arg("first_rank").noconvert(), py::arg("cp_size").noconvert(), py::arg("offsets").noconvert(),
        py::arg("padded_lengths").noconvert(), py::arg("tokens_per_rank").noconvert(), py::arg("group").noconvert(),
        py::arg("num_ranks"), py::arg("cost"), py::arg("mode"), py::arg("stages_before"),
        "Seconds of the step of a plan; -1 where ranks in lockstep do not meet.");
}

}  // namespace tdp
