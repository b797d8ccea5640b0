// From positions in samples to bytes in the .bin, and from those bytes to training tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "unaligned.h"

namespace tdp {

// Runs of tokens that lie side by side in the .bin; those of span s are [span_begin[s], span_begin[s + 1]).
struct Pieces {
    std::vector<int64_t> byte_offset;
    std::vector<int64_t> count;       // tokens
    std::vector<int64_t> span_begin;  // [spans + 1]
};

// The arrays of fixed-length samples. rows is the sample index, [num_rows, 2].
template <typename Row>
struct GptIndex {
    Unaligned<int32_t> lengths;
    Unaligned<int64_t> pointers;
    int64_t num_lengths;
    const int32_t* document_index;
    int64_t num_documents;
    const Row* rows;
    int64_t num_rows;
    int64_t extra_tokens;
};

// The documents that tokens [start, start + length) of samples touch, sample[] being row numbers of the sample index.
//
// Tokens past the sample's end (the extra token included) do not exist: the pieces of such a span hold fewer tokens
// than asked. Throws std::out_of_range for rows, documents or offsets that are not there.
template <typename Row>
Pieces sample_pieces(const GptIndex<Row>& index, int64_t itemsize, const int64_t* sample, const int64_t* start,
                     const int64_t* length, int64_t num_spans);

// What to make of num_spans spans: length[s] tokens each, written at destination[s] of every output.
struct Spans {
    int64_t num_spans;
    const int64_t* start;  // tokens from the start of the sample
    const int64_t* length;
    const int64_t* destination;
};

struct TokenOutputs {
    int64_t* tokens;
    int64_t* labels;
    float* loss_mask;
    int64_t* position_ids;  // may be null
    int64_t size;           // elements of each
};

struct GatherRules {
    int64_t ignore_label;  // the label of a last token whose successor is unknown; it has no loss
    int64_t eod_no_loss;   // positions of this token have no loss; negative for none
    int64_t eod_reset;     // position ids restart after this token; negative for none
};

// Tokens in front of a span that its pieces must hold as well: with eod_reset the sample's beginning decides where
// positions restart.
inline int64_t lead(const Spans& spans, const GatherRules& rules, int64_t s) {
    return rules.eod_reset >= 0 ? spans.start[s] : 0;
}

// Converts spans to tokens, labels, loss mask and position ids, on several threads when they are large.
//
// The pieces of a span hold lead + length + 1 tokens when the next token is known, lead + length when it is not.
// dtype_code is the .idx code of an integer type; throws std::invalid_argument for others and std::out_of_range for
// anything outside the source or the outputs, before anything is written.
void gather_tokens(const unsigned char* source, int64_t source_bytes, int dtype_code, const int64_t* piece_offset,
                   const int64_t* piece_count, int64_t num_pieces, const int64_t* span_begin, const Spans& spans,
                   const GatherRules& rules, const TokenOutputs& out);

// Copies n byte ranges; throws std::out_of_range when one leaves its buffer.
void copy_spans(const unsigned char* source, int64_t source_bytes, const int64_t* source_offset,
                unsigned char* target, int64_t target_bytes, const int64_t* target_offset, const int64_t* num_bytes,
                int64_t n);

}  // namespace tdp
