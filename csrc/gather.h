// From runs of tokens in memory to training tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "convert.h"
#include "readahead.h"

namespace tdp {

// Runs of tokens that lie side by side in the .bin; those of span s are [span_begin[s], span_begin[s + 1]).
struct Pieces {
    std::vector<int64_t> byte_offset;
    std::vector<int64_t> count;       // tokens
    std::vector<int64_t> span_begin;  // [spans + 1]
};

// The same in somebody else's memory.
struct PieceTable {
    const int64_t* byte_offset;
    const int64_t* count;
    int64_t num_pieces;
    const int64_t* span_begin;

    PieceTable(const int64_t* offsets, const int64_t* counts, int64_t n, const int64_t* begins)
        : byte_offset(offsets), count(counts), num_pieces(n), span_begin(begins) {}
    explicit PieceTable(const Pieces& pieces)
        : PieceTable(pieces.byte_offset.data(), pieces.count.data(), static_cast<int64_t>(pieces.count.size()),
                     pieces.span_begin.data()) {}
};

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

// Tokens in memory, of any integer type.
struct TokenBytes {
    const unsigned char* data;
    int64_t size;  // bytes
    Converter type;
};

// Spans of any number of files, to be written into the same outputs in one go.
class Gather {
public:
    // The pieces of a span hold lead + length + 1 tokens when the next token is known, lead + length when it is not.
    // Throws std::out_of_range for anything outside the source or the outputs.
    void add(const TokenBytes& source, const PieceTable& pieces, const Spans& spans, const GatherRules& rules,
             const TokenOutputs& out);

    // Where the spans' tokens lie.
    std::vector<ByteRange> ranges() const;

    // Converts all spans to tokens, labels, loss mask and position ids, on several threads when they are large.
    void run(const TokenOutputs& out) const;

private:
    struct Piece {
        const unsigned char* bytes;
        int64_t count;
        int64_t size;  // bytes
    };
    struct Span {
        std::size_t first_piece, last_piece;
        int64_t start, lead, length, destination;
        std::size_t kind;
    };
    struct Kind {
        Converter type;
        GatherRules rules;
    };
    class Source;
    class Ahead;

    void write(const Span& span, const TokenOutputs& out, Ahead* ahead) const;

    std::vector<Piece> pieces_;
    std::vector<Span> spans_;
    std::vector<Kind> kinds_;
    int64_t num_tokens_ = 0;
};

// The documents of one row of `width` tokens, from the lengths of its sample's documents.
//
// cu_seqlens[width + 1] holds their ends, closed by `width` and filled up with it; a document without a token repeats
// an end. What is missing in the row or too much is the last document's. position_ids[width] restart at each document.
// Returns the longest document's tokens.
int32_t fill_documents(const std::vector<int64_t>& lengths, int64_t width, int64_t* position_ids,
                       int32_t* cu_seqlens);

// Copies n byte ranges; throws std::out_of_range when one leaves its buffer.
void copy_spans(const unsigned char* source, int64_t source_bytes, const int64_t* source_offset,
                unsigned char* target, int64_t target_bytes, const int64_t* target_offset, const int64_t* num_bytes,
                int64_t n);

}  // namespace tdp
