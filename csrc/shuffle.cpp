#include "shuffle.h"

#include <algorithm>
#include <utility>

namespace tdp {

namespace {

// The swaps are cache misses all over the array. Places are drawn a block ahead, each prefetched as it is drawn, so
// that a block's worth of misses is under way while the block before it is swapped. They are prefetched into the second
// level, which has twice as many misses under way as the first.
constexpr int kAhead = 256;

inline uint64_t mask_for(uint64_t bound) {
    uint64_t mask = bound;
    for (int shift = 1; shift < 64; shift <<= 1) mask |= mask >> shift;
    return mask;
}

// Draws places for the bounds bound, bound - 1, ... of one mask: `count` of them, all below 2^32.
template <typename T>
void draw_narrow(Mt19937& random, const T* values, uint32_t bound, int count, uint32_t* places) {
    const uint32_t mask = static_cast<uint32_t>(mask_for(bound));
    int drawn = 0;
    while (drawn < count) {
        int available;
        const uint32_t* words = random.peek(&available);
        int used = 0;
        // Without a branch on the outcome, which is a coin toss: a rejected draw is overwritten by the next one.
        while (used < available && drawn < count) {
            const uint32_t value = words[used++] & mask;
            places[drawn] = value;
            __builtin_prefetch(values + std::min(value, bound), 1, 2);
            const uint32_t accepted = value <= bound;
            drawn += static_cast<int>(accepted);
            bound -= accepted;
        }
        random.skip(used);
    }
}

uint64_t draw_wide(Mt19937& random, uint64_t bound) {
    const uint64_t mask = mask_for(bound);
    for (;;) {
        const uint64_t high = random.next();
        const uint64_t value = (high << 32 | random.next()) & mask;
        if (value <= bound) return value;
    }
}

// The next block: as many bounds below `bound` as fit the buffer and share its mask.
template <typename T>
int draw_block(Mt19937& random, const T* values, int64_t bound, uint32_t* places) {
    if (bound < 1) return 0;
    const int64_t lowest = static_cast<int64_t>(mask_for(static_cast<uint64_t>(bound)) >> 1) + 1;
    const int count = static_cast<int>(std::min<int64_t>(kAhead, bound - lowest + 1));
    draw_narrow(random, values, static_cast<uint32_t>(bound), count, places);
    return count;
}

}  // namespace

template <typename T>
void legacy_shuffle(Mt19937& random, T* values, int64_t n, const Poll& poll) {
    int64_t i = n - 1;
    for (; i > static_cast<int64_t>(UINT32_MAX); --i) {
        if (i % kStepsPerPoll == 0) poll();
        std::swap(values[i], values[draw_wide(random, static_cast<uint64_t>(i))]);
    }
    int64_t next_poll = i - kStepsPerPoll;
    uint32_t buffers[2][kAhead];
    uint32_t *now = buffers[0], *next = buffers[1];
    int count = draw_block(random, values, i, now);
    while (count > 0) {
        const int upcoming = draw_block(random, values, i - count, next);
        for (int k = 0; k < count; ++k) std::swap(values[i - k], values[now[k]]);
        i -= count;
        count = upcoming;
        if (i < next_poll) {
            next_poll = i - kStepsPerPoll;
            poll();
        }
        std::swap(now, next);
    }
}

template void legacy_shuffle<int32_t>(Mt19937&, int32_t*, int64_t, const Poll&);
template void legacy_shuffle<uint32_t>(Mt19937&, uint32_t*, int64_t, const Poll&);
template void legacy_shuffle<int64_t>(Mt19937&, int64_t*, int64_t, const Poll&);

}  // namespace tdp
