// Bindings of blend_changing.h.
#include <cmath>
#include <cstdint>

#include "arrays.h"
#include "bind_poll.h"
#include "blend_changing.h"

namespace tdp {

namespace {

// Counts are kept as doubles, which count exactly up to here.
constexpr int64_t kExact = int64_t{1} << 53;

void require_weights(const Array<double>& weights, const char* name, int64_t k) {
    if (weights.ndim() != 2 || weights.shape(1) != k)
        throw std::invalid_argument(std::string(name) + " must have two dimensions, the second of " +
                                    std::to_string(k));
    const double* w = weights.data();
    for (int64_t i = 0; i < weights.size(); ++i)
        if (!(w[i] >= 0 && w[i] <= 1))
            throw std::invalid_argument(std::string(name) + "[" + std::to_string(i / k) + ", " +
                                        std::to_string(i % k) + "] is " + std::to_string(w[i]) +
                                        "; weights must be normalised, in [0, 1]");
}

// What both blends go on from, checked, and where their draws go.
struct Draws {
    int64_t k, n;
    double* targets;
    int64_t* counts;
    const bool* active;
    Array<int32_t> dataset;
    Array<int64_t> sample;
    int32_t* d;
    int64_t* s;

    Draws(Array<double>& targets_in, Array<int64_t>& counts_in, const Array<bool>& active_in, int64_t n_in)
        : k(size_1d(targets_in, "targets")), n(n_in), targets(targets_in.mutable_data()), active(active_in.data()) {
        require_size(counts_in, "counts", k);
        require_size(active_in, "active", k);
        if (k == 0) throw std::invalid_argument("a blend needs at least one dataset");
        if (n < 0) throw std::invalid_argument("n must not be negative");
        counts = counts_in.mutable_data();
        bool any = false;
        for (int64_t i = 0; i < k; ++i) {
            any = any || active[i];
            if (!std::isfinite(targets[i]))
                throw std::invalid_argument("targets[" + std::to_string(i) + "] is " + std::to_string(targets[i]));
            if (n >= kExact || counts[i] < 0 || counts[i] >= kExact - n)
                throw std::invalid_argument("counts[" + std::to_string(i) + "] is " + std::to_string(counts[i]) +
                                            "; with n it must be below 2**53");
        }
        if (!any) throw std::invalid_argument("at least one source must be active");
        dataset = empty<int32_t>({static_cast<py::ssize_t>(n)});
        sample = empty<int64_t>({static_cast<py::ssize_t>(n)});
        d = dataset.mutable_data();
        s = sample.mutable_data();
    }

    py::tuple result() const { return py::make_tuple(dataset, sample); }
};

py::tuple py_blend_weighted(const Array<double>& weights, Array<double>& targets, Array<int64_t>& counts,
                            const Array<bool>& active, const py::object& stop) {
    require_weights(weights, "weights", size_1d(targets, "targets"));
    Draws draws(targets, counts, active, weights.shape(0));
    const double* w = weights.data();
    const Poll poll = poll_of(stop);
    {
        py::gil_scoped_release release;
        blend_weighted(w, draws.k, draws.targets, draws.counts, draws.active, draws.n, draws.d, draws.s, poll);
    }
    return draws.result();
}

py::tuple py_blend_linear(const Array<double>& points, const Array<double>& rows, Array<double>& targets,
                          Array<int64_t>& counts, const Array<bool>& active, int64_t position, int64_t n,
                          const py::object& stop) {
    const int64_t p = size_1d(points, "points");
    if (p == 0) throw std::invalid_argument("points must not be empty");
    const double* at = points.data();
    for (int64_t i = 0; i < p; ++i)
        if (!(at[i] >= 0 && at[i] < static_cast<double>(kExact)) || at[i] != std::floor(at[i]) ||
            (i > 0 && at[i] <= at[i - 1]))
            throw std::invalid_argument("points[" + std::to_string(i) + "] is " + std::to_string(at[i]) +
                                        "; points must be whole, rise from 0 on and stay below 2**53");
    require_weights(rows, "rows", size_1d(targets, "targets"));
    if (rows.shape(0) != p)
        throw std::invalid_argument(std::to_string(rows.shape(0)) + " rows for " + std::to_string(p) + " points");
    if (position < 0) throw std::invalid_argument("position must not be negative");
    if (n < 0 || position > kExact - n) throw std::invalid_argument("position + n must be at most 2**53");
    Draws draws(targets, counts, active, n);
    const double* w = rows.data();
    const Poll poll = poll_of(stop);
    {
        py::gil_scoped_release release;
        blend_linear(at, w, p, draws.k, draws.targets, draws.counts, draws.active, position, n, draws.d, draws.s,
                     poll);
    }
    return draws.result();
}

}  // namespace

void register_blend_changing(py::module_& m) {
    m.def("blend_weighted", &py_blend_weighted, py::arg("weights").noconvert(), py::arg("targets").noconvert(),
          py::arg("counts").noconvert(), py::arg("active").noconvert(), py::arg("stop") = py::none(),
          "The next draws of a blend, one per row of weights [n, k]: (dataset_index int32 [n], sample_index int64 [n]); "
          "targets and counts are updated.");
    m.def("blend_linear", &py_blend_linear, py::arg("points").noconvert(), py::arg("rows").noconvert(),
          py::arg("targets").noconvert(), py::arg("counts").noconvert(), py::arg("active").noconvert(),
          py::arg("position"), py::arg("n"), py::arg("stop") = py::none(),
          "The next n draws of a blend with weights on lines between points: (dataset_index int32 [n], sample_index "
          "int64 [n]); targets and counts are updated.");
}

}  // namespace tdp
