// Preloaded into a process, lets one of C++'s allocations fail.

#include <cstddef>
#include <cstdlib>
#include <new>

static thread_local long n_left = 0;

// let this thread's nth allocation from now on fail; 0: none
extern "C" void fail_new(long n) {
    n_left = n;
}

void * operator new(std::size_t size) {
    void * data = n_left > 0 && --n_left == 0 ? nullptr : std::malloc(size ? size : 1);
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
