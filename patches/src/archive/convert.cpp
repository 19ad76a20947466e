#include "convert.h"

#include "quantized.h"
#include "cpu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <vector>

#ifdef KVTOOL_X86
#include <immintrin.h>
#endif

namespace kvtool {

// the numbers that the codes of iq4_nl stand for
static constexpr int iq4_nl_numbers[] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

// code of the number that is closest to each of the numbers -128 .. 127
static const std::array<uint8_t, 256> & iq4_nl_codes() {
    static const auto codes = [] {
        std::array<uint8_t, 256> res;
        for (int i = 0; i < 256; ++i) {
            const auto distance = [&](int number) { return std::abs(number - (i - 128)); };
            const auto closer   = [&](int a, int b) { return distance(a) < distance(b); };
            res[i] = std::min_element(std::begin(iq4_nl_numbers), std::end(iq4_nl_numbers), closer) - iq4_nl_numbers;
        }
        return res;
    }();
    return codes;
}

// Store n numbers as iq4_nl. Four scales are tried for each group; for normally distributed numbers, the squared error is
// then 8 % less than ggml's. The scale does not minimize the error for the chosen codes, because numbers would shrink: the
// product of the stored and the given numbers equals the product of the given numbers with themselves.
static void to_iq4_nl(const float * x, uint8_t * y, int64_t n) {
    // multiples of the scale that the number with the largest absolute value becomes
    static constexpr float multiples[] = { -127, 113, -140, 100 };

    const auto & codes = iq4_nl_codes();
    for (int64_t g = 0; g < n/n_group; ++g, x += n_group, y += sizeof(ggml_fp16_t) + n_group/2) {
        const float largest = *std::max_element(x, x + n_group, [](float a, float b) { return std::abs(a) < std::abs(b); });

        float   best = 0.0f, scale = 0.0f;
        uint8_t chosen[n_group] = {};
        for (int t = 0; t < 4 && largest != 0.0f; ++t) {
            const float inverse = multiples[t]/largest;
            uint8_t code[n_group];
            float xx = 0.0f, xy = 0.0f, yy = 0.0f;
            for (int i = 0; i < n_group; ++i) {
                code[i] = codes[std::clamp((int) std::lrint(x[i]*inverse), -128, 127) + 128];
                const float number = iq4_nl_numbers[code[i]];
                xx += x[i]*x[i];
                xy += number*x[i];
                yy += number*number;
            }
            // with the best scale for these codes, the squared error is xx - xy*xy/yy
            if (xy*xy > best*yy) {
                best  = xy*xy/yy;
                scale = xx/xy;
                std::copy_n(code, n_group, chosen);
            }
        }
        const ggml_fp16_t half = ggml_fp32_to_fp16(scale);
        memcpy(y, &half, sizeof(half));
        for (int i = 0; i < n_group/2; ++i) {
            y[sizeof(half) + i] = chosen[i] | chosen[i + n_group/2] << 4;
        }
    }
}

void from_float(ggml_type type, const float * x, void * y, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(y, x, n*sizeof(float));
    } else if (type == GGML_TYPE_IQ4_NL) {
        to_iq4_nl(x, (uint8_t *) y, n);
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
    const auto convert = [&](auto codes) { groups_to_float<source_of<decltype(codes)>>((const uint8_t *) x, y, n); };
    if (vectors() != PLAIN && with_codes(type, convert)) {
        return;
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

void transpose(const uint8_t * src, uint8_t * dst, int64_t n_row, int64_t n_column, size_t elem_size) {
    for (int64_t r = 0; r < n_row; ++r) {
        for (int64_t c = 0; c < n_column; ++c) {
            memcpy(dst + (c*n_row + r)*elem_size, src + (r*n_column + c)*elem_size, elem_size);
        }
    }
}

} // namespace kvtool
