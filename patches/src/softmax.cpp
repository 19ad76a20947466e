#include "softmax.h"

#include "cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

namespace kvtool {

// numbers that are looked at together; a compiler makes of them what vectors the CPU has
#if defined(__GNUC__)
static constexpr int n_lane = 16;

typedef float   floats __attribute__((vector_size(n_lane*sizeof(float))));
typedef int32_t ints   __attribute__((vector_size(n_lane*sizeof(int32_t))));

#define KVTOOL_CONVERT(x, type) __builtin_convertvector(x, type)
#else
static constexpr int n_lane = 1;

typedef float   floats;
typedef int32_t ints;

#define KVTOOL_CONVERT(x, type) (type) (x)
#endif

static inline KVTOOL_INLINE softmax_part exponentials_of(float * x, int n, float scale, float * e) {
    const int end = (n + n_lane - 1)/n_lane*n_lane;
    std::fill(x + n, x + end, -INFINITY);

    floats f;
    floats most = floats {} - INFINITY;
    for (int i = 0; i < end; i += n_lane) {
        memcpy(&f, x + i, sizeof(f));
        most = f > most ? f : most;
    }
    float lane[n_lane];
    memcpy(lane, &most, sizeof(most));
    const float top = *std::max_element(lane, lane + n_lane);

    floats sum = {};
    for (int i = 0; i < end; i += n_lane) {
        memcpy(&f, x + i, sizeof(f));

        // 2^f = 2^whole * 2^(f - whole), the second of Taylor's series around -0.5, within 2e-7 of itself
        f = (f - top)*(scale*1.44269504f);
        f = f > -126.0f ? f : floats {} - 126.0f;
        const ints whole = KVTOOL_CONVERT(f, ints);
        f = f - KVTOOL_CONVERT(whole, floats) + 0.5f;

        floats y = f*1.0891941e-4f + 9.4282494e-4f;
        y = y*f + 6.8010443e-3f;
        y = y*f + 3.9247332e-2f;
        y = y*f + 1.6986579e-1f;
        y = y*f + 4.9012907e-1f;
        y = y*f + 7.0710678e-1f;

        const ints bits = (whole + 127)*(1 << 23);
        memcpy(&f, &bits, sizeof(f));
        y = y*f;

        memcpy(e + i, &y, sizeof(y));
        sum = sum + y;
    }
    memcpy(lane, &sum, sizeof(sum));

    return { scale*top, std::accumulate(lane, lane + n_lane, 0.0f) };
}

static inline KVTOOL_INLINE void add_to(float * y, const float * x, int n, float w) {
    for (int i = 0; i < n; ++i) {
        y[i] += w*x[i];
    }
}

#ifdef KVTOOL_X86
KVTOOL_AVX2   static softmax_part exponentials_avx2  (float * x, int n, float scale, float * e) { return exponentials_of(x, n, scale, e); }
KVTOOL_AVX512 static softmax_part exponentials_avx512(float * x, int n, float scale, float * e) { return exponentials_of(x, n, scale, e); }

KVTOOL_AVX2   static void add_avx2  (float * y, const float * x, int n, float w) { add_to(y, x, n, w); }
KVTOOL_AVX512 static void add_avx512(float * y, const float * x, int n, float w) { add_to(y, x, n, w); }
#endif

softmax_part exponentials(float * x, int n, float scale, float * e) {
#ifdef KVTOOL_X86
    switch (vectors()) {
        case AVX512: return exponentials_avx512(x, n, scale, e);
        case AVX2:   return exponentials_avx2  (x, n, scale, e);
        case PLAIN:  break;
    }
#endif
    return exponentials_of(x, n, scale, e);
}

void add(float * y, const float * x, int n, float w) {
#ifdef KVTOOL_X86
    switch (vectors()) {
        case AVX512: return add_avx512(y, x, n, w);
        case AVX2:   return add_avx2  (y, x, n, w);
        case PLAIN:  break;
    }
#endif
    add_to(y, x, n, w);
}

} // namespace kvtool
