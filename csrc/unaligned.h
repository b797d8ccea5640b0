// Reads from arrays that lie inside an .idx file: its 34-byte header leaves them unaligned.
#pragma once

#include <cstdint>
#include <cstring>

namespace tdp {

template <typename T>
class Unaligned {
public:
    explicit Unaligned(const void* data) : bytes_(static_cast<const unsigned char*>(data)) {}

    T operator[](int64_t i) const {
        T value;
        std::memcpy(&value, bytes_ + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
        return value;
    }

    // A hint only: i may be any number. Into the second level, which has more misses under way than the first.
    void prefetch(int64_t i) const {
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(bytes_) +
                                                         static_cast<uintptr_t>(i) * sizeof(T)),
                           0, 2);
    }

private:
    const unsigned char* bytes_;
};

}  // namespace tdp
