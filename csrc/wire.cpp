#include "wire.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "multiversion.h"

namespace tdp {

namespace {

constexpr int64_t kBlock = 1024;  // tokens; a block of all four keys stays in the first-level cache

// What differs, as a bitwise or over a block: no branch, any instruction set. Zero is the common case by far.
TDP_MULTIVERSION uint64_t bits_of(const int64_t* ids, int64_t n) {
    uint64_t bits = 0;
    for (int64_t i = 0; i < n; ++i) bits |= static_cast<uint64_t>(ids[i]);
    return bits;
}

TDP_MULTIVERSION uint64_t differ(const int64_t* a, const int64_t* b, int64_t n) {
    uint64_t bits = 0;
    for (int64_t i = 0; i < n; ++i) bits |= static_cast<uint64_t>(a[i] ^ b[i]);
    return bits;
}

TDP_MULTIVERSION uint64_t differ_from_count(const int64_t* positions, int64_t first, int64_t n) {
    uint64_t bits = 0;
    for (int64_t i = 0; i < n; ++i) bits |= static_cast<uint64_t>(positions[i] ^ (first + i));
    return bits;
}

TDP_MULTIVERSION uint32_t differ_from_one(const unsigned char* floats, int64_t n) {
    uint32_t bits = 0;
    for (int64_t i = 0; i < n; ++i) {
        uint32_t value;
        std::memcpy(&value, floats + i * 4, 4);
        bits |= value ^ 0x3f800000u;  // 1.0f
    }
    return bits;
}

// What is true of a sample, or of all of them.
struct Truths {
    bool follow = true, follow_loss = true, one = true, binary = true;

    void operator&=(const Truths& other) {
        follow &= other.follow;
        follow_loss &= other.follow_loss;
        one &= other.one;
        binary &= other.binary;
    }
};

// All but the last position of a sample, where something is not plain: labels follow and every loss is one.
Truths look_closely(const int64_t* token, const int64_t* label, const float* loss, int64_t length,
                    int64_t ignore_label, int64_t* with_loss) {
    Truths t;
    for (int64_t j = 0; j + 1 < length; ++j) {
        const bool next = label[j] == token[j + 1], absent = loss[j] == 0.0f;
        t.follow &= next;
        t.follow_loss &= absent ? label[j] == ignore_label : next;
        t.one &= !absent;
        t.binary &= absent || loss[j] == 1.0f;
        *with_loss += !absent;
    }
    return t;
}

}  // namespace

SampleFacts scan_samples(const Column& tokens, const Column& labels, const Column& loss_mask,
                         const Column* position_ids, int64_t ignore_label, int64_t* last_label, int64_t* loss_count) {
    Truths all;
    uint64_t id_bits = 0, position_bits = 0;
    for (size_t i = 0; i < tokens.data.size(); ++i) {
        const int64_t length = tokens.length[i];
        last_label[i] = ignore_label;
        loss_count[i] = 0;
        if (length == 0) continue;
        const auto* token = reinterpret_cast<const int64_t*>(tokens.data[i]);
        const auto* label = reinterpret_cast<const int64_t*>(labels.data[i]);
        const auto* loss = reinterpret_cast<const float*>(loss_mask.data[i]);
        const auto* position = position_ids ? reinterpret_cast<const int64_t*>(position_ids->data[i]) : nullptr;
        uint64_t odd = 0;
        for (int64_t at = 0; at < length; at += kBlock) {
            const int64_t n = std::min(kBlock, length - at), inner = std::min(n, length - 1 - at);
            id_bits |= bits_of(token + at, n);
            odd |= differ(label + at, token + at + 1, inner);
            odd |= differ_from_one(loss_mask.data[i] + at * 4, inner);
            if (position) position_bits |= differ_from_count(position + at, at, n);
        }
        Truths sample;
        int64_t with_loss = 0;
        if (odd == 0)
            with_loss = length - 1;
        else
            sample = look_closely(token, label, loss, length, ignore_label, &with_loss);
        const int64_t last = label[length - 1];
        const bool absent = loss[length - 1] == 0.0f, none = last == ignore_label;
        const bool known = last >= 0 || none;
        sample.follow &= known;
        sample.follow_loss &= known && (none || !absent);
        sample.one &= absent == none;
        sample.binary &= absent || loss[length - 1] == 1.0f;
        all &= sample;
        last_label[i] = last;
        loss_count[i] = with_loss + !absent;
        if (last > 0) id_bits |= static_cast<uint64_t>(last);
    }
    int64_t bits = 0;
    if (all.follow) bits |= kLabelsFollow;
    if (all.follow_loss) bits |= kLabelsFollowLoss;
    if (all.one && all.binary) bits |= kLossIsOne;
    if (all.binary) bits |= kLossIsBinary;
    if (position_bits == 0) bits |= kPositionsCount;
    return {bits, id_bits >> 63 ? int64_t{1} << 62 : static_cast<int64_t>(id_bits)};
}

void number_samples(const int64_t* rows, int64_t num_ranks, int64_t room, int64_t num_columns, const int64_t* counts,
                    int64_t key, int64_t* out) {
    struct Place {
        int64_t number, place, rank;
    };
    std::vector<Place> order;
    for (int64_t r = 0; r < num_ranks; ++r)
        if (counts[r] < 0 || counts[r] > room)
            throw std::out_of_range("rank " + std::to_string(r) + " has " + std::to_string(counts[r]) +
                                    " samples, there is room for " + std::to_string(room));
    for (int64_t p = 0; p < room; ++p)
        for (int64_t r = 0; r < num_ranks; ++r)
            if (p < counts[r]) order.push_back({rows[(r * room + p) * num_columns + key], p, r});
    std::stable_sort(order.begin(), order.end(), [](const Place& a, const Place& b) { return a.number < b.number; });
    const auto n = static_cast<int64_t>(order.size());
    for (int64_t i = 0; i < n; ++i) {
        const int64_t* row = rows + (order[i].rank * room + order[i].place) * num_columns;
        for (int64_t c = 0; c < num_columns; ++c) out[c * n + i] = row[c];
        out[num_columns * n + i] = order[i].rank;
        out[(num_columns + 1) * n + i] = order[i].place;
    }
}

void fill_spans(const int64_t* destinations, const int64_t* widths, const int64_t* starts, const int64_t* lengths,
                const int64_t* entries, int64_t n, int64_t pad_id, int64_t ignore_label, const PackOutput& out) {
    int64_t place = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (destinations[i] != place || widths[i] < 0 || lengths[i] < 0 || lengths[i] > widths[i] ||
            widths[i] > out.size - place)
            throw std::out_of_range("span " + std::to_string(i) + " does not follow the one before it");
        place += widths[i];
    }
    if (place != out.size) throw std::out_of_range("the spans do not fill the pack");
    for (int64_t i = 0; i < n; ++i) {
        const int64_t begin = destinations[i], end = begin + widths[i], real = begin + lengths[i];
        for (int64_t t = begin; t < end; ++t) out.position_ids[t] = starts[i] + (t - begin);
        std::fill(out.padding_mask + begin, out.padding_mask + real, false);
        std::fill(out.padding_mask + real, out.padding_mask + end, true);
        std::fill(out.document_id + begin, out.document_id + end, static_cast<int32_t>(entries[i]));
        std::fill(out.tokens + real, out.tokens + end, pad_id);
        std::fill(out.labels + real, out.labels + end, ignore_label);
        std::fill(out.loss_mask + real, out.loss_mask + end, 0.0f);
    }
}

}  // namespace tdp
