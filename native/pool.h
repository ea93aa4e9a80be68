// Threads that claim chunks of one job at a time.
//
// Each has a part of the chunks to itself and takes them in order, so that what is fetched beyond the
// end of one is the beginning of its next; who has none left takes the last of another's part:
//
//     10 chunks, 2 threads    0 1 2 3 4 │ 5 6 7 8 9      the first, when it is done:  9, then 8
//
// The caller works too and waits only for chunks that somebody claimed, never for a thread that has
// not arrived: with a busy neighbour on the machine the rest of the team does its share. A worker
// without a job spins for a moment, then sleeps. Two callers at once are an error, not a wrong
// result. After a fork the child has no workers: it computes alone, and never joins them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headway {

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(team_->workers.size()) + 1; }

    // Calls work(chunk, thread) for chunk = 0 … chunks - 1, each once, in any order; returns when
    // all have ended. `thread` is below `threads()`. One caller at a time: std::logic_error else.
    template <class Work>
    void run(int64_t chunks, const Work& work) {
        run_erased(chunks, [](const void* it, int64_t chunk, int thread) {
            (*static_cast<const Work*>(it))(chunk, thread);
        }, &work);
    }

private:
    using Function = void (*)(const void*, int64_t, int);

    // What only the process that made it may destroy: in a child of a fork a thread cannot be joined,
    // and a condition that one waited for is waited for itself.
    struct Team {
        std::vector<std::thread> workers;
        std::mutex mutex;
        std::condition_variable wake;
    };

    // What is left of one thread's part: epoch (24 bits) | end (20 bits) | next chunk (20 bits).
    // Whoever moves it has a chunk of that epoch, and the job cannot change before that is done.
    struct alignas(64) Part {
        std::atomic<uint64_t> left{0};
    };

    void run_erased(int64_t chunks, Function function, const void* work);
    void share(int64_t chunks, Function function, const void* work);
    bool forked() const;
    bool has_chunks() const;
    bool claim(int thread, int64_t& chunk);
    void serve(int thread);
    void work_on(int64_t chunk, int thread);

    const int num_parts_;
    const std::unique_ptr<Part[]> parts_;
    uint64_t epoch_ = 0;
    std::atomic<int64_t> left_{0};
    Function function_ = nullptr;
    const void* work_ = nullptr;
    Team* team_;
    const int forks_;
    std::atomic<bool> busy_{false};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> ended_{false}, failed_{false};
};

}  // namespace headway
