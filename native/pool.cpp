#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headway {
namespace {

constexpr int chunk_bits = 20;
constexpr uint64_t chunk_mask = (uint64_t{1} << chunk_bits) - 1;
constexpr int spins = 4000;  // about 50 µs, the time between two calls of one layer

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

std::atomic<int> forks{0};  // of this process and those it came from, since the first pool

int forks_so_far() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    static_cast<void>(registered);
    return forks.load(std::memory_order_relaxed);
}

uint64_t next_of(uint64_t part) { return part & chunk_mask; }
uint64_t end_of(uint64_t part) { return part >> chunk_bits & chunk_mask; }
bool has_some(uint64_t part) { return next_of(part) < end_of(part); }

}  // namespace

Pool::Pool(int threads)
    : num_parts_(std::max(1, threads)),
      parts_(new Part[num_parts_]),
      team_(new Team),
      forks_(forks_so_far()) {
    try {
        for (int thread = 1; thread < threads; ++thread)
            team_->workers.emplace_back([this, thread] { serve(thread); });
    } catch (const std::system_error&) {  // the system grants no more: those that run will do
    }
}

Pool::~Pool() {
    if (forked()) return;
    {
        std::lock_guard lock(team_->mutex);
        ended_.store(true);
    }
    team_->wake.notify_all();
    for (auto& worker : team_->workers) worker.join();
    delete team_;
}

bool Pool::forked() const { return forks.load(std::memory_order_relaxed) != forks_; }

bool Pool::has_chunks() const {
    for (int n = 0; n < num_parts_; ++n)
        if (has_some(parts_[n].left.load())) return true;
    return false;
}

// Takes the next chunk of the thread's own part, else the last of another's.
bool Pool::claim(int thread, int64_t& chunk) {
    for (int n = 0; n < num_parts_; ++n) {
        const bool own = n == 0;
        std::atomic<uint64_t>& left = parts_[(thread + n) % num_parts_].left;
        uint64_t part = left.load(std::memory_order_acquire);
        while (has_some(part)) {
            const uint64_t then = own ? part + 1 : part - (uint64_t{1} << chunk_bits);
            if (left.compare_exchange_weak(part, then, std::memory_order_acq_rel,
                                           std::memory_order_acquire)) {
                chunk = static_cast<int64_t>(own ? next_of(part) : end_of(then));
                return true;
            }
        }
    }
    return false;
}

void Pool::run_erased(int64_t chunks, Function function, const void* work) {
    const bool alone = forked();
    if (!alone && busy_.exchange(true, std::memory_order_acquire))
        throw std::logic_error("two threads call the same kernels at once");
    struct Turn {
        std::atomic<bool>& busy;
        const bool alone;
        ~Turn() { if (!alone) busy.store(false, std::memory_order_release); }
    } turn{busy_, alone};
    if (alone || team_->workers.empty() || chunks <= 1 || chunks > static_cast<int64_t>(chunk_mask))
        for (int64_t chunk = 0; chunk < chunks; ++chunk) function(work, chunk, 0);
    else
        share(chunks, function, work);
}

// With the workers.
void Pool::share(int64_t chunks, Function function, const void* work) {
    function_ = function;
    work_ = work;
    left_.store(chunks, std::memory_order_relaxed);
    ++epoch_;
    for (int64_t n = 0, next = 0; n < threads(); ++n) {
        const int64_t end = chunks * (n + 1) / threads();
        parts_[n].left.store(epoch_ << 2 * chunk_bits | static_cast<uint64_t>(end) << chunk_bits |
                             static_cast<uint64_t>(next));
        next = end;
    }
    if (sleeping_.load() > 0) {
        { std::lock_guard lock(team_->mutex); }
        team_->wake.notify_all();
    }
    int64_t chunk;
    while (claim(0, chunk)) work_on(chunk, 0);
    for (int spin = 0; left_.load(std::memory_order_acquire) > 0; ++spin)
        if (spin < spins) relax(); else std::this_thread::yield();
    if (failed_.exchange(false)) throw std::bad_alloc();
}

// One claimed chunk. Only memory can fail here; the caller hears of it when all chunks have ended.
void Pool::work_on(int64_t chunk, int thread) {
    try {
        function_(work_, chunk, thread);
    } catch (...) {
        failed_.store(true);
    }
    left_.fetch_sub(1, std::memory_order_acq_rel);
}

void Pool::serve(int thread) {
    int64_t chunk;
    for (int spin = 0; !ended_.load(std::memory_order_relaxed);) {
        if (claim(thread, chunk)) {
            work_on(chunk, thread);
            spin = 0;
        } else if (++spin < spins) {
            relax();
        } else {
            std::unique_lock lock(team_->mutex);
            sleeping_.fetch_add(1);
            team_->wake.wait(lock, [&] { return ended_.load() || has_chunks(); });
            sleeping_.fetch_sub(1);
            spin = 0;
        }
    }
}

}  // namespace headway
