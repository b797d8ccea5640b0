// Stable order of many keys by radix: several times faster than comparisons from a few hundred keys on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace tdp::schedule {

// Bits of a double that is not negative, in an order that falls as the number rises.
inline std::uint64_t falling(double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return ~bits;
}

// Keeps its memory from one sort to the next.
class RadixOrder {
   public:
    struct Entry {
        std::uint64_t key;
        std::int64_t number;
    };

    // Sorts `entries` by rising key; equal ones keep their order.
    void sort(std::vector<Entry>& entries);

   private:
    std::vector<Entry> spare_;
    std::vector<std::uint32_t> counts_;
};

}  // namespace tdp::schedule
