#include "readahead.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace tdp {

namespace {

// Reads that ask ahead after one that had to wait. Asking for what is in memory costs some microseconds; to find out
// too late that it is not costs many waits, and what the kernel reads around each of them.
constexpr int kReads = 256;

std::atomic<int> reads_left{kReads};
std::atomic<ReadAhead> mode{ReadAhead::kWhereSlow};

struct Waits {
    int64_t faults = 0;  // pages this thread touched that were not there
    int64_t all = 0;     // and pages under way that it waited for
};

Waits waits_of_thread() {
#ifdef RUSAGE_THREAD
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0) return {usage.ru_majflt, usage.ru_majflt + usage.ru_nvcsw};
#endif
    return {};
}

}  // namespace

void set_read_ahead(ReadAhead wanted) { mode.store(wanted); }

bool should_read_ahead() {
    const ReadAhead wanted = mode.load(std::memory_order_relaxed);
    return wanted == ReadAhead::kAlways ||
           (wanted == ReadAhead::kWhereSlow && reads_left.load(std::memory_order_relaxed) > 0);
}

StorageWatch::StorageWatch() : asking_(should_read_ahead()) {
    if (asking_) waits_ = waits_of_thread().all;
}

StorageWatch::~StorageWatch() {
    const Waits now = waits_of_thread();
    // Where nothing is asked for, one call a read has to do: faults between reads count as well, and do no harm.
    static thread_local int64_t seen = 0;
    const bool has_waited = asking_ ? now.all > waits_ : now.faults > seen;
    seen = now.faults;
    if (has_waited)
        reads_left.store(kReads);
    else if (asking_)
        reads_left.fetch_sub(1);
}

void read_ahead(std::vector<ByteRange> ranges) {
    static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
    for (std::size_t i = 0; i < ranges.size();) {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(ranges[i].begin) / page * page;
        uintptr_t end = begin;
        // Neighbours are one request.
        for (; i < ranges.size() && (end == begin || reinterpret_cast<uintptr_t>(ranges[i].begin) <= end + page); ++i)
            end = std::max(end, reinterpret_cast<uintptr_t>(ranges[i].begin) + static_cast<uintptr_t>(ranges[i].size));
        // A hint: what goes wrong here is found when the pages are touched.
        if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
    }
}

}  // namespace tdp
