#include "choice.h"

#include "cpu.h"

namespace kvtool {

// total size of the items whose score is at least `least`
static inline KVTOOL_INLINE int64_t size_above(const int32_t * score, const int32_t * size, int n, int32_t least) {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) {
        sum += score[i] >= least ? size[i] : 0;
    }
    return sum;
}

static inline KVTOOL_INLINE int32_t cut_of(const int32_t * score, const int32_t * size, int n, int64_t wanted) {
    // the low 12 bits of a score are ignored, which saves 12 passes
    int32_t cut = 0;
    for (int bit = 30; bit >= 12; --bit) {
        const int32_t higher = cut | 1 << bit;
        if (size_above(score, size, n, higher) >= wanted) {
            cut = higher;
        }
    }
    return cut;
}

static inline KVTOOL_INLINE void choose_of(const int32_t * score, const int32_t * size, int n, int64_t wanted, uint8_t * chosen) {
    const int32_t cut  = cut_of(score, size, n, wanted);
    const int32_t next = cut + (1 << 12);

    int64_t n_left = wanted - size_above(score, size, n, next);
    for (int i = 0; i < n; ++i) {
        chosen[i] = (score[i] >= next) & (size[i] > 0);
    }
    for (int i = n - 1; i >= 0 && n_left > 0; --i) {
        if (score[i] >= cut && score[i] < next && size[i] > 0) {
            chosen[i] = 1;
            n_left -= size[i];
        }
    }
}

#ifdef KVTOOL_X86
KVTOOL_AVX2 static void choose_avx2(const int32_t * score, const int32_t * size, int n, int64_t wanted, uint8_t * chosen) {
    choose_of(score, size, n, wanted, chosen);
}
#endif

void choose(const float * score, const int32_t * size, int n, int64_t wanted, uint8_t * chosen) {
    // non-negative floats have the same order as their bits read as integers
    const auto * bits = (const int32_t *) score;
#ifdef KVTOOL_X86
    if (vectors() != PLAIN) {
        return choose_avx2(bits, size, n, wanted, chosen);
    }
#endif
    choose_of(bits, size, n, wanted, chosen);
}

} // namespace kvtool
