// Token ids of any integer type to int64, as fast as the processor moves bytes.
#pragma once

#include <cstdint>

namespace tdp {

// Converts n values at `source` (any alignment) to out[n].
using Convert = void (*)(const unsigned char* source, int64_t n, int64_t* out);

// What becomes of n tokens whose successors are known, in one pass: reads n + 1 values at `source` (any alignment),
// writes tokens[n], labels[n] (the successors), loss_mask[n] = 1 and position_ids[i] = first + i.
using Emit = void (*)(const unsigned char* source, int64_t n, int64_t first, int64_t* tokens, int64_t* labels,
                      float* loss_mask, int64_t* position_ids);

struct Converter {
    int64_t itemsize;
    Convert convert;
    Emit emit;
};

// The converter of an .idx dtype code; throws std::invalid_argument for codes that are no integer type.
Converter converter_for(int dtype_code);

// out[i] = 0 where tokens[i] == token, 1 elsewhere.
void fill_mask_without(const int64_t* tokens, int64_t n, int64_t token, float* out);

// The first i with tokens[i] == token, n if there is none.
int64_t first_place(const int64_t* tokens, int64_t n, int64_t token);

// out[i] = 1.
void fill_ones(int64_t n, float* out);

// out[i] = first + i.
void fill_positions(int64_t first, int64_t n, int64_t* out);

}  // namespace tdp
