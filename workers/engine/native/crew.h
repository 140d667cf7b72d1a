// The threads of one forward pass. They share the items of each part of the work, and wait for one another after it.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace millstream {

class Crew {
public:
    explicit Crew(int threads) : threads_(threads) {}

    // work(item) for each item from 0 to count − 1, `together` of them at a time by whichever thread is free.
    template <class Work>
    void share(int64_t count, int64_t together, const Work& work) {
        for (int64_t first; (first = next_.fetch_add(together, std::memory_order_relaxed)) < count;) {
            for (int64_t item = first; item < std::min(count, first + together); item++) work(item);
        }
        wait();
    }

private:
    // Parts take microseconds, so a wait begins by looking; but it gives way where the other thread has no core to run on.
    void wait() {
        const int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int looked = 0; round_.load(std::memory_order_acquire) == round; looked++) {
            if (looked < LOOKS) _mm_pause();
            else sched_yield();
        }
    }

    static constexpr int LOOKS = 2000;
    const int threads_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

}  // namespace millstream
