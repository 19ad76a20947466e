// Independent parts of work, shared by several threads.

#pragma once

#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace kvtool {

// Call work(i) for 0 <= i < n. If a thread throws, the exception is thrown again after all threads have ended.
template <typename F>
void parallel_for(int n_thread, int n, F && work) {
    std::atomic<int> next(0);
    std::vector<std::exception_ptr> errors(n_thread);

    const auto run = [&](int thread) {
        try {
            for (int i; (i = next++) < n;) {
                work(i);
            }
        } catch (...) {
            errors[thread] = std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(n_thread);
    try {
        for (int thread = 1; thread < n_thread && thread < n; ++thread) {
            threads.emplace_back(run, thread);
        }
    } catch (const std::system_error &) {
        // no more threads can be started, so the existing threads do all the work
    }
    run(0);
    for (auto & thread : threads) {
        thread.join();
    }
    for (const auto & error : errors) {
        if (error) {
            std::rethrow_exception(error);
        }
    }
}

} // namespace kvtool
