// Vector instructions of this CPU. libllama is built for old CPUs; faster instructions are chosen at run time if the
// CPU has them.

#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define KVTOOL_X86
#define KVTOOL_INLINE __attribute__((always_inline))
#define KVTOOL_AVX2   __attribute__((target("avx2,fma,f16c")))
#define KVTOOL_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#else
#define KVTOOL_INLINE
#endif

namespace kvtool {

enum vector_set { PLAIN, AVX2, AVX512 };

inline vector_set vectors() {
#ifdef KVTOOL_X86
    static const vector_set res =
        !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c") ? PLAIN :
        !__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512bw")   || !__builtin_cpu_supports("avx512dq")  ? AVX2  : AVX512;
    return res;
#else
    return PLAIN;
#endif
}

#ifdef KVTOOL_X86
template <typename F> KVTOOL_AVX2   static auto with_avx2  (const F & f) { return f(); }
template <typename F> KVTOOL_AVX512 static auto with_avx512(const F & f) { return f(); }
#endif

// Return f(), compiled for the vector instructions of this CPU. f and the functions that it calls must be KVTOOL_INLINE
template <typename F>
static auto vectorized(const F & f) {
#ifdef KVTOOL_X86
    switch (vectors()) {
        case AVX512: return with_avx512(f);
        case AVX2:   return with_avx2(f);
        case PLAIN:  break;
    }
#endif
    return f();
}

} // namespace kvtool
