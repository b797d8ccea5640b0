// Bindings of wire.h.
#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "arrays.h"
#include "wire.h"

namespace tdp {

namespace {

// Addresses of the arrays of a list, which must be one-dimensional, contiguous and of type T; their sizes go to
// `lengths`, or must equal those there already.
template <typename T>
std::vector<int64_t> addresses(const py::list& arrays, const char* name, std::vector<int64_t>* lengths, bool first) {
    const size_t n = arrays.size();
    if (first)
        lengths->reserve(n);
    else if (n != lengths->size())
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(n) + " arrays, tokens have " +
                                    std::to_string(lengths->size()));
    std::vector<int64_t> found;
    found.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        const py::handle item = arrays[i];
        if (!py::isinstance<Array<T>>(item))
            throw py::type_error(std::string(name) + "[" + std::to_string(i) +
                                 "] is not a contiguous array of the right dtype");
        const auto array = py::reinterpret_borrow<Array<T>>(item);
        if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must have one dimension");
        if (first)
            lengths->push_back(array.shape(0));
        else if (array.shape(0) != (*lengths)[i])
            throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] has another length than tokens");
        found.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(array.data())));
    }
    return found;
}

py::tuple py_scan_samples(const py::list& tokens, const py::list& labels, const py::list& loss_mask,
                          const std::optional<py::list>& position_ids, int64_t ignore_label) {
    std::vector<int64_t> lengths;
    const auto t = addresses<int64_t>(tokens, "tokens", &lengths, true);
    const auto l = addresses<int64_t>(labels, "labels", &lengths, false);
    const auto m = addresses<float>(loss_mask, "loss_mask", &lengths, false);
    std::vector<int64_t> p;
    if (position_ids) p = addresses<int64_t>(*position_ids, "position_ids", &lengths, false);
    const auto n = static_cast<int64_t>(lengths.size());
    auto last_label = empty<int64_t>({static_cast<py::ssize_t>(n)});
    auto loss_count = empty<int64_t>({static_cast<py::ssize_t>(n)});
    int64_t *last = last_label.mutable_data(), *count = loss_count.mutable_data();
    const int64_t* positions = position_ids ? p.data() : nullptr;
    SampleFacts facts;
    {
        py::gil_scoped_release release;
        facts = scan_samples(t.data(), l.data(), m.data(), positions, lengths.data(), n, ignore_label, last, count);
    }
    return py::make_tuple(facts.bits, facts.largest, last_label, loss_count);
}

void py_narrow_tokens(const py::list& tokens, int dtype_code, Array<uint8_t>& out) {
    std::vector<int64_t> lengths;
    const auto t = addresses<int64_t>(tokens, "tokens", &lengths, true);
    int64_t total = 0;
    for (const int64_t length : lengths) total += length;
    require_size(out, "out", total * (dtype_code == 8 ? 2 : dtype_code == 4 ? 4 : 8));
    uint8_t* to = out.mutable_data();
    py::gil_scoped_release release;
    narrow_tokens(t.data(), lengths.data(), static_cast<int64_t>(lengths.size()), dtype_code, to);
}

void py_fill_spans(const Array<int64_t>& destinations, const Array<int64_t>& widths, const Array<int64_t>& starts,
                   const Array<int64_t>& lengths, const Array<int64_t>& entries, int64_t pad_id, int64_t ignore_label,
                   Array<int64_t>& tokens, Array<int64_t>& labels, Array<float>& loss_mask,
                   Array<int64_t>& position_ids, Array<bool>& padding_mask, Array<int32_t>& document_id) {
    const int64_t n = size_1d(destinations, "destinations");
    require_size(widths, "widths", n);
    require_size(starts, "starts", n);
    require_size(lengths, "lengths", n);
    require_size(entries, "entries", n);
    const int64_t size = size_1d(tokens, "tokens");
    require_size(labels, "labels", size);
    require_size(loss_mask, "loss_mask", size);
    require_size(position_ids, "position_ids", size);
    require_size(padding_mask, "padding_mask", size);
    require_size(document_id, "document_id", size);
    const PackOutput out{tokens.mutable_data(),       labels.mutable_data(),      loss_mask.mutable_data(),
                       position_ids.mutable_data(), padding_mask.mutable_data(), document_id.mutable_data(), size};
    const int64_t *d = destinations.data(), *w = widths.data(), *s = starts.data(), *len = lengths.data(),
                  *e = entries.data();
    py::gil_scoped_release release;
    fill_spans(d, w, s, len, e, n, pad_id, ignore_label, out);
}

}  // namespace

void register_wire(py::module_& m) {
    m.def("scan_samples", &py_scan_samples, py::arg("tokens"), py::arg("labels"), py::arg("loss_mask"),
          py::arg("position_ids"), py::arg("ignore_label"),
          "(bits, largest id, last labels, loss counts) of samples given as lists of arrays (int64 tokens, labels and "
          "positions, float32 loss mask); see csrc/wire.h.");
    m.def("narrow_tokens", &py_narrow_tokens, py::arg("tokens"), py::arg("dtype_code"), py::arg("out").noconvert(),
          "Joins a list of int64 token arrays in a narrower type.");
    m.def("fill_spans", &py_fill_spans, py::arg("destinations").noconvert(), py::arg("widths").noconvert(),
          py::arg("starts").noconvert(), py::arg("lengths").noconvert(), py::arg("entries").noconvert(),
          py::arg("pad_id"), py::arg("ignore_label"), py::arg("tokens").noconvert(), py::arg("labels").noconvert(),
          py::arg("loss_mask").noconvert(), py::arg("position_ids").noconvert(), py::arg("padding_mask").noconvert(),
          py::arg("document_id").noconvert(),
          "Positions, padding mask and documents of packs, and their pads; see csrc/wire.h.");
}

}  // namespace tdp
