#include "gather.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace tdp {

namespace {

// A helper thread costs more processor time to wake than it takes to convert this many tokens.
constexpr int64_t kTokensPerThread = 1 << 17;

// What is written for this many tokens stays in the first level of the cache while a second pass looks at it.
constexpr int64_t kChunk = 512;

// How far ahead of its use memory is asked for: documents lie anywhere, and processors guess only within a page.
constexpr int64_t kBytesAhead = 16 << 10;

[[noreturn]] void out_of_range(const std::string& what) { throw std::out_of_range(what); }

// The last place of `value` in n tokens, -1 if there is none.
int64_t last_place(const Converter& type, const unsigned char* bytes, int64_t n, int64_t value) {
    int64_t buffer[256];
    for (int64_t end = n; end > 0;) {
        const int64_t begin = std::max<int64_t>(end - 256, 0);
        type.convert(bytes + begin * type.itemsize, end - begin, buffer);
        for (int64_t i = end - 1; i >= begin; --i)
            if (buffer[i - begin] == value) return i;
        end = begin;
    }
    return -1;
}

// Positions that count from *next and start again from 0 after every eod.
void restart_positions(const int64_t* tokens, int64_t n, int64_t eod, int64_t* next, int64_t* positions) {
    for (int64_t i = 0; i < n;) {
        const int64_t found = i + first_place(tokens + i, n - i, eod);
        const int64_t end = std::min(found + 1, n);
        fill_positions(*next, end - i, positions + i);
        *next = found < n ? 0 : *next + end - i;
        i = end;
    }
}

}  // namespace

// Asks for the memory of the pieces, in order, some way ahead of who reads them.
class Gather::Ahead {
public:
    Ahead(const Piece* piece, const Piece* end) : piece_(piece), end_(end) { advance(kBytesAhead); }

    void advance(int64_t bytes) {
        constexpr int64_t kLine = 64;
        for (; bytes > 0 && piece_ != end_; ++piece_, at_ = 0) {
            const int64_t count = std::min(bytes, piece_->size - at_);
            for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(piece_->bytes + at_ + i, 0, 2);
            bytes -= count;
            at_ += count;
            if (at_ < piece_->size) return;
        }
    }

private:
    const Piece* piece_;
    const Piece* end_;
    int64_t at_ = 0;
};

// The tokens of a span one after the other, whatever pieces they lie in.
class Gather::Source {
public:
    Source(const Piece* piece, int64_t itemsize) : piece_(piece), itemsize_(itemsize) {}

    // The next n tokens, of which all (used = n) or all but the last (used = n - 1) are passed over for the next call.
    // They stay where they are when one piece holds them all, and are copied otherwise. n is at most kChunk + 1.
    const unsigned char* next(int64_t n, int64_t used) {
        settle();
        if (piece_->count - at_ >= n) {
            const unsigned char* found = piece_->bytes + at_ * itemsize_;
            at_ += used;
            return found;
        }
        unsigned char* to = copied_;
        for (int64_t left = n; left > 0;) {
            settle();
            const int64_t count = std::min(left, piece_->count - at_);
            std::memcpy(to, piece_->bytes + at_ * itemsize_, static_cast<size_t>(count * itemsize_));
            to += count * itemsize_;
            left -= count;
            at_ += std::min(count, used);
            used -= std::min(count, used);
        }
        return copied_;
    }

    // Passes over n tokens. Returns how many of them come after the last `eod`, n if there is none.
    int64_t skip(int64_t n, const Converter& type, int64_t eod) {
        int64_t since = n;
        while (n > 0) {
            settle();
            const int64_t count = std::min(n, piece_->count - at_);
            const int64_t place = last_place(type, piece_->bytes + at_ * itemsize_, count, eod);
            n -= count;
            if (place >= 0) since = count - place - 1 + n;
            at_ += count;
        }
        return since;
    }

private:
    void settle() {
        while (at_ == piece_->count) {
            ++piece_;
            at_ = 0;
        }
    }

    const Piece* piece_;
    int64_t at_ = 0;
    int64_t itemsize_;
    alignas(64) unsigned char copied_[(kChunk + 1) * sizeof(int64_t)];
};

void Gather::write(const Span& span, const TokenOutputs& out, Ahead* ahead) const {
    const auto& [type, rules] = kinds_[span.kind];
    int64_t* tokens = out.tokens + span.destination;
    int64_t* labels = out.labels + span.destination;
    float* loss_mask = out.loss_mask + span.destination;
    int64_t* positions = out.position_ids ? out.position_ids + span.destination : nullptr;
    int64_t held = 0;
    for (size_t p = span.first_piece; p < span.last_piece; ++p) held += pieces_[p].count;
    const bool successor_known = held > span.lead + span.length;

    Source source(pieces_.data() + span.first_piece, type.itemsize);
    int64_t next_position = span.start;  // of the next token, where positions restart
    if (span.lead > 0) next_position = source.skip(span.lead, type, rules.eod_reset);
    for (int64_t at = 0, n; at < span.length; at += n) {
        n = std::min(kChunk, span.length - at);
        ahead->advance(n * type.itemsize);
        // The last token without a successor is left over; it has no label.
        const bool is_end = at + n == span.length && !successor_known;
        const unsigned char* bytes = source.next(n + !is_end, n);
        const int64_t whole = n - is_end;
        if (positions && rules.eod_reset < 0) {
            type.emit(bytes, whole, span.start + at, tokens + at, labels + at, loss_mask + at, positions + at);
        } else {
            type.convert(bytes, whole, tokens + at);
            type.convert(bytes + type.itemsize, whole, labels + at);
            fill_ones(whole, loss_mask + at);
        }
        if (is_end) {
            type.convert(bytes + whole * type.itemsize, 1, tokens + at + whole);
            labels[at + whole] = rules.ignore_label;
            if (positions) positions[at + whole] = span.start + at + whole;
        }
        if (rules.eod_no_loss >= 0) fill_mask_without(tokens + at, n, rules.eod_no_loss, loss_mask + at);
        if (is_end) loss_mask[at + whole] = 0.0f;
        if (positions && rules.eod_reset >= 0)
            restart_positions(tokens + at, n, rules.eod_reset, &next_position, positions + at);
    }
}

void Gather::add(const TokenBytes& source, const PieceTable& pieces, const Spans& spans, const GatherRules& rules,
                 const TokenOutputs& out) {
    const int64_t itemsize = source.type.itemsize;
    pieces_.reserve(pieces_.size() + pieces.num_pieces);
    spans_.reserve(spans_.size() + spans.num_spans);
    for (int64_t s = 0; s < spans.num_spans; ++s) {
        const int64_t length = spans.length[s], at = spans.destination[s];
        const int64_t first = pieces.span_begin[s], last = pieces.span_begin[s + 1];
        if (first < 0 || last < first || last > pieces.num_pieces)
            out_of_range("span " + std::to_string(s) + " has an impossible range of pieces");
        if (length < 0 || at < 0 || at > out.size - length)
            out_of_range("span " + std::to_string(s) + " leaves the output of " + std::to_string(out.size) +
                         " tokens");
        if (spans.start[s] < 0) out_of_range("span " + std::to_string(s) + " starts before its sample");
        int64_t total = 0;
        const size_t first_piece = pieces_.size();
        for (int64_t p = first; p < last; ++p) {
            const int64_t offset = pieces.byte_offset[p], count = pieces.count[p];
            if (count < 0 || offset < 0 || count > (source.size - offset) / itemsize)
                out_of_range("piece of " + std::to_string(count) + " tokens at byte " + std::to_string(offset) +
                             " leaves the file of " + std::to_string(source.size) + " bytes");
            total += count;
            pieces_.push_back({source.data + offset, count, count * itemsize});
        }
        const int64_t before = lead(spans, rules, s), wanted = before + length;
        if (total != wanted && total != wanted + 1)
            out_of_range("span " + std::to_string(s) + " wants " + std::to_string(wanted) +
                         " tokens, its pieces hold " + std::to_string(total));
        spans_.push_back({first_piece, pieces_.size(), spans.start[s], before, length, at, kinds_.size()});
        num_tokens_ += length;
    }
    kinds_.push_back({source.type, rules});
}

std::vector<ByteRange> Gather::ranges() const {
    std::vector<ByteRange> found;
    found.reserve(pieces_.size());
    for (const Piece& piece : pieces_) found.push_back({piece.bytes, piece.size});
    return found;
}

void Gather::run(const TokenOutputs& out) const {
    const int64_t n = static_cast<int64_t>(spans_.size());
    const int threads = static_cast<int>(std::min<int64_t>(num_threads(), 1 + num_tokens_ / kTokensPerThread));
    // Neighbouring spans go to one thread, which then knows what comes next; a few parts each even out their lengths.
    const int64_t parts = threads > 1 ? std::min<int64_t>(n, 4 * threads) : 1;
    const Piece* end = pieces_.data() + pieces_.size();
    parallel_for(parts, threads, [&](int64_t part) {
        const int64_t first = n * part / parts, last = n * (part + 1) / parts;
        if (first == last) return;
        Ahead ahead(pieces_.data() + spans_[first].first_piece, end);
        for (int64_t s = first; s < last; ++s) write(spans_[s], out, &ahead);
    });
}

int32_t fill_documents(const std::vector<int64_t>& lengths, int64_t width, int64_t* position_ids,
                       int32_t* cu_seqlens) {
    // Only empty documents can be more than there are entries; they are then left out.
    const bool with_empty = static_cast<int64_t>(lengths.size()) <= width;
    int64_t num = 0, at = 0, longest = 0;
    cu_seqlens[0] = 0;
    for (std::size_t i = 0; i < lengths.size() && num < width; ++i) {
        const int64_t end = i + 1 == lengths.size() ? width : std::min(at + lengths[i], width);
        if (end == at && !with_empty) continue;
        fill_positions(0, end - at, position_ids + at);
        longest = std::max(longest, end - at);
        cu_seqlens[++num] = static_cast<int32_t>(end);
        at = end;
    }
    std::fill(cu_seqlens + num + 1, cu_seqlens + width + 1, static_cast<int32_t>(width));
    return static_cast<int32_t>(longest);
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
