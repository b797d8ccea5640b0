// From samples that lie one after the other to packed microbatches.
#pragma once

#include <cstdint>

namespace tdp {

// Spans of the packs, one line of `capacity` numbers per field. Span q fills the packs from destination[q] to
// destination[q + 1] (the last one to num_tokens): `length` real tokens, then pads.
struct PackRows {
    const int64_t* destination;
    const int64_t* source;   // place of the first token in the sources
    const int64_t* length;   // real tokens
    const int64_t* start;    // position of the first token in its sequence
    const int64_t* targets;  // tokens whose label is the token behind
    const int64_t* entry;    // number of the sequence in its pack
    const int64_t* first_edge;
    const int64_t* last_edge;
    int64_t count;
    int64_t num_tokens;
};

// Null where they are to be derived.
struct PackSources {
    const unsigned char* tokens;
    int dtype_code;
    int64_t size;  // tokens
    const int64_t* labels;
    const float* loss_mask;
    const int64_t* position_ids;
    const int64_t* loss_edges;
    int64_t num_edges;
};

struct PackOutputs {
    int64_t* tokens;
    int64_t* labels;
    float* loss_mask;
    int64_t* position_ids;
    bool* padding_mask;
    int32_t* document_id;
};

struct PackPads {
    int64_t token;
    int64_t label;
    int64_t ignore_label;  // of real tokens without a label
    bool zero_positions;
};

// Writes every element of the outputs, num_tokens of each. Throws std::out_of_range for a span that leaves the
// sources or the packs, std::invalid_argument for a dtype code that is not an integer type.
void pack(const PackRows& rows, const PackSources& sources, const PackPads& pads, const PackOutputs& out);

// The same for a key of `width` bytes per token; pads are zeros.
void pack_bytes(const PackRows& rows, const unsigned char* source, int64_t source_bytes, int64_t width,
                unsigned char* out);

// Places in the whole pack of the tokens of one context-parallel rank; `out` has cu_seqlens[count] / cp_size elements.
// Throws std::invalid_argument for a length that is negative or no multiple of 2 * cp_size.
template <typename T>
void cp_positions(const T* cu_seqlens, int64_t count, int64_t cp_size, int64_t cp_rank, int64_t* out);

}  // namespace tdp
