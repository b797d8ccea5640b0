// Readers of token files as Python knows them, and how their spans are read.
#pragma once

#include <memory>
#include <vector>

#include "arrays.h"
#include "gather.h"
#include "token_source.h"

namespace tdp {

// The samples of one file and the rules for what is made of them.
struct SpanReader {
    std::unique_ptr<TokenSource> source;
    TokenBytes bytes;
    bool is_mapped;
    GatherRules rules;
    std::vector<py::object> kept;  // the arrays that `source` and `bytes` look into
};

using Readers = std::vector<SpanReader*>;

// Throws std::invalid_argument where a reader only knows where its tokens lie.
void require_mapped(const Readers& readers);

// Spans of several readers, those of one reader side by side.
class Requests {
public:
    std::vector<int64_t> sample, start, length, destination;
    std::vector<int64_t> begin;  // [readers + 1]

    // n spans of the readers that reader_index names; it may be null where there is one.
    Requests(const int64_t* reader_index, std::size_t num_readers, int64_t n);

    void set(int64_t i, int64_t sample_number, int64_t first, int64_t count, int64_t at) {
        const int64_t place = place_[i];
        sample[place] = sample_number;
        start[place] = first;
        length[place] = count;
        destination[place] = at;
    }

private:
    std::vector<int64_t> place_;
};

// To be called with the GIL, before `read`.
void prepare(const Readers& readers, const Requests& requests);

// What will be read after a read, as far as it is known.
struct Later {
    // The beginnings of num_samples samples of the only reader; 0 where it is not known.
    const int64_t* sample = nullptr;
    int64_t num_samples = 0;
    // The same as requests; made where pages are to be asked for.
    const Requests* requests = nullptr;
};

// Reads all spans; without the GIL.
void read(const Readers& readers, const Requests& requests, const TokenOutputs& out, const Later& later);

}  // namespace tdp
