#include "token_source.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tdp {

namespace {

// Spans whose index entries are asked for ahead of their use.
constexpr int64_t kWindow = 16;
// Documents per span for which that is done.
constexpr int64_t kWindowDocuments = 32;
// Pieces per span that there is room for from the start.
constexpr int64_t kUsualPieces = 8;

[[noreturn]] void out_of_range(const std::string& what) { throw std::out_of_range(what); }

[[noreturn]] void no_sample(int64_t sample, const char* table, int64_t size) {
    out_of_range("sample " + std::to_string(sample) + " is outside " + table + " of " + std::to_string(size) +
                 " samples");
}

// Three dependent cache misses lead to a document: the row, its place in document_index, length and pointer. Taking
// them step by step for a window of spans together hides most of them.
constexpr int kSteps = 3;

template <typename Row>
void prefetch_step(const GptIndex<Row>& index, const int64_t* row, int64_t n, int step) {
    for (int64_t s = 0; s < n; ++s) {
        if (row[s] < 0 || row[s] >= index.num_rows - 1) continue;
        const Row* rows = index.rows + 2 * row[s];
        if (step == 0) {
            __builtin_prefetch(rows);
            continue;
        }
        const int64_t first = std::max<int64_t>(rows[0], 0);
        if (step == 1) {
            if (first < index.num_documents) __builtin_prefetch(index.document_index + first);
            continue;
        }
        const int64_t last = std::min<int64_t>({rows[2], first + kWindowDocuments, index.num_documents - 1});
        for (int64_t place = first; place <= last; ++place) {
            index.lengths.prefetch(index.document_index[place]);
            index.pointers.prefetch(index.document_index[place]);
        }
    }
}

// Calls part(document, first token, one past the last) for all documents of a row, empty parts included, until it
// returns false.
template <typename Row, typename Part>
void for_each_part(const GptIndex<Row>& index, int64_t row, Part part) {
    if (row < 0 || row >= index.num_rows - 1)
        out_of_range("sample " + std::to_string(row) + " outside [0, " + std::to_string(index.num_rows - 1) + ")");
    const Row* rows = index.rows + 2 * row;
    const int64_t first = rows[0], last = rows[2];
    if (first < 0 || last < first || last >= index.num_documents)
        out_of_range("sample index row " + std::to_string(row) + " points to documents " + std::to_string(first) +
                     ".." + std::to_string(last) + " of " + std::to_string(index.num_documents));
    for (int64_t place = first; place <= last; ++place) {
        const int64_t document = index.document_index[place];
        if (document < 0 || document >= index.num_lengths)
            out_of_range("document_index[" + std::to_string(place) + "] is " + std::to_string(document));
        const int64_t length = index.lengths[document];
        const int64_t begin = place == first ? static_cast<int64_t>(rows[1]) : 0;
        const int64_t end = place == last ? static_cast<int64_t>(rows[3]) + index.extra_tokens : length;
        if (begin < 0 || end > length)
            out_of_range("sample index row " + std::to_string(row) + " leaves sequence " + std::to_string(document) +
                         " of length " + std::to_string(length));
        if (!part(document, begin, std::max(begin, end))) return;
    }
}

template <typename Row>
void add_pieces(const GptIndex<Row>& index, int64_t itemsize, int64_t row, int64_t skip, int64_t want,
                Pieces* pieces) {
    if (skip < 0 || want < 0)
        out_of_range("span from token " + std::to_string(skip) + " of " + std::to_string(want) +
                     " tokens: neither may be negative");
    for_each_part(index, row, [&](int64_t document, int64_t begin, int64_t end) {
        const int64_t passed = std::min(skip, end - begin);
        const int64_t count = std::min(end - begin - passed, want);
        skip -= passed;
        want -= count;
        if (count > 0) {
            pieces->byte_offset.push_back(index.pointers[document] + (begin + passed) * itemsize);
            pieces->count.push_back(count);
        }
        return want > 0;
    });
}

}  // namespace

template <typename Row, typename Shuffle>
int64_t GptSource<Row, Shuffle>::row_of(int64_t sample) const {
    if (sample < 0 || sample >= num_samples_) no_sample(sample, "the shuffle index", num_samples_);
    return static_cast<int64_t>(shuffle_[sample]);
}

template <typename Row, typename Shuffle>
void GptSource<Row, Shuffle>::expect(const int64_t* sample, int64_t n, int step) const {
    int64_t row[kWindow];
    const int64_t size = std::min(kWindow, n);
    for (int64_t i = 0; i < size; ++i) row[i] = sample[i] >= 0 && sample[i] < num_samples_ ? shuffle_[sample[i]] : -1;
    prefetch_step(index_, row, size, step);
}

template <typename Row, typename Shuffle>
Pieces GptSource<Row, Shuffle>::locate(const int64_t* sample, const int64_t* start, const int64_t* length,
                                       int64_t n) const {
    Pieces pieces;
    for (auto* column : {&pieces.byte_offset, &pieces.count}) column->reserve(n * kUsualPieces);
    pieces.span_begin.reserve(n + 1);
    pieces.span_begin.push_back(0);
    for (int64_t first = 0; first < n; first += kWindow) {
        const int64_t size = std::min(kWindow, n - first);
        int64_t row[kWindow];
        for (int64_t i = 0; i < size; ++i) row[i] = row_of(sample[first + i]);
        for (int step = 0; step < kSteps; ++step) prefetch_step(index_, row, size, step);
        for (int64_t i = 0; i < size; ++i) {
            add_pieces(index_, itemsize_, row[i], start[first + i], length[first + i], &pieces);
            pieces.span_begin.push_back(static_cast<int64_t>(pieces.count.size()));
        }
    }
    return pieces;
}

template <typename Row, typename Shuffle>
std::vector<int64_t> GptSource<Row, Shuffle>::document_lengths(int64_t sample) const {
    std::vector<int64_t> lengths;
    for_each_part(index_, row_of(sample), [&](int64_t, int64_t begin, int64_t end) {
        lengths.push_back(end - begin);
        return true;
    });
    return lengths;
}

template class GptSource<int32_t, uint32_t>;
template class GptSource<int64_t, uint32_t>;
template class GptSource<int32_t, int64_t>;
template class GptSource<int64_t, int64_t>;

void RunSource::check(int64_t sample) const {
    if (sample < 0 || sample >= num_runs_) no_sample(sample, "the table", num_runs_);
}

Pieces RunSource::locate(const int64_t* sample, const int64_t* start, const int64_t* length, int64_t n) const {
    Pieces pieces;
    pieces.byte_offset.reserve(n);
    pieces.count.reserve(n);
    pieces.span_begin.reserve(n + 1);
    pieces.span_begin.push_back(0);
    for (int64_t s = 0; s < n; ++s) {
        check(sample[s]);
        const int64_t available = available_[sample[s]];
        if (start[s] < 0 || length[s] < 0 || start[s] > available)
            out_of_range("span " + std::to_string(s) + " starts at token " + std::to_string(start[s]) + " of " +
                         std::to_string(available));
        pieces.byte_offset.push_back(byte_offset_[sample[s]] + start[s] * itemsize_);
        pieces.count.push_back(std::min(length[s], available - start[s]));
        pieces.span_begin.push_back(s + 1);
    }
    return pieces;
}

std::vector<int64_t> RunSource::document_lengths(int64_t sample) const {
    check(sample);
    return {available_[sample]};
}

InstantSource::InstantSource(const InstantStream& stream, int64_t sequence_length, int64_t extra_tokens,
                             std::function<Keys(int64_t)> keys_of)
    : stream_(stream),
      sequence_length_(sequence_length),
      extra_tokens_(extra_tokens),
      samples_per_epoch_(std::max<int64_t>((stream.end_byte - stream.begin_byte) / stream.itemsize - extra_tokens, 0) /
                         sequence_length),
      keys_of_(std::move(keys_of)) {
    if (samples_per_epoch_ < 1) throw std::invalid_argument("the stream is shorter than one sample");
}

void InstantSource::prepare(const int64_t* sample, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const int64_t epoch = sample[i] / samples_per_epoch_;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (known_.count(epoch)) continue;
        }
        // Not under the lock: who is called back may let another thread come here.
        const Keys found = keys_of_(epoch);
        const std::lock_guard<std::mutex> lock(mutex_);
        known_[epoch] = found;
    }
}

InstantSource::Keys InstantSource::keys(int64_t epoch) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(epoch);
    if (found == known_.end()) throw std::logic_error("epoch " + std::to_string(epoch) + " was not prepared");
    return found->second;
}

Pieces InstantSource::locate(const int64_t* sample, const int64_t* start, const int64_t* length, int64_t n) const {
    Pieces pieces;
    pieces.span_begin.push_back(0);
    // Spans of one epoch in a row, nearly always all of them, are looked up together.
    for (int64_t first = 0, last; first < n; first = last) {
        if (sample[first] < 0) no_sample(sample[first], "the numbers from 0 on, epochs", samples_per_epoch_);
        const int64_t epoch = sample[first] / samples_per_epoch_, begin = epoch * samples_per_epoch_;
        for (last = first + 1; last < n && sample[last] >= begin && sample[last] < begin + samples_per_epoch_;) ++last;
        const Keys epoch_keys = keys(epoch);
        const KeyedPermutation order(samples_per_epoch_, epoch_keys.chunks);
        std::vector<int64_t> from, count;
        for (int64_t s = first; s < last; ++s) {
            // A chunk ends where the next one begins, but for the extra token.
            const int64_t room = sequence_length_ + extra_tokens_ - start[s];
            if (start[s] < 0 || length[s] < 0 || room < 0)
                out_of_range("span " + std::to_string(s) + " starts at token " + std::to_string(start[s]) + " of " +
                             std::to_string(sequence_length_ + extra_tokens_));
            from.push_back(order(sample[s] - begin) * sequence_length_ + start[s]);
            count.push_back(std::min(length[s], room));
        }
        InstantStream stream = stream_;
        stream.key = epoch_keys.windows;
        const Pieces found = instant_pieces(stream, from.data(), count.data(), last - first);
        const int64_t base = static_cast<int64_t>(pieces.count.size());
        pieces.byte_offset.insert(pieces.byte_offset.end(), found.byte_offset.begin(), found.byte_offset.end());
        pieces.count.insert(pieces.count.end(), found.count.begin(), found.count.end());
        for (size_t i = 1; i < found.span_begin.size(); ++i) pieces.span_begin.push_back(base + found.span_begin[i]);
    }
    return pieces;
}

std::vector<int64_t> InstantSource::document_lengths(int64_t sample) const {
    const int64_t start = 0, length = sequence_length_ + extra_tokens_;
    return locate(&sample, &start, &length, 1).count;
}

}  // namespace tdp
