// Where each fixed-length sample begins in the shuffled sequence of documents.
#pragma once

#include <cstdint>

#include "poll.h"
#include "unaligned.h"

namespace tdp {

// Fills rows[(num_samples + 1) * 2] with (place in document_index, token offset in that document).
//
// Think of the documents of document_index laid end to end. Sample i covers the tokens [i*S, i*S + S + x). Row i is
// the document that holds the *last* token of sample i-1, with the offset of token i*S from that document's start,
// so a sample that ends exactly at a document's end keeps pointing into that document. Row 0 is (0, 0). Tokens past
// the end (a last partial sample) are attributed to the last document at offset length - x.
//
// Throws std::out_of_range for a document number outside [0, num_lengths) or a negative length.
template <typename Row>
void build_sample_index(Unaligned<int32_t> lengths, int64_t num_lengths, const int32_t* document_index,
                        int64_t num_documents, int64_t sequence_length, int64_t extra_tokens, int64_t num_samples,
                        Row* rows, const Poll& poll);

}  // namespace tdp
