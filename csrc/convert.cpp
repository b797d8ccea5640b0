#include "convert.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "multiversion.h"

namespace tdp {

namespace {

// A value at any address.
template <typename T>
struct Anywhere {
    typedef T type __attribute__((aligned(1), may_alias));
};

// target_clones does not apply to templates, so each type gets its functions by macro. Successors are loaded a second
// time instead of shifting what is there: loads are free where stores are the limit.
#define TDP_CONVERT(T)                                                                                              \
    TDP_MULTIVERSION void convert_##T(const unsigned char* __restrict source, int64_t n, int64_t* __restrict out) { \
        const auto* values = reinterpret_cast<const Anywhere<T>::type*>(source);                                    \
        for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int64_t>(values[i]);                                   \
    }                                                                                                               \
    TDP_MULTIVERSION void emit_##T(const unsigned char* __restrict source, int64_t n, int64_t first,                \
                                   int64_t* __restrict tokens, int64_t* __restrict labels,                          \
                                   float* __restrict loss_mask, int64_t* __restrict position_ids) {                 \
        const auto* values = reinterpret_cast<const Anywhere<T>::type*>(source);                                    \
        for (int64_t i = 0; i < n; ++i) {                                                                           \
            tokens[i] = static_cast<int64_t>(values[i]);                                                            \
            labels[i] = static_cast<int64_t>(values[i + 1]);                                                        \
            loss_mask[i] = 1.0f;                                                                                    \
            position_ids[i] = first + i;                                                                            \
        }                                                                                                           \
    }

TDP_CONVERT(uint8_t)
TDP_CONVERT(int8_t)
TDP_CONVERT(int16_t)
TDP_CONVERT(uint16_t)
TDP_CONVERT(int32_t)
TDP_CONVERT(int64_t)
#undef TDP_CONVERT

TDP_MULTIVERSION int64_t count_of(const int64_t* tokens, int64_t n, int64_t token) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) found += tokens[i] == token;
    return found;
}

}  // namespace

TDP_MULTIVERSION void fill_mask_without(const int64_t* __restrict tokens, int64_t n, int64_t token,
                                        float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = tokens[i] == token ? 0.0f : 1.0f;
}

int64_t first_place(const int64_t* tokens, int64_t n, int64_t token) {
    // Most stretches hold none, which counting finds out several at a time.
    constexpr int64_t kStretch = 64;
    for (int64_t begin = 0; begin < n; begin += kStretch) {
        const int64_t end = std::min(begin + kStretch, n);
        if (count_of(tokens + begin, end - begin, token)) return std::find(tokens + begin, tokens + end, token) - tokens;
    }
    return n;
}

TDP_MULTIVERSION void fill_ones(int64_t n, float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = 1.0f;
}

TDP_MULTIVERSION void fill_positions(int64_t first, int64_t n, int64_t* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = first + i;
}

Converter converter_for(int dtype_code) {
    switch (dtype_code) {
        case 1: return {1, convert_uint8_t, emit_uint8_t};
        case 2: return {1, convert_int8_t, emit_int8_t};
        case 3: return {2, convert_int16_t, emit_int16_t};
        case 4: return {4, convert_int32_t, emit_int32_t};
        case 5: return {8, convert_int64_t, emit_int64_t};
        case 8: return {2, convert_uint16_t, emit_uint16_t};
        default:
            throw std::invalid_argument("dtype code " + std::to_string(dtype_code) + " is not an integer type");
    }
}

}  // namespace tdp
