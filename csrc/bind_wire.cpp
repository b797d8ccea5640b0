// Bindings of wire.h.
#include <algorithm>

#include "arrays.h"
#include "bind_columns.h"
#include "wire.h"

namespace tdp {

namespace {

void require_like(const OwnedColumn& column, const Column& tokens, const char* name) {
    if (column.lengths_of() != tokens.length)
        throw std::invalid_argument(std::string(name) + " has other lengths than tokens");
}

py::tuple py_scan_samples(const OwnedColumn& tokens, const OwnedColumn& labels, const OwnedColumn& loss_mask,
                          const OwnedColumn* position_ids, int64_t ignore_label) {
    const Column& t = tokens.view_as<int64_t>("tokens");
    const Column& l = labels.view_as<int64_t>("labels");
    const Column& m = loss_mask.view_as<float>("loss_mask");
    const Column* p = position_ids ? &position_ids->view_as<int64_t>("position_ids") : nullptr;
    require_like(labels, t, "labels");
    require_like(loss_mask, t, "loss_mask");
    if (position_ids) require_like(*position_ids, t, "position_ids");
    auto last_label = empty<int64_t>({tokens.size()});
    auto loss_count = empty<int64_t>({tokens.size()});
    int64_t *last = last_label.mutable_data(), *count = loss_count.mutable_data();
    SampleFacts facts;
    {
        py::gil_scoped_release release;
        facts = scan_samples(t, l, m, p, ignore_label, last, count);
    }
    return py::make_tuple(facts.bits, facts.largest, last_label, loss_count);
}

Array<int64_t> py_number_samples(const Array<int64_t>& rows, const Array<int64_t>& counts, int64_t key) {
    if (rows.ndim() != 3) throw std::invalid_argument("rows must have three dimensions");
    const int64_t num_ranks = rows.shape(0), room = rows.shape(1), columns = rows.shape(2);
    require_size(counts, "counts", num_ranks);
    if (key < 0 || key >= columns) throw std::out_of_range("there is no column " + std::to_string(key));
    int64_t total = 0;
    for (int64_t r = 0; r < num_ranks; ++r) total += std::min(std::max<int64_t>(counts.data()[r], 0), room);
    auto out = empty<int64_t>({columns + 2, static_cast<py::ssize_t>(total)});
    number_samples(rows.data(), num_ranks, room, columns, counts.data(), key, out.mutable_data());
    return out;
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
          py::arg("position_ids").none(true), py::arg("ignore_label"),
          "(bits, largest id, last labels, loss counts) of samples given as columns (int64 tokens, labels and "
          "positions, float32 loss mask); see csrc/wire.h.");
    m.def("number_samples", &py_number_samples, py::arg("rows").noconvert(), py::arg("counts").noconvert(),
          py::arg("key"), "Columns of all ranks' samples in one order, with rank and place; see csrc/wire.h.");
    m.def("fill_spans", &py_fill_spans, py::arg("destinations").noconvert(), py::arg("widths").noconvert(),
          py::arg("starts").noconvert(), py::arg("lengths").noconvert(), py::arg("entries").noconvert(),
          py::arg("pad_id"), py::arg("ignore_label"), py::arg("tokens").noconvert(), py::arg("labels").noconvert(),
          py::arg("loss_mask").noconvert(), py::arg("position_ids").noconvert(), py::arg("padding_mask").noconvert(),
          py::arg("document_id").noconvert(),
          "Positions, padding mask and documents of packs, and their pads; see csrc/wire.h.");
}

}  // namespace tdp
