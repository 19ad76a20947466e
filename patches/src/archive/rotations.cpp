#include "rotations.h"

#include "cpu.h"
#include "hadamard.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#ifdef KVTOOL_X86
#include <immintrin.h>
#endif

namespace kvtool {

rotation::rotation(const layer & l, int n_map) : rope(l.rope), n_map(l.rope.is_mapped ? n_map : 0) {
    const auto read = [](const ggml_tensor * t, int64_t n) {
        std::vector<float> res(t ? n : 0);
        if (t) {
            ggml_backend_tensor_get(t, res.data(), 0, n*sizeof(float));
        }
        return res;
    };

    if (rope.is_rotary()) {
        factors = read(rope.factors, rope.n_dims/2);
        scale   = read(rope.scale, l.n_embd_k);
    }
    rope.factors = nullptr;
    rope.scale   = nullptr;
}

rotations::rotations(const rotation & r, int64_t n_embd, int max_delta) : n_map(r.n_map), n_embd(n_embd), scale(r.scale) {
    const auto & rope = r.rope;

    if (!rope.is_rotary()) {
        return;
    }

    is_neox = rope.mode != GGML_ROPE_TYPE_NORMAL;
    first   = rope.first;
    n_pair  = rope.n_dims/2;

    for (const float x : scale) {
        unscale.push_back(1.0f/x);
    }

    float range[2];
    ggml_rope_yarn_corr_dims(2*n_pair, rope.n_ctx_orig, rope.freq_base, rope.beta_fast, rope.beta_slow, range);

    for (int i = 0; i < n_pair; ++i) {
        const double freq = pow(rope.freq_base, -i/(double) n_pair)/(r.factors.empty() ? 1.0f : r.factors[i]);
        const double ramp = 1.0 - std::min(1.0, std::max(0.0, (i - range[0])/(double) std::max(0.001f, range[1] - range[0])));
        const double mix  = ramp*rope.ext_factor;

        omega.push_back(rope.has_pair(i) ? freq*(rope.freq_scale*(1.0 - mix) + mix) : 0.0);
    }

    const auto res = std::make_shared<trig_tables>();
    const auto fill = [&](std::vector<float> & table, int64_t first, int64_t step, int n) {
        for (int i = 0; i < n; ++i) {
            add_row(table, (first + i)*step);
        }
    };

    const int n_large = max_delta/n_small + 2;

    res->first_large = -n_large;
    fill(res->small, 0, 1, n_small);
    fill(res->large, res->first_large, n_small, 2*n_large + 1);
    for (int i = 0; i < n_small; ++i) {
        const float * c = res->small.data() + i*4*n_pair;
        for (int p = 0; p < n_pair; ++p) {
            res->pairs.push_back(c[element(p, true)]);
        }
        for (int p = 0; p < n_pair; ++p) {
            res->pairs.push_back(c[2*n_pair + element(p, true)]);
        }
    }
    tables = res;
}

// second: distance of a pair's elements; step: distance of two pairs
template <typename S>
static void multiply_pairs_of(const float * query, const float * key, int n_pair, int second, S step, float * out) {
    for (int p = 0; p < n_pair; ++p) {
        const int i = p*step;
        const int j = i + second;
        out[p]          = query[i]*key[i] + query[j]*key[j];
        out[p + n_pair] = query[j]*key[i] - query[i]*key[j];
    }
}

float rotations::multiply_pairs(const float * query, const float * key, float * out) const {
    if (is_neox) {
        multiply_pairs_of(query + first, key + first, n_pair, n_pair, std::integral_constant<int, 1>(), out);
    } else {
        multiply_pairs_of(query + first, key + first, n_pair, 1, std::integral_constant<int, 2>(), out);
    }
    const int end = first + n_rotated();
    return std::inner_product(query, query + first, key, std::inner_product(query + end, query + n_embd, key + end, 0.0f));
}

void rotations::share(const rotations & other) {
    if (tables && other.tables && omega == other.omega && is_neox == other.is_neox && tables->large.size() == other.tables->large.size()) {
        tables = other.tables;
    }
}

// index of a pair's first or second element among the rotated elements
int rotations::element(int pair, bool is_second) const {
    return is_neox ? pair + is_second*n_pair : 2*pair + is_second;
}

void rotations::add_row(std::vector<float> & table, int64_t delta) const {
    const size_t begin = table.size();
    table.resize(begin + 4*n_pair);

    float * c = table.data() + begin;
    float * s = c + 2*n_pair;
    for (int i = 0; i < n_pair; ++i) {
        c[element(i, false)] = c[element(i, true)] = cos(delta*omega[i]);
        s[element(i, true)]  = sin(delta*omega[i]);
        s[element(i, false)] = -s[element(i, true)];
    }
}

// Rotate the pairs in y by the sum of the rotations a and b. A rotation is an array of 2*n_pair cosines, followed by
// 2*n_pair sines: one cosine and one sine per element. A rotated element is the element times its cosine, plus the
// other element of the pair times the sine
static void rotate_pairs_plain(const float * a, const float * b, int n_pair, bool is_neox, float * y) {
    for (int i = 0; i < n_pair; ++i) {
        const int j = is_neox ? i : 2*i;
        const int k = is_neox ? i + n_pair : 2*i + 1;

        const float c = a[j]*b[j] - a[k + 2*n_pair]*b[k + 2*n_pair];
        const float s = a[k + 2*n_pair]*b[k] + a[k]*b[k + 2*n_pair];

        const float u = y[j];
        const float v = y[k];
        y[j] = u*c - v*s;
        y[k] = u*s + v*c;
    }
}

#ifdef KVTOOL_X86
KVTOOL_AVX2 static void rotate_pairs_avx2(const float * a, const float * b, int n_pair, bool is_neox, float * y) {
    // number of cosines; the sines follow them
    const int n = 2*n_pair;

    const auto cosine = [&](int i) KVTOOL_AVX2 {
        return _mm256_fmsub_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), _mm256_mul_ps(_mm256_loadu_ps(a + n + i), _mm256_loadu_ps(b + n + i)));
    };
    const auto sine = [&](int i) KVTOOL_AVX2 {
        return _mm256_fmadd_ps(_mm256_loadu_ps(a + n + i), _mm256_loadu_ps(b + i), _mm256_mul_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + n + i)));
    };
    if (!is_neox) {
        for (int i = 0; i < n; i += 8) {
            const __m256 x = _mm256_loadu_ps(y + i);
            _mm256_storeu_ps(y + i, _mm256_fmadd_ps(x, cosine(i), _mm256_mul_ps(_mm256_permute_ps(x, 0xB1), sine(i))));
        }
        return;
    }
    for (int i = 0; i < n_pair; i += 8) {
        const __m256 u = _mm256_loadu_ps(y + i);
        const __m256 v = _mm256_loadu_ps(y + i + n_pair);
        const __m256 c = cosine(i);
        const __m256 s = sine(i + n_pair);
        _mm256_storeu_ps(y + i,          _mm256_fmsub_ps(u, c, _mm256_mul_ps(v, s)));
        _mm256_storeu_ps(y + i + n_pair, _mm256_fmadd_ps(v, c, _mm256_mul_ps(u, s)));
    }
}
#endif

static void rotate_pairs(const float * a, const float * b, int n_pair, bool is_neox, float * y) {
#ifdef KVTOOL_X86
    if (vectors() != PLAIN && n_pair % 8 == 0) {
        return rotate_pairs_avx2(a, b, n_pair, is_neox, y);
    }
#endif
    rotate_pairs_plain(a, b, n_pair, is_neox, y);
}

static void multiply(float * x, const std::vector<float> & factors) {
    for (size_t i = 0; i < factors.size(); ++i) {
        x[i] *= factors[i];
    }
}

void rotations::undo_query(float * query) const {
    hadamard(query, n_embd, n_map);
    multiply(query, scale);
}

void rotations::undo_key(float * key) const {
    hadamard(key, n_embd, n_map);
    multiply(key, unscale);
}

void rotations::rotate(float * x, int64_t delta, const std::vector<float> & after, const std::vector<float> & before) const {
    if (n_pair == 0 || delta == 0) {
        return;
    }

    const int64_t i_small = delta & (n_small - 1);
    const int64_t row     = (delta - i_small)/n_small - tables->first_large;

    std::vector<float> computed;

    const float * a = tables->small.data() + i_small*4*n_pair;
    const float * b = tables->large.data() + row*4*n_pair;
    if (row < 0 || row*4*n_pair >= (int64_t) tables->large.size()) {
        add_row(computed, delta - i_small);
        b = computed.data();
    }

    hadamard(x, n_embd, n_map);
    multiply(x, before);

    rotate_pairs(a, b, n_pair, is_neox, x + first);
    multiply(x, after);
    hadamard(x, n_embd, n_map);
}

} // namespace kvtool
