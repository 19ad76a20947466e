// Library to preload into a process. In it, one chosen call of C++'s operator new fails.

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

static thread_local long n_left = 0;

static thread_local bool is_caller = false;
static std::atomic<long> n_left_elsewhere { 0 };

// Makes the nth allocation of this thread fail, counted from this call. With n = 0, no allocation fails.
extern "C" void fail_new(long n) {
    n_left = n;
}

// Makes the nth allocation of all other threads together fail. With n = 0, no allocation fails.
extern "C" void fail_new_elsewhere(long n) {
    is_caller = true;
    n_left_elsewhere = n;
}

void * operator new(std::size_t size) {
    const bool fails = (n_left > 0 && --n_left == 0) || (!is_caller && n_left_elsewhere > 0 && --n_left_elsewhere == 0);

    void * data = fails ? nullptr : std::malloc(size ? size : 1);
    if (!data) {
        throw std::bad_alloc();
    }
    return data;
}

void operator delete(void * data) noexcept {
    std::free(data);
}

void operator delete(void * data, std::size_t) noexcept {
    std::free(data);
}
