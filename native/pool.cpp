#include "pool.h"

#include <pthread.h>

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

uint64_t next_of(uint64_t ticket) { return ticket & chunk_mask; }
uint64_t chunks_of(uint64_t ticket) { return ticket >> chunk_bits & chunk_mask; }

}  // namespace

Pool::Pool(int threads) : team_(new Team), forks_(forks_so_far()) {
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

// Takes the next chunk; `ticket` is then the one that named it.
bool Pool::claim(uint64_t& ticket) {
    ticket = ticket_.load(std::memory_order_acquire);
    while (next_of(ticket) < chunks_of(ticket))
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire))
            return true;
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
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 2 * chunk_bits) + 1;
    ticket_.store(epoch << 2 * chunk_bits | static_cast<uint64_t>(chunks) << chunk_bits);
    if (sleeping_.load() > 0) {
        { std::lock_guard lock(team_->mutex); }
        team_->wake.notify_all();
    }
    uint64_t ticket;
    while (claim(ticket)) work_on(ticket, 0);
    for (int spin = 0; left_.load(std::memory_order_acquire) > 0; ++spin)
        if (spin < spins) relax(); else std::this_thread::yield();
    if (failed_.exchange(false)) throw std::bad_alloc();
}

// One claimed chunk. Only memory can fail here; the caller hears of it when all chunks have ended.
void Pool::work_on(uint64_t ticket, int thread) {
    try {
        function_(work_, static_cast<int64_t>(next_of(ticket)), thread);
    } catch (...) {
        failed_.store(true);
    }
    left_.fetch_sub(1, std::memory_order_acq_rel);
}

void Pool::serve(int thread) {
    uint64_t ticket;
    for (int spin = 0; !ended_.load(std::memory_order_relaxed);) {
        if (claim(ticket)) {
            work_on(ticket, thread);
            spin = 0;
        } else if (++spin < spins) {
            relax();
        } else {
            std::unique_lock lock(team_->mutex);
            sleeping_.fetch_add(1);
            team_->wake.wait(lock, [&] {
                const uint64_t now = ticket_.load();
                return ended_.load() || next_of(now) < chunks_of(now);
            });
            sleeping_.fetch_sub(1);
            spin = 0;
        }
    }
}

}  // namespace headway
