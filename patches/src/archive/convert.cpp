#include "convert.h"

#include "cpu.h"

#include <cstring>
#include <vector>

#ifdef KVTOOL_X86
#include <immintrin.h>
#endif

namespace kvtool {


void from_float(ggml_type type, const float * x, void * y, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(y, x, n*sizeof(float));
    } else {
        ggml_get_type_traits(type)->from_float_ref(x, y, n);
    }
}

// q8_0: a scale in half precision, then n_group signed bytes
static constexpr int q8_0_size = sizeof(ggml_fp16_t) + n_group;

#ifdef KVTOOL_X86

KVTOOL_AVX2 static void floats_to_half(const float * x, ggml_fp16_t * y, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_storeu_si128((__m128i *) (y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    }
    ggml_fp32_to_fp16_row(x + i, y + i, n - i);
}

KVTOOL_AVX2 static void q8_0_to_half(const uint8_t * x, ggml_fp16_t * y, int64_t n) {
    for (int64_t i = 0; i < n; i += n_group, x += q8_0_size) {
        ggml_fp16_t d;
        memcpy(&d, x, sizeof(d));
        const __m256 scale = _mm256_set1_ps(_cvtsh_ss(d));
        for (int j = 0; j < n_group; j += 8) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *) (x + sizeof(d) + j));
            const __m256  f     = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
            _mm_storeu_si128((__m128i *) (y + i + j), _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
        }
    }
}

KVTOOL_AVX2 static void q8_0_to_float(const uint8_t * x, float * y, int64_t n) {
    for (int64_t i = 0; i < n; i += n_group, x += q8_0_size) {
        ggml_fp16_t d;
        memcpy(&d, x, sizeof(d));
        const __m256 scale = _mm256_set1_ps(_cvtsh_ss(d));
        for (int j = 0; j < n_group; j += 8) {
            const __m128i bytes = _mm_loadl_epi64((const __m128i *) (x + sizeof(d) + j));
            _mm256_storeu_ps(y + i + j, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))));
        }
    }
}

// q4_1: a scale and a minimum in half precision, then codes of 4 bits. The low bits of the bytes hold the first half of
// the group's codes
KVTOOL_AVX2 static void q4_1_to_float(const uint8_t * x, float * y, int64_t n) {
    for (int64_t i = 0; i < n; i += n_group, x += 2*sizeof(ggml_fp16_t) + n_group/2) {
        ggml_fp16_t d[2];
        memcpy(d, x, sizeof(d));
        const __m256  scale = _mm256_set1_ps(_cvtsh_ss(d[0]));
        const __m256  least = _mm256_set1_ps(_cvtsh_ss(d[1]));
        const __m128i both  = _mm_loadu_si128((const __m128i *) (x + sizeof(d)));
        const __m128i codes[2] = { _mm_and_si128(both, _mm_set1_epi8(15)), _mm_and_si128(_mm_srli_epi16(both, 4), _mm_set1_epi8(15)) };
        for (int j = 0; j < 4; ++j) {
            const __m128i some = j % 2 == 0 ? codes[j/2] : _mm_srli_si128(codes[j/2], 8);
            _mm256_storeu_ps(y + i + 8*j, _mm256_add_ps(_mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(some))), least));
        }
    }
}

// q5_0: a scale in half precision, the fifth bits of all codes, then the other bits as in q4_1
KVTOOL_AVX2 static void q5_0_to_float(const uint8_t * x, float * y, int64_t n) {
    const __m256i shift = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int64_t i = 0; i < n; i += n_group, x += sizeof(ggml_fp16_t) + sizeof(uint32_t) + n_group/2) {
        ggml_fp16_t d;
        uint32_t    bits;
        memcpy(&d, x, sizeof(d));
        memcpy(&bits, x + sizeof(d), sizeof(bits));
        const __m256  scale = _mm256_set1_ps(_cvtsh_ss(d));
        const __m128i both  = _mm_loadu_si128((const __m128i *) (x + sizeof(d) + sizeof(bits)));
        const __m128i low[2] = { _mm_and_si128(both, _mm_set1_epi8(15)), _mm_and_si128(_mm_srli_epi16(both, 4), _mm_set1_epi8(15)) };
        for (int j = 0; j < 4; ++j) {
            const __m128i some  = j % 2 == 0 ? low[j/2] : _mm_srli_si128(low[j/2], 8);
            const __m256i fifth = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int) (bits >> 8*j)), shift), _mm256_set1_epi32(1));
            const __m256i code  = _mm256_or_si256(_mm256_cvtepu8_epi32(some), _mm256_slli_epi32(fifth, 4));
            _mm256_storeu_ps(y + i + 8*j, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(16)))));
        }
    }
}

KVTOOL_AVX2 static void half_to_floats(const ggml_fp16_t * x, float * y, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (x + i))));
    }
    ggml_fp16_to_fp32_row(x + i, y + i, n - i);
}

#endif

void to_float(ggml_type type, const void * x, float * y, int64_t n) {
#ifdef KVTOOL_X86
    if (vectors() != PLAIN && type == GGML_TYPE_Q8_0) {
        return q8_0_to_float((const uint8_t *) x, y, n);
    }
    if (vectors() != PLAIN && type == GGML_TYPE_Q5_0) {
        return q5_0_to_float((const uint8_t *) x, y, n);
    }
    if (vectors() != PLAIN && type == GGML_TYPE_Q4_1) {
        return q4_1_to_float((const uint8_t *) x, y, n);
    }
    if (vectors() != PLAIN && type == GGML_TYPE_F16) {
        return half_to_floats((const ggml_fp16_t *) x, y, n);
    }
#endif
    if (type == GGML_TYPE_F32) {
        memcpy(y, x, n*sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(x, y, n);
    }
}

void to_half(const float * x, ggml_fp16_t * y, int64_t n) {
#ifdef KVTOOL_X86
    if (vectors() != PLAIN) {
        return floats_to_half(x, y, n);
    }
#endif
    ggml_fp32_to_fp16_row(x, y, n);
}

void to_half(ggml_type type, const void * x, ggml_fp16_t * y, int64_t n) {
    if (type == GGML_TYPE_F16) {
        memcpy(y, x, n*sizeof(ggml_fp16_t));
        return;
    }
#ifdef KVTOOL_X86
    if (type == GGML_TYPE_Q8_0 && vectors() != PLAIN) {
        return q8_0_to_half((const uint8_t *) x, y, n);
    }
#endif
    std::vector<float> f(n);
    to_float(type, x, f.data(), n);
    to_half(f.data(), y, n);
}

void transpose(const uint8_t * from, uint8_t * to, int64_t n_row, int64_t n_column, size_t one) {
    for (int64_t a = 0; a < n_row; ++a) {
        for (int64_t b = 0; b < n_column; ++b) {
            memcpy(to + (b*n_row + a)*one, from + (a*n_column + b)*one, one);
        }
    }
}

} // namespace kvtool
