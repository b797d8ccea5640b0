// Pages of mapped files that are not in memory: asked for together, before they are touched one by one.
#pragma once

#include <cstdint>
#include <vector>

namespace tdp {

struct ByteRange {
    const unsigned char* begin;
    int64_t size;
};

// Asks the kernel for the pages of these parts of mapped files, in the order they lie in; returns at once.
//
// A page that is touched instead makes the thread wait for a device, one request after the other, and brings the pages
// around it along, of which samples in random order need few.
void read_ahead(std::vector<ByteRange> ranges);

enum class ReadAhead { kWhereSlow, kNever, kAlways };
void set_read_ahead(ReadAhead mode);

// Whether files are read from a device at present, so that asking pays: where all is in memory it costs more than it
// gains.
bool should_read_ahead();

// Lives around one read: tells later ones whether its thread had to wait for a device. In the beginning that is assumed.
class StorageWatch {
public:
    StorageWatch();
    ~StorageWatch();
    StorageWatch(const StorageWatch&) = delete;
    StorageWatch& operator=(const StorageWatch&) = delete;

private:
    bool asking_;
    int64_t waits_ = 0;
};

}  // namespace tdp
