#include "sample_index.h"

#include <stdexcept>
#include <string>

namespace tdp {

template <typename Row>
void build_sample_index(Unaligned<int32_t> lengths, int64_t num_lengths, const int32_t* document_index,
                        int64_t num_documents, int64_t sequence_length, int64_t extra_tokens, int64_t num_samples,
                        Row* rows, const Poll& poll) {
    // The documents are in random order, so every length is a cache miss unless it is asked for early.
    constexpr int64_t kAhead = 48;
    auto length_at = [&](int64_t place) -> int64_t {
        if (place % kStepsPerPoll == kStepsPerPoll - 1) poll();
        const int64_t document = document_index[place];
        if (place + kAhead < num_documents) lengths.prefetch(document_index[place + kAhead]);
        if (document < 0 || document >= num_lengths)
            throw std::out_of_range("document_index[" + std::to_string(place) + "] is " + std::to_string(document) +
                                    ", the file has " + std::to_string(num_lengths) + " sequences");
        const int64_t length = lengths[document];
        if (length < 0)
            throw std::out_of_range("sequence " + std::to_string(document) + " has length " + std::to_string(length));
        return length;
    };

    rows[0] = 0;
    rows[1] = 0;
    if (num_samples == 0) return;
    if (num_documents == 0) throw std::out_of_range("document_index is empty");

    int64_t place = 0;
    int64_t begin = 0;  // global position of the first token of document `place`
    int64_t end = length_at(0);
    for (int64_t i = 1; i <= num_samples; ++i) {
        const int64_t boundary = i * sequence_length;
        const int64_t last_token = boundary + extra_tokens - 1;
        while (end <= last_token && place + 1 < num_documents) {
            ++place;
            begin = end;
            end += length_at(place);
        }
        const int64_t offset = end <= last_token ? (end - begin) - extra_tokens : boundary - begin;
        rows[2 * i] = static_cast<Row>(place);
        rows[2 * i + 1] = static_cast<Row>(offset);
    }
}

template void build_sample_index<int32_t>(Unaligned<int32_t>, int64_t, const int32_t*, int64_t, int64_t, int64_t,
                                          int64_t, int32_t*, const Poll&);
template void build_sample_index<int64_t>(Unaligned<int32_t>, int64_t, const int32_t*, int64_t, int64_t, int64_t,
                                          int64_t, int64_t*, const Poll&);

}  // namespace tdp
