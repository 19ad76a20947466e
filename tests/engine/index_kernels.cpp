// Calls each kernel of patches/src/archive/index.cpp and softmax.cpp by number. 0: the plain one; -1: the one that
// kvtool chooses for this CPU.

#include "../../patches/src/archive/index.cpp"
#include "../../patches/src/archive/softmax.cpp"

using namespace kvtool;

extern "C" {

int n_kernel() {
    return vectors() + 1;
}

// e[n] = e^(scale*x - most); most: maximum of scale*x; sum: sum of e. x and e need room for n rounded up to a
// multiple of 16.
void powers(int kernel, float * x, int n, float scale, float * e, float * most, float * sum) {
    softmax_part res;
    if (kernel < 0) {
        res = exponentials(x, n, scale, e);
    } else if (kernel == 0) {
        res = exponentials_of(x, n, scale, e);
    }
#ifdef KVTOOL_X86
    else {
        res = (kernel == 1 ? exponentials_avx2 : exponentials_avx512)(x, n, scale, e);
    }
#endif
    *most = res.most;
    *sum  = res.sum;
}

// out[n*n_side] = products of keys [n*n_side][n_embd] and a query [n_embd], both rounded to 8 bits.
void products(int kernel, const float * keys, int n, const float * query, int n_embd, float * out) {
    std::vector<uint8_t> sides(n*side_bytes(n_embd));
    for (int i = 0; i < n*n_side; ++i) {
        set_key(sides.data() + i/n_side*side_bytes(n_embd), i % n_side, keys + (size_t) i*n_embd, n_embd);
    }

    small_query q;
    q.set(query, n_embd);

    if (kernel < 0) {
        multiply(sides.data(), n, q, n_embd, out);
    } else if (kernel == 0) {
        multiply_plain(sides.data(), n, q, n_embd, out);
    }
#ifdef KVTOOL_X86
    else {
        (kernel == 1 ? multiply_avx2 : multiply_vnni)(sides.data(), n, q, n_embd, out);
    }
#endif
}

}
