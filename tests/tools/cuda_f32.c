// Preloaded (LD_PRELOAD) for the tests on CUDA: ggml computes short products of F32 on tensor cores, which round to 10
// bits. With this library, cuBLAS computes them, and does not round if NVIDIA_TF32_OVERRIDE=0 is set.
//
// bool ggml_cuda_should_use_mmf(ggml_type, int, int, const int64_t *, const size_t *, int, bool)
#include <stdbool.h>

bool _Z24ggml_cuda_should_use_mmf9ggml_typeiiPKlPKmib(void) {
    return false;
}
