// Bindings of gather.h.
#include "arrays.h"
#include "gather.h"

namespace tdp {

namespace {

template <typename Row>
py::tuple pieces_of(const Array<int32_t>& lengths, const Array<int64_t>& pointers,
                    const Array<int32_t>& document_index, const Array<Row>& rows, int64_t extra_tokens,
                    int64_t itemsize, const Array<int64_t>& sample, const Array<int64_t>& start,
                    const Array<int64_t>& length) {
    const int64_t num_lengths = size_1d(lengths, "lengths");
    require_size(pointers, "pointers", num_lengths);
    const int64_t num_documents = size_1d(document_index, "document_index");
    if (rows.ndim() != 2 || rows.shape(1) != 2) throw std::invalid_argument("sample_index must have shape [n + 1, 2]");
    const int64_t num_rows = rows.shape(0);
    const int64_t num_spans = size_1d(sample, "sample");
    require_size(start, "start", num_spans);
    require_size(length, "length", num_spans);
    const Unaligned<int32_t> lengths_view(lengths.data());
    const Unaligned<int64_t> pointers_view(pointers.data());
    const int32_t* documents = document_index.data();
    const Row* row_data = rows.data();
    const int64_t *sample_data = sample.data(), *start_data = start.data(), *length_data = length.data();
    Pieces pieces;
    {
        py::gil_scoped_release release;
        pieces = sample_pieces<Row>(lengths_view, pointers_view, num_lengths, documents, num_documents, row_data,
                                    num_rows, extra_tokens, itemsize, sample_data, start_data, length_data, num_spans);
    }
    return py::make_tuple(to_array(pieces.byte_offset), to_array(pieces.count), to_array(pieces.span_begin));
}

void py_gather_tokens(const Array<uint8_t>& source, int dtype_code, const Array<int64_t>& piece_offset,
                      const Array<int64_t>& piece_count, const Array<int64_t>& span_begin,
                      const Array<int64_t>& length, const Array<int64_t>& destination, Array<int64_t>& tokens,
                      Array<int64_t>& labels, Array<float>& loss_mask, int64_t ignore_label, int64_t eod) {
    const int64_t num_spans = size_1d(length, "length");
    require_size(span_begin, "span_begin", num_spans + 1);
    require_size(destination, "destination", num_spans);
    const int64_t num_pieces = size_1d(piece_offset, "piece_offset");
    require_size(piece_count, "piece_count", num_pieces);
    const int64_t size = size_1d(tokens, "tokens");
    require_size(labels, "labels", size);
    require_size(loss_mask, "loss_mask", size);
    const int64_t source_bytes = size_1d(source, "source");
    const TokenOutputs out{tokens.mutable_data(), labels.mutable_data(), loss_mask.mutable_data(), size};
    const uint8_t* bytes = source.data();
    const int64_t *po = piece_offset.data(), *pc = piece_count.data(), *sb = span_begin.data(), *ln = length.data(),
                  *ds = destination.data();
    py::gil_scoped_release release;
    gather_tokens(bytes, source_bytes, dtype_code, po, pc, num_pieces, sb, ln, ds, num_spans, ignore_label, eod, out);
}

void py_copy_spans(const Array<uint8_t>& source, const Array<int64_t>& source_offset, Array<uint8_t>& target,
                   const Array<int64_t>& target_offset, const Array<int64_t>& num_bytes) {
    const int64_t n = size_1d(num_bytes, "num_bytes");
    require_size(source_offset, "source_offset", n);
    require_size(target_offset, "target_offset", n);
    const int64_t source_bytes = size_1d(source, "source"), target_bytes = size_1d(target, "target");
    const uint8_t* from = source.data();
    uint8_t* to = target.mutable_data();
    const int64_t *so = source_offset.data(), *to_offset = target_offset.data(), *nb = num_bytes.data();
    py::gil_scoped_release release;
    copy_spans(from, source_bytes, so, to, target_bytes, to_offset, nb, n);
}

}  // namespace

void register_gather(py::module_& m) {
    const char* pieces_doc =
        "Pieces (byte_offset, count, span_begin) of spans of fixed-length samples; see csrc/gather.h.";
    m.def("sample_pieces", &pieces_of<int32_t>, py::arg("lengths").noconvert(), py::arg("pointers").noconvert(),
          py::arg("document_index").noconvert(), py::arg("sample_index").noconvert(), py::arg("extra_tokens"),
          py::arg("itemsize"), py::arg("sample").noconvert(), py::arg("start").noconvert(),
          py::arg("length").noconvert(), pieces_doc);
    m.def("sample_pieces", &pieces_of<int64_t>, py::arg("lengths").noconvert(), py::arg("pointers").noconvert(),
          py::arg("document_index").noconvert(), py::arg("sample_index").noconvert(), py::arg("extra_tokens"),
          py::arg("itemsize"), py::arg("sample").noconvert(), py::arg("start").noconvert(),
          py::arg("length").noconvert(), pieces_doc);
    m.def("gather_tokens", &py_gather_tokens, py::arg("source").noconvert(), py::arg("dtype_code"),
          py::arg("piece_offset").noconvert(), py::arg("piece_count").noconvert(), py::arg("span_begin").noconvert(),
          py::arg("length").noconvert(), py::arg("destination").noconvert(), py::arg("tokens").noconvert(),
          py::arg("labels").noconvert(), py::arg("loss_mask").noconvert(), py::arg("ignore_label"), py::arg("eod"),
          "Converts spans of tokens into tokens and labels (int64) and loss_mask (float32); see csrc/gather.h.");
    m.def("copy_spans", &py_copy_spans, py::arg("source").noconvert(), py::arg("source_offset").noconvert(),
          py::arg("target").noconvert(), py::arg("target_offset").noconvert(), py::arg("num_bytes").noconvert(),
          "Copies byte ranges from one buffer to another.");
}

}  // namespace tdp
