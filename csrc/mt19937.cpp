#include "mt19937.h"

#include <stdexcept>

#include "multiversion.h"

namespace tdp {

namespace {

constexpr int kN = Mt19937::kBlock;
constexpr int kM = 397;
constexpr uint32_t kUpper = 0x80000000u, kLower = 0x7fffffffu;

inline uint32_t twist(uint32_t upper, uint32_t lower) {
    const uint32_t y = (upper & kUpper) | (lower & kLower);
    return (y >> 1) ^ ((0u - (lower & 1u)) & 0x9908b0dfu);
}

void init_genrand(uint32_t* state, uint32_t seed) {
    state[0] = seed;
    for (int i = 1; i < kN; ++i)
        state[i] = 1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + static_cast<uint32_t>(i);
}

// Every loop reads what lies at least 227 words away, so each of them is one the compiler can vectorise.
TDP_MULTIVERSION
void next_block(uint32_t* __restrict state, uint32_t* __restrict block) {
    for (int i = 0; i < kN - kM; ++i) state[i] = state[i + kM] ^ twist(state[i], state[i + 1]);
    for (int i = kN - kM; i < kN - 1; ++i) state[i] = state[i - (kN - kM)] ^ twist(state[i], state[i + 1]);
    state[kN - 1] = state[kM - 1] ^ twist(state[kN - 1], state[0]);
    for (int i = 0; i < kN; ++i) {
        uint32_t y = state[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        y ^= y >> 18;
        block[i] = y;
    }
}

}  // namespace

Mt19937::Mt19937(uint32_t seed) { init_genrand(state_, seed); }

Mt19937::Mt19937(const uint32_t* key, int64_t size) {
    if (size < 1) throw std::invalid_argument("the key of a random generator must not be empty");
    if (size == 1) {
        init_genrand(state_, key[0]);
        return;
    }
    init_genrand(state_, 19650218u);
    int i = 1;
    int64_t j = 0;
    for (int64_t k = size > kN ? size : kN; k > 0; --k) {
        state_[i] = (state_[i] ^ ((state_[i - 1] ^ (state_[i - 1] >> 30)) * 1664525u)) + key[j] +
                    static_cast<uint32_t>(j);
        if (++i >= kN) {
            state_[0] = state_[kN - 1];
            i = 1;
        }
        if (++j >= size) j = 0;
    }
    for (int k = kN - 1; k > 0; --k) {
        state_[i] =
            (state_[i] ^ ((state_[i - 1] ^ (state_[i - 1] >> 30)) * 1566083941u)) - static_cast<uint32_t>(i);
        if (++i >= kN) {
            state_[0] = state_[kN - 1];
            i = 1;
        }
    }
    state_[0] = 0x80000000u;
}

void Mt19937::refill() {
    next_block(state_, block_);
    used_ = 0;
}

}  // namespace tdp
