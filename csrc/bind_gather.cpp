// Bindings of gather.h and of the threads it uses.
#include <pybind11/stl.h>

#include <optional>

#include "arrays.h"
#include "bind_outputs.h"
#include "gather.h"
#include "readahead.h"
#include "thread_pool.h"

namespace tdp {

namespace {

using Int64s = Array<int64_t>;

void py_gather_tokens(const Array<uint8_t>& source, int dtype_code, const Int64s& piece_offset,
                      const Int64s& piece_count, const Int64s& span_begin, const Int64s& start, const Int64s& length,
                      const Int64s& destination, Int64s& tokens, Int64s& labels, Array<float>& loss_mask,
                      std::optional<Int64s> position_ids, int64_t ignore_label, int64_t eod_no_loss,
                      int64_t eod_reset) {
    const int64_t num_spans = size_1d(length, "length");
    require_size(start, "start", num_spans);
    require_size(destination, "destination", num_spans);
    require_size(span_begin, "span_begin", num_spans + 1);
    const int64_t num_pieces = size_1d(piece_offset, "piece_offset");
    require_size(piece_count, "piece_count", num_pieces);
    const TokenOutputs out = token_outputs(tokens, labels, loss_mask, position_ids);
    const TokenBytes bytes{source.data(), size_1d(source, "source"), converter_for(dtype_code)};
    const PieceTable pieces(piece_offset.data(), piece_count.data(), num_pieces, span_begin.data());
    const Spans spans{num_spans, start.data(), length.data(), destination.data()};
    py::gil_scoped_release release;
    Gather gather;
    gather.add(bytes, pieces, spans, {ignore_label, eod_no_loss, out.position_ids ? eod_reset : -1}, out);
    gather.run(out);
}

void py_copy_spans(const Array<uint8_t>& source, const Int64s& source_offset, Array<uint8_t>& target,
                   const Int64s& target_offset, const Int64s& num_bytes) {
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

void py_set_num_threads(int n) {
    if (n < 0 || n > 64) throw std::invalid_argument("num_threads must be in [0, 64], 0 for the default; got " +
                                                     std::to_string(n));
    set_num_threads(n);
}

void py_set_read_ahead(const std::string& when) {
    if (when == "slow")
        set_read_ahead(ReadAhead::kWhereSlow);
    else if (when == "never")
        set_read_ahead(ReadAhead::kNever);
    else if (when == "always")
        set_read_ahead(ReadAhead::kAlways);
    else
        throw std::invalid_argument("read ahead must be 'slow', 'never' or 'always', got '" + when + "'");
}

#define TDP_ARG(name) py::arg(#name).noconvert()

}  // namespace

void register_gather(py::module_& m) {
    m.def("gather_tokens", &py_gather_tokens, TDP_ARG(source), py::arg("dtype_code"), TDP_ARG(piece_offset),
          TDP_ARG(piece_count), TDP_ARG(span_begin), TDP_ARG(start), TDP_ARG(length), TDP_ARG(destination),
          TDP_ARG(tokens), TDP_ARG(labels), TDP_ARG(loss_mask), TDP_ARG(position_ids), py::arg("ignore_label"),
          py::arg("eod_no_loss"), py::arg("eod_reset"),
          "Spans made of given pieces as tokens, labels, loss mask and position ids; see csrc/gather.h.");
    m.def("copy_spans", &py_copy_spans, TDP_ARG(source), TDP_ARG(source_offset), TDP_ARG(target),
          TDP_ARG(target_offset), TDP_ARG(num_bytes), "Copies byte ranges from one buffer to another.");
    m.def("set_num_threads", &py_set_num_threads, py::arg("n"),
          "Most threads a large gather uses; 0 for the default, the processors of this process up to 4.");
    m.def("set_read_ahead", &py_set_read_ahead, py::arg("when"),
          "When pages of mapped files are asked for before they are touched: where reads have lately waited for a "
          "device ('slow', the default), 'never' or 'always'.");
}

}  // namespace tdp
