#include "wire.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tdp {

namespace {

template <typename T>
const T* at(const int64_t* addresses, int64_t i) {
    return reinterpret_cast<const T*>(static_cast<uintptr_t>(addresses[i]));
}

template <typename T>
void narrow(const int64_t* tokens, const int64_t* lengths, int64_t n, unsigned char* bytes) {
    T* out = reinterpret_cast<T*>(bytes);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t* from = at<int64_t>(tokens, i);
        for (int64_t j = 0; j < lengths[i]; ++j) out[j] = static_cast<T>(from[j]);
        out += lengths[i];
    }
}

}  // namespace

SampleFacts scan_samples(const int64_t* tokens, const int64_t* labels, const int64_t* loss_mask,
                         const int64_t* position_ids, const int64_t* lengths, int64_t n, int64_t ignore_label,
                         int64_t* last_label, int64_t* loss_count) {
    bool follow = true, follow_loss = true, one = true, binary = true, count_up = true;
    int64_t least = 0, largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t length = lengths[i];
        last_label[i] = ignore_label;
        loss_count[i] = 0;
        if (length == 0) continue;
        const int64_t* token = at<int64_t>(tokens, i);
        const int64_t* label = at<int64_t>(labels, i);
        const float* loss = at<float>(loss_mask, i);
        int64_t with_loss = 0;
        // Plain flags, no early exits: the loop vectorises and almost always runs to the end anyway.
        bool f = true, fl = true, o = true, b = true;
        for (int64_t j = 0; j + 1 < length; ++j) {
            const bool next = label[j] == token[j + 1], absent = loss[j] == 0.0f;
            f &= next;
            fl &= absent ? label[j] == ignore_label : next;
            o &= !absent;
            b &= absent || loss[j] == 1.0f;
            with_loss += !absent;
        }
        const int64_t last = label[length - 1];
        const bool absent = loss[length - 1] == 0.0f, none = last == ignore_label;
        const bool known = last >= 0 || none;
        with_loss += !absent;
        follow &= f && known;
        follow_loss &= fl && known && (none || !absent);
        one &= o && absent == none;
        binary &= b && (absent || loss[length - 1] == 1.0f);
        last_label[i] = last;
        loss_count[i] = with_loss;
        for (int64_t j = 0; j < length; ++j) {
            least = std::min(least, token[j]);
            largest = std::max(largest, token[j]);
        }
        largest = std::max(largest, last);
        if (position_ids != nullptr) {
            const int64_t* position = at<int64_t>(position_ids, i);
            bool c = true;
            for (int64_t j = 0; j < length; ++j) c &= position[j] == j;
            count_up &= c;
        }
    }
    int64_t bits = 0;
    if (follow) bits |= kLabelsFollow;
    if (follow_loss) bits |= kLabelsFollowLoss;
    if (one && binary) bits |= kLossIsOne;
    if (binary) bits |= kLossIsBinary;
    if (count_up) bits |= kPositionsCount;
    return {bits, least < 0 ? int64_t{1} << 62 : largest};
}

void narrow_tokens(const int64_t* tokens, const int64_t* lengths, int64_t n, int dtype_code, unsigned char* out) {
    switch (dtype_code) {
        case 8: return narrow<uint16_t>(tokens, lengths, n, out);
        case 4: return narrow<int32_t>(tokens, lengths, n, out);
        case 5: return narrow<int64_t>(tokens, lengths, n, out);
        default: throw std::invalid_argument("dtype code " + std::to_string(dtype_code) + " is not one of 8, 4, 5");
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
