// Barrier for the threads of one ggml operation.

#pragma once

#include <atomic>
#include <thread>

namespace kvtool {

class barrier {
public:
    // wait until n threads have called this
    void wait(int n) {
        const int met = n_met;
        if (++n_here == n) {
            n_here = 0;
            ++n_met;
            return;
        }
        for (int i = 0; n_met == met; ++i) {
            if (i > 1000) {
                std::this_thread::yield();
            }
        }
    }

private:
    std::atomic<int> n_here { 0 };
    std::atomic<int> n_met  { 0 };
};

} // namespace kvtool
