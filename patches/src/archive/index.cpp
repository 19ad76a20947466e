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
    float largest = 0.0f;
    for (int64_t j = 0; j < n; ++j) {
        largest = std::max(largest, std::fabs(x[j]));
    }
    const float scale   = largest/127.0f;
    const float inverse = largest > 0.0f ? 1.0f/scale : 0.0f;
    for (int64_t j = 0; j < n; ++j) {
        // the offset makes all numbers positive, so that truncation rounds them to the nearest integer
        const float y = x[j]*inverse + 128.5f;
        out[j] = (int8_t) ((int32_t) (y > 0.0f && y < 256.0f ? y : 128.5f) - 128);
    }
    return scale;
}

void byte_query::set(const float * query, int64_t n_embd) {
    quads.resize(n_embd/4);
    auto * x = (int8_t *) quads.data();
    scale = to_bytes(query, n_embd, x);
    sum   = std::accumulate(x, x + n_embd, 0);
}

// the byte that stores the number 0
static constexpr int zero = 128;

size_t pack_bytes(int64_t n_embd) {
    return n_embd*n_pack + n_pack*sizeof(float);
}

void set_key(uint8_t * pack, int i, const float * key, int64_t n_embd) {
    // the element with the largest absolute value becomes -128, because 8-bit numbers reach farther below 0 than above
    // it
    float largest = 0.0f;
    for (int64_t j = 0; j < n_embd; ++j) {
        largest = std::fabs(key[j]) > std::fabs(largest) ? key[j] : largest;
    }
    const float scale = -largest/zero;

    for (int64_t j = 0; j < n_embd; j += 4) {
        uint8_t quad[4];
        for (int e = 0; e < 4; ++e) {
            // Same result as lround, which would take longer than all other code here. NaN becomes 0
            const float x     = key[j + e]/scale;
            const float y     = std::fabs(x) < 1e6f ? x : 0.0f;
            const int   whole = (int) y;
            const int   near  = whole + (y - whole >= 0.5f) - (y - whole <= -0.5f);
            quad[e] = std::min(2*zero - 1, std::max(0, near + zero));
        }
        memcpy(pack + (j/4*n_pack + i)*4, quad, 4);
    }
    memcpy(pack + n_embd*n_pack + i*sizeof(float), &scale, sizeof(float));
}

void get_key(const uint8_t * pack, int i, float * key, int64_t n_embd) {
    float scale;
    memcpy(&scale, pack + n_embd*n_pack + i*sizeof(float), sizeof(float));

    for (int64_t j = 0; j < n_embd; ++j) {
        key[j] = scale*(pack[(j/4*n_pack + i)*4 + j % 4] - zero);
    }
}

void copy_key(uint8_t * dst, int i, const uint8_t * src, int j, int64_t n_embd) {
    for (int64_t group = 0; group < n_embd/4; ++group) {
        memcpy(dst + (group*n_pack + i)*4, src + (group*n_pack + j)*4, 4);
    }
    memcpy(dst + n_embd*n_pack + i*sizeof(float), src + n_embd*n_pack + j*sizeof(float), sizeof(float));
}

static void multiply_plain(const uint8_t * packs, int n, const byte_query & query, int64_t n_embd, float * out) {
    const size_t size = pack_bytes(n_embd);
    const auto * q    = (const int8_t *) query.quads.data();

    for (int s = 0; s < n; ++s, packs += size) {
        const auto * scale = (const float *) (packs + size) - n_pack;

        int32_t sums[n_pack] = {};
        for (int64_t group = 0; group < n_embd/4; ++group) {
            for (int i = 0; i < n_pack; ++i) {
                for (int j = 0; j < 4; ++j) {
                    sums[i] += packs[(group*n_pack + i)*4 + j]*q[group*4 + j];
                }
            }
        }
        for (int i = 0; i < n_pack; ++i) {
            out[s*n_pack + i] = query.scale*scale[i]*(sums[i] - zero*query.sum);
        }
    }
}

#ifdef KVTOOL_X86

KVTOOL_AVX512
static void multiply_vnni(const uint8_t * packs, int n, const byte_query & query, int64_t n_embd, float * out) {
    const size_t size = pack_bytes(n_embd);

    const __m512i offset      = _mm512_set1_epi32(zero*query.sum);
    const __m512  query_scale = _mm512_set1_ps(query.scale);

    for (int s = 0; s < n; ++s, packs += size) {
        __m512i a = _mm512_setzero_si512();
        __m512i b = _mm512_setzero_si512();
        for (int64_t group = 0; group < n_embd/4; group += 2) {
            a = _mm512_dpbusd_epi32(a, _mm512_loadu_si512(packs + (group + 0)*64), _mm512_set1_epi32(query.quads[group]));
            b = _mm512_dpbusd_epi32(b, _mm512_loadu_si512(packs + (group + 1)*64), _mm512_set1_epi32(query.quads[group + 1]));
        }
        const __m512 sum   = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(a, b), offset));
        const __m512 scale = _mm512_loadu_ps(packs + size - n_pack*sizeof(float));
        _mm512_storeu_ps(out + s*n_pack, _mm512_mul_ps(sum, _mm512_mul_ps(scale, query_scale)));
    }
}

KVTOOL_AVX2
static void multiply_avx2(const uint8_t * packs, int n, const byte_query & query, int64_t n_embd, float * out) {
    const size_t size = pack_bytes(n_embd);

    const __m256i offset      = _mm256_set1_epi32(zero*query.sum);
    const __m256  query_scale = _mm256_set1_ps(query.scale);

    for (int s = 0; s < n; ++s, packs += size) {
        for (int half = 0; half < 2; ++half) {
            __m256i sum = _mm256_setzero_si256();
            for (int64_t group = 0; group < n_embd/4; ++group) {
                const __m256i q = _mm256_set1_epi32(query.quads[group]);
                const __m256i x = _mm256_loadu_si256((const __m256i *) (packs + group*64 + half*32));
                // Even and odd bytes are multiplied separately, because a sum of two 8-bit products does not fit into
                // 16 bits
                const __m256i xe = _mm256_and_si256(x, _mm256_set1_epi16(0xFF));
                const __m256i xo = _mm256_srli_epi16(x, 8);
                const __m256i qe = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8);
                const __m256i qo = _mm256_srai_epi16(q, 8);
                sum = _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(xe, qe), _mm256_madd_epi16(xo, qo)));
            }
            const __m256 scale = _mm256_loadu_ps((const float *) (packs + size) - n_pack + half*8);
            const __m256 f     = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, offset));
            _mm256_storeu_ps(out + s*n_pack + half*8, _mm256_mul_ps(f, _mm256_mul_ps(scale, query_scale)));
        }
    }
}

#endif

void multiply(const uint8_t * packs, int n, const byte_query & query, int64_t n_embd, float * out) {
#ifdef KVTOOL_X86
    switch (vectors()) {
        case AVX512: return multiply_vnni(packs, n, query, n_embd, out);
        case AVX2:   return multiply_avx2(packs, n, query, n_embd, out);
        case PLAIN:  break;
    }
#endif
    multiply_plain(packs, n, query, n_embd, out);
}

} // namespace kvtool
