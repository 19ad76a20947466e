#include "hadamard.h"

#include "cpu.h"

#include <cmath>

#ifdef KVTOOL_X86
#include <immintrin.h>
#endif

namespace kvtool {

static constexpr int n_largest = 64;

static void hadamard_plain(float * x, int64_t n, int n_size) {
    const float scale = 1.0f/std::sqrt((float) n_size);

    for (float * end = x + n; x < end; x += n_size) {
        for (int half = 1; half < n_size; half *= 2) {
            for (int i = 0; i < n_size; i += 2*half) {
                for (int j = i; j < i + half; ++j) {
                    const float a = x[j];
                    const float b = x[j + half];
                    x[j]        = a + b;
                    x[j + half] = a - b;
                }
            }
        }
        for (int i = 0; i < n_size; ++i) {
            x[i] *= scale;
        }
    }
}

#ifdef KVTOOL_X86

// N: number of vectors of 8 elements to which the matrix is applied at once
template <int N>
KVTOOL_AVX2 static void hadamard_avx2(float * x, int64_t n) {
    const __m256 scale = _mm256_set1_ps(1.0f/std::sqrt(8.0f*N));

    // Signs of the butterflies with distance 1, 2 and 4. A butterfly multiplies each element by its sign, and adds the
    // element at this distance
    const __m256 signs_1 = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
    const __m256 signs_2 = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
    const __m256 signs_4 = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);

    for (float * end = x + n; x < end; x += 8*N) {
        __m256 v[N];
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            v[i] = _mm256_mul_ps(_mm256_loadu_ps(x + 8*i), scale);
            v[i] = _mm256_fmadd_ps(v[i], signs_1, _mm256_permute_ps(v[i], 0xB1));
            v[i] = _mm256_fmadd_ps(v[i], signs_2, _mm256_permute_ps(v[i], 0x4E));
            v[i] = _mm256_fmadd_ps(v[i], signs_4, _mm256_permute2f128_ps(v[i], v[i], 1));
        }
#pragma GCC unroll 8
        for (int half = 1; half < N; half *= 2) {
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) {
                if (!(i & half)) {
                    const __m256 a = v[i];
                    v[i]        = _mm256_add_ps(a, v[i + half]);
                    v[i + half] = _mm256_sub_ps(a, v[i + half]);
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            _mm256_storeu_ps(x + 8*i, v[i]);
        }
    }
}

#endif

void hadamard(float * x, int64_t n, int n_size) {
    if (n_size == 0) {
        return;
    }
#ifdef KVTOOL_X86
    if (vectors() != PLAIN && n_size == 64) {
        return hadamard_avx2<8>(x, n);
    }
    if (vectors() != PLAIN && n_size == 32) {
        return hadamard_avx2<4>(x, n);
    }
#endif
    hadamard_plain(x, n, n_size);
}

int hadamard_size(ggml_type type, int64_t n_embd) {
    const bool is_short = ggml_is_quantized(type) && ggml_type_size(type) < (size_t) ggml_blck_size(type);
    if (!is_short) {
        return 0;
    }
    int res = n_largest;
    while (n_embd % res != 0) {
        res /= 2;
    }
    return res;
}

} // namespace kvtool
