// numba's allocator, which kernels call for local arrays; link.py links it into the library of kernels
#include "nrt.cpp"

static void out_of_memory() {
    fprintf(stderr, "no memory for a kernel\n");
    abort();
}

extern "C" {

__attribute__((constructor)) static void start() { NRT_MemSys_init(); }

// Compiled kernels call these functions to raise a Python error. Kernels do not hold the GIL, so these functions abort
// the process instead. Lack of memory is the only error that a kernel can have
void numba_gil_ensure(void *) { out_of_memory(); }
void numba_gil_release(void *) { out_of_memory(); }
void * numba_unpickle(void *, int, void *) { out_of_memory(); return nullptr; }
void * numba_runtime_build_excinfo_struct(void *, void *) { out_of_memory(); return nullptr; }
void numba_do_raise(void *) { out_of_memory(); }

}
