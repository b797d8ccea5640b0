// Where the tokens of samples lie in a .bin: fixed-length samples, runs of neighbouring tokens, chunks without an index.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "gather.h"
#include "instant.h"
#include "unaligned.h"

namespace tdp {

// The samples of one file, under their numbers.
class TokenSource {
public:
    virtual ~TokenSource() = default;

    // To be called, where Python may be called back, before the numbers are used below.
    virtual void prepare(const int64_t*, int64_t) {}

    // A hint that the pieces of these samples will be asked for: steps 0, 1 and 2, with some time between them.
    virtual void expect(const int64_t*, int64_t, int) const {}

    // The pieces of tokens [start[i], start[i] + length[i]) of sample[i].
    //
    // Tokens past the sample's end (the extra token included) do not exist: the pieces of such a span hold fewer
    // tokens than asked. Throws std::out_of_range for what is not there.
    virtual Pieces locate(const int64_t* sample, const int64_t* start, const int64_t* length, int64_t n) const = 0;

    // Tokens of a sample that each of its documents has, from the first; a document that only has the extra token
    // counts as well.
    virtual std::vector<int64_t> document_lengths(int64_t sample) const = 0;
};

// The arrays of fixed-length samples. rows is the sample index, [num_rows, 2].
template <typename Row>
struct GptIndex {
    Unaligned<int32_t> lengths;
    Unaligned<int64_t> pointers;
    int64_t num_lengths;
    const int32_t* document_index;
    int64_t num_documents;
    const Row* rows;
    int64_t num_rows;
    int64_t extra_tokens;
};

// Sample i is row shuffle[i] of the sample index.
template <typename Row, typename Shuffle>
class GptSource : public TokenSource {
public:
    GptSource(const GptIndex<Row>& index, const Shuffle* shuffle, int64_t num_samples, int64_t itemsize)
        : index_(index), shuffle_(shuffle), num_samples_(num_samples), itemsize_(itemsize) {}

    void expect(const int64_t* sample, int64_t n, int step) const override;
    Pieces locate(const int64_t* sample, const int64_t* start, const int64_t* length, int64_t n) const override;
    std::vector<int64_t> document_lengths(int64_t sample) const override;

private:
    int64_t row_of(int64_t sample) const;

    GptIndex<Row> index_;
    const Shuffle* shuffle_;
    int64_t num_samples_;
    int64_t itemsize_;
};

// Sample i is the tokens from byte_offset[i] on; available[i] of them, those behind the sample included, belong to it.
class RunSource : public TokenSource {
public:
    RunSource(const int64_t* byte_offset, const int64_t* available, int64_t num_runs, int64_t itemsize)
        : byte_offset_(byte_offset), available_(available), num_runs_(num_runs), itemsize_(itemsize) {}

    Pieces locate(const int64_t* sample, const int64_t* start, const int64_t* length, int64_t n) const override;
    std::vector<int64_t> document_lengths(int64_t sample) const override;

private:
    void check(int64_t sample) const;

    const int64_t* byte_offset_;
    const int64_t* available_;
    int64_t num_runs_;
    int64_t itemsize_;
};

// The chunks of a stream, permuted anew in every epoch; sample numbers run on over the epochs.
class InstantSource : public TokenSource {
public:
    struct Keys {
        uint64_t chunks, windows;
    };

    // keys_of is asked in `prepare` only, once for each epoch.
    InstantSource(const InstantStream& stream, int64_t sequence_length, int64_t extra_tokens,
                  std::function<Keys(int64_t)> keys_of);

    void prepare(const int64_t* sample, int64_t n) override;
    Pieces locate(const int64_t* sample, const int64_t* start, const int64_t* length, int64_t n) const override;
    std::vector<int64_t> document_lengths(int64_t sample) const override;

private:
    Keys keys(int64_t epoch) const;

    InstantStream stream_;
    int64_t sequence_length_;
    int64_t extra_tokens_;
    int64_t samples_per_epoch_;
    std::function<Keys(int64_t)> keys_of_;
    std::map<int64_t, Keys> known_;
    mutable std::mutex mutex_;
};

}  // namespace tdp
