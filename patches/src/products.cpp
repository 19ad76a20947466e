#include "products.h"

#include "cpu.h"

#include <cstring>

namespace kvtool {

#if defined(__GNUC__)
typedef float lanes __attribute__((vector_size(8*sizeof(float))));
static constexpr int n_lane = 8;
#else
typedef float lanes;
static constexpr int n_lane = 1;
#endif

static constexpr int n_vector = n_column/n_lane;

// n_row rows of c, n_column columns
template <int n_row>
static inline KVTOOL_INLINE void multiply_block(float * c, int cs, const float * a, int as, const float * b, int bs, int k) {
    lanes sum[n_row][n_vector];
    for (int i = 0; i < n_row; ++i) {
        memcpy(sum[i], c + i*cs, sizeof(sum[i]));
    }
    for (int e = 0; e < k; ++e) {
        lanes x[n_vector];
        memcpy(x, b + (long) e*bs, sizeof(x));
        for (int i = 0; i < n_row; ++i) {
            const float w = a[i*as + e];
            for (int j = 0; j < n_vector; ++j) {
                sum[i][j] += w*x[j];
            }
        }
    }
    for (int i = 0; i < n_row; ++i) {
        memcpy(c + i*cs, sum[i], sizeof(sum[i]));
    }
}

static inline KVTOOL_INLINE void multiply_all(float * c, int cs, const float * a, int as, const float * b, int bs, int m, int k, int n) {
    for (int j = 0; j < n; j += n_column) {
        int i = 0;
        for (; i + 4 <= m; i += 4) {
            multiply_block<4>(c + i*cs + j, cs, a + i*as, as, b + j, bs, k);
        }
        switch (m - i) {
            case 3: multiply_block<3>(c + i*cs + j, cs, a + i*as, as, b + j, bs, k); break;
            case 2: multiply_block<2>(c + i*cs + j, cs, a + i*as, as, b + j, bs, k); break;
            case 1: multiply_block<1>(c + i*cs + j, cs, a + i*as, as, b + j, bs, k); break;
        }
    }
}

#ifdef KVTOOL_X86
KVTOOL_AVX2   static void multiply_avx2  (float * c, int cs, const float * a, int as, const float * b, int bs, int m, int k, int n) { multiply_all(c, cs, a, as, b, bs, m, k, n); }
KVTOOL_AVX512 static void multiply_avx512(float * c, int cs, const float * a, int as, const float * b, int bs, int m, int k, int n) { multiply_all(c, cs, a, as, b, bs, m, k, n); }
#endif

void multiply_add(float * c, int cs, const float * a, int as, const float * b, int bs, int m, int k, int n) {
#ifdef KVTOOL_X86
    switch (vectors()) {
        case AVX512: return multiply_avx512(c, cs, a, as, b, bs, m, k, n);
        case AVX2:   return multiply_avx2  (c, cs, a, as, b, bs, m, k, n);
        case PLAIN:  break;
    }
#endif
    multiply_all(c, cs, a, as, b, bs, m, k, n);
}

} // namespace kvtool
