#include "convert.h"

#include "codes.h"
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

#ifdef KVTOOL_X86

KVTOOL_AVX2 static void floats_to_half(const float * x, ggml_fp16_t * y, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_storeu_si128((__m128i *) (y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    }
    ggml_fp32_to_fp16_row(x + i, y + i, n - i);
}

KVTOOL_AVX2 static void q8_0_to_half(const uint8_t * x, ggml_fp16_t * y, int64_t n) {
    for (int64_t g = 0; g < n/n_group; ++g) {
        const group f = of_q8_0::load(x, g);
        for (int j = 0; j < 4; ++j) {
            _mm_storeu_si128((__m128i *) (y + g*n_group + 8*j), _mm256_cvtps_ph(f.x[j], _MM_FROUND_TO_NEAREST_INT));
        }
    }
}

// S: of_q8_0 or of_codes, which reads the format of x
template <typename S>
KVTOOL_AVX2 static void groups_to_float(const uint8_t * x, float * y, int64_t n) {
    for (int64_t g = 0; g < n/n_group; ++g) {
        const group f = S::load(x, g);
        for (int j = 0; j < 4; ++j) {
            _mm256_storeu_ps(y + g*n_group + 8*j, f.x[j]);
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
        return groups_to_float<of_q8_0>((const uint8_t *) x, y, n);
    }
    if (vectors() != PLAIN && type == GGML_TYPE_Q5_0) {
        return groups_to_float<of_codes<q5_0>>((const uint8_t *) x, y, n);
    }
    if (vectors() != PLAIN && type == GGML_TYPE_Q4_1) {
        return groups_to_float<of_codes<q4_1>>((const uint8_t *) x, y, n);
    }
    if (vectors() != PLAIN && type == GGML_TYPE_Q4_0) {
        return groups_to_float<of_codes<q4_0>>((const uint8_t *) x, y, n);
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
