#include "columns.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "multiversion.h"

namespace tdp {

namespace {

void check_spans(const Column& column, const ColumnSpans& spans, const int64_t* more, int64_t itemsize,
                 int64_t target_bytes) {
    const auto num_samples = static_cast<int64_t>(column.data.size());
    for (int64_t i = 0; i < spans.n; ++i) {
        const int64_t sample = spans.sample[i], start = spans.start[i], length = spans.length[i];
        if (sample < 0 || sample >= num_samples)
            throw std::out_of_range("span " + std::to_string(i) + " is of sample " + std::to_string(sample) + " of " +
                                    std::to_string(num_samples));
        if (start < 0 || length < 0 || start > column.length[sample] - length)
            throw std::out_of_range("span " + std::to_string(i) + ", " + std::to_string(length) + " tokens from " +
                                    std::to_string(start) + ", leaves its sample of " +
                                    std::to_string(column.length[sample]) + " tokens");
        const int64_t bytes = (length + (more != nullptr && more[i] != 0)) * itemsize;
        if (spans.target[i] < 0 || spans.target[i] > target_bytes - bytes)
            throw std::out_of_range("span " + std::to_string(i) + " of " + std::to_string(bytes) +
                                    " bytes leaves the target of " + std::to_string(target_bytes));
    }
}

// target_clones does not apply to templates, so each type gets its function by macro.
#define TDP_NARROW(T)                                                                                     \
    TDP_MULTIVERSION void narrow_##T(const unsigned char* source, int64_t n, unsigned char* out) {        \
        for (int64_t i = 0; i < n; ++i) {                                                                 \
            int64_t token;                                                                                \
            std::memcpy(&token, source + i * 8, 8);                                                       \
            const T value = static_cast<T>(token);                                                        \
            std::memcpy(out + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));                    \
        }                                                                                                 \
    }

TDP_NARROW(uint16_t)
TDP_NARROW(int32_t)
TDP_NARROW(int64_t)
#undef TDP_NARROW

}  // namespace

void copy_column_spans(const Column& column, const ColumnSpans& spans, unsigned char* target, int64_t target_bytes) {
    check_spans(column, spans, nullptr, column.width, target_bytes);
    for (int64_t i = 0; i < spans.n; ++i) {
        if (spans.length[i] == 0) continue;
        std::memcpy(target + spans.target[i], column.data[spans.sample[i]] + spans.start[i] * column.width,
                    static_cast<size_t>(spans.length[i] * column.width));
    }
}

void narrow_column_spans(const Column& tokens, const ColumnSpans& spans, const int64_t* follows,
                         const int64_t* last_label, int dtype_code, unsigned char* target, int64_t target_bytes) {
    void (*narrow)(const unsigned char*, int64_t, unsigned char*) = nullptr;
    int64_t itemsize = 0;
    switch (dtype_code) {
        case 8: narrow = narrow_uint16_t, itemsize = 2; break;
        case 4: narrow = narrow_int32_t, itemsize = 4; break;
        case 5: narrow = narrow_int64_t, itemsize = 8; break;
        default: throw std::invalid_argument("dtype code " + std::to_string(dtype_code) + " is not one of 8, 4, 5");
    }
    check_spans(tokens, spans, follows, itemsize, target_bytes);
    for (int64_t i = 0; i < spans.n; ++i) {
        const int64_t sample = spans.sample[i], end = spans.start[i] + spans.length[i];
        const bool inside = follows[i] != 0 && end < tokens.length[sample];
        unsigned char* out = target + spans.target[i];
        narrow(tokens.data[sample] + spans.start[i] * 8, spans.length[i] + inside, out);
        if (follows[i] == 0 || inside) continue;
        const int64_t last = last_label[sample] < 0 ? 0 : last_label[sample];
        narrow(reinterpret_cast<const unsigned char*>(&last), 1, out + spans.length[i] * itemsize);
    }
}

}  // namespace tdp
