#include "products.h"

#include "cpu.h"

#include <cstdint>

namespace kvtool {

#if defined(__GNUC__)
// a vector of floats that needs only the alignment of a float
typedef float lanes __attribute__((vector_size(8*sizeof(float)), aligned(sizeof(float)), may_alias));
static constexpr int n_lane = 8;
#else
typedef float lanes;
static constexpr int n_lane = 1;
#endif

// compute one block of c: n_row rows, and n_vector vectors of columns
template <int n_row, int n_vector>
static inline KVTOOL_INLINE void multiply_block(float * c, int cs, const float * a, int as, int ak, const float * b, int bs, int k) {
    lanes sum[n_row][n_vector];
    for (int i = 0; i < n_row; ++i) {
        for (int j = 0; j < n_vector; ++j) {
            sum[i][j] = *(const lanes *) (c + i*cs + j*n_lane);
        }
    }
    for (int e = 0; e < k; ++e) {
        lanes x[n_vector];
        for (int j = 0; j < n_vector; ++j) {
            x[j] = *(const lanes *) (b + (int64_t) e*bs + j*n_lane);
        }
        for (int i = 0; i < n_row; ++i) {
            const float w = a[i*as + e*ak];
            for (int j = 0; j < n_vector; ++j) {
                sum[i][j] += w*x[j];
            }
        }
    }
    for (int i = 0; i < n_row; ++i) {
        for (int j = 0; j < n_vector; ++j) {
            *(lanes *) (c + i*cs + j*n_lane) = sum[i][j];
        }
    }
}

template <int n_vector>
static inline KVTOOL_INLINE void multiply_columns(float * c, int cs, const float * a, int as, int ak, const float * b, int bs, int m, int k) {
    // at least 8 independent sums, so that an addition need not wait for the previous addition
    constexpr int n_row = n_vector < 8 ? 8/n_vector : 1;

    int i = 0;
    for (; i + n_row <= m; i += n_row) {
        multiply_block<n_row, n_vector>(c + i*cs, cs, a + i*as, as, ak, b, bs, k);
    }
    if (n_row == 8 && i + 4 <= m) {
        multiply_block<4, n_vector>(c + i*cs, cs, a + i*as, as, ak, b, bs, k);
        i += 4;
    }
    switch (m - i) {
        case 3: multiply_block<3, n_vector>(c + i*cs, cs, a + i*as, as, ak, b, bs, k); break;
        case 2: multiply_block<2, n_vector>(c + i*cs, cs, a + i*as, as, ak, b, bs, k); break;
        case 1: multiply_block<1, n_vector>(c + i*cs, cs, a + i*as, as, ak, b, bs, k); break;
    }
}

static inline KVTOOL_INLINE void multiply_all(
        float * c, int cs, const float * a, int as, int ak, const float * b, int bs, int m, int k, int n) {
    int j = 0;
    for (; j + 2*n_column <= n; j += 2*n_column) {
        multiply_columns<2*n_column/n_lane>(c + j, cs, a, as, ak, b + j, bs, m, k);
    }
    if (j < n) {
        multiply_columns<n_column/n_lane>(c + j, cs, a, as, ak, b + j, bs, m, k);
    }
}

void multiply_add(float * c, int cs, const float * a, int as, int ak, const float * b, int bs, int m, int k, int n) {
    vectorized([&]() KVTOOL_INLINE { multiply_all(c, cs, a, as, ak, b, bs, m, k, n); });
}

} // namespace kvtool
