#include "convert.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "multiversion.h"

namespace tdp {

namespace {

// target_clones does not apply to templates, so each type gets its functions by macro.
#define TDP_CONVERT(T) \
    TDP_MULTIVERSION void once_##T(const unsigned char* __restrict source, int64_t n, int64_t* __restrict out) { \
        for (int64_t i = 0; i < n; ++i) { \
            T value; \
            std::memcpy(&value, source + i * static_cast<int64_t>(sizeof(T)), sizeof(T)); \
            out[i] = static_cast<int64_t>(value); \
        } \
    }

TDP_CONVERT(uint8_t)
TDP_CONVERT(int8_t)
TDP_CONVERT(int16_t)
TDP_CONVERT(uint16_t)
TDP_CONVERT(int32_t)
TDP_CONVERT(int64_t)
#undef TDP_CONVERT

TDP_MULTIVERSION void mask_eod(const int64_t* __restrict tokens, int64_t n, int64_t eod, float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = tokens[i] == eod ? 0.0f : 1.0f;
}

TDP_MULTIVERSION void ones(int64_t n, float* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = 1.0f;
}

}  // namespace

TDP_MULTIVERSION void fill_positions(int64_t first, int64_t n, int64_t* __restrict out) {
    for (int64_t i = 0; i < n; ++i) out[i] = first + i;
}

void fill_loss_mask(const int64_t* tokens, int64_t n, int64_t eod, float* loss_mask) {
    if (eod < 0)
        ones(n, loss_mask);
    else
        mask_eod(tokens, n, eod, loss_mask);
}

Converter converter_for(int dtype_code) {
    switch (dtype_code) {
        case 1: return {1, once_uint8_t};
        case 2: return {1, once_int8_t};
        case 3: return {2, once_int16_t};
        case 4: return {4, once_int32_t};
        case 5: return {8, once_int64_t};
        case 8: return {2, once_uint16_t};
        default:
            throw std::invalid_argument("dtype code " + std::to_string(dtype_code) + " is not an integer type");
    }
}

}  // namespace tdp
