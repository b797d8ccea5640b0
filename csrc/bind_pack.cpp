// Bindings of pack.h.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "arrays.h"
#include "pack.h"

namespace tdp {

namespace {

template <typename T>
const T* data_or_null(const std::optional<Array<T>>& array) {
    return array ? array->data() : nullptr;
}

PackRows rows_of(const Array<int64_t>& rows, int64_t num_tokens) {
    if (rows.ndim() != 2 || rows.shape(0) != 8) throw std::invalid_argument("rows must have shape [8, capacity]");
    const int64_t capacity = rows.shape(1);
    const int64_t* line = rows.data();
    // Unused columns begin at the end of the packs; spans do not.
    const int64_t count = std::lower_bound(line, line + capacity, num_tokens) - line;
    return {line,
            line + capacity,
            line + 2 * capacity,
            line + 3 * capacity,
            line + 4 * capacity,
            line + 5 * capacity,
            line + 6 * capacity,
            line + 7 * capacity,
            count,
            num_tokens};
}

void py_pack(const Array<int64_t>& rows, const std::optional<Array<int64_t>>& loss_edges,
             const Array<uint8_t>& tokens, int dtype_code, const std::optional<Array<int64_t>>& labels,
             const std::optional<Array<float>>& loss_mask, const std::optional<Array<int64_t>>& position_ids,
             Array<int64_t>& out_tokens, Array<int64_t>& out_labels, Array<float>& out_loss_mask,
             Array<int64_t>& out_position_ids, Array<bool>& out_padding_mask, Array<int32_t>& out_document_id,
             int64_t pad_token, int64_t pad_label, int64_t ignore_label, bool zero_positions) {
    const int64_t num_tokens = size_1d(out_tokens, "out_tokens");
    require_size(out_labels, "out_labels", num_tokens);
    require_size(out_loss_mask, "out_loss_mask", num_tokens);
    require_size(out_position_ids, "out_position_ids", num_tokens);
    require_size(out_padding_mask, "out_padding_mask", num_tokens);
    require_size(out_document_id, "out_document_id", num_tokens);
    const int itemsize = dtype_code == 5 ? 8 : dtype_code == 4 ? 4 : dtype_code == 3 || dtype_code == 8 ? 2 : 1;
    const int64_t size = size_1d(tokens, "tokens") / itemsize;
    if (labels) require_size(*labels, "labels", size);
    if (loss_mask) require_size(*loss_mask, "loss_mask", size);
    if (position_ids) require_size(*position_ids, "position_ids", size);
    const PackRows table = rows_of(rows, num_tokens);
    const PackSources sources{tokens.data(),
                              dtype_code,
                              size,
                              data_or_null(labels),
                              data_or_null(loss_mask),
                              data_or_null(position_ids),
                              data_or_null(loss_edges),
                              loss_edges ? size_1d(*loss_edges, "loss_edges") : 0};
    const PackOutputs out{out_tokens.mutable_data(),       out_labels.mutable_data(),
                          out_loss_mask.mutable_data(),    out_position_ids.mutable_data(),
                          out_padding_mask.mutable_data(), out_document_id.mutable_data()};
    const PackPads pads{pad_token, pad_label, ignore_label, zero_positions};
    py::gil_scoped_release release;
    pack(table, sources, pads, out);
}

void py_pack_bytes(const Array<int64_t>& rows, const Array<uint8_t>& source, int64_t width, Array<uint8_t>& out) {
    if (width < 0) throw std::invalid_argument("width must not be negative, got " + std::to_string(width));
    const int64_t num_tokens = width ? size_1d(out, "out") / width : 0;
    const PackRows table = rows_of(rows, num_tokens);
    const int64_t source_bytes = size_1d(source, "source");
    const uint8_t* from = source.data();
    uint8_t* to = out.mutable_data();
    py::gil_scoped_release release;
    pack_bytes(table, from, source_bytes, width, to);
}

template <typename T>
Array<int64_t> py_cp_positions(const Array<T>& cu_seqlens, int64_t cp_size, int64_t cp_rank) {
    const int64_t size = size_1d(cu_seqlens, "cu_seqlens");
    if (cp_size < 1 || cp_size > INT32_MAX || cp_rank < 0 || cp_rank >= cp_size)
        throw std::invalid_argument("cp_rank " + std::to_string(cp_rank) + " is outside the " +
                                    std::to_string(cp_size) + " ranks");
    if (size == 0 || cu_seqlens.data()[0] != 0)
        throw std::invalid_argument("cu_seqlens_padded must be one-dimensional and start with 0");
    const T* cu = cu_seqlens.data();
    for (int64_t i = 1; i < size; ++i)  // before anything is allocated from the last of them
        if (cu[i] < cu[i - 1]) throw std::invalid_argument("cu_seqlens_padded decreases");
    Array<int64_t> out = empty<int64_t>({static_cast<py::ssize_t>(cu[size - 1] / cp_size)});
    int64_t* to = out.mutable_data();
    {
        py::gil_scoped_release release;
        cp_positions(cu, size - 1, cp_size, cp_rank, to);
    }
    return out;
}

}  // namespace

void register_pack(py::module_& m) {
    m.def("pack", &py_pack, py::arg("rows").noconvert(), py::arg("loss_edges").noconvert().none(true),
          py::arg("tokens").noconvert(), py::arg("dtype_code"), py::arg("labels").noconvert().none(true),
          py::arg("loss_mask").noconvert().none(true), py::arg("position_ids").noconvert().none(true),
          py::arg("out_tokens").noconvert(), py::arg("out_labels").noconvert(), py::arg("out_loss_mask").noconvert(),
          py::arg("out_position_ids").noconvert(), py::arg("out_padding_mask").noconvert(),
          py::arg("out_document_id").noconvert(), py::arg("pad_token"), py::arg("pad_label"),
          py::arg("ignore_label"), py::arg("zero_positions"),
          "Gathers spans of samples into packed microbatches; see csrc/pack.h.");
    m.def("pack_bytes", &py_pack_bytes, py::arg("rows").noconvert(), py::arg("source").noconvert(), py::arg("width"),
          py::arg("out").noconvert(), "The same for a key of `width` bytes per token.");
    const char* positions_doc = "Places in the whole pack of one context-parallel rank's tokens.";
    m.def("cp_positions", &py_cp_positions<int32_t>, py::arg("cu_seqlens").noconvert(), py::arg("cp_size"),
          py::arg("cp_rank"), positions_doc);
    m.def("cp_positions", &py_cp_positions<int64_t>, py::arg("cu_seqlens").noconvert(), py::arg("cp_size"),
          py::arg("cp_rank"), positions_doc);
}

}  // namespace tdp
