// From positions in samples to bytes in the .bin, and from those bytes to training tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "unaligned.h"

namespace tdp {

// A run of tokens that lie side by side in the .bin.
struct Pieces {
    std::vector<int64_t> byte_offset;
    std::vector<int64_t> count;       // tokens
    std::vector<int64_t> span_begin;  // [spans + 1], first piece of each span
};

// The documents that spans [start, start + length) of fixed-length samples touch.
//
// rows is the sample index ([num_rows, 2]), sample[] its row numbers. Tokens past the sample's end (the extra token
// included) do not exist: the pieces of such a span hold fewer tokens than asked.
template <typename Row>
Pieces sample_pieces(Unaligned<int32_t> lengths, Unaligned<int64_t> pointers, int64_t num_lengths,
                     const int32_t* document_index, int64_t num_documents, const Row* rows, int64_t num_rows,
                     int64_t extra_tokens, int64_t itemsize, const int64_t* sample, const int64_t* start,
                     const int64_t* length, int64_t num_spans);

struct TokenOutputs {
    int64_t* tokens;
    int64_t* labels;
    float* loss_mask;
    int64_t size;  // elements of each
};

// Converts spans of `length[s]` tokens to tokens, labels and loss mask at `destination[s]`.
//
// The pieces of a span hold length[s] + 1 tokens when the next token is known, length[s] when it is not: then the last
// label is `ignore_label` with loss 0. With eod >= 0, positions whose token is eod get loss 0.
// dtype_code is the .idx code of an integer type; throws std::invalid_argument for others and std::out_of_range
// for anything outside the source or the outputs.
void gather_tokens(const unsigned char* source, int64_t source_bytes, int dtype_code, const int64_t* piece_offset,
                   const int64_t* piece_count, int64_t num_pieces, const int64_t* span_begin, const int64_t* length,
                   const int64_t* destination, int64_t num_spans, int64_t ignore_label, int64_t eod,
                   const TokenOutputs& out);

// Copies n byte ranges; throws std::out_of_range when one leaves its buffer.
void copy_spans(const unsigned char* source, int64_t source_bytes, const int64_t* source_offset,
                unsigned char* target, int64_t target_bytes, const int64_t* target_offset, const int64_t* num_bytes,
                int64_t n);

}  // namespace tdp
