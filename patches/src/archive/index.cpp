#include "index.h"

#include "cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#ifdef KVTOOL_X86
#include <immintrin.h>
#endif

namespace kvtool {

float to_bytes(const float * x, int64_t n, int8_t * out) {
    float most = 0.0f;
    for (int64_t j = 0; j < n; ++j) {
        most = std::max(most, std::fabs(x[j]));
    }
    const float scale = most/127.0f;
    const float by    = most > 0.0f ? 1.0f/scale : 0.0f;
    for (int64_t j = 0; j < n; ++j) {
        // the offset makes all numbers positive, so that truncation rounds them to the nearest integer
        const float y = x[j]*by + 128.5f;
        out[j] = (int8_t) ((int32_t) (y > 0.0f && y < 256.0f ? y : 128.5f) - 128);
    }
    return scale;
}

void small_query::set(const float * query, int64_t n_embd) {
    fours.resize(n_embd/4);
    auto * x = (int8_t *) fours.data();
    scale = to_bytes(query, n_embd, x);
    sum   = std::accumulate(x, x + n_embd, 0);
}

// the byte that stores the number 0
static constexpr int zero = 128;

size_t side_bytes(int64_t n_embd) {
    return n_embd*n_side + n_side*sizeof(float);
}

void set_key(uint8_t * side, int i, const float * key, int64_t n_embd) {
    // the element with the largest absolute value becomes -128, because 8-bit numbers reach farther below 0 than above
    // it
    float most = 0.0f;
    for (int64_t j = 0; j < n_embd; ++j) {
        most = std::fabs(key[j]) > std::fabs(most) ? key[j] : most;
    }
    const float scale = -most/zero;

    for (int64_t j = 0; j < n_embd; j += 4) {
        uint8_t four[4];
        for (int e = 0; e < 4; ++e) {
            // Same result as lround, which would take longer than all other code here. NaN becomes 0
            const float x     = key[j + e]/scale;
            const float y     = std::fabs(x) < 1e6f ? x : 0.0f;
            const int   whole = (int) y;
            const int   near  = whole + (y - whole >= 0.5f) - (y - whole <= -0.5f);
            four[e] = std::min(2*zero - 1, std::max(0, near + zero));
        }
        memcpy(side + (j/4*n_side + i)*4, four, 4);
    }
    memcpy(side + n_embd*n_side + i*sizeof(float), &scale, sizeof(float));
}

void get_key(const uint8_t * side, int i, float * key, int64_t n_embd) {
    float scale;
    memcpy(&scale, side + n_embd*n_side + i*sizeof(float), sizeof(float));

    for (int64_t j = 0; j < n_embd; ++j) {
        key[j] = scale*(side[(j/4*n_side + i)*4 + j % 4] - zero);
    }
}

void copy_key(uint8_t * side, int i, const uint8_t * from, int j, int64_t n_embd) {
    for (int64_t group = 0; group < n_embd/4; ++group) {
        memcpy(side + (group*n_side + i)*4, from + (group*n_side + j)*4, 4);
    }
    memcpy(side + n_embd*n_side + i*sizeof(float), from + n_embd*n_side + j*sizeof(float), sizeof(float));
}

static void multiply_plain(const uint8_t * sides, int n, const small_query & query, int64_t n_embd, float * out) {
    const size_t size = side_bytes(n_embd);
    const auto * q    = (const int8_t *) query.fours.data();

    for (int s = 0; s < n; ++s, sides += size) {
        const auto * scale = (const float *) (sides + size) - n_side;

        int32_t sums[n_side] = {};
        for (int64_t group = 0; group < n_embd/4; ++group) {
            for (int i = 0; i < n_side; ++i) {
                for (int j = 0; j < 4; ++j) {
                    sums[i] += sides[(group*n_side + i)*4 + j]*q[group*4 + j];
                }
            }
        }
        for (int i = 0; i < n_side; ++i) {
            out[s*n_side + i] = query.scale*scale[i]*(sums[i] - zero*query.sum);
        }
    }
}

#ifdef KVTOOL_X86

KVTOOL_AVX512
static void multiply_vnni(const uint8_t * sides, int n, const small_query & query, int64_t n_embd, float * out) {
    const size_t size = side_bytes(n_embd);

    const __m512i off = _mm512_set1_epi32(zero*query.sum);
    const __m512  one = _mm512_set1_ps(query.scale);

    for (int s = 0; s < n; ++s, sides += size) {
        __m512i a = _mm512_setzero_si512();
        __m512i b = _mm512_setzero_si512();
        for (int64_t group = 0; group < n_embd/4; group += 2) {
            a = _mm512_dpbusd_epi32(a, _mm512_loadu_si512(sides + (group + 0)*64), _mm512_set1_epi32(query.fours[group]));
            b = _mm512_dpbusd_epi32(b, _mm512_loadu_si512(sides + (group + 1)*64), _mm512_set1_epi32(query.fours[group + 1]));
        }
        const __m512 sum   = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(a, b), off));
        const __m512 scale = _mm512_loadu_ps(sides + size - n_side*sizeof(float));
        _mm512_storeu_ps(out + s*n_side, _mm512_mul_ps(sum, _mm512_mul_ps(scale, one)));
    }
}

KVTOOL_AVX2
static void multiply_avx2(const uint8_t * sides, int n, const small_query & query, int64_t n_embd, float * out) {
    const size_t size = side_bytes(n_embd);

    const __m256i off = _mm256_set1_epi32(zero*query.sum);
    const __m256  one = _mm256_set1_ps(query.scale);

    for (int s = 0; s < n; ++s, sides += size) {
        for (int half = 0; half < 2; ++half) {
            __m256i sum = _mm256_setzero_si256();
            for (int64_t group = 0; group < n_embd/4; ++group) {
                const __m256i q = _mm256_set1_epi32(query.fours[group]);
                const __m256i x = _mm256_loadu_si256((const __m256i *) (sides + group*64 + half*32));
                // Even and odd bytes are multiplied separately, because a sum of two 8-bit products does not fit into
                // 16 bits
                const __m256i xe = _mm256_and_si256(x, _mm256_set1_epi16(0xFF));
                const __m256i xo = _mm256_srli_epi16(x, 8);
                const __m256i qe = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8);
                const __m256i qo = _mm256_srai_epi16(q, 8);
                sum = _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(xe, qe), _mm256_madd_epi16(xo, qo)));
            }
            const __m256 scale = _mm256_loadu_ps((const float *) (sides + size) - n_side + half*8);
            const __m256 f     = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, off));
            _mm256_storeu_ps(out + s*n_side + half*8, _mm256_mul_ps(f, _mm256_mul_ps(scale, one)));
        }
    }
}

#endif

void multiply(const uint8_t * sides, int n, const small_query & query, int64_t n_embd, float * out) {
#ifdef KVTOOL_X86
    switch (vectors()) {
        case AVX512: return multiply_vnni(sides, n, query, n_embd, out);
        case AVX2:   return multiply_avx2(sides, n, query, n_embd, out);
        case PLAIN:  break;
    }
#endif
    multiply_plain(sides, n, query, n_embd, out);
}

} // namespace kvtool
