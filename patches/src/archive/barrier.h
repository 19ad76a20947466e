// Barrier for the threads of one ggml operation.

#pragma once

#include <atomic>
#include <thread>

namespace kvtool {

class barrier {
public:
    // wait until n threads have called this
    void wait(int n) {
        const int current = generation;
        if (++n_waiting == n) {
            n_waiting = 0;
            ++generation;
            return;
        }
        for (int i = 0; generation == current; ++i) {
            if (i > 1000) {
                std::this_thread::yield();
            }
        }
    }

private:
    std::atomic<int> n_waiting  { 0 };
    std::atomic<int> generation { 0 }; // number of times that all threads have met
};

} // namespace kvtool
