// Bindings of sample_index.h and blend.h.
#include <cmath>
#include <cstdint>

#include "arrays.h"
#include "bind_poll.h"
#include "blend.h"
#include "sample_index.h"

namespace tdp {

namespace {

template <typename Row>
py::array build_rows(const Array<int32_t>& lengths, const Array<int32_t>& document_index, int64_t sequence_length,
                     int64_t extra_tokens, int64_t num_samples, const py::object& stop) {
    const int64_t num_lengths = size_1d(lengths, "lengths");
    const int64_t num_documents = size_1d(document_index, "document_index");
    auto rows = empty<Row>({static_cast<py::ssize_t>(num_samples + 1), 2});
    Row* out = rows.mutable_data();
    const Unaligned<int32_t> lengths_view(lengths.data());
    const int32_t* documents = document_index.data();
    const Poll poll = poll_of(stop);
    {
        py::gil_scoped_release release;
        build_sample_index<Row>(lengths_view, num_lengths, documents, num_documents, sequence_length, extra_tokens,
                                num_samples, out, poll);
    }
    return rows;
}

py::array py_build_sample_index(const Array<int32_t>& lengths, const Array<int32_t>& document_index,
                                int64_t sequence_length, int64_t extra_tokens, int64_t num_samples, bool wide, const py::object& stop) {
    if (sequence_length < 1) throw std::invalid_argument("sequence_length must be at least 1");
    if (extra_tokens != 0 && extra_tokens != 1) throw std::invalid_argument("extra_tokens must be 0 or 1");
    if (num_samples < 0) throw std::invalid_argument("num_samples must not be negative");
    if (num_samples >= INT64_MAX / sequence_length - 1)
        throw std::invalid_argument("num_samples * sequence_length leaves int64");
    if (wide) return build_rows<int64_t>(lengths, document_index, sequence_length, extra_tokens, num_samples, stop);
    return build_rows<int32_t>(lengths, document_index, sequence_length, extra_tokens, num_samples, stop);
}

py::tuple py_blend_continue(const Array<double>& weights, Array<int64_t>& counts, int64_t position, int64_t n,
                            const py::object& stop) {
    const int64_t k = size_1d(weights, "weights");
    require_size(counts, "counts", k);
    if (k == 0) throw std::invalid_argument("a blend needs at least one dataset");
    if (position < 0 || n < 0) throw std::invalid_argument("position and n must not be negative");
    if (position > INT64_MAX - n) throw std::invalid_argument("position + n leaves int64");
    const double* w = weights.data();
    for (int64_t i = 0; i < k; ++i)  // the scan for the largest would not end at a NaN
        if (!std::isfinite(w[i]))
            throw std::invalid_argument("weights[" + std::to_string(i) + "] is " + std::to_string(w[i]));
    int64_t* c = counts.mutable_data();
    for (int64_t i = 0; i < k; ++i)
        if (c[i] > INT64_MAX - n) throw std::invalid_argument("counts[" + std::to_string(i) + "] + n leaves int64");
    auto dataset = empty<int32_t>({static_cast<py::ssize_t>(n)});
    auto sample = empty<int64_t>({static_cast<py::ssize_t>(n)});
    int32_t* d = dataset.mutable_data();
    int64_t* s = sample.mutable_data();
    const Poll poll = poll_of(stop);
    {
        py::gil_scoped_release release;
        blend_continue(w, k, c, position, n, d, s, poll);
    }
    return py::make_tuple(dataset, sample);
}

py::tuple py_blend_exhaustive(const Array<int64_t>& sizes, const py::object& stop) {
    const int64_t k = size_1d(sizes, "sizes");
    if (k == 0) throw std::invalid_argument("a blend needs at least one dataset");
    const int64_t* size = sizes.data();
    int64_t total = 0;
    for (int64_t i = 0; i < k; ++i) {
        if (size[i] < 0) throw std::invalid_argument("sizes[" + std::to_string(i) + "] is " + std::to_string(size[i]));
        if (size[i] >= (int64_t{1} << 53) - total)
            throw std::invalid_argument("the sizes sum to more than 2**53 samples");
        total += size[i];
    }
    auto dataset = empty<int32_t>({static_cast<py::ssize_t>(total)});
    auto sample = empty<int64_t>({static_cast<py::ssize_t>(total)});
    int32_t* d = dataset.mutable_data();
    int64_t* s = sample.mutable_data();
    const Poll poll = poll_of(stop);
    {
        py::gil_scoped_release release;
        blend_exhaustive(size, k, total, d, s, poll);
    }
    return py::make_tuple(dataset, sample);
}

}  // namespace

void register_indices(py::module_& m) {
    m.def("build_sample_index", &py_build_sample_index, py::arg("lengths").noconvert(),
          py::arg("document_index").noconvert(), py::arg("sequence_length"), py::arg("extra_tokens"),
          py::arg("num_samples"), py::arg("wide"), py::arg("stop") = py::none(),
          "Rows (place in document_index, token offset) [num_samples + 1, 2], int64 if wide else int32.");
    m.def("blend_continue", &py_blend_continue, py::arg("weights").noconvert(), py::arg("counts").noconvert(),
          py::arg("position"), py::arg("n"), py::arg("stop") = py::none(),
          "The next n draws of a blend: (dataset_index int32 [n], sample_index int64 [n]); counts is updated.");
    m.def("blend_exhaustive", &py_blend_exhaustive, py::arg("sizes").noconvert(), py::arg("stop") = py::none(),
          "Every sample of every dataset once: (dataset_index int32, sample_index int64), each [sum of sizes].");
}

}  // namespace tdp
