// numba's allocator, called by kernels with local arrays; link.py links them with it
#include "nrt.cpp"

static void out_of_memory() {
    fprintf(stderr, "no memory for a kernel\n");
    abort();
}

extern "C" {

__attribute__((constructor)) static void start() { NRT_MemSys_init(); }

// numba calls these to raise a Python error. A kernel holds no Python lock, so it aborts; its only error is no memory
void numba_gil_ensure(void *) { out_of_memory(); }
void numba_gil_release(void *) { out_of_memory(); }
void * numba_unpickle(void *, int, void *) { out_of_memory(); return nullptr; }
void * numba_runtime_build_excinfo_struct(void *, void *) { out_of_memory(); return nullptr; }
void numba_do_raise(void *) { out_of_memory(); }

}
