#include "gather.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "convert.h"
#include "thread_pool.h"

namespace tdp {

namespace {

// A helper thread costs some microseconds to wake; this many tokens take about as long to convert from memory.
constexpr int64_t kTokensPerThread = 1 << 15;

// Spans whose index entries are asked for ahead of their use.
constexpr int64_t kWindow = 16;
// Documents per span for which that is done.
constexpr int64_t kWindowDocuments = 32;

[[noreturn]] void out_of_range(const std::string& what) { throw std::out_of_range(what); }

// Three dependent cache misses lead to a document; taking them for a window of spans together hides most of them.
template <typename Row>
void prefetch_window(const GptIndex<Row>& index, const int64_t* sample, int64_t begin, int64_t end) {
    const auto valid = [&](int64_t s) { return sample[s] >= 0 && sample[s] < index.num_rows - 1; };
    for (int64_t s = begin; s < end; ++s)
        if (valid(s)) __builtin_prefetch(index.rows + 2 * sample[s]);
    for (int64_t s = begin; s < end; ++s) {
        if (!valid(s)) continue;
        const int64_t first = index.rows[2 * sample[s]];
        if (first >= 0 && first < index.num_documents) __builtin_prefetch(index.document_index + first);
    }
    for (int64_t s = begin; s < end; ++s) {
        if (!valid(s)) continue;
        const int64_t first = std::max<int64_t>(index.rows[2 * sample[s]], 0);
        const int64_t last = std::min<int64_t>({index.rows[2 * sample[s] + 2], first + kWindowDocuments,
                                                index.num_documents - 1});
        for (int64_t place = first; place <= last; ++place) {
            index.lengths.prefetch(index.document_index[place]);
            index.pointers.prefetch(index.document_index[place]);
        }
    }
}

template <typename Row>
void add_pieces(const GptIndex<Row>& index, int64_t itemsize, int64_t row, int64_t skip, int64_t want,
                Pieces* pieces) {
    if (row < 0 || row >= index.num_rows - 1)
        out_of_range("sample " + std::to_string(row) + " outside [0, " + std::to_string(index.num_rows - 1) + ")");
    const Row* rows = index.rows + 2 * row;
    const int64_t first = rows[0], last = rows[2];
    if (first < 0 || last < first || last >= index.num_documents)
        out_of_range("sample index row " + std::to_string(row) + " points to documents " + std::to_string(first) +
                     ".." + std::to_string(last) + " of " + std::to_string(index.num_documents));
    if (skip < 0 || want < 0)
        out_of_range("span from token " + std::to_string(skip) + " of " + std::to_string(want) +
                     " tokens: neither may be negative");
    for (int64_t place = first; place <= last && want > 0; ++place) {
        const int64_t document = index.document_index[place];
        if (document < 0 || document >= index.num_lengths)
            out_of_range("document_index[" + std::to_string(place) + "] is " + std::to_string(document));
        const int64_t length = index.lengths[document];
        const int64_t begin = place == first ? static_cast<int64_t>(rows[1]) : 0;
        const int64_t end = place == last ? static_cast<int64_t>(rows[3]) + index.extra_tokens : length;
        if (begin < 0 || end > length)
            out_of_range("sample index row " + std::to_string(row) + " leaves sequence " + std::to_string(document) +
                         " of length " + std::to_string(length));
        const int64_t available = end - begin;
        if (available <= skip) {
            skip -= std::max<int64_t>(available, 0);
            continue;
        }
        const int64_t count = std::min(available - skip, want);
        pieces->byte_offset.push_back(index.pointers[document] + (begin + skip) * itemsize);
        pieces->count.push_back(count);
        want -= count;
        skip = 0;
    }
}

// The last place of `value` in n tokens, -1 if there is none.
int64_t last_place(const Converter& type, const unsigned char* bytes, int64_t n, int64_t value) {
    int64_t buffer[256];
    for (int64_t end = n; end > 0;) {
        const int64_t begin = std::max<int64_t>(end - 256, 0);
        type.convert(bytes + begin * type.itemsize, end - begin, buffer);
        for (int64_t i = end - 1; i >= begin; --i)
            if (buffer[i - begin] == value) return i;
        end = begin;
    }
    return -1;
}

// The next piece lies anywhere in the file; the processor's own prefetching needs a few misses to get going.
void prefetch_bytes(const unsigned char* begin, int64_t size) {
    constexpr int64_t kLine = 64, kMost = 64 * kLine;
    for (int64_t at = 0; at < std::min(size, kMost); at += kLine) __builtin_prefetch(begin + at, 0, 2);
}

void gather_span(const unsigned char* source, const Converter& type, const int64_t* piece_offset,
                 const int64_t* piece_count, int64_t num_pieces, int64_t first_piece, int64_t last_piece,
                 int64_t start, int64_t lead, int64_t length, const GatherRules& rules, int64_t destination, const TokenOutputs& out) {
    int64_t* tokens = out.tokens + destination;
    int64_t* labels = out.labels + destination;
    float* loss_mask = out.loss_mask + destination;
    int64_t at = -lead;          // position in the span of the next source token
    int64_t next_position = start;  // position id of the span's first token
    for (int64_t p = first_piece; p < last_piece; ++p) {
        const unsigned char* bytes = source + piece_offset[p];
        int64_t count = piece_count[p];
        if (p + 1 < num_pieces) prefetch_bytes(source + piece_offset[p + 1], piece_count[p + 1] * type.itemsize);
        if (at < 0) {
            const int64_t before = std::min(count, -at);
            const int64_t eod = last_place(type, bytes, before, rules.eod_reset);
            if (eod >= 0) next_position = -at - eod - 1;
            at += before;
            bytes += before * type.itemsize;
            count -= before;
            if (count == 0) continue;
        }
        type.convert(bytes, std::min(count, length - at), tokens + at);
        // The label of position i is the source token i + 1.
        const int64_t skip = at == 0 ? 1 : 0;
        if (count > skip) type.convert(bytes + skip * type.itemsize, count - skip, labels + at + skip - 1);
        at += count;
    }
    fill_loss_mask(tokens, length, rules.eod_no_loss, loss_mask);
    if (at == length && length > 0) {
        labels[length - 1] = rules.ignore_label;
        loss_mask[length - 1] = 0.0f;
    }
    if (!out.position_ids) return;
    int64_t* positions = out.position_ids + destination;
    if (rules.eod_reset < 0) {
        fill_positions(start, length, positions);
        return;
    }
    for (int64_t i = 0; i < length; ++i) {
        positions[i] = next_position;
        next_position = tokens[i] == rules.eod_reset ? 0 : next_position + 1;
    }
}

}  // namespace

template <typename Row>
Pieces sample_pieces(const GptIndex<Row>& index, int64_t itemsize, const int64_t* sample, const int64_t* start,
                     const int64_t* length, int64_t num_spans) {
    Pieces pieces;
    pieces.span_begin.reserve(num_spans + 1);
    pieces.span_begin.push_back(0);
    for (int64_t s = 0; s < num_spans; ++s) {
        if (s % kWindow == 0) prefetch_window(index, sample, s, std::min(s + kWindow, num_spans));
        add_pieces(index, itemsize, sample[s], start[s], length[s], &pieces);
        pieces.span_begin.push_back(static_cast<int64_t>(pieces.count.size()));
    }
    return pieces;
}

template Pieces sample_pieces<int32_t>(const GptIndex<int32_t>&, int64_t, const int64_t*, const int64_t*,
                                       const int64_t*, int64_t);
template Pieces sample_pieces<int64_t>(const GptIndex<int64_t>&, int64_t, const int64_t*, const int64_t*,
                                       const int64_t*, int64_t);

void gather_tokens(const unsigned char* source, int64_t source_bytes, int dtype_code, const int64_t* piece_offset,
                   const int64_t* piece_count, int64_t num_pieces, const int64_t* span_begin, const Spans& spans,
                   const GatherRules& rules, const TokenOutputs& out) {
    const Converter type = converter_for(dtype_code);
    int64_t num_tokens = 0;
    for (int64_t s = 0; s < spans.num_spans; ++s) {
        const int64_t length = spans.length[s], at = spans.destination[s];
        if (span_begin[s] < 0 || span_begin[s + 1] < span_begin[s] || span_begin[s + 1] > num_pieces)
            out_of_range("span " + std::to_string(s) + " has an impossible range of pieces");
        if (length < 0 || at < 0 || at > out.size - length)
            out_of_range("span " + std::to_string(s) + " leaves the output of " + std::to_string(out.size) +
                         " tokens");
        if (spans.start[s] < 0) out_of_range("span " + std::to_string(s) + " starts before its sample");
        int64_t total = 0;
        for (int64_t p = span_begin[s]; p < span_begin[s + 1]; ++p) {
            if (piece_count[p] < 0 || piece_offset[p] < 0 ||
                piece_count[p] > (source_bytes - piece_offset[p]) / type.itemsize)
                out_of_range("piece of " + std::to_string(piece_count[p]) + " tokens at byte " +
                             std::to_string(piece_offset[p]) + " leaves the file of " +
                             std::to_string(source_bytes) + " bytes");
            total += piece_count[p];
        }
        const int64_t wanted = lead(spans, rules, s) + length;
        if (total != wanted && total != wanted + 1)
            out_of_range("span " + std::to_string(s) + " wants " + std::to_string(wanted) +
                         " tokens, its pieces hold " + std::to_string(total));
        num_tokens += length;
    }
    const int threads = static_cast<int>(std::min<int64_t>(num_threads(), 1 + num_tokens / kTokensPerThread));
    parallel_for(spans.num_spans, threads, [&](int64_t s) {
        gather_span(source, type, piece_offset, piece_count, num_pieces, span_begin[s], span_begin[s + 1],
                    spans.start[s], lead(spans, rules, s), spans.length[s], rules, spans.destination[s], out);
    });
}

void copy_spans(const unsigned char* source, int64_t source_bytes, const int64_t* source_offset,
                unsigned char* target, int64_t target_bytes, const int64_t* target_offset, const int64_t* num_bytes,
                int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        if (num_bytes[i] < 0 || source_offset[i] < 0 || target_offset[i] < 0 ||
            source_offset[i] > source_bytes - num_bytes[i] || target_offset[i] > target_bytes - num_bytes[i])
            out_of_range("span " + std::to_string(i) + " of " + std::to_string(num_bytes[i]) +
                         " bytes leaves its buffer");
    }
    for (int64_t i = 0; i < n; ++i)
        std::memcpy(target + target_offset[i], source + source_offset[i], static_cast<size_t>(num_bytes[i]));
}

}  // namespace tdp
