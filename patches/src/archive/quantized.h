// Reads rows of q8_0, q5_0, q4_1, q4_0 and iq4_nl as floats, one group at a time. The floats are equal to ggml's, bit for bit.

#pragma once

#include "cpu.h"

#include "ggml.h"

#include <cstdint>
#include <cstring>

#ifdef KVTOOL_X86
#include <immintrin.h>
#endif

namespace kvtool {

// numbers that share a scale, in all of these formats
constexpr int n_group = 32;

#ifdef KVTOOL_X86

// the numbers of a group in four vectors
struct group {
    __m256 x[4];
};

// q8_0: a scale in half precision, then signed bytes
struct of_q8_0 {
    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256 eight(const uint8_t * src, __m256 scale) {
        return _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) src))));
    }
    KVTOOL_AVX2 static inline KVTOOL_INLINE group load(const uint8_t * row, int64_t g) {
        const uint8_t * src = row + g*(int64_t) (sizeof(ggml_fp16_t) + n_group);
        uint16_t d;
        memcpy(&d, src, sizeof(d));
        const __m256 scale = _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(d)));
        src += sizeof(d);
        return { eight(src, scale), eight(src + 8, scale), eight(src + 16, scale), eight(src + 24, scale) };
    }
};

// Formats whose elements are scale*code + min. In all of them except q8_0, the last n_group/2 bytes of a group have the low four bits of all
// codes. Byte i has the bits of code i in its low half, and the bits of code i + n_group/2 in its high half

KVTOOL_AVX2 static inline KVTOOL_INLINE __m256i low_bits(const uint8_t * src) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *) src);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), _mm256_set1_epi8(15));
}

// Return { scale, min } for a format that stores only the scale: min = -scale*zero. zero: the code of the number 0
KVTOOL_AVX2 static inline KVTOOL_INLINE __m128 scale_of(const uint8_t * src, float zero) {
    uint16_t d;
    memcpy(&d, src, sizeof(d));
    const __m128 scale = _mm_cvtph_ps(_mm_cvtsi32_si128(d));
    return _mm_unpacklo_ps(scale, _mm_mul_ss(scale, _mm_set_ss(-zero)));
}

// a scale in half precision, codes of 8 bits
struct q8_0 {
    static constexpr int64_t n_bytes = sizeof(ggml_fp16_t) + n_group;
    static constexpr char    zero    = (char) 128; // the code of 0

    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256i codes(const uint8_t * src) {
        // the stored numbers are signed, but codes are unsigned: flipping the sign bit adds 128
        return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *) (src + sizeof(ggml_fp16_t))), _mm256_set1_epi8((char) 0x80));
    }
    KVTOOL_AVX2 static inline KVTOOL_INLINE __m128 params(const uint8_t * src) { return scale_of(src, 128.0f); }
};

// a scale in half precision, codes of 4 bits
struct q4_0 {
    static constexpr int64_t n_bytes = sizeof(ggml_fp16_t) + n_group/2;
    static constexpr char    zero    = 8; // the code of 0

    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256i codes (const uint8_t * src) { return low_bits(src + sizeof(ggml_fp16_t)); }
    KVTOOL_AVX2 static inline KVTOOL_INLINE __m128  params(const uint8_t * src) { return scale_of(src, zero); }
};

// a scale and a minimum in half precision, codes of 4 bits
struct q4_1 {
    static constexpr int64_t n_bytes = 2*sizeof(ggml_fp16_t) + n_group/2;
    static constexpr char    zero    = 0; // no code is fixed for the number 0: each group stores a minimum

    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256i codes(const uint8_t * src) { return low_bits(src + 2*sizeof(ggml_fp16_t)); }

    // return { scale, min }; the group stores both
    KVTOOL_AVX2 static inline KVTOOL_INLINE __m128 params(const uint8_t * src) {
        uint32_t halves;
        memcpy(&halves, src, sizeof(halves));
        return _mm_cvtph_ps(_mm_cvtsi32_si128(halves));
    }
};

// a scale in half precision, the fifth bits of all codes, then the lower four bits of all codes
struct q5_0 {
    static constexpr int64_t n_bytes = sizeof(ggml_fp16_t) + sizeof(uint32_t) + n_group/2;
    static constexpr char    zero    = 16; // the code of 0

    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256i codes(const uint8_t * src) {
        uint32_t bits;
        memcpy(&bits, src + sizeof(ggml_fp16_t), sizeof(bits));
        // byte i gets the byte of `bits` that holds the fifth bit of code i
        const __m256i index = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i bit   = _mm256_set1_epi64x((int64_t) 0x8040201008040201);
        const __m256i fifth = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int) bits), index), bit);
        const __m256i high  = _mm256_and_si256(_mm256_cmpeq_epi8(fifth, bit), _mm256_set1_epi8(16));
        return _mm256_or_si256(low_bits(src + sizeof(ggml_fp16_t) + sizeof(bits)), high);
    }

    KVTOOL_AVX2 static inline KVTOOL_INLINE __m128 params(const uint8_t * src) { return scale_of(src, zero); }
};

// A scale in half precision, codes of 4 bits. A code stands for one of 16 numbers, which are closer to each other near 0
struct iq4_nl {
    static constexpr int64_t n_bytes = sizeof(ggml_fp16_t) + n_group/2;
    static constexpr char    zero    = (char) 128; // added to the numbers, so that they are unsigned

    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256i codes(const uint8_t * src) {
        const __m128i numbers = _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, (char) 129, (char) 141, (char) 153, (char) 166, (char) 181, (char) 197, (char) 217, (char) 241);
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), low_bits(src + sizeof(ggml_fp16_t)));
    }
    KVTOOL_AVX2 static inline KVTOOL_INLINE __m128 params(const uint8_t * src) { return scale_of(src, 128.0f); }
};

template <typename Q>
struct of_codes {
    // codes: the stored codes minus Q::zero. If Q::zero is not 0, an element is therefore scale*codes. Computing it
    // from the stored code, as scale*code + min, would lose the sign of a 0: in ggml, a 0 has the sign of the scale
    KVTOOL_AVX2 static inline KVTOOL_INLINE __m256 eight(__m128i codes, __m256 scale, __m256 min) {
        const __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
        return Q::zero != 0 ? _mm256_mul_ps(scale, x) : _mm256_fmadd_ps(scale, x, min);
    }
    KVTOOL_AVX2 static inline KVTOOL_INLINE group load(const uint8_t * row, int64_t g) {
        const uint8_t * src  = row + g*Q::n_bytes;
        const __m128  params = Q::params(src);
        const __m256  scale  = _mm256_broadcastss_ps(params);
        const __m256  min    = _mm256_broadcastss_ps(_mm_movehdup_ps(params));
        const __m256i codes  = _mm256_sub_epi8(Q::codes(src), _mm256_set1_epi8(Q::zero));
        const __m128i a      = _mm256_castsi256_si128(codes);
        const __m128i b      = _mm256_extracti128_si256(codes, 1);
        return { eight(a, scale, min), eight(_mm_srli_si128(a, 8), scale, min), eight(b, scale, min), eight(_mm_srli_si128(b, 8), scale, min) };
    }
};

// the type that reads groups as floats
template <typename Q> struct source_of : of_codes<Q> {};
template <> struct source_of<q8_0> : of_q8_0 {}; // needs no codes, which saves operations

// Call run(Q()), where Q describes the groups of this type. Return false for a type without such a Q. This is the only
// list of quantized types that kvtool's own kernels read
template <typename F>
static bool with_codes(ggml_type type, const F & run) {
    switch (type) {
        case GGML_TYPE_Q8_0:   run(q8_0());   return true;
        case GGML_TYPE_Q5_0:   run(q5_0());   return true;
        case GGML_TYPE_Q4_1:   run(q4_1());   return true;
        case GGML_TYPE_Q4_0:   run(q4_0());   return true;
        case GGML_TYPE_IQ4_NL: run(iq4_nl()); return true;
        default:                              return false;
    }
}

#endif

} // namespace kvtool
