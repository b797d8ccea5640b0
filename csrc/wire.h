// What is true of a rank's samples, so that as little as possible of them has to travel; and the pads of packs.
#pragma once

#include <cstdint>

#include "columns.h"

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
    int64_t largest;  // no id needs more bits than this number; 2^62 where some id is negative
};

// Reads all samples once. position_ids may be null: positions then count up. last_label and loss_count get one value
// per sample. The columns hold int64, loss_mask float32, all of the same lengths.
SampleFacts scan_samples(const Column& tokens, const Column& labels, const Column& loss_mask,
                         const Column* position_ids, int64_t ignore_label, int64_t* last_label, int64_t* loss_count);

// Numbers the samples of all ranks: by `key` (a column of their rows), then by place among their rank's, then by rank.
// rows are [num_ranks, room, num_columns], of which rank r fills counts[r]. out gets num_columns + 2 lines of one value
// per sample: the columns, the rank and the place. Throws std::out_of_range where a count is not in [0, room].
void number_samples(const int64_t* rows, int64_t num_ranks, int64_t room, int64_t num_columns, const int64_t* counts,
                    int64_t key, int64_t* out);

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
