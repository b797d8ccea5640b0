#include "instant.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>

#include "multiversion.h"

namespace tdp {

namespace {

inline uint64_t finalise(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Networks of very few bits are far from reaching all permutations alike; small ranges walk through a larger one.
constexpr int kLeastHalfBits = 4;

}  // namespace

uint64_t mix(uint64_t a, uint64_t b) { return finalise(finalise(a + 0x9e3779b97f4a7c15ull) + b); }

KeyedPermutation::KeyedPermutation(int64_t size, uint64_t key) : size_(static_cast<uint64_t>(size)), half_bits_(kLeastHalfBits) {
    while (half_bits_ < 31 && (uint64_t{1} << (2 * half_bits_)) < size_) ++half_bits_;
    mask_ = (uint64_t{1} << half_bits_) - 1;
    for (int round = 0; round < kRounds; ++round) round_keys_[round] = mix(key, static_cast<uint64_t>(round));
}

int64_t KeyedPermutation::operator()(int64_t i) const {
    uint64_t x = static_cast<uint64_t>(i);
    do {
        uint64_t left = x >> half_bits_, right = x & mask_;
        for (int round = 0; round < kRounds; ++round) {
            const uint64_t next = left ^ (finalise(right + round_keys_[round]) & mask_);
            left = right;
            right = next;
        }
        x = left << half_bits_ | right;
    } while (x >= size_);
    return static_cast<int64_t>(x);
}

namespace {

// One round for n numbers at once, whose halves are left[n] and right[n].
TDP_MULTIVERSION void round_of_all(uint64_t* __restrict left, uint64_t* __restrict right, int64_t n, uint64_t key,
                                   uint64_t mask) {
    for (int64_t i = 0; i < n; ++i) {
        uint64_t x = right[i] + key;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        x ^= x >> 31;
        const uint64_t next = left[i] ^ (x & mask);
        left[i] = right[i];
        right[i] = next;
    }
}

}  // namespace

std::vector<int64_t> KeyedPermutation::all() const {
    const int64_t size = static_cast<int64_t>(size_), domain = int64_t{1} << (2 * half_bits_);
    std::vector<int64_t> result(size);
    if (domain > 8 * size + 256) {
        for (int64_t i = 0; i < size; ++i) result[i] = (*this)(i);
        return result;
    }
    // The network on its whole domain, vector by vector; the cycles are then walked by look-up.
    std::vector<uint64_t> left(domain), right(domain);
    for (int64_t x = 0; x < domain; ++x) {
        left[x] = static_cast<uint64_t>(x) >> half_bits_;
        right[x] = static_cast<uint64_t>(x) & mask_;
    }
    for (const uint64_t key : round_keys_) round_of_all(left.data(), right.data(), domain, key, mask_);
    for (int64_t i = 0; i < size; ++i) {
        uint64_t x = static_cast<uint64_t>(i);
        do x = left[x] << half_bits_ | right[x];
        while (x >= size_);
        result[i] = static_cast<int64_t>(x);
    }
    return result;
}

namespace {

// The sequences of one window in their order, and where each begins in the window.
class Window {
public:
    Window(const InstantStream& stream, int64_t number)
        : first_(stream.begin + number * stream.window), last_(std::min(first_ + stream.window, stream.end)) {
        const int64_t count = last_ - first_;
        const std::vector<int64_t> order = KeyedPermutation(count, mix(stream.key, static_cast<uint64_t>(number))).all();
        sequence.resize(count);
        begin.resize(count + 1);
        begin[0] = 0;
        for (int64_t i = 0; i < count; ++i) {
            sequence[i] = first_ + order[i];
            const int64_t length = stream.lengths[sequence[i]];
            if (length < 0) throw std::out_of_range("sequence " + std::to_string(sequence[i]) + " has a negative length");
            begin[i + 1] = begin[i] + length;
        }
    }

    std::vector<int64_t> sequence, begin;

private:
    int64_t first_, last_;
};

}  // namespace

void check_stream(const InstantStream& stream, int64_t num_lengths) {
    if (stream.begin < 0 || stream.end <= stream.begin || stream.end > num_lengths)
        throw std::invalid_argument("sequences [" + std::to_string(stream.begin) + ", " + std::to_string(stream.end) +
                                    ") of " + std::to_string(num_lengths));
    if (stream.window < 1 || stream.itemsize < 1 || stream.end_byte < stream.begin_byte)
        throw std::invalid_argument("window and itemsize must be at least 1, and the bytes a range");
}

Pieces instant_pieces(const InstantStream& stream, const int64_t* start, const int64_t* length, int64_t num_spans) {
    const int64_t num_windows = (stream.end - stream.begin + stream.window - 1) / stream.window;
    const int64_t total = (stream.end_byte - stream.begin_byte) / stream.itemsize;
    // First token of a window in the stream: the windows lie one after the other in the file.
    const auto window_begin = [&](int64_t number) {
        if (number >= num_windows) return total;
        return (stream.pointers[stream.begin + number * stream.window] - stream.begin_byte) / stream.itemsize;
    };
    Pieces pieces;
    pieces.span_begin.push_back(0);
    for (int64_t s = 0; s < num_spans; ++s) {
        int64_t at = start[s];
        const int64_t end = std::min(at + length[s], total);
        if (at < 0 || length[s] < 0 || at > total) throw std::out_of_range("tokens " + std::to_string(at) + ".. of " +
                                                                           std::to_string(total));
        // The last window that begins at or before the token, by bisection.
        int64_t low = 0, high = num_windows;
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            (window_begin(middle) <= at ? low : high) = middle;
        }
        for (int64_t number = low; at < end; ++number) {
            if (number >= num_windows) throw std::out_of_range("pointers and lengths of the index contradict each other");
            const Window window(stream, number);
            const int64_t origin = window_begin(number);
            if (origin + window.begin.back() != window_begin(number + 1))
                throw std::out_of_range("pointers and lengths of the index contradict each other at sequence " +
                                        std::to_string(stream.begin + number * stream.window));
            int64_t i = std::upper_bound(window.begin.begin(), window.begin.end(), at - origin) - window.begin.begin() - 1;
            for (; at < end && i < static_cast<int64_t>(window.sequence.size()); ++i) {
                const int64_t skip = at - origin - window.begin[i];
                const int64_t count = std::min(window.begin[i + 1] - window.begin[i] - skip, end - at);
                if (count <= 0) continue;
                pieces.byte_offset.push_back(stream.pointers[window.sequence[i]] + skip * stream.itemsize);
                pieces.count.push_back(count);
                at += count;
            }
        }
        pieces.span_begin.push_back(static_cast<int64_t>(pieces.count.size()));
    }
    return pieces;
}

void blend_period(const int64_t* shares, int64_t k, int64_t sum, int32_t* dataset, int32_t* sample) {
    // Sample j of dataset i may come from step release(j) on, and has to by deadline(j): that keeps its count within
    // 1 - slack of its share. All in units of 1 / (2k - 2), in integers.
    const int64_t unit = std::max<int64_t>(2 * k - 2, 1);
    const auto step = [&](int64_t i, int64_t numerator, bool up) {
        const __int128 value = static_cast<__int128>(numerator) * sum;
        const __int128 divisor = static_cast<__int128>(shares[i]) * unit;
        return static_cast<int64_t>(up ? (value + divisor - 1) / divisor : value / divisor);
    };
    using Task = std::tuple<int64_t, int64_t>;  // step, dataset
    std::vector<std::vector<int32_t>> waiting(sum + 1);
    std::priority_queue<Task, std::vector<Task>, std::greater<Task>> ready;
    std::vector<int64_t> count(k, 0);
    const auto release = [&](int64_t i) { return std::max<int64_t>(step(i, count[i] * unit + 1, true), 1); };
    const auto deadline = [&](int64_t i) { return step(i, (count[i] + 1) * unit - 1, false) + 1; };
    const auto wait = [&](int64_t i, int64_t from) {
        if (count[i] < shares[i]) waiting[std::min(std::max(release(i), from), sum)].push_back(static_cast<int32_t>(i));
    };
    if (k == 1) {
        std::fill_n(dataset, sum, 0);
        std::iota(sample, sample + sum, 0);
        return;
    }
    for (int64_t i = 0; i < k; ++i) wait(i, 1);
    for (int64_t n = 1; n <= sum; ++n) {
        for (const int32_t i : waiting[n]) ready.emplace(deadline(i), i);
        waiting[n].clear();
        waiting[n].shrink_to_fit();
        if (ready.empty()) throw std::logic_error("no dataset may be drawn at step " + std::to_string(n));
        const int64_t i = std::get<1>(ready.top());
        ready.pop();
        dataset[n - 1] = static_cast<int32_t>(i);
        sample[n - 1] = static_cast<int32_t>(count[i]++);
        wait(i, n + 1);
    }
}

}  // namespace tdp
