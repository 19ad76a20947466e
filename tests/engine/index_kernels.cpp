// Calls the kernels of patches/src/archive/index.cpp and softmax.cpp by their numbers. Kernel 0 is the plain kernel.
// Kernel -1 is the kernel that kvtool chooses for this CPU.

#include "../../patches/src/archive/index.cpp"
#include "../../patches/src/archive/softmax.cpp"

using namespace kvtool;

extern "C" {

int n_kernel() {
    return vectors() + 1;
}

// Computes e[i] = exp(scale*x[i] - most) for i < n, with most = max(scale*x[i]) and sum = sum(e[i]). `x` and `e` need
// room for n elements, rounded up to a multiple of 16.
void powers(int kernel, float * x, int n, float scale, float * e, float * most, float * sum) {
    softmax_part res;
    if (kernel < 0) {
        res = exponentials(x, n, scale, e);
    } else if (kernel == 0) {
        res = exponentials_of(x, n, scale, e);
    }
#ifdef KVTOOL_X86
    else {
        const auto f = [&]() KVTOOL_INLINE { return exponentials_of(x, n, scale, e); };
        res = kernel == 1 ? with_avx2(f) : with_avx512(f);
    }
#endif
    *most = res.max;
    *sum  = res.sum;
}

// Multiplies keys [n*n_pack][n_embd] by a query [n_embd]. The products are out[n*n_pack]. The kernels read n blocks of
// n_pack keys. Keys and query are rounded to 8 bits.
void products(int kernel, const float * keys, int n, const float * query, int n_embd, float * out) {
    std::vector<uint8_t> packs(n*pack_bytes(n_embd));
    for (int i = 0; i < n*n_pack; ++i) {
        set_key(packs.data() + i/n_pack*pack_bytes(n_embd), i % n_pack, keys + (size_t) i*n_embd, n_embd);
    }

    byte_query q;
    q.set(query, n_embd);

    if (kernel < 0) {
        multiply(packs.data(), n, q, n_embd, out);
    } else if (kernel == 0) {
        multiply_plain(packs.data(), n, q, n_embd, out);
    }
#ifdef KVTOOL_X86
    else {
        (kernel == 1 ? multiply_avx2 : multiply_vnni)(packs.data(), n, q, n_embd, out);
    }
#endif
}

}
