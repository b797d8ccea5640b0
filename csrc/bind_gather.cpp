// Bindings of gather.h and of the threads it uses.
#include <pybind11/stl.h>

#include <optional>

#include "arrays.h"
#include "convert.h"
#include "gather.h"
#include "thread_pool.h"

namespace tdp {

namespace {

using Int64s = Array<int64_t>;

// Arguments that all readers of spans share, checked and with the GIL held.
struct SpanArguments {
    Spans spans;
    GatherRules rules;
    TokenOutputs out;
    const uint8_t* source;
    int64_t source_bytes;
};

SpanArguments span_arguments(const Array<uint8_t>& source, const Int64s& start, const Int64s& length,
                             const Int64s& destination, Int64s& tokens, Int64s& labels, Array<float>& loss_mask,
                             std::optional<Int64s>& position_ids, int64_t ignore_label, int64_t eod_no_loss,
                             int64_t eod_reset) {
    const int64_t num_spans = size_1d(length, "length");
    require_size(start, "start", num_spans);
    require_size(destination, "destination", num_spans);
    const int64_t size = size_1d(tokens, "tokens");
    require_size(labels, "labels", size);
    require_size(loss_mask, "loss_mask", size);
    if (position_ids) require_size(*position_ids, "position_ids", size);
    return {{num_spans, start.data(), length.data(), destination.data()},
            {ignore_label, eod_no_loss, position_ids ? eod_reset : -1},
            {tokens.mutable_data(), labels.mutable_data(), loss_mask.mutable_data(),
             position_ids ? position_ids->mutable_data() : nullptr, size},
            source.data(),
            size_1d(source, "source")};
}

// For each span the token to begin with and how many: the lead, the span, and the token that is the last label.
struct Wanted {
    // Far above any sample, far below what would overflow.
    static constexpr int64_t kMost = int64_t{1} << 48;

    std::vector<int64_t> start, length;

    Wanted(const Spans& spans, const GatherRules& rules) : start(spans.num_spans), length(spans.num_spans) {
        for (int64_t s = 0; s < spans.num_spans; ++s) {
            if (spans.start[s] < 0 || spans.start[s] > kMost || spans.length[s] < 0 || spans.length[s] > kMost)
                throw std::out_of_range("span " + std::to_string(s) + " has start " + std::to_string(spans.start[s]) +
                                        " and length " + std::to_string(spans.length[s]));
            const int64_t before = lead(spans, rules, s);
            start[s] = spans.start[s] - before;
            length[s] = before + spans.length[s] + 1;
        }
    }
};

template <typename T>
std::vector<int64_t> look_up(const T* table, int64_t size, const int64_t* places, int64_t n, const char* name) {
    std::vector<int64_t> found(n);
    for (int64_t i = 0; i < n; ++i) {
        if (places[i] < 0 || places[i] >= size)
            throw std::out_of_range("sample " + std::to_string(places[i]) + " is outside " + name + " of " +
                                    std::to_string(size) + " samples");
        found[i] = static_cast<int64_t>(table[places[i]]);
    }
    return found;
}

template <typename Row>
GptIndex<Row> gpt_index(const Array<int32_t>& lengths, const Int64s& pointers, const Array<int32_t>& document_index,
                        const Array<Row>& rows, int64_t extra_tokens) {
    const int64_t num_lengths = size_1d(lengths, "lengths");
    require_size(pointers, "pointers", num_lengths);
    if (rows.ndim() != 2 || rows.shape(1) != 2)
        throw std::invalid_argument("sample_index must have shape [n + 1, 2]");
    return {Unaligned<int32_t>(lengths.data()),
            Unaligned<int64_t>(pointers.data()),
            num_lengths,
            document_index.data(),
            size_1d(document_index, "document_index"),
            rows.data(),
            rows.shape(0),
            extra_tokens};
}

template <typename Row, typename Shuffle>
void read_gpt_spans(const Array<uint8_t>& source, int dtype_code, const Array<int32_t>& lengths,
                    const Int64s& pointers, const Array<int32_t>& document_index, const Array<Row>& sample_index,
                    const Array<Shuffle>& shuffle_index, int64_t extra_tokens, const Int64s& sample,
                    const Int64s& start, const Int64s& length, const Int64s& destination, Int64s& tokens,
                    Int64s& labels, Array<float>& loss_mask, std::optional<Int64s> position_ids,
                    int64_t ignore_label, int64_t eod_no_loss, int64_t eod_reset) {
    const SpanArguments a = span_arguments(source, start, length, destination, tokens, labels, loss_mask,
                                           position_ids, ignore_label, eod_no_loss, eod_reset);
    require_size(sample, "sample", a.spans.num_spans);
    const GptIndex<Row> index = gpt_index(lengths, pointers, document_index, sample_index, extra_tokens);
    const Shuffle* shuffle = shuffle_index.data();
    const int64_t num_samples = size_1d(shuffle_index, "shuffle_index");
    const int64_t* samples = sample.data();
    py::gil_scoped_release release;
    const std::vector<int64_t> rows = look_up(shuffle, num_samples, samples, a.spans.num_spans, "the shuffle index");
    const Wanted wanted(a.spans, a.rules);
    const Pieces pieces = sample_pieces(index, converter_for(dtype_code).itemsize, rows.data(), wanted.start.data(),
                                        wanted.length.data(), a.spans.num_spans);
    gather_tokens(a.source, a.source_bytes, dtype_code, pieces.byte_offset.data(), pieces.count.data(),
                  static_cast<int64_t>(pieces.count.size()), pieces.span_begin.data(), a.spans, a.rules, a.out);
}

void read_run_spans(const Array<uint8_t>& source, int dtype_code, const Int64s& byte_offsets,
                    const Int64s& available, const Int64s& sample, const Int64s& start, const Int64s& length,
                    const Int64s& destination, Int64s& tokens, Int64s& labels, Array<float>& loss_mask,
                    std::optional<Int64s> position_ids, int64_t ignore_label, int64_t eod_no_loss,
                    int64_t eod_reset) {
    const SpanArguments a = span_arguments(source, start, length, destination, tokens, labels, loss_mask,
                                           position_ids, ignore_label, eod_no_loss, eod_reset);
    const int64_t n = a.spans.num_spans;
    require_size(sample, "sample", n);
    const int64_t num_runs = size_1d(byte_offsets, "byte_offsets");
    require_size(available, "available", num_runs);
    const int64_t *offsets = byte_offsets.data(), *tokens_left = available.data(), *samples = sample.data();
    py::gil_scoped_release release;
    const Wanted wanted(a.spans, a.rules);
    std::vector<int64_t> offset = look_up(offsets, num_runs, samples, n, "the table");
    std::vector<int64_t> count = look_up(tokens_left, num_runs, samples, n, "the table");
    std::vector<int64_t> span_begin(n + 1);
    const int64_t itemsize = converter_for(dtype_code).itemsize;
    for (int64_t s = 0; s < n; ++s) {
        if (wanted.start[s] > count[s])
            throw std::out_of_range("span " + std::to_string(s) + " starts at token " +
                                    std::to_string(wanted.start[s]) + " of " + std::to_string(count[s]));
        offset[s] += wanted.start[s] * itemsize;
        count[s] = std::min(wanted.length[s], count[s] - wanted.start[s]);
        span_begin[s + 1] = s + 1;
    }
    gather_tokens(a.source, a.source_bytes, dtype_code, offset.data(), count.data(), n, span_begin.data(), a.spans,
                  a.rules, a.out);
}

void py_gather_tokens(const Array<uint8_t>& source, int dtype_code, const Int64s& piece_offset,
                      const Int64s& piece_count, const Int64s& span_begin, const Int64s& start, const Int64s& length,
                      const Int64s& destination, Int64s& tokens, Int64s& labels, Array<float>& loss_mask,
                      std::optional<Int64s> position_ids, int64_t ignore_label, int64_t eod_no_loss,
                      int64_t eod_reset) {
    const SpanArguments a = span_arguments(source, start, length, destination, tokens, labels, loss_mask,
                                           position_ids, ignore_label, eod_no_loss, eod_reset);
    require_size(span_begin, "span_begin", a.spans.num_spans + 1);
    const int64_t num_pieces = size_1d(piece_offset, "piece_offset");
    require_size(piece_count, "piece_count", num_pieces);
    const int64_t *offsets = piece_offset.data(), *counts = piece_count.data(), *begins = span_begin.data();
    py::gil_scoped_release release;
    gather_tokens(a.source, a.source_bytes, dtype_code, offsets, counts, num_pieces, begins, a.spans, a.rules, a.out);
}

template <typename Row, typename Shuffle>
py::tuple gpt_pieces(const Array<int32_t>& lengths, const Int64s& pointers, const Array<int32_t>& document_index,
                     const Array<Row>& sample_index, const Array<Shuffle>& shuffle_index, int64_t extra_tokens,
                     int64_t itemsize, const Int64s& sample, const Int64s& start, const Int64s& length) {
    const int64_t n = size_1d(sample, "sample");
    require_size(start, "start", n);
    require_size(length, "length", n);
    const GptIndex<Row> index = gpt_index(lengths, pointers, document_index, sample_index, extra_tokens);
    const Shuffle* shuffle = shuffle_index.data();
    const int64_t num_samples = size_1d(shuffle_index, "shuffle_index");
    const int64_t *samples = sample.data(), *starts = start.data(), *counts = length.data();
    Pieces pieces;
    {
        py::gil_scoped_release release;
        const std::vector<int64_t> rows = look_up(shuffle, num_samples, samples, n, "the shuffle index");
        pieces = sample_pieces(index, itemsize, rows.data(), starts, counts, n);
    }
    return py::make_tuple(to_array(pieces.byte_offset), to_array(pieces.count), to_array(pieces.span_begin));
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

#define TDP_ARG(name) py::arg(#name).noconvert()
#define TDP_SPAN_ARGS                                                                                         \
    TDP_ARG(sample), TDP_ARG(start), TDP_ARG(length), TDP_ARG(destination), TDP_ARG(tokens), TDP_ARG(labels), \
        TDP_ARG(loss_mask), TDP_ARG(position_ids), py::arg("ignore_label"), py::arg("eod_no_loss"),           \
        py::arg("eod_reset")

template <typename Row, typename Shuffle>
void register_gpt(py::module_& m) {
    m.def("read_gpt_spans", &read_gpt_spans<Row, Shuffle>, TDP_ARG(source), py::arg("dtype_code"), TDP_ARG(lengths),
          TDP_ARG(pointers), TDP_ARG(document_index), TDP_ARG(sample_index), TDP_ARG(shuffle_index),
          py::arg("extra_tokens"), TDP_SPAN_ARGS,
          "Spans of fixed-length samples as tokens, labels, loss mask and position ids; see csrc/gather.h.");
    m.def("gpt_pieces", &gpt_pieces<Row, Shuffle>, TDP_ARG(lengths), TDP_ARG(pointers), TDP_ARG(document_index),
          TDP_ARG(sample_index), TDP_ARG(shuffle_index), py::arg("extra_tokens"), py::arg("itemsize"),
          TDP_ARG(sample), TDP_ARG(start), TDP_ARG(length),
          "Pieces (byte_offset, count, span_begin) of spans of fixed-length samples; see csrc/gather.h.");
}

}  // namespace

void register_gather(py::module_& m) {
    register_gpt<int32_t, uint32_t>(m);
    register_gpt<int64_t, uint32_t>(m);
    register_gpt<int32_t, int64_t>(m);
    register_gpt<int64_t, int64_t>(m);
    m.def("read_run_spans", &read_run_spans, TDP_ARG(source), py::arg("dtype_code"), TDP_ARG(byte_offsets),
          TDP_ARG(available), TDP_SPAN_ARGS,
          "Spans of runs of neighbouring tokens as tokens, labels, loss mask and position ids; see csrc/gather.h.");
    m.def("gather_tokens", &py_gather_tokens, TDP_ARG(source), py::arg("dtype_code"), TDP_ARG(piece_offset),
          TDP_ARG(piece_count), TDP_ARG(span_begin), TDP_ARG(start), TDP_ARG(length), TDP_ARG(destination),
          TDP_ARG(tokens), TDP_ARG(labels), TDP_ARG(loss_mask), TDP_ARG(position_ids), py::arg("ignore_label"),
          py::arg("eod_no_loss"), py::arg("eod_reset"),
          "Spans made of given pieces as tokens, labels, loss mask and position ids; see csrc/gather.h.");
    m.def("copy_spans", &py_copy_spans, TDP_ARG(source), TDP_ARG(source_offset), TDP_ARG(target),
          TDP_ARG(target_offset), TDP_ARG(num_bytes), "Copies byte ranges from one buffer to another.");
    m.def("set_num_threads", &py_set_num_threads, py::arg("n"),
          "Most threads a large gather uses; 0 for the default, the processors of this process up to 4.");
}

}  // namespace tdp
