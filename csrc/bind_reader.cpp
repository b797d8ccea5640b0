// Readers of token files: what is needed to find and convert samples is checked and kept once, then one call reads a
// batch, from one file or from many.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <optional>

#include "bind_outputs.h"
#include "bind_reader.h"

namespace tdp {

namespace {

using Int64s = Array<int64_t>;
using Bytes = std::optional<Array<uint8_t>>;

std::unique_ptr<SpanReader> make_reader(std::unique_ptr<TokenSource> source, const Bytes& file, int dtype_code,
                                        int64_t ignore_label, int64_t eod_no_loss, int64_t eod_reset,
                                        std::vector<py::object> kept) {
    TokenBytes bytes{nullptr, 0, converter_for(dtype_code)};
    if (file) {
        bytes.data = file->data();
        bytes.size = size_1d(*file, "source");
        kept.push_back(*file);
    }
    auto* reader = new SpanReader{std::move(source), bytes, file.has_value(), {ignore_label, eod_no_loss, eod_reset},
                                  std::move(kept)};
    return std::unique_ptr<SpanReader>(reader);
}

template <typename Row, typename Shuffle>
std::unique_ptr<SpanReader> gpt_reader(const Bytes& source, int dtype_code, const Array<int32_t>& lengths,
                                       const Int64s& pointers, const Array<int32_t>& document_index,
                                       const Array<Row>& sample_index, const Array<Shuffle>& shuffle_index,
                                       int64_t extra_tokens, int64_t ignore_label, int64_t eod_no_loss,
                                       int64_t eod_reset) {
    const int64_t num_lengths = size_1d(lengths, "lengths");
    require_size(pointers, "pointers", num_lengths);
    if (sample_index.ndim() != 2 || sample_index.shape(1) != 2)
        throw std::invalid_argument("sample_index must have shape [n + 1, 2]");
    const GptIndex<Row> index{Unaligned<int32_t>(lengths.data()),
                              Unaligned<int64_t>(pointers.data()),
                              num_lengths,
                              document_index.data(),
                              size_1d(document_index, "document_index"),
                              sample_index.data(),
                              sample_index.shape(0),
                              extra_tokens};
    auto samples = std::make_unique<GptSource<Row, Shuffle>>(index, shuffle_index.data(),
                                                             size_1d(shuffle_index, "shuffle_index"),
                                                             converter_for(dtype_code).itemsize);
    return make_reader(std::move(samples), source, dtype_code, ignore_label, eod_no_loss, eod_reset,
                       {lengths, pointers, document_index, sample_index, shuffle_index});
}

std::unique_ptr<SpanReader> run_reader(const Bytes& source, int dtype_code, const Int64s& byte_offsets,
                                       const Int64s& available, int64_t ignore_label, int64_t eod_no_loss,
                                       int64_t eod_reset) {
    const int64_t num_runs = size_1d(byte_offsets, "byte_offsets");
    require_size(available, "available", num_runs);
    auto samples = std::make_unique<RunSource>(byte_offsets.data(), available.data(), num_runs,
                                               converter_for(dtype_code).itemsize);
    return make_reader(std::move(samples), source, dtype_code, ignore_label, eod_no_loss, eod_reset,
                       {byte_offsets, available});
}

std::unique_ptr<SpanReader> instant_reader(const Bytes& source, int dtype_code, const Array<int32_t>& lengths,
                                           const Int64s& pointers, int64_t begin, int64_t end, int64_t begin_byte,
                                           int64_t end_byte, int64_t window, int64_t sequence_length,
                                           int64_t extra_tokens, const py::function& keys, int64_t ignore_label,
                                           int64_t eod_no_loss, int64_t eod_reset) {
    const int64_t num_lengths = size_1d(lengths, "lengths");
    require_size(pointers, "pointers", num_lengths);
    const InstantStream stream{Unaligned<int32_t>(lengths.data()), Unaligned<int64_t>(pointers.data()), begin, end,
                               begin_byte, end_byte, converter_for(dtype_code).itemsize, window, 0};
    check_stream(stream, num_lengths);
    if (sequence_length < 1 || extra_tokens < 0)
        throw std::invalid_argument("sequence_length must be at least 1 and extra_tokens not negative, got " +
                                    std::to_string(sequence_length) + " and " + std::to_string(extra_tokens));
    const auto keys_of = [keys = keys.ptr()](int64_t epoch) {
        const auto found = py::reinterpret_borrow<py::function>(keys)(epoch).cast<std::pair<uint64_t, uint64_t>>();
        return InstantSource::Keys{found.first, found.second};
    };
    auto samples = std::make_unique<InstantSource>(stream, sequence_length, extra_tokens, keys_of);
    return make_reader(std::move(samples), source, dtype_code, ignore_label, eod_no_loss, eod_reset,
                       {lengths, pointers, keys});
}

py::tuple reader_pieces(SpanReader& reader, const Int64s& sample, const Int64s& start, const Int64s& length) {
    const int64_t n = size_1d(sample, "sample");
    require_size(start, "start", n);
    require_size(length, "length", n);
    const int64_t *samples = sample.data(), *starts = start.data(), *counts = length.data();
    reader.source->prepare(samples, n);
    Pieces pieces;
    {
        py::gil_scoped_release release;
        pieces = reader.source->locate(samples, starts, counts, n);
    }
    return py::make_tuple(to_array(pieces.byte_offset), to_array(pieces.count), to_array(pieces.span_begin));
}

Int64s reader_document_lengths(SpanReader& reader, int64_t sample) {
    reader.source->prepare(&sample, 1);
    return to_array(reader.source->document_lengths(sample));
}

// Far above any sample, far below what would overflow.
constexpr int64_t kMost = int64_t{1} << 48;

Pieces locate(const SpanReader& reader, const Spans& spans, const GatherRules& rules, const int64_t* sample) {
    const int64_t n = spans.num_spans;
    std::vector<int64_t> start(n), length(n);
    for (int64_t s = 0; s < n; ++s) {
        if (spans.start[s] < 0 || spans.start[s] > kMost || spans.length[s] < 0 || spans.length[s] > kMost)
            throw std::out_of_range("span " + std::to_string(s) + " has start " + std::to_string(spans.start[s]) +
                                    " and length " + std::to_string(spans.length[s]));
        // The lead, the span, and the token that is the last label.
        const int64_t before = lead(spans, rules, s);
        start[s] = spans.start[s] - before;
        length[s] = before + spans.length[s] + 1;
    }
    return reader.source->locate(sample, start.data(), length.data(), n);
}

void read_spans(const Readers& readers, const std::optional<Int64s>& reader_index, const Int64s& sample,
                const Int64s& start, const Int64s& length, const Int64s& destination, Int64s& tokens, Int64s& labels,
                Array<float>& loss_mask, std::optional<Int64s> position_ids) {
    require_mapped(readers);
    const int64_t n = size_1d(sample, "sample");
    require_size(start, "start", n);
    require_size(length, "length", n);
    require_size(destination, "destination", n);
    if (reader_index) require_size(*reader_index, "reader_index", n);
    const TokenOutputs out = token_outputs(tokens, labels, loss_mask, position_ids);
    Requests requests(reader_index ? reader_index->data() : nullptr, readers.size(), n);
    for (int64_t i = 0; i < n; ++i)
        requests.set(i, sample.data()[i], start.data()[i], length.data()[i], destination.data()[i]);
    prepare(readers, requests);
    py::gil_scoped_release release;
    read(readers, requests, out, {});
}

#define TDP_ARG(name) py::arg(#name).noconvert()
#define TDP_RULES py::arg("ignore_label"), py::arg("eod_no_loss"), py::arg("eod_reset")

template <typename Row, typename Shuffle>
void register_gpt_reader(py::module_& m) {
    m.def("gpt_reader", &gpt_reader<Row, Shuffle>, TDP_ARG(source), py::arg("dtype_code"), TDP_ARG(lengths),
          TDP_ARG(pointers), TDP_ARG(document_index), TDP_ARG(sample_index), TDP_ARG(shuffle_index),
          py::arg("extra_tokens"), TDP_RULES, "Fixed-length samples in Megatron's order; see csrc/token_source.h.");
}

}  // namespace

Requests::Requests(const int64_t* reader_index, std::size_t num_readers, int64_t n)
    : begin(num_readers + 1, 0), place_(n) {
    for (auto* column : {&sample, &start, &length, &destination}) column->resize(n);
    if (!reader_index && num_readers != 1)
        throw std::invalid_argument("reader_index may be None only where there is one reader, there are " +
                                    std::to_string(num_readers));
    for (int64_t i = 0; i < n; ++i) {
        const int64_t reader = reader_index ? reader_index[i] : 0;
        if (reader < 0 || reader >= static_cast<int64_t>(num_readers))
            throw std::out_of_range("reader_index[" + std::to_string(i) + "] is " + std::to_string(reader) +
                                    ", there are " + std::to_string(num_readers) + " readers");
        ++begin[reader + 1];
    }
    for (std::size_t r = 0; r < num_readers; ++r) begin[r + 1] += begin[r];
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < n; ++i) place_[i] = next[reader_index ? reader_index[i] : 0]++;
}

void require_mapped(const Readers& readers) {
    for (const SpanReader* reader : readers)
        if (!reader || !reader->is_mapped) throw std::invalid_argument("a reader has no file in memory to read from");
}

void prepare(const Readers& readers, const Requests& requests) {
    for (size_t r = 0; r < readers.size(); ++r)
        readers[r]->source->prepare(requests.sample.data() + requests.begin[r],
                                    requests.begin[r + 1] - requests.begin[r]);
}

namespace {

Gather located(const Readers& readers, const Requests& requests, const TokenOutputs& out) {
    Gather gather;
    for (size_t r = 0; r < readers.size(); ++r) {
        const int64_t first = requests.begin[r], n = requests.begin[r + 1] - first;
        if (n == 0) continue;
        const SpanReader& reader = *readers[r];
        GatherRules rules = reader.rules;
        if (!out.position_ids) rules.eod_reset = -1;
        const Spans spans{n, requests.start.data() + first, requests.length.data() + first,
                          requests.destination.data() + first};
        const Pieces pieces = locate(reader, spans, rules, requests.sample.data() + first);
        gather.add(reader.bytes, PieceTable(pieces), spans, rules, out);
    }
    return gather;
}

}  // namespace

void read(const Readers& readers, const Requests& requests, const TokenOutputs& out, const Later& later) {
    const StorageWatch storage;
    const auto expect = [&](int step) {
        if (later.num_samples) readers[0]->source->expect(later.sample, later.num_samples, step);
    };
    expect(0);
    const Gather gather = located(readers, requests, out);
    if (should_read_ahead()) {
        read_ahead(gather.ranges());
        if (later.requests) read_ahead(located(readers, *later.requests, out).ranges());
    }
    expect(1);
    gather.run(out);
    expect(2);
}

void register_reader(py::module_& m) {
    py::class_<SpanReader>(m, "SpanReader", "The samples of one token file; made by gpt_reader, run_reader, instant_reader.")
        .def_property_readonly("is_mapped", [](const SpanReader& reader) { return reader.is_mapped; })
        .def("pieces", &reader_pieces, TDP_ARG(sample), TDP_ARG(start), TDP_ARG(length),
             "Pieces (byte_offset, count, span_begin) of spans of samples.")
        .def("document_lengths", &reader_document_lengths, py::arg("sample"),
             "Tokens that each document of a sample has.");
    register_gpt_reader<int32_t, uint32_t>(m);
    register_gpt_reader<int64_t, uint32_t>(m);
    register_gpt_reader<int32_t, int64_t>(m);
    register_gpt_reader<int64_t, int64_t>(m);
    m.def("run_reader", &run_reader, TDP_ARG(source), py::arg("dtype_code"), TDP_ARG(byte_offsets),
          TDP_ARG(available), TDP_RULES, "Samples that are runs of neighbouring tokens; see csrc/token_source.h.");
    m.def("instant_reader", &instant_reader, TDP_ARG(source), py::arg("dtype_code"), TDP_ARG(lengths),
          TDP_ARG(pointers), py::arg("begin"), py::arg("end"), py::arg("begin_byte"), py::arg("end_byte"),
          py::arg("window"), py::arg("sequence_length"), py::arg("extra_tokens"), py::arg("keys"), TDP_RULES,
          "Samples of the order without an index; keys(epoch) gives the epoch's; see csrc/token_source.h.");
    m.def("read_spans", &read_spans, py::arg("readers"), TDP_ARG(reader_index), TDP_ARG(sample), TDP_ARG(start),
          TDP_ARG(length), TDP_ARG(destination), TDP_ARG(tokens), TDP_ARG(labels), TDP_ARG(loss_mask),
          TDP_ARG(position_ids), "Spans of samples as tokens, labels, loss mask and position ids.");
}

}  // namespace tdp
