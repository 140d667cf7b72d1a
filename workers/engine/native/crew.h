// The threads of one forward pass. They share the items of each part of the work, and wait for one another after it.
#pragma once
#include <immintrin.h>

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
    // Parts take microseconds, so a wait begins by looking; a longer one sleeps, and leaves the core to others.
    void wait() {
        const int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        for (int looked = 0; looked < LOOKS; looked++) {
            if (round_.load(std::memory_order_acquire) != round) return;
            _mm_pause();
        }
        round_.wait(round, std::memory_order_acquire);
    }

    static constexpr int LOOKS = 1000;
    const int threads_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

}  // namespace millstream
