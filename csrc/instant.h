// An order that needs no index: permutations and blends that are computed where they are needed.
#pragma once

#include <cstdint>
#include <vector>

#include "gather.h"
#include "unaligned.h"

namespace tdp {

// A keyed permutation of [0, size): a balanced Feistel network over the smallest even number of bits (at least 8) that
// holds size, walked along its cycles until it is back in the range (Black & Rogaway 2002). The round function is the
// finaliser of SplitMix64 over the half and the round's key.
class KeyedPermutation {
public:
    KeyedPermutation(int64_t size, uint64_t key);
    // Where place i of the permuted order comes from; i in [0, size).
    int64_t operator()(int64_t i) const;
    // Where all places come from, in order; for small ranges far cheaper than one by one.
    std::vector<int64_t> all() const;

private:
    static constexpr int kRounds = 6;

    uint64_t size_;
    int half_bits_;
    uint64_t mask_;
    uint64_t round_keys_[kRounds];
};

// 64 well mixed bits of two numbers; for deriving keys.
uint64_t mix(uint64_t a, uint64_t b);

// Chunks of a token stream in which the documents of every window of `window` sequences are permuted.
//
// The stream holds the sequences [begin, end) of the file; window w is sequences begin + [w * window, (w + 1) * window),
// in an order of its own. Chunk c covers the tokens [c * stride, c * stride + stride + extra) of the stream.
struct InstantStream {
    Unaligned<int32_t> lengths;
    Unaligned<int64_t> pointers;
    int64_t begin, end;
    int64_t begin_byte, end_byte;  // of the stream's tokens in the .bin
    int64_t itemsize;
    int64_t window;
    uint64_t key;
};

// Throws std::invalid_argument for a stream that no index of num_lengths sequences has.
void check_stream(const InstantStream& stream, int64_t num_lengths);

// Pieces of tokens [start[s], start[s] + length[s]) of the stream; fewer where the stream ends.
// Throws std::out_of_range where pointers and lengths contradict each other.
Pieces instant_pieces(const InstantStream& stream, const int64_t* start, const int64_t* length, int64_t num_spans);

// One period of a blend that gives dataset i shares[i] of sum(shares) samples, spread as evenly as can be: at every
// prefix of n samples each dataset has had n * share / sum samples, give or take less than one (Tijdeman 1980; here
// as earliest deadline first).
//
// dataset int32[sum] and sample int32[sum] (the dataset's running number in the period) are written.
void blend_period(const int64_t* shares, int64_t k, int64_t sum, int32_t* dataset, int32_t* sample);

}  // namespace tdp
