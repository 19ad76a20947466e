#include "softmax.h"

#include "cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

namespace kvtool {

// number of floats that are processed at once; the compiler maps them to the CPU's vectors
#if defined(__GNUC__)
static constexpr int n_wide   = 16;
static constexpr int n_narrow = 8;

typedef float   floats __attribute__((vector_size(n_wide*sizeof(float))));
typedef int32_t ints   __attribute__((vector_size(n_wide*sizeof(int32_t))));

typedef float   few_floats __attribute__((vector_size(n_narrow*sizeof(float))));
typedef int32_t few_ints   __attribute__((vector_size(n_narrow*sizeof(int32_t))));

#define KVTOOL_CONVERT(x, type) __builtin_convertvector(x, type)
#else
static constexpr int n_wide   = 1;
static constexpr int n_narrow = 1;

typedef float   floats;
typedef int32_t ints;
typedef float   few_floats;
typedef int32_t few_ints;

#define KVTOOL_CONVERT(x, type) (type) (x)
#endif

// Replace f by 2^f, for f <= 0. This is computed as 2^whole * 2^(f - whole). The second factor is a Taylor series
// around -0.5 with a relative error below 2e-7
template <typename F, typename I>
static inline KVTOOL_INLINE void power_of_2(F & f) {
    f = f > -126.0f ? f : F {} - 126.0f;
    const I whole = KVTOOL_CONVERT(f, I);
    f = f - KVTOOL_CONVERT(whole, F) + 0.5f;

    F y = f*1.0891941e-4f + 9.4282494e-4f;
    y = y*f + 6.8010443e-3f;
    y = y*f + 3.9247332e-2f;
    y = y*f + 1.6986579e-1f;
    y = y*f + 4.9012907e-1f;
    y = y*f + 7.0710678e-1f;

    const I bits = (whole + 127)*(1 << 23);
    memcpy(&f, &bits, sizeof(f));
    f = y*f;
}

// maximum of x[end]; end is a multiple of n_wide
static inline KVTOOL_INLINE float max_of(const float * x, int end) {
    floats f;
    floats max = floats {} - INFINITY;
    for (int i = 0; i < end; i += n_wide) {
        memcpy(&f, x + i, sizeof(f));
        max = f > max ? f : max;
    }
    float lane[n_wide];
    memcpy(lane, &max, sizeof(max));
    return *std::max_element(lane, lane + n_wide);
}

static inline KVTOOL_INLINE softmax_part exponentials_of(float * x, int n, float scale, float * e) {
    const int end = (n + n_wide - 1)/n_wide*n_wide;
    std::fill(x + n, x + end, -INFINITY);

    const float max = max_of(x, end);

    floats f;
    floats sum = {};
    for (int i = 0; i < end; i += n_wide) {
        memcpy(&f, x + i, sizeof(f));

        f = (f - max)*(scale*1.44269504f);
        power_of_2<floats, ints>(f);

        memcpy(e + i, &f, sizeof(f));
        sum = sum + f;
    }
    float lane[n_wide];
    memcpy(lane, &sum, sizeof(sum));

    return { scale*max, std::accumulate(lane, lane + n_wide, 0.0f) };
}

static inline KVTOOL_INLINE softmax_part exponential_differences_of(float * x, float * lower, int n, float * e) {
    const int end = (n + n_wide - 1)/n_wide*n_wide;
    std::fill(x     + n, x     + end, -INFINITY);
    std::fill(lower + n, lower + end, -INFINITY);

    const float max = max_of(x, end);

    floats f, g;
    floats sum = {};
    for (int i = 0; i < end; i += n_wide) {
        memcpy(&f, x     + i, sizeof(f));
        memcpy(&g, lower + i, sizeof(g));

        f = (f - max)*1.44269504f;
        g = (g - max)*1.44269504f;
        power_of_2<floats, ints>(f);
        power_of_2<floats, ints>(g);

        sum = sum + f;
        f = f - g;
        memcpy(e + i, &f, sizeof(f));
    }
    float lane[n_wide];
    memcpy(lane, &sum, sizeof(sum));

    return { max, std::accumulate(lane, lane + n_wide, 0.0f) };
}

static inline KVTOOL_INLINE void exponential_columns_of(float * x, int n, int n_column, float scale, float * max, float * factor, float * sum) {
    for (int q = 0; q < n_column; q += n_narrow) {
        few_floats f, top = few_floats {} - INFINITY;
        for (int i = 0; i < n; ++i) {
            memcpy(&f, x + i*n_column + q, sizeof(f));
            // comparisons with NaN are false, so NaN never becomes the maximum
            top = f > top ? f : top;
        }
        float lane[n_narrow];
        memcpy(lane, &top, sizeof(top));
        for (int j = 0; j < n_narrow; ++j) {
            const float higher = std::max(max[q + j], scale*lane[j]);
            factor[q + j] = max[q + j] > -INFINITY ? std::exp(max[q + j] - higher) : 0.0f;
            max[q + j]    = higher;
        }
        memcpy(&top, max + q, sizeof(top));

        few_floats sums = {};
        for (int i = 0; i < n; ++i) {
            memcpy(&f, x + i*n_column + q, sizeof(f));
            f = f*scale - top;
            // f is NaN if the logit is NaN, or if both the logit and the maximum are -INFINITY. A NaN is replaced by
            // -126, so that the exponential becomes 2^-126. At the maximum, rounding may make f slightly greater than
            // 0; f is then set to 0
            f = f < 1.0f ? f : few_floats {} - 126.0f;
            f = (f < 0.0f ? f : few_floats {})*1.44269504f;
            power_of_2<few_floats, few_ints>(f);
            memcpy(x + i*n_column + q, &f, sizeof(f));
            sums = sums + f;
        }
        memcpy(sum + q, &sums, sizeof(sums));
    }
}

static inline KVTOOL_INLINE float keep_above_of(float * x, int n, float threshold) {
    const int end = (n + n_wide - 1)/n_wide*n_wide;
    std::fill(x + n, x + end, 0.0f);

    floats sum = {};
    for (int i = 0; i < end; i += n_wide) {
        floats f;
        memcpy(&f, x + i, sizeof(f));
        f = f > threshold ? f : floats {};
        memcpy(x + i, &f, sizeof(f));
        sum = sum + f;
    }
    float lane[n_wide];
    memcpy(lane, &sum, sizeof(sum));
    return std::accumulate(lane, lane + n_wide, 0.0f);
}

static inline KVTOOL_INLINE void add_to(float * y, const float * x, int n, float w) {
    for (int i = 0; i < n; ++i) {
        y[i] += w*x[i];
    }
}

softmax_part exponentials(float * x, int n, float scale, float * e) {
    return vectorized([&]() KVTOOL_INLINE { return exponentials_of(x, n, scale, e); });
}

softmax_part exponential_differences(float * x, float * lower, int n, float * e) {
    return vectorized([&]() KVTOOL_INLINE { return exponential_differences_of(x, lower, n, e); });
}

void exponential_columns(float * x, int n, int n_column, float scale, float * max, float * factor, float * sum) {
    vectorized([&]() KVTOOL_INLINE { exponential_columns_of(x, n, n_column, scale, max, factor, sum); });
}

float keep_above(float * x, int n, float threshold) {
    return vectorized([&]() KVTOOL_INLINE { return keep_above_of(x, n, threshold); });
}

void add(float * y, const float * x, int n, float w) {
    vectorized([&]() KVTOOL_INLINE { add_to(y, x, n, w); });
}

} // namespace kvtool
