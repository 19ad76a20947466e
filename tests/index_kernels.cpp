// The kernels of patches/src/index.cpp one by one, for tests: in a program the CPU decides which of them runs.

#include "../patches/src/index.cpp"

using namespace kvtool;

extern "C" {

int n_kernel() {
#ifdef KVTOOL_X86
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        return 3;
    }
    return __builtin_cpu_supports("avx2") ? 2 : 1;
#else
    return 1;
#endif
}

// keys [n*n_side][n_embd] and a query [n_embd] -> out[n*n_side]; kernel -1: the one that a program runs
void products(int kernel, const float * keys, int n, const float * query, int n_embd, int n_bit, float * out) {
    std::vector<uint8_t> sides(n*side_bytes(n_embd, n_bit));
    for (int i = 0; i < n*n_side; ++i) {
        set_key(sides.data() + i/n_side*side_bytes(n_embd, n_bit), i % n_side, keys + (size_t) i*n_embd, n_embd, n_bit);
    }

    small_query q;
    q.set(query, n_embd);

    const auto run = [&](auto plain, auto avx2, auto vnni) {
        (kernel == 0 ? plain : kernel == 1 ? avx2 : vnni)(sides.data(), n, q, n_embd, out);
    };

    if (kernel < 0) {
        multiply(sides.data(), n, q, n_embd, n_bit, out);
    } else if (kernel == 0) {
        (n_bit == 8 ? multiply_plain<8> : multiply_plain<4>)(sides.data(), n, q, n_embd, out);
    }
#ifdef KVTOOL_X86
    else if (n_bit == 8) {
        run(multiply_plain<8>, multiply_avx2<8>, multiply_vnni<8>);
    } else {
        run(multiply_plain<4>, multiply_avx2<4>, multiply_vnni<4>);
    }
#else
    (void) run;
#endif
}

}
