#include "gather.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tdp {

namespace {

[[noreturn]] void out_of_range(const std::string& what) { throw std::out_of_range(what); }

template <typename T>
void convert(const unsigned char* bytes, int64_t n, int64_t* out) {
    for (int64_t i = 0; i < n; ++i) {
        T value;
        std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
        out[i] = static_cast<int64_t>(value);
    }
}

template <typename T>
void gather_span(const unsigned char* source, const int64_t* piece_offset, const int64_t* piece_count,
                 int64_t first_piece, int64_t last_piece, int64_t length, int64_t ignore_label, int64_t eod,
                 int64_t* tokens, int64_t* labels, float* loss_mask) {
    int64_t at = 0;  // position in the span of the next source token
    for (int64_t p = first_piece; p < last_piece; ++p) {
        const unsigned char* bytes = source + piece_offset[p];
        const int64_t count = piece_count[p];
        convert<T>(bytes, std::min(count, length - at), tokens + at);
        // The label of position i is the source token i + 1.
        const int64_t skip = at == 0 ? 1 : 0;
        if (count > skip)
            convert<T>(bytes + skip * static_cast<int64_t>(sizeof(T)), count - skip, labels + at + skip - 1);
        at += count;
    }
    std::fill_n(loss_mask, length, 1.0f);
    if (eod >= 0)
        for (int64_t i = 0; i < length; ++i)
            if (tokens[i] == eod) loss_mask[i] = 0.0f;
    if (at == length && length > 0) {
        labels[length - 1] = ignore_label;
        loss_mask[length - 1] = 0.0f;
    }
}

using GatherSpan = decltype(&gather_span<int32_t>);

GatherSpan gather_for(int dtype_code, int64_t* itemsize) {
    switch (dtype_code) {
        case 1: *itemsize = 1; return gather_span<uint8_t>;
        case 2: *itemsize = 1; return gather_span<int8_t>;
        case 3: *itemsize = 2; return gather_span<int16_t>;
        case 4: *itemsize = 4; return gather_span<int32_t>;
        case 5: *itemsize = 8; return gather_span<int64_t>;
        case 8: *itemsize = 2; return gather_span<uint16_t>;
        default:
            throw std::invalid_argument("dtype code " + std::to_string(dtype_code) + " is not an integer type");
    }
}

}  // namespace

template <typename Row>
Pieces sample_pieces(Unaligned<int32_t> lengths, Unaligned<int64_t> pointers, int64_t num_lengths,
                     const int32_t* document_index, int64_t num_documents, const Row* rows, int64_t num_rows,
                     int64_t extra_tokens, int64_t itemsize, const int64_t* sample, const int64_t* start,
                     const int64_t* length, int64_t num_spans) {
    Pieces pieces;
    pieces.span_begin.reserve(num_spans + 1);
    pieces.span_begin.push_back(0);
    for (int64_t s = 0; s < num_spans; ++s) {
        const int64_t row = sample[s];
        if (row < 0 || row + 1 >= num_rows)
            out_of_range("sample " + std::to_string(row) + " outside [0, " + std::to_string(num_rows - 1) + ")");
        const int64_t first = rows[2 * row], last = rows[2 * row + 2];
        if (first < 0 || last < first || last >= num_documents)
            out_of_range("sample index row " + std::to_string(row) + " points to documents " + std::to_string(first) +
                         ".." + std::to_string(last) + " of " + std::to_string(num_documents));
        int64_t skip = start[s], want = length[s];
        for (int64_t place = first; place <= last && want > 0; ++place) {
            const int64_t document = document_index[place];
            if (document < 0 || document >= num_lengths)
                out_of_range("document_index[" + std::to_string(place) + "] is " + std::to_string(document));
            const int64_t begin = place == first ? static_cast<int64_t>(rows[2 * row + 1]) : 0;
            const int64_t end = place == last ? static_cast<int64_t>(rows[2 * row + 3]) + extra_tokens
                                              : static_cast<int64_t>(lengths[document]);
            if (begin < 0 || end > lengths[document])
                out_of_range("sample index row " + std::to_string(row) + " leaves sequence " +
                             std::to_string(document) + " of length " + std::to_string(lengths[document]));
            const int64_t available = end - begin;
            if (available <= skip) {
                skip -= std::max<int64_t>(available, 0);
                continue;
            }
            const int64_t count = std::min(available - skip, want);
            pieces.byte_offset.push_back(pointers[document] + (begin + skip) * itemsize);
            pieces.count.push_back(count);
            want -= count;
            skip = 0;
        }
        pieces.span_begin.push_back(static_cast<int64_t>(pieces.count.size()));
    }
    return pieces;
}

template Pieces sample_pieces<int32_t>(Unaligned<int32_t>, Unaligned<int64_t>, int64_t, const int32_t*, int64_t,
                                       const int32_t*, int64_t, int64_t, int64_t, const int64_t*, const int64_t*,
                                       const int64_t*, int64_t);
template Pieces sample_pieces<int64_t>(Unaligned<int32_t>, Unaligned<int64_t>, int64_t, const int32_t*, int64_t,
                                       const int64_t*, int64_t, int64_t, int64_t, const int64_t*, const int64_t*,
                                       const int64_t*, int64_t);

void gather_tokens(const unsigned char* source, int64_t source_bytes, int dtype_code, const int64_t* piece_offset,
                   const int64_t* piece_count, int64_t num_pieces, const int64_t* span_begin, const int64_t* length,
                   const int64_t* destination, int64_t num_spans, int64_t ignore_label, int64_t eod,
                   const TokenOutputs& out) {
    int64_t itemsize = 0;
    const GatherSpan gather = gather_for(dtype_code, &itemsize);
    for (int64_t s = 0; s < num_spans; ++s) {
        if (span_begin[s] < 0 || span_begin[s + 1] < span_begin[s] || span_begin[s + 1] > num_pieces)
            out_of_range("span " + std::to_string(s) + " has an impossible range of pieces");
        if (length[s] < 0 || destination[s] < 0 || destination[s] > out.size - length[s])
            out_of_range("span " + std::to_string(s) + " leaves the output of " + std::to_string(out.size) +
                         " tokens");
        int64_t total = 0;
        for (int64_t p = span_begin[s]; p < span_begin[s + 1]; ++p) {
            if (piece_count[p] < 0 || piece_offset[p] < 0 ||
                piece_count[p] > (source_bytes - piece_offset[p]) / itemsize)
                out_of_range("piece of " + std::to_string(piece_count[p]) + " tokens at byte " +
                             std::to_string(piece_offset[p]) + " leaves the file of " +
                             std::to_string(source_bytes) + " bytes");
            total += piece_count[p];
        }
        if (total != length[s] && total != length[s] + 1)
            out_of_range("span " + std::to_string(s) + " wants " + std::to_string(length[s]) +
                         " tokens, its pieces hold " + std::to_string(total));
    }
    for (int64_t s = 0; s < num_spans; ++s) {
        const int64_t at = destination[s];
        gather(source, piece_offset, piece_count, span_begin[s], span_begin[s + 1], length[s], ignore_label, eod,
               out.tokens + at, out.labels + at, out.loss_mask + at);
    }
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
