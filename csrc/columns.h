// The arrays that many samples have under one key, read where they lie.
#pragma once

#include <cstdint>
#include <vector>

namespace tdp {

struct Column {
    std::vector<const unsigned char*> data;  // one array per sample
    std::vector<int64_t> length;             // tokens
    int64_t width = 0;                       // bytes of one token's entry
};

// Which tokens of which samples, and where their bytes go.
struct ColumnSpans {
    const int64_t* sample;
    const int64_t* start;
    const int64_t* length;
    const int64_t* target;  // byte offset
    int64_t n;
};

// Copies spans as they are. Throws std::out_of_range where a span leaves its sample or the target.
void copy_column_spans(const Column& column, const ColumnSpans& spans, unsigned char* target, int64_t target_bytes);

// Copies spans of int64 tokens in the narrower type of an .idx dtype code (8, 4 or 5). Where follows[i] is set, the
// token after the span comes along: the next one of the sample, or its last_label where there is none.
// Throws std::invalid_argument for another code, std::out_of_range as above.
void narrow_column_spans(const Column& tokens, const ColumnSpans& spans, const int64_t* follows,
                         const int64_t* last_label, int dtype_code, unsigned char* target, int64_t target_bytes);

}  // namespace tdp
