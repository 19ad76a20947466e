#include "choice.h"

#include "cpu.h"

#include <cstring>

namespace kvtool {

// non-negative floats have the same order as their bits read as integers
static inline KVTOOL_INLINE int32_t bits_of(float score) {
    int32_t bits;
    memcpy(&bits, &score, sizeof(bits));
    return bits;
}

// total size of the items whose score is at least `threshold`
static inline KVTOOL_INLINE int64_t size_from(const float * score, const int32_t * size, int n, int32_t threshold) {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) {
        sum += bits_of(score[i]) >= threshold ? size[i] : 0;
    }
    return sum;
}

static inline KVTOOL_INLINE int32_t threshold_of(const float * score, const int32_t * size, int n, int64_t n_token) {
    // the low 12 bits of a score are ignored, which saves 12 passes
    int32_t threshold = 0;
    for (int bit = 30; bit >= 12; --bit) {
        const int32_t higher = threshold | 1 << bit;
        if (size_from(score, size, n, higher) >= n_token) {
            threshold = higher;
        }
    }
    return threshold;
}

static inline KVTOOL_INLINE void choose_of(const float * score, const int32_t * size, int n, int64_t n_token, uint8_t * chosen) {
    const int32_t threshold = threshold_of(score, size, n, n_token);
    const int32_t next      = threshold + (1 << 12);

    int64_t n_remaining = n_token - size_from(score, size, n, next);
    for (int i = 0; i < n; ++i) {
        chosen[i] = (bits_of(score[i]) >= next) & (size[i] > 0);
    }
    for (int i = n - 1; i >= 0 && n_remaining > 0; --i) {
        if (bits_of(score[i]) >= threshold && bits_of(score[i]) < next && size[i] > 0) {
            chosen[i] = 1;
            n_remaining -= size[i];
        }
    }
}

#ifdef KVTOOL_X86
KVTOOL_AVX2 static void choose_avx2(const float * score, const int32_t * size, int n, int64_t n_token, uint8_t * chosen) {
    choose_of(score, size, n, n_token, chosen);
}
#endif

void choose(const float * score, const int32_t * size, int n, int64_t n_token, uint8_t * chosen) {
#ifdef KVTOOL_X86
    if (vectors() != PLAIN) {
        return choose_avx2(score, size, n, n_token, chosen);
    }
#endif
    choose_of(score, size, n, n_token, chosen);
}

} // namespace kvtool
