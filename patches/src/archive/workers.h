// Background threads that do work in the order in which it is added.

#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kvtool {

class workers {
public:
    // Work items that a caller waits for together.
    class group {
        friend class workers;

        int         n_pending = 0;
        std::string error; // reason of the last failure
    };

    explicit workers(size_t n_thread) {
        try {
            for (size_t t = 0; t < n_thread; ++t) {
                threads.emplace_back([this, t] { run(t); });
            }
        } catch (...) {
            stop();
            throw;
        }
    }

    // Work that has not begun is dropped.
    ~workers() { stop(); }

    workers(const workers &) = delete;

    size_t size() const { return threads.size(); }

    // work(thread) is called by one of the threads.
    void add(group & group, std::function<void (size_t)> work) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            queue.emplace_back(&group, std::move(work));
            ++group.n_pending; // only now, because emplace_back may throw
        }
        changed.notify_all();
    }

    // Wait until all work of a group is done. Returns the reason of a failure, or an empty string.
    std::string wait(group & group) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return group.n_pending == 0; });
        return std::exchange(group.error, {});
    }

private:
    std::vector<std::thread> threads;
    std::mutex               mutex;
    std::condition_variable  changed;

    std::deque<std::pair<group *, std::function<void (size_t)>>> queue;

    bool is_stopped = false;

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            is_stopped = true;
        }
        changed.notify_all();
        for (auto & t : threads) {
            t.join();
        }
    }

    void run(size_t thread) {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return is_stopped || !queue.empty(); });
            if (is_stopped) {
                return;
            }
            const auto [group, work] = std::move(queue.front());
            queue.pop_front();

            lock.unlock();
            std::string why;
            try {
                work(thread);
            } catch (const std::exception & e) {
                why = e.what();
            }
            lock.lock();

            if (!why.empty()) {
                group->error = why;
            }
            --group->n_pending;
            changed.notify_all();
        }
    }
};

} // namespace kvtool
