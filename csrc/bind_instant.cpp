// Bindings of instant.h.
#include "arrays.h"
#include "instant.h"

namespace tdp {

namespace {

Array<int64_t> py_permute(const Array<int64_t>& places, int64_t size, uint64_t key) {
    const int64_t n = size_1d(places, "places");
    if (size < 1 || size > int64_t{1} << 62) throw std::invalid_argument("size must be in [1, 2**62], got " +
                                                                         std::to_string(size));
    auto result = empty<int64_t>({static_cast<py::ssize_t>(n)});
    const int64_t* in = places.data();
    int64_t* out = result.mutable_data();
    py::gil_scoped_release release;
    const KeyedPermutation permutation(size, key);
    for (int64_t i = 0; i < n; ++i) {
        if (in[i] < 0 || in[i] >= size)
            throw std::out_of_range("place " + std::to_string(in[i]) + " is outside [0, " + std::to_string(size) + ")");
        out[i] = permutation(in[i]);
    }
    return result;
}

py::tuple py_instant_pieces(const Array<int32_t>& lengths, const Array<int64_t>& pointers, int64_t begin, int64_t end,
                            int64_t begin_byte, int64_t end_byte, int64_t itemsize, int64_t window, uint64_t key,
                            const Array<int64_t>& start, const Array<int64_t>& length) {
    const int64_t num_lengths = size_1d(lengths, "lengths");
    require_size(pointers, "pointers", num_lengths);
    const int64_t n = size_1d(start, "start");
    require_size(length, "length", n);
    const InstantStream stream{Unaligned<int32_t>(lengths.data()), Unaligned<int64_t>(pointers.data()), begin, end,
                               begin_byte, end_byte, itemsize, window, key};
    check_stream(stream, num_lengths);
    const int64_t *starts = start.data(), *counts = length.data();
    Pieces pieces;
    {
        py::gil_scoped_release release;
        pieces = instant_pieces(stream, starts, counts, n);
    }
    return py::make_tuple(to_array(pieces.byte_offset), to_array(pieces.count), to_array(pieces.span_begin));
}

py::tuple py_blend_period(const Array<int64_t>& shares) {
    const int64_t k = size_1d(shares, "shares");
    const int64_t* share = shares.data();
    int64_t sum = 0;
    for (int64_t i = 0; i < k; ++i) {
        if (share[i] < 0 || share[i] > int64_t{1} << 24)
            throw std::invalid_argument("shares[" + std::to_string(i) + "] is " + std::to_string(share[i]));
        sum += share[i];
    }
    if (sum < 1 || sum > int64_t{1} << 24) throw std::invalid_argument("the shares must sum to 1 .. 2**24");
    auto dataset = empty<int32_t>({static_cast<py::ssize_t>(sum)});
    auto sample = empty<int32_t>({static_cast<py::ssize_t>(sum)});
    int32_t *d = dataset.mutable_data(), *s = sample.mutable_data();
    {
        py::gil_scoped_release release;
        blend_period(share, k, sum, d, s);
    }
    return py::make_tuple(dataset, sample);
}

}  // namespace

void register_instant(py::module_& m) {
    m.def("permute", &py_permute, py::arg("places").noconvert(), py::arg("size"), py::arg("key"),
          "A keyed permutation of [0, size) at some places; see csrc/instant.h.");
    m.def("instant_pieces", &py_instant_pieces, py::arg("lengths").noconvert(), py::arg("pointers").noconvert(),
          py::arg("begin"), py::arg("end"), py::arg("begin_byte"), py::arg("end_byte"), py::arg("itemsize"),
          py::arg("window"), py::arg("key"), py::arg("start").noconvert(), py::arg("length").noconvert(),
          "Pieces of token ranges of a stream whose documents are permuted in windows; see csrc/instant.h.");
    m.def("blend_period", &py_blend_period, py::arg("shares").noconvert(),
          "One period of an evenly spread blend: (dataset, sample) int32 [sum of shares]; see csrc/instant.h.");
}

}  // namespace tdp
