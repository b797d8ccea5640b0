#include "schedule_sort.h"

#include <algorithm>

namespace tdp::schedule {
namespace {

constexpr std::size_t kFewest = 256;
constexpr unsigned kDigitBits = 11, kDigits = 6;
constexpr std::size_t kValues = std::size_t{1} << kDigitBits;

std::size_t digit(std::uint64_t key, unsigned number) {
    return static_cast<std::size_t>(key >> (number * kDigitBits)) & (kValues - 1);
}

}  // namespace

void RadixOrder::sort(std::vector<Entry>& entries) {
    if (entries.size() < kFewest) {
        std::stable_sort(entries.begin(), entries.end(), [](const Entry& x, const Entry& y) { return x.key < y.key; });
        return;
    }
    counts_.assign(kDigits * kValues, 0);
    for (const Entry& entry : entries) {
        for (unsigned number = 0; number < kDigits; ++number) {
            ++counts_[number * kValues + digit(entry.key, number)];
        }
    }
    spare_.resize(entries.size());
    for (unsigned number = 0; number < kDigits; ++number) {
        std::uint32_t* counts = counts_.data() + number * kValues;
        if (counts[digit(entries[0].key, number)] == entries.size()) continue;
        std::uint32_t before = 0;
        for (std::size_t value = 0; value < kValues; ++value) {
            const std::uint32_t count = counts[value];
            counts[value] = before;
            before += count;
        }
        for (const Entry& entry : entries) spare_[counts[digit(entry.key, number)]++] = entry;
        entries.swap(spare_);
    }
}

}  // namespace tdp::schedule
