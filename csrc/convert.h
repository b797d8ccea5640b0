// Token ids of any integer type to int64, as fast as the processor moves bytes.
#pragma once

#include <cstdint>

namespace tdp {

// Converts n values at `source` (any alignment) to out[n].
using Convert = void (*)(const unsigned char* source, int64_t n, int64_t* out);

struct Converter {
    int64_t itemsize;
    Convert convert;
};

// The converter of an .idx dtype code; throws std::invalid_argument for codes that are no integer type.
Converter converter_for(int dtype_code);

// 1 everywhere but where tokens[i] == eod, there 0; with a negative eod 1 everywhere.
void fill_loss_mask(const int64_t* tokens, int64_t n, int64_t eod, float* loss_mask);

// out[i] = first + i.
void fill_positions(int64_t first, int64_t n, int64_t* out);

}  // namespace tdp
