#include "stored.h"

#include "convert.h"
#include "cpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

#ifdef KVTOOL_X86
#include <immintrin.h>
#endif

namespace kvtool {

// numbers that have one scale in q8_0
static constexpr int n_group = 32;

static bool any(const float * w, int wx, int n) {
    for (int q = 0; q < n; ++q) {
        if (w[q*wx] != 0.0f) {
            return true;
        }
    }
    return false;
}

// row by row, converted
static void multiply_converted(ggml_type type, const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, float * out, int os) {
    std::vector<float> row(d);
    for (int i = 0; i < n; ++i) {
        to_float(type, rows + i*size, row.data(), d);
        for (int q = 0; q < n_x; ++q) {
            float sum = 0.0f;
            for (int64_t e = 0; e < d; ++e) {
                sum += row[e]*x[q*d + e];
            }
            out[i*os + q] = sum;
        }
    }
}

static void add_converted(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t d, const float * w, int ws, int wx, int n_y, float * y, int64_t ys) {
    std::vector<float> row(d);
    for (int i = 0; i < n; ++i) {
        if (!any(w + i*ws, wx, n_y)) {
            continue;
        }
        to_float(type, rows + i*size, row.data(), d);
        for (int q = 0; q < n_y; ++q) {
            for (int64_t e = 0; e < d; ++e) {
                y[q*ys + e] += w[i*ws + q*wx]*row[e];
            }
        }
    }
}

#ifdef KVTOOL_X86

// eight numbers of a row from e on
struct of_floats {
    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256 load(const uint8_t * row, int64_t e) { return _mm256_loadu_ps((const float *) row + e); }
};

struct of_halves {
    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256 load(const uint8_t * row, int64_t e) {
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) ((const ggml_fp16_t *) row + e)));
    }
};

struct of_q8_0 {
    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256 load(const uint8_t * row, int64_t e) {
        const uint8_t * group = row + e/n_group*(sizeof(ggml_fp16_t) + n_group);
        uint16_t d;
        memcpy(&d, group, sizeof(d));
        const __m128i bytes = _mm_loadl_epi64((const __m128i *) (group + sizeof(d) + e % n_group));
        return _mm256_mul_ps(_mm256_set1_ps(_cvtsh_ss(d)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
    }
};

KVTOOL_AVX2 static inline KVTOOL_INLINE __m128 sum_of(__m256 x) {
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

template <typename S, int N>
KVTOOL_AVX2 static void multiply_avx2(const uint8_t * rows, size_t size, int n, int64_t d, const float * x, float * out, int os) {
    for (int i = 0; i < n; ++i, rows += size, out += os) {
        __m256 sum[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
        for (int64_t e = 0; e < d; e += 8) {
            const __m256 row = S::load(rows, e);
            for (int q = 0; q < N; ++q) {
                sum[q] = _mm256_fmadd_ps(row, _mm256_loadu_ps(x + q*d + e), sum[q]);
            }
        }
        const __m128 all = _mm_hadd_ps(_mm_hadd_ps(sum_of(sum[0]), sum_of(sum[1])), _mm_hadd_ps(sum_of(sum[2]), sum_of(sum[3])));
        float four[4];
        _mm_storeu_ps(four, all);
        for (int q = 0; q < N; ++q) {
            out[q] = four[q];
        }
    }
}

// pairs lie side by side, or half of the numbers apart
template <typename S, int N, bool HALVES>
KVTOOL_AVX2 static void multiply_turned_avx2(
        const uint8_t * rows, size_t size, int n, int64_t d, const float * x, const float * turns, const uint8_t * by, float * out, int os) {
    for (int i = 0; i < n; ++i, rows += size, out += os) {
        const float * c = turns - (int64_t) by[i]*2*d;
        const float * s = c + d;

        __m256 sum[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
        const auto multiply = [&](__m256 row, int64_t e) KVTOOL_AVX2 KVTOOL_INLINE {
            for (int q = 0; q < N; ++q) {
                sum[q] = _mm256_fmadd_ps(row, _mm256_loadu_ps(x + q*d + e), sum[q]);
            }
        };
        if (HALVES) {
            for (int64_t e = 0; e < d/2; e += 8) {
                const __m256 u = S::load(rows, e);
                const __m256 v = S::load(rows, e + d/2);
                const __m256 cosine = _mm256_loadu_ps(c + e);
                const __m256 sine   = _mm256_loadu_ps(s + e + d/2);
                multiply(_mm256_fmsub_ps(u, cosine, _mm256_mul_ps(v, sine)), e);
                multiply(_mm256_fmadd_ps(v, cosine, _mm256_mul_ps(u, sine)), e + d/2);
            }
        } else {
            for (int64_t e = 0; e < d; e += 8) {
                const __m256 u = S::load(rows, e);
                multiply(_mm256_fmadd_ps(u, _mm256_loadu_ps(c + e), _mm256_mul_ps(_mm256_permute_ps(u, 0xB1), _mm256_loadu_ps(s + e))), e);
            }
        }
        const __m128 all = _mm_hadd_ps(_mm_hadd_ps(sum_of(sum[0]), sum_of(sum[1])), _mm_hadd_ps(sum_of(sum[2]), sum_of(sum[3])));
        float four[4];
        _mm_storeu_ps(four, all);
        for (int q = 0; q < N; ++q) {
            out[q] = four[q];
        }
    }
}

// 32 numbers of each row at a time, so that their sums stay in registers
template <typename S, int N>
KVTOOL_AVX2 static void add_avx2(const uint8_t * rows, size_t size, int n, int64_t d, const float * w, int ws, int wx, float * y, int64_t ys) {
    for (int64_t e = 0; e < d; e += n_group) {
        __m256 sum[N][4];
        for (int q = 0; q < N; ++q) {
            for (int j = 0; j < 4; ++j) {
                sum[q][j] = _mm256_loadu_ps(y + q*ys + e + 8*j);
            }
        }
        const uint8_t * row = rows;
        for (int i = 0; i < n; ++i, row += size) {
            if (!any(w + i*ws, wx, N)) {
                continue;
            }
            __m256 by[N];
            for (int q = 0; q < N; ++q) {
                by[q] = _mm256_set1_ps(w[i*ws + q*wx]);
            }
            for (int j = 0; j < 4; ++j) {
                const __m256 x = S::load(row, e + 8*j);
                for (int q = 0; q < N; ++q) {
                    sum[q][j] = _mm256_fmadd_ps(by[q], x, sum[q][j]);
                }
            }
        }
        for (int q = 0; q < N; ++q) {
            for (int j = 0; j < 4; ++j) {
                _mm256_storeu_ps(y + q*ys + e + 8*j, sum[q][j]);
            }
        }
    }
}

template <typename S>
static void multiply_some(const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, float * out, int os) {
    for (; n_x > 0; n_x -= 4, x += 4*d, out += 4) {
        switch (n_x) {
            case 1:  multiply_avx2<S, 1>(rows, size, n, d, x, out, os); break;
            case 2:  multiply_avx2<S, 2>(rows, size, n, d, x, out, os); break;
            case 3:  multiply_avx2<S, 3>(rows, size, n, d, x, out, os); break;
            default: multiply_avx2<S, 4>(rows, size, n, d, x, out, os); break;
        }
    }
}

template <typename S, bool HALVES>
static void multiply_turned_some(
        const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, const float * turns, const uint8_t * by, float * out, int os) {
    for (; n_x > 0; n_x -= 4, x += 4*d, out += 4) {
        switch (n_x) {
            case 1:  multiply_turned_avx2<S, 1, HALVES>(rows, size, n, d, x, turns, by, out, os); break;
            case 2:  multiply_turned_avx2<S, 2, HALVES>(rows, size, n, d, x, turns, by, out, os); break;
            case 3:  multiply_turned_avx2<S, 3, HALVES>(rows, size, n, d, x, turns, by, out, os); break;
            default: multiply_turned_avx2<S, 4, HALVES>(rows, size, n, d, x, turns, by, out, os); break;
        }
    }
}

template <typename S>
static void add_some(const uint8_t * rows, size_t size, int n, int64_t d, const float * w, int ws, int wx, int n_y, float * y, int64_t ys) {
    for (; n_y > 0; n_y -= 3, w += 3*wx, y += 3*ys) {
        switch (n_y) {
            case 1:  add_avx2<S, 1>(rows, size, n, d, w, ws, wx, y, ys); break;
            case 2:  add_avx2<S, 2>(rows, size, n, d, w, ws, wx, y, ys); break;
            default: add_avx2<S, 3>(rows, size, n, d, w, ws, wx, y, ys); break;
        }
    }
}

#endif

void multiply_rows(ggml_type type, const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, float * out, int os) {
#ifdef KVTOOL_X86
    if (vectors() != PLAIN && d % 8 == 0) {
        switch (type) {
            case GGML_TYPE_F32:  return multiply_some<of_floats>(rows, size, n, d, x, n_x, out, os);
            case GGML_TYPE_F16:  return multiply_some<of_halves>(rows, size, n, d, x, n_x, out, os);
            case GGML_TYPE_Q8_0: return multiply_some<of_q8_0>  (rows, size, n, d, x, n_x, out, os);
            default:             break;
        }
    }
#endif
    multiply_converted(type, rows, size, n, d, x, n_x, out, os);
}

bool can_turn(ggml_type type, int64_t d) {
#ifdef KVTOOL_X86
    return vectors() != PLAIN && d % 16 == 0 && (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0);
#else
    (void) type, (void) d;
    return false;
#endif
}

void multiply_turned_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, const float * turns, bool are_halves,
        const uint8_t * by, float * out, int os) {
#ifdef KVTOOL_X86
    const auto run = [&](auto source) {
        using S = decltype(source);
        if (are_halves) {
            multiply_turned_some<S, true>(rows, size, n, d, x, n_x, turns, by, out, os);
        } else {
            multiply_turned_some<S, false>(rows, size, n, d, x, n_x, turns, by, out, os);
        }
    };
    switch (type) {
        case GGML_TYPE_F16:  return run(of_halves());
        case GGML_TYPE_Q8_0: return run(of_q8_0());
        default:             return run(of_floats());
    }
#else
    (void) type, (void) rows, (void) size, (void) n, (void) d, (void) x, (void) n_x, (void) turns, (void) are_halves, (void) by, (void) out, (void) os;
#endif
}

void add_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t d, const float * w, int ws, int wx, int n_y, float * y, int64_t ys) {
#ifdef KVTOOL_X86
    if (vectors() != PLAIN && d % n_group == 0) {
        switch (type) {
            case GGML_TYPE_F32:  return add_some<of_floats>(rows, size, n, d, w, ws, wx, n_y, y, ys);
            case GGML_TYPE_F16:  return add_some<of_halves>(rows, size, n, d, w, ws, wx, n_y, y, ys);
            case GGML_TYPE_Q8_0: return add_some<of_q8_0>  (rows, size, n, d, w, ws, wx, n_y, y, ys);
            default:             break;
        }
    }
#endif
    add_converted(type, rows, size, n, d, w, ws, wx, n_y, y, ys);
}

} // namespace kvtool
