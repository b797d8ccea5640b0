// What is true of a rank's samples, so that as little as possible of them has to travel; and the pads of packs.
#pragma once

#include <cstdint>

namespace tdp {

// Bits of SampleFacts::bits; the Python side gives them their names.
enum : int64_t {
    kLabelsFollow = 1,      // every label is the next token, wherever there is one
    kLabelsFollowLoss = 2,  // the same where there is a loss; elsewhere there is no label
    kLossIsOne = 4,         // a loss wherever there is a label
    kLossIsBinary = 8,
    kPositionsCount = 16,
};

struct SampleFacts {
    int64_t bits;
    int64_t largest;  // token id; 2^62 where some id is negative
};

// Reads n samples once. tokens, labels, loss_mask and position_ids are arrays of n addresses (position_ids may be null:
// positions then count up); last_label and loss_count get n values each.
SampleFacts scan_samples(const int64_t* tokens, const int64_t* labels, const int64_t* loss_mask,
                         const int64_t* position_ids, const int64_t* lengths, int64_t n, int64_t ignore_label,
                         int64_t* last_label, int64_t* loss_count);

// Joins the tokens of n samples (addresses) in the narrower integer type of an .idx dtype code (8, 4 or 5).
// Throws std::invalid_argument for another code.
void narrow_tokens(const int64_t* tokens, const int64_t* lengths, int64_t n, int dtype_code, unsigned char* out);

struct PackOutput {
    int64_t* tokens;
    int64_t* labels;
    float* loss_mask;
    int64_t* position_ids;
    bool* padding_mask;
    int32_t* document_id;
    int64_t size;
};

// Writes positions, padding mask and document of every place, and tokens, labels and loss of the pads only: spans lie
// side by side, span i has widths[i] places from destinations[i] of which the first lengths[i] are real.
// Throws std::out_of_range where spans do not tile [0, size).
void fill_spans(const int64_t* destinations, const int64_t* widths, const int64_t* starts, const int64_t* lengths,
                const int64_t* entries, int64_t n, int64_t pad_id, int64_t ignore_label, const PackOutput& out);

}  // namespace tdp
