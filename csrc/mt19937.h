// The Mersenne Twister, seeded the ways NumPy's legacy RandomState seeds it.
#pragma once

#include <cstdint>

namespace tdp {

// MT19937 (Matsumoto & Nishimura 1998), producing its 624 words a block at a time.
class Mt19937 {
public:
    static constexpr int kBlock = 624;

    // As numpy.random.RandomState(int): init_genrand of the reference implementation.
    explicit Mt19937(uint32_t seed);
    // As numpy.random.RandomState(uint32 array): init_by_array, but a key of one word is an int seed.
    // Throws std::invalid_argument for an empty key.
    Mt19937(const uint32_t* key, int64_t size);

    uint32_t next() {
        if (used_ == kBlock) refill();
        return block_[used_++];
    }

    // What is left of the present block, never empty: tempered words [returned pointer, + *count). Say how many of
    // them were used with skip().
    const uint32_t* peek(int* count) {
        if (used_ == kBlock) refill();
        *count = kBlock - used_;
        return block_ + used_;
    }
    void skip(int count) { used_ += count; }

private:
    void refill();

    uint32_t state_[kBlock];
    uint32_t block_[kBlock];
    int used_ = kBlock;
};

}  // namespace tdp
