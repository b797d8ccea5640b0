#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace tdp {

namespace {

constexpr int kDefaultMost = 4;

std::atomic<int> wanted_threads{0};

int processors() {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::thread::hardware_concurrency());
}

// What one loop and its helpers share; helpers that wake late find nothing left to do.
struct Loop {
    const std::function<void(int64_t)>* body;
    int64_t n;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};

    void work() {
        int64_t finished = 0;
        for (int64_t i; (i = next.fetch_add(1)) < n; ++finished) (*body)(i);
        done.fetch_add(finished);
    }
};

class Pool {
public:
    void run(int64_t n, int helpers, const std::function<void(int64_t)>& body) {
        auto loop = std::make_shared<Loop>();
        loop->body = &body;
        loop->n = n;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            try {
                for (; started_ < helpers; ++started_) std::thread([this] { serve(); }).detach();
            } catch (const std::system_error&) {
                // No more threads allowed here: those there are do the work, the caller alone if need be.
            }
            loop_ = loop;
            seats_ = helpers;
            ++round_;
        }
        wake_.notify_all();
        loop->work();
        std::unique_lock<std::mutex> lock(mutex_);
        finished_.wait(lock, [&] { return loop->done.load() == n; });
        loop_.reset();
    }

    // Held by the thread whose loop is running.
    std::mutex busy;

private:
    void serve() {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (seats_ == 0 || !loop_) continue;
            --seats_;
            const std::shared_ptr<Loop> loop = loop_;
            lock.unlock();
            loop->work();
            lock.lock();
            finished_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::shared_ptr<Loop> loop_;
    int started_ = 0;
    int seats_ = 0;
    uint64_t round_ = 0;
};

// Never destroyed: its threads sleep on it until the process ends.
std::atomic<Pool*> pool{nullptr};

Pool* the_pool() {
    Pool* existing = pool.load();
    if (existing) return existing;
    // In the child the copy's threads do not exist and its locks may be held: it is abandoned.
    static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
    (void)registered;
    auto made = std::make_unique<Pool>();
    return pool.compare_exchange_strong(existing, made.get()) ? made.release() : existing;
}

}  // namespace

int num_threads() {
    const int wanted = wanted_threads.load();
    if (wanted > 0) return wanted;
    static const int most = std::max(1, std::min(kDefaultMost, processors()));
    return most;
}

void set_num_threads(int n) { wanted_threads.store(n); }

void parallel_for(int64_t n, int num_threads, const std::function<void(int64_t)>& body) {
    const int helpers = static_cast<int>(std::min<int64_t>(num_threads, n)) - 1;
    Pool* const shared = helpers > 0 ? the_pool() : nullptr;
    std::unique_lock<std::mutex> lock;
    if (shared) lock = std::unique_lock<std::mutex>(shared->busy, std::try_to_lock);
    if (!lock.owns_lock()) {
        for (int64_t i = 0; i < n; ++i) body(i);
        return;
    }
    shared->run(n, helpers, body);
}

}  // namespace tdp
