#include "row-products.h"

#include "quantized.h"
#include "convert.h"
#include "cpu.h"
#include "hadamard.h"
#include "index.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#ifdef KVTOOL_X86
#include <immintrin.h>
#endif

namespace kvtool {

// number of rows that are collected in a list before they are added together
static constexpr int n_list = 64;

static bool has_weight(const float * w, int64_t wx, int n) {
    for (int q = 0; q < n; ++q) {
        if (w[q*wx] != 0.0f) {
            return true;
        }
    }
    return false;
}

// multiply row by row; each row is converted to floats first
static void multiply_converted(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, float * out, int os, const uint8_t * indices) {
    std::vector<float> row(d);
    for (int i = 0; i < n; ++i) {
        to_float(type, rows + (indices ? indices[i] : i)*size, row.data(), d);
        for (int q = 0; q < n_x; ++q) {
            float sum = 0.0f;
            for (int64_t e = 0; e < d; ++e) {
                sum += row[e]*x[q*d + e];
            }
            out[q*os + i] = sum;
        }
    }
}

static void add_converted(
        ggml_type type, const weighted_row * rows, int n, int64_t d, int64_t wx, int n_y, float * y, int64_t ys) {
    std::vector<float> row(d);
    for (int i = 0; i < n; ++i) {
        to_float(type, rows[i].row, row.data(), d);
        for (int q = 0; q < n_y; ++q) {
            for (int64_t e = 0; e < d; ++e) {
                y[q*ys + e] += rows[i].w[q*wx]*row[e];
            }
        }
    }
}

void prefetch(const uint8_t * rows, size_t n_bytes) {
#ifdef __GNUC__
    for (const uint8_t * end = rows + n_bytes; rows < end; rows += 64) {
        __builtin_prefetch(rows);
    }
#else
    (void) rows, (void) n_bytes;
#endif
}

#ifdef KVTOOL_X86

struct of_floats {
    KVTOOL_AVX2 static inline KVTOOL_INLINE group load(const uint8_t * row, int64_t g) {
        const float * src = (const float *) row + g*n_group;
        return { _mm256_loadu_ps(src), _mm256_loadu_ps(src + 8), _mm256_loadu_ps(src + 16), _mm256_loadu_ps(src + 24) };
    }
};

struct of_halves {
    KVTOOL_AVX2 static inline KVTOOL_INLINE group load(const uint8_t * row, int64_t g) {
        const auto * src = (const __m128i *) row + g*4;
        return { _mm256_cvtph_ps(_mm_loadu_si128(src)),     _mm256_cvtph_ps(_mm_loadu_si128(src + 1)),
                 _mm256_cvtph_ps(_mm_loadu_si128(src + 2)), _mm256_cvtph_ps(_mm_loadu_si128(src + 3)) };
    }
};

// sum[q] += row.x * x[q*d ...], for one group of a row and N columns
template <int N>
KVTOOL_AVX2 static inline KVTOOL_INLINE void multiply_group(const group & row, const float * x, int64_t d, __m256 * sum) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
        for (int q = 0; q < N; ++q) {
            sum[q] = _mm256_fmadd_ps(row.x[j], _mm256_loadu_ps(x + q*d + 8*j), sum[q]);
        }
    }
}

KVTOOL_AVX2 static inline KVTOOL_INLINE __m128 sum_of(__m256 x) {
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

template <int N>
KVTOOL_AVX2 static inline KVTOOL_INLINE void put_sums(const __m256 * sum, float * out, int os) {
    const __m128 sums = _mm_hadd_ps(_mm_hadd_ps(sum_of(sum[0]), sum_of(sum[1])), _mm_hadd_ps(sum_of(sum[2]), sum_of(sum[3])));
    float lanes[4];
    _mm_storeu_ps(lanes, sums);
#pragma GCC unroll 4
    for (int q = 0; q < N; ++q) {
        out[q*os] = lanes[q];
    }
}

template <typename S, int N>
KVTOOL_AVX2 static void multiply_avx2(const uint8_t * rows, size_t size, int n, int64_t d, const float * x, float * out, int os, const uint8_t * indices) {
    for (int i = 0; i < n; ++i) {
        const uint8_t * row = rows + (indices ? indices[i] : i)*size;

        __m256 sum[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
        for (int64_t g = 0; g < d/n_group; ++g) {
            multiply_group<N>(S::load(row, g), x + g*n_group, d, sum);
        }
        put_sums<N>(sum, out + i, os);
    }
}

// products of codes with columns in 8 bits (AVX512 VNNI)
template <typename Q, int N>
KVTOOL_AVX512 static void multiply_codes(
        const uint8_t * rows, size_t size, int n, int64_t d, const int8_t * x, const float * scales, const float * sums, float * out, int os) {
    const int64_t n_scale = d/n_group;

    for (int i = 0; i < n; ++i, rows += size) {
        __m256 sum [4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
        float  bias[4] = {};
        for (int64_t g = 0; g < n_scale; ++g) {
            const uint8_t * src    = rows + g*Q::n_bytes;
            const __m256i   codes  = Q::codes(src);
            const __m128    params = Q::params(src);
            const float     scale  = _mm_cvtss_f32(params);
            const float     min    = _mm_cvtss_f32(_mm_movehdup_ps(params));
#pragma GCC unroll 4
            for (int q = 0; q < N; ++q) {
                const __m256i dot = _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, _mm256_loadu_si256((const __m256i *) (x + q*d + g*n_group)));
                sum [q]  = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(scale*scales[q*n_scale + g]), sum[q]);
                bias[q] += min*sums[q*n_scale + g];
            }
        }
        put_sums<N>(sum, out + i, os);
#pragma GCC unroll 4
        for (int q = 0; q < N; ++q) {
            out[i + q*os] += bias[q];
        }
    }
}

template <typename Q>
static void multiply_code_columns(
        const uint8_t * rows, size_t size, int n, int64_t d, const int8_t * x, const float * scales, const float * sums, int n_x, float * out, int os) {
    const int64_t n_scale = d/n_group;

    for (; n_x > 0; n_x -= 4, x += 4*d, scales += 4*n_scale, sums += 4*n_scale, out += 4*os) {
        switch (n_x) {
            case 1:  multiply_codes<Q, 1>(rows, size, n, d, x, scales, sums, out, os); break;
            case 2:  multiply_codes<Q, 2>(rows, size, n, d, x, scales, sums, out, os); break;
            case 3:  multiply_codes<Q, 3>(rows, size, n, d, x, scales, sums, out, os); break;
            default: multiply_codes<Q, 4>(rows, size, n, d, x, scales, sums, out, os); break;
        }
    }
}

// HALVES: true if the two elements of a pair are d/2 apart, false if they are neighbours
template <typename S, int N, bool HALVES>
KVTOOL_AVX2 static void multiply_rotated_avx2(
        const uint8_t * rows, size_t size, int n, int64_t d, const float * x, const float * rotations, const uint8_t * offsets, float * out, int os) {
    const int64_t n_half = d/n_group/2;

    for (int i = 0; i < n; ++i, rows += size) {
        const float * c = rotations - (int64_t) offsets[i]*2*d;
        const float * s = c + d;

        __m256 sum[4] = { _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps() };
        for (int64_t g = 0; HALVES && g < n_half; ++g) {
            const group u = S::load(rows, g);
            const group v = S::load(rows, g + n_half);
            group a, b;
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m256 cosine = _mm256_loadu_ps(c + g*n_group + 8*j);
                const __m256 sine   = _mm256_loadu_ps(s + g*n_group + 8*j + d/2);
                a.x[j] = _mm256_fmsub_ps(u.x[j], cosine, _mm256_mul_ps(v.x[j], sine));
                b.x[j] = _mm256_fmadd_ps(v.x[j], cosine, _mm256_mul_ps(u.x[j], sine));
            }
            multiply_group<N>(a, x + g*n_group, d, sum);
            multiply_group<N>(b, x + (g + n_half)*n_group, d, sum);
        }
        for (int64_t g = 0; !HALVES && g < d/n_group; ++g) {
            group u = S::load(rows, g);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const int64_t e = g*n_group + 8*j;
                u.x[j] = _mm256_fmadd_ps(u.x[j], _mm256_loadu_ps(c + e), _mm256_mul_ps(_mm256_permute_ps(u.x[j], 0xB1), _mm256_loadu_ps(s + e)));
            }
            multiply_group<N>(u, x + g*n_group, d, sum);
        }
        put_sums<N>(sum, out + i, os);
    }
}

// add one group of all rows before the next group, so that the group's sums stay in registers
template <typename S, int N>
KVTOOL_AVX2 static void add_avx2(
        const weighted_row * rows, int n, int64_t d, int first, int64_t wx, float * y, int64_t ys) {
    for (int64_t g = 0; g < d/n_group; ++g) {
        __m256 sum[N][4];
#pragma GCC unroll 4
        for (int q = 0; q < N; ++q) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                sum[q][j] = _mm256_loadu_ps(y + q*ys + g*n_group + 8*j);
            }
        }
        for (int i = 0; i < n; ++i) {
            const group x = S::load(rows[i].row, g);
#pragma GCC unroll 4
            for (int q = 0; q < N; ++q) {
                const __m256 w = _mm256_broadcast_ss(rows[i].w + (first + q)*wx);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    sum[q][j] = _mm256_fmadd_ps(w, x.x[j], sum[q][j]);
                }
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < N; ++q) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                _mm256_storeu_ps(y + q*ys + g*n_group + 8*j, sum[q][j]);
            }
        }
    }
}

template <typename S>
static void multiply_columns(const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, float * out, int os, const uint8_t * indices) {
    for (; n_x > 0; n_x -= 4, x += 4*d, out += 4*os) {
        switch (n_x) {
            case 1:  multiply_avx2<S, 1>(rows, size, n, d, x, out, os, indices); break;
            case 2:  multiply_avx2<S, 2>(rows, size, n, d, x, out, os, indices); break;
            case 3:  multiply_avx2<S, 3>(rows, size, n, d, x, out, os, indices); break;
            default: multiply_avx2<S, 4>(rows, size, n, d, x, out, os, indices); break;
        }
    }
}

template <typename S, bool HALVES>
static void multiply_rotated_columns(
        const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, const float * rotations, const uint8_t * offsets, float * out, int os) {
    for (; n_x > 0; n_x -= 4, x += 4*d, out += 4*os) {
        switch (n_x) {
            case 1:  multiply_rotated_avx2<S, 1, HALVES>(rows, size, n, d, x, rotations, offsets, out, os); break;
            case 2:  multiply_rotated_avx2<S, 2, HALVES>(rows, size, n, d, x, rotations, offsets, out, os); break;
            case 3:  multiply_rotated_avx2<S, 3, HALVES>(rows, size, n, d, x, rotations, offsets, out, os); break;
            default: multiply_rotated_avx2<S, 4, HALVES>(rows, size, n, d, x, rotations, offsets, out, os); break;
        }
    }
}

template <typename S>
static void add_to_sums(const weighted_row * rows, int n, int64_t d, int64_t wx, int n_y, float * y, int64_t ys) {
    for (int q = 0; q < n_y; q += 3) {
        switch (n_y - q) {
            case 1:  add_avx2<S, 1>(rows, n, d, q, wx, y + q*ys, ys); break;
            case 2:  add_avx2<S, 2>(rows, n, d, q, wx, y + q*ys, ys); break;
            default: add_avx2<S, 3>(rows, n, d, q, wx, y + q*ys, ys); break;
        }
    }
}

// call run(S()), where S reads rows of this type; returns false if no such S exists
template <typename F>
static bool with_source(ggml_type type, const F & run) {
    switch (type) {
        case GGML_TYPE_F32: run(of_floats()); return true;
        case GGML_TYPE_F16: run(of_halves()); return true;
        default:
            return with_codes(type, [&](auto codes) { run(source_of<decltype(codes)>()); });
    }
}

#endif

void multiply_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, float * out, int os, const uint8_t * indices) {
#ifdef KVTOOL_X86
    if (vectors() != PLAIN && d % n_group == 0) {
        const auto run = [&](auto source) { multiply_columns<decltype(source)>(rows, size, n, d, x, n_x, out, os, indices); };
        if (with_source(type, run)) {
            return;
        }
    }
#endif
    multiply_converted(type, rows, size, n, d, x, n_x, out, os, indices);
}

bool can_rotate(ggml_type type, int64_t d) {
#ifdef KVTOOL_X86
    return vectors() != PLAIN && d % (2*n_group) == 0 && with_source(type, [](auto) {});
#else
    (void) type, (void) d;
    return false;
#endif
}

#ifdef KVTOOL_X86
// multiply row by row; each row is first converted to floats and multiplied by the Hadamard matrix
template <bool HALVES>
static void multiply_mapped_rotated(
        ggml_type type, int n_map, const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, const float * rotations,
        const uint8_t * offsets, float * out, int os) {
    thread_local std::vector<float> row;
    row.resize(d);
    for (int i = 0; i < n; ++i) {
        to_float(type, rows + i*size, row.data(), d);
        hadamard(row.data(), d, n_map);
        multiply_rotated_columns<of_floats, HALVES>((const uint8_t *) row.data(), 0, 1, d, x, n_x, rotations, offsets + i, out + i, os);
    }
}
#endif

void multiply_rotated_rows(
        ggml_type type, int n_map, const uint8_t * rows, size_t size, int n, int64_t d, const float * x, int n_x, const float * rotations, bool are_halves,
        const uint8_t * offsets, float * out, int os) {
#ifdef KVTOOL_X86
    const auto run = [&](auto source) {
        using S = decltype(source);
        if (are_halves) {
            multiply_rotated_columns<S, true>(rows, size, n, d, x, n_x, rotations, offsets, out, os);
        } else {
            multiply_rotated_columns<S, false>(rows, size, n, d, x, n_x, rotations, offsets, out, os);
        }
    };
    switch (type) {
        case GGML_TYPE_F32:  return run(of_floats());
        case GGML_TYPE_F16:  return run(of_halves());
        case GGML_TYPE_Q8_0: return run(of_q8_0());
        default:             break;
    }
    if (are_halves) {
        multiply_mapped_rotated<true>(type, n_map, rows, size, n, d, x, n_x, rotations, offsets, out, os);
    } else {
        multiply_mapped_rotated<false>(type, n_map, rows, size, n, d, x, n_x, rotations, offsets, out, os);
    }
#else
    (void) type, (void) n_map, (void) rows, (void) size, (void) n, (void) d, (void) x, (void) n_x, (void) rotations, (void) are_halves,
    (void) offsets, (void) out, (void) os;
#endif
}

void byte_columns::set(const float * columns, int n_x, int64_t d) {
    x     .resize(n_x*d);
    scales.resize(n_x*d/n_group);
    sums  .resize(scales.size());
    for (size_t g = 0; g < scales.size(); ++g) {
        int8_t * bytes = x.data() + g*n_group;
        scales[g] = to_bytes(columns + g*n_group, n_group, bytes);
        sums  [g] = scales[g]*std::accumulate(bytes, bytes + n_group, 0);
    }
}

bool can_multiply_bytes(ggml_type type, int64_t d) {
#ifdef KVTOOL_X86
    return vectors() == AVX512 && d % n_group == 0 && with_codes(type, [](auto) {});
#else
    (void) type, (void) d;
    return false;
#endif
}

void multiply_byte_rows(ggml_type type, const uint8_t * rows, size_t size, int n, int64_t d, const byte_columns & x, int first_x, int n_x, float * out, int os) {
#ifdef KVTOOL_X86
    const auto * bytes  = x.x     .data() + first_x*d;
    const auto * scales = x.scales.data() + first_x*d/n_group;
    const auto * sums   = x.sums  .data() + first_x*d/n_group;
    const bool is_known = with_codes(type, [&](auto codes) {
        multiply_code_columns<decltype(codes)>(rows, size, n, d, bytes, scales, sums, n_x, out, os);
    });
    GGML_ASSERT(is_known);
#else
    (void) type, (void) rows, (void) size, (void) n, (void) d, (void) x, (void) first_x, (void) n_x, (void) out, (void) os;
#endif
}

void add_rows(ggml_type type, const weighted_row * rows, int n, int64_t d, int64_t wx, int n_y, float * y, int64_t ys) {
#ifdef KVTOOL_X86
    if (vectors() != PLAIN && d % n_group == 0) {
        const auto run = [&](auto source) { add_to_sums<decltype(source)>(rows, n, d, wx, n_y, y, ys); };
        if (with_source(type, run)) {
            return;
        }
    }
#endif
    add_converted(type, rows, n, d, wx, n_y, y, ys);
}

void add_rows(
        ggml_type type, const uint8_t * rows, size_t size, int n, int64_t d, const float * w, int64_t wx, int n_y, float * y, int64_t ys) {
    weighted_row list[n_list];
    int n_listed = 0;
    for (int i = 0; i < n; ++i) {
        if (has_weight(w + i, wx, n_y)) {
            list[n_listed++] = { rows + i*size, w + i };
        }
        if (n_listed == n_list || i == n - 1) {
            add_rows(type, list, n_listed, d, wx, n_y, y, ys);
            n_listed = 0;
        }
    }
}

} // namespace kvtool
