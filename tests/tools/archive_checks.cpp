// Checks of patches/src/archive, without llama.cpp. Each check compares the archive's code with a definition that is
// written here. `archive_checks NAME` runs one check. If the check fails, the program prints a line and exits with
// status 1.

#include "archive/convert.h"
#include "archive/kmeans.h"
#include "archive/synthetic-cells.h"
#include "archive/products.h"
#include "archive/recaller.h"
#include "archive/residents.h"
#include "archive/staging.h"
#include "archive/parallel.h"
#include "archive/workers.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <bitset>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>

using namespace kvtool;

static std::map<std::string, void (*)()> & checks() {
    static std::map<std::string, void (*)()> res;
    return res;
}

static bool add_check(const char * name, void (*check)()) {
    return checks().emplace(name, check).second;
}

#define CHECK(name)                                           \
    static void name();                                       \
    static const bool added_##name = add_check(#name, name);  \
    static void name()

[[noreturn]] static void fail(int line, const std::string & why) {
    printf("archive_checks.cpp:%d: %s\n", line, why.c_str());
    exit(1);
}

#define EXPECT(condition) \
    do { if (!(condition)) fail(__LINE__, "not so: " #condition); } while (0)

#define EXPECT_NEAR(a, b, limit)                                                                                   \
    do {                                                                                                           \
        const double a_ = a, b_ = b;                                                                               \
        if (!(std::fabs(a_ - b_) <= (limit))) fail(__LINE__, #a " is " + std::to_string(a_) + ", " #b " is " + std::to_string(b_)); \
    } while (0)

template <typename F>
static bool throws(F && f) {
    try {
        f();
    } catch (const std::exception &) {
        return true;
    }
    return false;
}

static std::vector<float> normal(size_t n, unsigned seed, float size = 1.0f) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution(0.0f, size);
    std::vector<float> res(n);
    for (auto & x : res) {
        x = distribution(random);
    }
    return res;
}

static double dot(const float * a, const float * b, int64_t n) {
    return std::inner_product(a, a + n, b, 0.0);
}

//
// kernels
//

static const ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL };

CHECK(conversions_equal_those_of_ggml) {
    constexpr int n = 160;
    const auto x = normal(n, 1);
    for (const ggml_type type : types) {
        std::vector<uint8_t> bytes(ggml_row_size(type, n)), ggml_bytes(bytes.size());
        from_float(type, x.data(), bytes.data(), n);
        if (type == GGML_TYPE_F32) {
            memcpy(ggml_bytes.data(), x.data(), ggml_bytes.size());
        } else {
            ggml_quantize_chunk(type, x.data(), ggml_bytes.data(), 0, 1, n, nullptr);
        }

        std::vector<float> y(n), z(n);
        to_float(type, bytes.data(), y.data(), n);
        if (type == GGML_TYPE_F32) {
            z = x;
        } else {
            ggml_get_type_traits(type)->to_float(bytes.data(), z.data(), n);
        }
        // compare bits, so that zeros must also have the same sign
        EXPECT(memcmp(y.data(), z.data(), n*sizeof(float)) == 0);
        // ggml may round ties in the other direction, so the bytes of quantized types are not compared
        const float step = hadamard_size(type, n) > 0 ? 0.5f : 0.05f;
        for (int i = 0; i < n; ++i) {
            EXPECT_NEAR(y[i], x[i], step);
        }
        if (type == GGML_TYPE_F16 || type == GGML_TYPE_F32) {
            EXPECT(bytes == ggml_bytes);
        }

        std::vector<ggml_fp16_t> halves(n);
        to_half(type, bytes.data(), halves.data(), n);
        for (int i = 0; i < n; ++i) {
            EXPECT(halves[i] == ggml_fp32_to_fp16(y[i]));
        }
    }
}

CHECK(transpose_swaps_rows_and_columns) {
    constexpr int n_row = 5, n_column = 7;
    std::vector<uint16_t> src(n_row*n_column), dst(src.size());
    std::iota(src.begin(), src.end(), 0);
    transpose((const uint8_t *) src.data(), (uint8_t *) dst.data(), n_row, n_column, sizeof(uint16_t));
    for (int r = 0; r < n_row; ++r) {
        for (int c = 0; c < n_column; ++c) {
            EXPECT(dst[c*n_row + r] == src[r*n_column + c]);
        }
    }
}

CHECK(a_matrix_product_adds_to_its_result) {
    constexpr int m = 5, k = 19;
    for (const int n : { 8, 24, 40 }) {
        const auto a = normal(m*k, 1), b = normal(k*n, 2), before = normal(m*n, 3);
        // read `a` first as a matrix [m][k], then as a transposed matrix [k][m]
        for (const auto & [as, ak] : { std::pair(k, 1), std::pair(1, m) }) {
            auto c = before;
            multiply_add(c.data(), n, a.data(), as, ak, b.data(), n, m, k, n);
            for (int i = 0; i < m; ++i) {
                for (int j = 0; j < n; ++j) {
                    double sum = before[i*n + j];
                    for (int e = 0; e < k; ++e) {
                        sum += (double) a[i*as + e*ak]*b[e*n + j];
                    }
                    EXPECT_NEAR(c[i*n + j], sum, 1e-4);
                }
            }
        }
    }
}

CHECK(products_and_sums_of_stored_rows_equal_those_of_their_numbers) {
    constexpr int n = 70, d = 64, gap = 12; // more rows than add_rows reads at once
    for (const ggml_type type : types) {
        for (const int n_x : { 1, 3, 8 }) {
            const size_t size = ggml_row_size(type, d) + gap;
            const auto numbers = normal(n*d, 1), x = normal(n_x*d, 2);
            auto weights = normal(n_x*n, 3);
            for (int q = 0; q < n_x; ++q) {
                weights[q*n + 4] = 0.0f; // a row with weight 0 is not read
            }

            std::vector<uint8_t> rows(n*size);
            std::vector<float>   read(n*d);
            for (int i = 0; i < n; ++i) {
                from_float(type, numbers.data() + i*d, rows.data() + i*size, d);
                to_float  (type, rows.data() + i*size, read.data() + i*d, d);
            }
            std::vector<float> out(n_x*n), sums(n_x*d, 1.0f);
            multiply_rows(type, rows.data(), size, n, d, x.data(), n_x, out.data(), n);
            add_rows(type, rows.data(), size, n, d, weights.data(), n, n_x, sums.data(), d);
            for (int q = 0; q < n_x; ++q) {
                for (int i = 0; i < n; ++i) {
                    EXPECT_NEAR(out[q*n + i], dot(x.data() + q*d, read.data() + i*d, d), 1e-3);
                }
                for (int e = 0; e < d; ++e) {
                    double sum = 1.0;
                    for (int i = 0; i < n; ++i) {
                        sum += (double) weights[q*n + i]*read[i*d + e];
                    }
                    EXPECT_NEAR(sums[q*d + e], sum, 1e-3);
                }
            }
            if (can_multiply_bytes(type, d)) {
                byte_columns bytes;
                bytes.set(x.data(), n_x, d);
                multiply_byte_rows(type, rows.data(), size, n, d, bytes, 0, n_x, out.data(), n);
                for (int i = 0; i < n_x*n; ++i) {
                    EXPECT_NEAR(out[i], dot(x.data() + i/n*d, read.data() + i % n*d, d), 0.3);
                }
            }
        }
    }
}

CHECK(hadamard_equals_the_definition_and_is_its_own_inverse) {
    constexpr int n = 384;
    for (const int n_size : { 2, 8, 16, 32, 64, 128 }) {
        const auto x = normal(n, n_size);
        auto y = x;
        hadamard(y.data(), n, n_size);
        for (int i = 0; i < n; ++i) {
            double sum = 0.0;
            for (int j = 0; j < n_size; ++j) {
                const int bits = i % n_size & j;
                sum += (std::bitset<8>(bits).count() % 2 ? -1.0 : 1.0)*x[i/n_size*n_size + j];
            }
            EXPECT_NEAR(y[i], sum/std::sqrt(n_size), 1e-5);
        }
        hadamard(y.data(), n, n_size);
        for (int i = 0; i < n; ++i) {
            EXPECT_NEAR(y[i], x[i], 1e-5);
        }
    }
    EXPECT(hadamard_size(GGML_TYPE_Q4_1, 128) == 64 && hadamard_size(GGML_TYPE_Q4_1, 96) == 32);
    EXPECT(hadamard_size(GGML_TYPE_Q8_0, 128) == 0 && hadamard_size(GGML_TYPE_F16, 128) == 0);
}

CHECK(exponentials_are_relative_to_the_maximum) {
    constexpr int n = 37;
    auto x = normal(48, 1, 5.0f);
    const auto logits = x;
    std::vector<float> e(48);
    const auto part = exponentials(x.data(), n, 0.5f, e.data());

    const float max = *std::max_element(logits.begin(), logits.begin() + n);
    EXPECT_NEAR(part.max, 0.5f*max, 1e-6);
    double sum = 0.0;
    for (int i = 0; i < n; ++i) {
        EXPECT_NEAR(e[i], std::exp(0.5*logits[i] - 0.5*max), 1e-5);
        sum += std::exp(0.5*logits[i] - 0.5*max);
    }
    EXPECT_NEAR(part.sum, sum, 1e-4);

    double above = 0.0;
    const auto unfiltered = e;
    std::fill(e.begin() + n, e.end(), 1.0f); // keep_above must ignore the elements after the first n
    const float sum_above = keep_above(e.data(), n, 0.1f);
    for (int i = 0; i < n; ++i) {
        EXPECT(e[i] == (unfiltered[i] > 0.1f ? unfiltered[i] : 0.0f));
        above += e[i];
    }
    EXPECT_NEAR(sum_above, above, 1e-5);
}

CHECK(sums_of_columns_follow_a_rising_maximum) {
    constexpr int n = 9, n_column = 16;
    std::vector<float> max(n_column, -INFINITY), factor(n_column), sum(n_column);
    std::vector<double> sums(n_column, 0.0), expected(n_column, 0.0);
    std::vector<float> logits;
    for (unsigned batch = 0; batch < 3; ++batch) {
        auto x = normal(n*n_column, batch, 3.0f);
        logits.insert(logits.end(), x.begin(), x.end());
        exponential_columns(x.data(), n, n_column, 2.0f, max.data(), factor.data(), sum.data());
        for (int q = 0; q < n_column; ++q) {
            sums[q] = sums[q]*factor[q] + sum[q];
        }
    }
    for (int q = 0; q < n_column; ++q) {
        double top = -INFINITY;
        for (size_t i = q; i < logits.size(); i += n_column) {
            top = std::max(top, 2.0*logits[i]);
        }
        for (size_t i = q; i < logits.size(); i += n_column) {
            expected[q] += std::exp(2.0*logits[i] - top);
        }
        EXPECT_NEAR(max[q], top, 1e-5);
        EXPECT_NEAR(sums[q], expected[q], 1e-4);
    }
}

//
// rotations
//

static constexpr int n_embd = 64;
static constexpr int n_ctx  = 4096;

static rotation rope_of(int mode, int n_dims = n_embd, int first = 0) {
    rotation res;
    res.rope.is_known   = true;
    res.rope.n_dims     = n_dims;
    res.rope.first      = first;
    res.rope.mode       = mode;
    res.rope.n_ctx_orig = n_ctx;
    res.rope.freq_base  = 10000.0f;
    res.rope.freq_scale = 1.0f;
    res.rope.beta_fast  = 32.0f;
    res.rope.beta_slow  = 1.0f;
    return res;
}

CHECK(numbers_in_iq4_nl_are_near_and_do_not_shrink) {
    constexpr int n = 32*500;
    const auto x = normal(n, 1);
    std::vector<uint8_t> bytes(ggml_row_size(GGML_TYPE_IQ4_NL, n));
    std::vector<float> y(n);

    const auto error = [&] {
        ggml_get_type_traits(GGML_TYPE_IQ4_NL)->to_float(bytes.data(), y.data(), n);
        double sum = 0.0;
        for (int i = 0; i < n; ++i) {
            sum += std::pow(y[i] - x[i], 2);
        }
        return sum/n;
    };
    ggml_get_type_traits(GGML_TYPE_IQ4_NL)->from_float_ref(x.data(), bytes.data(), n);
    const double ggml_error = error();
    from_float(GGML_TYPE_IQ4_NL, x.data(), bytes.data(), n);
    EXPECT(error() < 0.95*ggml_error);
    for (int g = 0; g < n; g += 32) {
        EXPECT_NEAR(dot(x.data() + g, y.data() + g, 32)/dot(x.data() + g, x.data() + g, 32), 1.0, 1e-3);
    }
    const std::vector<float> zeros(32);
    from_float(GGML_TYPE_IQ4_NL, zeros.data(), bytes.data(), 32);
    to_float(GGML_TYPE_IQ4_NL, bytes.data(), y.data(), 32);
    EXPECT(std::all_of(y.begin(), y.begin() + 32, [](float v) { return v == 0.0f; }));
}

// The definition of RoPE: pair i is rotated by the angle delta/10000^(i/n_pair).
static std::vector<float> rotated(const std::vector<float> & x, int64_t delta, int mode, int n_dims, int first) {
    auto res = x;
    const int n_pair = n_dims/2;
    for (int i = 0; i < n_pair; ++i) {
        const int a = first + (mode == GGML_ROPE_TYPE_NEOX ? i : 2*i);
        const int b = first + (mode == GGML_ROPE_TYPE_NEOX ? i + n_pair : 2*i + 1);
        const double angle = delta*std::pow(10000.0, -i/(double) n_pair);
        res[a] = x[a]*std::cos(angle) - x[b]*std::sin(angle);
        res[b] = x[a]*std::sin(angle) + x[b]*std::cos(angle);
    }
    return res;
}

CHECK(keys_are_rotated_as_rope_defines) {
    const auto key = normal(n_embd, 1);
    for (const int mode : { GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX }) {
        // Rotate all elements, all except the first 24, or only the first 24. In the last case there are 12 pairs,
        // which is no multiple of the vector length 8.
        for (const auto & [n_dims, first] : { std::pair(n_embd, 0), std::pair(40, 24), std::pair(24, 0) }) {
            const rotations rope(rope_of(mode, n_dims, first), n_embd, n_ctx);
            // the last delta is too large for the tables of angles
            for (const int64_t delta : { 0, 1, -1, 255, 256, -300, 4000, -4000, 100000 }) {
                auto rotated_key = key;
                rope.rotate(rotated_key.data(), delta);
                const auto expected = rotated(key, delta, mode, n_dims, first);
                for (int e = 0; e < n_embd; ++e) {
                    EXPECT_NEAR(rotated_key[e], expected[e], 2e-3);
                }
            }
        }
    }
}

CHECK(rotating_the_query_equals_rotating_the_key_backwards) {
    const auto key = normal(n_embd, 1), query = normal(n_embd, 2);
    for (const int n_map : { 0, 32 }) {
        auto params = rope_of(GGML_ROPE_TYPE_NEOX);
        params.n_map = n_map;
        for (int e = 0; e < n_embd; ++e) {
            params.scale.push_back(1.0f + 0.01f*e);
        }
        const rotations rope(params, n_embd, n_ctx);
        auto k = key, q = query;
        rope.rotate(k.data(), -77);
        rope.rotate_query(q.data(), 77);
        EXPECT_NEAR(dot(q.data(), key.data(), n_embd), dot(query.data(), k.data(), n_embd), 1e-3);

        rope.rotate(k.data(), 77);
        for (int e = 0; e < n_embd; ++e) {
            EXPECT_NEAR(k[e], key[e], 1e-4);
        }
    }
}

CHECK(pair_products_equal_products_with_rotated_keys) {
    const auto key = normal(n_embd, 1), query = normal(n_embd, 2);
    for (const int mode : { GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX }) {
        for (const auto & [n_dims, first, n_map] : { std::tuple(n_embd, 0, 0), std::tuple(40, 24, 32), std::tuple(24, 8, 0), std::tuple(0, 0, 0) }) {
            auto params = rope_of(mode, n_dims, first);
            params.n_map = n_map;
            for (int e = 0; e < n_embd && n_dims > 0; ++e) {
                params.scale.push_back(1.0f + 0.01f*e);
            }
            const rotations rope(params, n_embd, n_ctx);
            auto k = key, q = query;
            rope.undo_key(k.data());
            rope.undo_query(q.data());
            std::vector<float> pairs(rope.n_rotated());
            const float unrotated = rope.multiply_pairs(q.data(), k.data(), pairs.data());

            for (const int delta : { 0, 1, 255 }) {
                auto expected = key;
                rope.rotate(expected.data(), delta);
                EXPECT_NEAR(dot(pairs.data(), rope.pair_rotations() + delta*rope.n_rotated(), rope.n_rotated()) + unrotated, dot(query.data(), expected.data(), n_embd), 1e-3);
            }
        }
    }
}

CHECK(products_with_rotation_equal_products_with_rotated_keys) {
    constexpr int n = 20, n_x = 3;
    for (const int mode : { GGML_ROPE_TYPE_NORMAL, GGML_ROPE_TYPE_NEOX }) {
        const rotations rope(rope_of(mode), n_embd, n_ctx);
        for (const auto & [type, n_map] : { std::pair(GGML_TYPE_F16, 0), std::pair(GGML_TYPE_Q8_0, 0), std::pair(GGML_TYPE_Q4_1, 0), std::pair(GGML_TYPE_Q4_1, 32), std::pair(GGML_TYPE_Q5_0, 64), std::pair(GGML_TYPE_Q4_0, 64), std::pair(GGML_TYPE_IQ4_NL, 64) }) {
            if (!can_rotate(type, n_embd)) {
                continue;
            }
            const size_t size = ggml_row_size(type, n_embd);
            const auto numbers = normal(n*n_embd, 1), x = normal(n_x*n_embd, 2);
            std::vector<uint8_t> rows(n*size), offsets(n);
            for (int i = 0; i < n; ++i) {
                from_float(type, numbers.data() + i*n_embd, rows.data() + i*size, n_embd);
                offsets[i] = 13*i % 256;
            }
            std::vector<float> out(n_x*n), key(n_embd);
            multiply_rotated_rows(type, n_map, rows.data(), size, n, n_embd, x.data(), n_x, rope.small_rotations() + 255*2*n_embd, rope.are_halves(), offsets.data(), out.data(), n);
            for (int i = 0; i < n; ++i) {
                to_float(type, rows.data() + i*size, key.data(), n_embd);
                if (n_map > 0) {
                    hadamard(key.data(), n_embd, n_map);
                }
                rope.rotate(key.data(), 255 - offsets[i]);
                for (int q = 0; q < n_x; ++q) {
                    EXPECT_NEAR(out[q*n + i], dot(x.data() + q*n_embd, key.data(), n_embd), 2e-3);
                }
            }
        }
    }
}

//
// clusters
//

// Points in n_cluster groups that are far from each other. Point i is in group i % n_cluster.
static std::vector<float> groups(int n, int d, unsigned seed, float noise) {
    const auto centres = normal(n_cluster*d, seed, 10.0f);
    auto res = normal(n*d, seed + 1, noise);
    for (int i = 0; i < n; ++i) {
        for (int e = 0; e < d; ++e) {
            res[i*d + e] += centres[i % n_cluster*d + e];
        }
    }
    return res;
}

CHECK(kmeans_finds_groups_that_lie_apart) {
    constexpr int n = 256, d = 16;
    const auto x        = groups(n, d, 1, 0.1f);
    const auto assigned = kmeans(x.data(), n, d, n_cluster);
    for (int i = n_cluster; i < n; ++i) {
        EXPECT(assigned[i] == assigned[i % n_cluster]);
    }
    EXPECT(std::set<int>(assigned.begin(), assigned.end()).size() == n_cluster);
}

CHECK(kmeans_gives_an_unusual_point_a_separate_cluster) {
    constexpr int n = 200, d = 16;
    auto x = normal(n*d, 1);
    for (int e = 0; e < d; ++e) {
        x[77*d + e] = 40.0f;
    }
    const auto assigned = kmeans(x.data(), n, d, n_cluster);
    EXPECT(std::count(assigned.begin(), assigned.end(), assigned[77]) == 1);
}

CHECK(kmeans_assigns_most_points_to_the_nearest_mean) {
    constexpr int n = 256, d = 8;
    const auto x        = normal(n*d, 1);
    const auto assigned = kmeans(x.data(), n, d, n_cluster);
    std::vector<double> mean(n_cluster*d, 0.0);
    std::vector<int> size(n_cluster, 0);
    for (int i = 0; i < n; ++i) {
        ++size[assigned[i]];
        for (int e = 0; e < d; ++e) {
            mean[assigned[i]*d + e] += x[i*d + e];
        }
    }
    int n_nearest = 0;
    for (int i = 0; i < n; ++i) {
        std::vector<double> far(n_cluster, 0.0);
        for (int c = 0; c < n_cluster; ++c) {
            for (int e = 0; e < d; ++e) {
                far[c] += std::pow(x[i*d + e] - mean[c*d + e]/std::max(size[c], 1), 2.0);
            }
            far[c] = size[c] > 0 ? far[c] : INFINITY;
        }
        n_nearest += std::min_element(far.begin(), far.end()) - far.begin() == assigned[i];
    }
    // kmeans moves the means after the last assignment of points. Therefore a few points may be nearer to another mean.
    EXPECT(n_nearest > n*8/10);
}

CHECK(halving_gives_equal_halves_and_keeps_near_points_together) {
    constexpr int n = 64, d = 8, n_set = 8;
    auto x = normal(n*d, 1, 0.1f);
    for (int i = 0; i < n; ++i) {
        x[i*d + 3] += i % 2 ? 9.0f : -9.0f;
    }
    const std::vector<float> weight(n, 1.0f);
    const auto order = kvtool::halved(x.data(), weight.data(), n, d, n_set);
    EXPECT(std::set<int>(order.begin(), order.end()).size() == n);
    for (int i = 0; i < n; ++i) {
        // Points with odd indices are far from points with even indices. Each half of the order must have only odd
        // indices or only even indices.
        EXPECT(order[i] % 2 == order[i < n/2 ? 0 : n/2] % 2);
    }
    EXPECT(order[0] % 2 != order[n/2] % 2);
}

// Clusters of n_block blocks of random keys. A block's keys are rotated to their positions minus the block's base. The
// base of block b is 0 if one_base, otherwise b. The scale of the keys differs between blocks and between elements.
static row_clusters clustered_row(int n_block, bool one_base, std::vector<std::vector<float>> & keys) {
    row_clusters res(n_embd, n_embd);
    for (int b = 0; b < n_block; ++b) {
        keys.push_back(normal(256*n_embd, b));
        for (int i = 0; i < 256*n_embd; ++i) {
            keys[b][i] *= (1.0f + 0.02f*b)*(0.5f + 0.5f*((i + 9*b) % n_embd)/n_embd);
        }
        res.set(b, 0, { false, one_base ? 0 : b }, keys[b].data(), keys[b].data(), nullptr);
    }
    return res;
}

// The row stores means, sizes and spreads in lists, with one entry for each cluster. block_of and index_in_block give the
// cluster of an entry. Expect that the stored numbers are right. A spread is the sum of the variances of all elements.
static void expect_means(const row_clusters & row, const std::vector<std::vector<float>> & keys, double tolerance_v = 0.05) {
    std::vector<float> key(n_embd), value(n_embd);
    std::set<std::pair<int64_t, int>> clusters;
    std::map<int64_t, std::vector<double>> squares; // [block], [element]: squared distances from the cluster's mean
    for (size_t i_cluster = 0; i_cluster < (size_t) (row.end() - row.begin())*n_cluster; ++i_cluster) {
        const int64_t block  = row.block_of(i_cluster);
        const int     c      = row.index_in_block(i_cluster);
        const auto  & sealed = row[block];
        EXPECT(clusters.insert({ block, c }).second);
        EXPECT(row.clusters.sizes[i_cluster] == sealed.start[c + 1] - sealed.start[c]);

        std::vector<double> sum(n_embd, 0.0);
        for (int slot = sealed.start[c]; slot < sealed.start[c + 1]; ++slot) {
            for (int e = 0; e < n_embd; ++e) {
                sum[e] += keys[block][sealed.order[slot]*n_embd + e];
            }
        }
        get_key(row.clusters.packs.data() + i_cluster/n_pack*row.pack_size(), i_cluster % n_pack, key.data(), n_embd);
        row.clusters.get_value(i_cluster, value.data());
        for (int e = 0; e < n_embd; ++e) {
            const double mean = sum[e]/std::max<int>(row.clusters.sizes[i_cluster], 1);
            EXPECT_NEAR(key  [e], mean, 0.05);
            EXPECT_NEAR(value[e], mean, tolerance_v);
        }
        double spread = 0.0;
        squares[block].resize(n_embd);
        for (int slot = sealed.start[c]; slot < sealed.start[c + 1]; ++slot) {
            for (int e = 0; e < n_embd; ++e) {
                const double x = keys[block][sealed.order[slot]*n_embd + e] - sum[e]/row.clusters.sizes[i_cluster];
                squares[block][e] += x*x;
                spread += x*x/row.clusters.sizes[i_cluster];
            }
        }
        EXPECT_NEAR(row.clusters.spreads[i_cluster], spread, 1e-3);
    }
    // `variance` must weight an element by its share of a block's squared distances, averaged over all blocks
    for (int e = 0; e < n_embd; ++e) {
        double mean = 0.0;
        for (const auto & [block, sums] : squares) {
            mean += sums[e]/std::accumulate(sums.begin(), sums.end(), 0.0)/squares.size();
        }
        std::vector<float> query(n_embd, 0.0f);
        query[e] = 2.0f;
        EXPECT_NEAR(row.variance(query.data()), 4.0*mean, 4e-5);
    }
}

CHECK(clusters_have_each_token_once_and_the_right_means) {
    std::vector<std::vector<float>> keys;
    const auto row = clustered_row(3, true, keys);
    for (int b = 0; b < 3; ++b) {
        std::set<int> tokens(row[b].order.begin(), row[b].order.end());
        EXPECT(tokens.size() == 256);
        EXPECT(row[b].start[0] == 0 && row[b].start[n_cluster] == 256);
        EXPECT(!row.is_grouped(b));
    }
    expect_means(row, keys);

    // this row stores mean values with 4 bits
    row_clusters small(n_embd, n_embd, 64);
    for (int b = 0; b < 3; ++b) {
        small.set(b, 0, { false, 0 }, keys[b].data(), keys[b].data(), nullptr);
    }
    expect_means(small, keys, 0.3);
    EXPECT(small.clusters.values.size() < row.clusters.values.size());
}

CHECK(clusters_of_saved_memberships_equal_the_computed_clusters) {
    const auto keys = normal(200*n_embd, 1);
    row_clusters a(n_embd, n_embd), b(n_embd, n_embd);
    a.set(5, 56, { true, 0 }, keys.data(), keys.data(), nullptr); // the archive begins at token 56 of block 5
    const membership members = a[5].members();
    b.set(5, 56, { true, 0 }, keys.data(), keys.data(), &members);
    EXPECT(a[5].order == b[5].order && a[5].start == b[5].start);
    EXPECT(a.clusters.packs == b.clusters.packs && a.clusters.values == b.clusters.values);
    EXPECT(a.clusters.spreads == b.clusters.spreads && a.variance(keys.data()) == b.variance(keys.data()));
    EXPECT(a[5].start[0] == 56);
}

static double squares_around_mean(const std::vector<double> & x) {
    const double mean = std::accumulate(x.begin(), x.end(), 0.0)/std::max<size_t>(x.size(), 1);
    return std::accumulate(x.begin(), x.end(), 0.0, [&](double sum, double element) { return sum + (element - mean)*(element - mean); });
}

CHECK(sets_are_means_of_their_clusters) {
    std::vector<std::vector<float>> keys;
    const auto row = clustered_row(n_grouped + 1, true, keys);
    EXPECT(row.is_grouped(0) && row.is_grouped(n_grouped - 1) && !row.is_grouped(n_grouped));
    expect_means(row, keys);

    std::vector<float> key(n_embd), cluster_key(n_embd);
    for (int s = 0; s < n_set; ++s) {
        std::vector<double> sum(n_embd, 0.0);
        int n = 0;
        for (size_t i_cluster = row.first_in_set(s); i_cluster < row.first_in_set(s) + n_pack; ++i_cluster) {
            get_key(row.clusters.packs.data() + i_cluster/n_pack*row.pack_size(), i_cluster % n_pack, cluster_key.data(), n_embd);
            for (int e = 0; e < n_embd; ++e) {
                sum[e] += (double) cluster_key[e]*row.clusters.sizes[i_cluster];
            }
            n += row.clusters.sizes[i_cluster];
        }
        EXPECT(row.sets.sizes[s] == n);
        get_key(row.sets.packs.data(), s, key.data(), n_embd);
        for (int e = 0; e < n_embd; ++e) {
            EXPECT_NEAR(key[e], sum[e]/n, 0.05);
        }
        // the spread of a set is computed from all keys of its clusters
        double spread = 0.0;
        for (int e = 0; e < n_embd; ++e) {
            std::vector<double> x;
            for (size_t i_cluster = row.first_in_set(s); i_cluster < row.first_in_set(s) + n_pack; ++i_cluster) {
                const auto & sealed = row[row.block_of(i_cluster)];
                const int    c      = row.index_in_block(i_cluster);
                for (int slot = sealed.start[c]; slot < sealed.start[c + 1]; ++slot) {
                    x.push_back(keys[row.block_of(i_cluster)][sealed.order[slot]*n_embd + e]);
                }
            }
            spread += squares_around_mean(x)/n;
        }
        EXPECT_NEAR(row.sets.spreads[s], spread, 0.01*spread);
    }
}

CHECK(blocks_with_different_bases_form_no_group) {
    std::vector<std::vector<float>> keys;
    const auto row = clustered_row(n_grouped, false, keys);
    EXPECT(!row.is_grouped(0));
    expect_means(row, keys);
}

CHECK(cutting_and_forgetting_clusters_keeps_the_others_right) {
    std::vector<std::vector<float>> keys;
    auto row = clustered_row(n_grouped + 2, true, keys);
    row.cut(n_grouped - 1);
    EXPECT(row.begin() == 0 && row.end() == n_grouped - 1 && !row.is_grouped(0));
    expect_means(row, keys);
    row.forget(3);
    EXPECT(row.begin() == 3 && row.end() == n_grouped - 1);
    expect_means(row, keys);
    row.set(n_grouped - 1, 0, { false, 0 }, keys[n_grouped - 1].data(), keys[n_grouped - 1].data(), nullptr);
    EXPECT(!row.is_grouped(5)); // the group of block 5 has lost some of its blocks
    expect_means(row, keys);

    auto other = clustered_row(n_grouped, true, keys);
    other.forget(3);
    EXPECT(!other.is_grouped(5));
    expect_means(other, keys);
}

//
// memory
//

// Expect that the slabs of tokens `begin` to `end` - 1 have the marks that the function `mark` wrote.
static void expect_marks(const store & memory, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += store::n_block) {
        int64_t mark;
        memcpy(&mark, memory.at(i), sizeof(mark));
        EXPECT(mark == i/store::n_block);
    }
}

static void mark(const store & memory, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += store::n_block) {
        const int64_t i_slab = i/store::n_block;
        memcpy(memory.at(i), &i_slab, sizeof(i_slab));
    }
}

static void expect_slabs(store & memory) {
    EXPECT(memory.slab_bytes() == 8192);
    memory.fit(0, 70*256);
    mark(memory, 0, 70*256);
    const int64_t full = memory.bytes();
    EXPECT(full == 70*8192);

    memory.fit(3*256 + 5, 72*256); // three slabs become free, and two of them are reused
    expect_marks(memory, 4*256, 70*256);
    EXPECT(memory.bytes() == full);
    mark(memory, 3*256, 72*256);
    expect_marks(memory, 3*256, 72*256);

    memory.trim();
    EXPECT(memory.bytes() == (memory.has_file() ? full : full - 8192));
    memory.clear();
    EXPECT(memory.bytes() == 0);
    memory.fit(256, 512);
    mark(memory, 256, 512);
    expect_marks(memory, 256, 512);
}

CHECK(slabs_keep_their_content_when_others_are_freed) {
    store memory;
    memory.make(5000);
    expect_slabs(memory);
}

CHECK(slabs_in_a_file_keep_their_content_when_others_are_freed) {
    const char * folder = getenv("TMPDIR");
    const std::string path = std::string(folder ? folder : "/tmp") + "/archive_checks.slabs";
    remove(path.c_str());
    store memory;
    memory.make(5000);
    memory.open(path);
    EXPECT(memory.has_file());
    EXPECT(fopen(path.c_str(), "r") == nullptr); // the file was unlinked, so its space is freed when the process ends
    expect_slabs(memory);

    FILE * other = fopen(path.c_str(), "w");
    store second;
    second.make(5000);
    EXPECT(throws([&] { second.open(path); })); // an existing file is not overwritten
    fclose(other);
    remove(path.c_str());
}

//
// archives
//

static constexpr int n_head  = 2;
static constexpr int n_layer = 2;
static constexpr int n_dim   = n_head*n_embd; // number of elements of a token's keys

static archive_params params_of(ggml_type type = GGML_TYPE_F32, int n_exact = 128, int n_near = n_ctx) {
    return { 0, n_near, type, type, 0, 2, n_exact };
}

// A stream of random tokens, and an archive of the tokens that were pushed. `keys` are not rotated. `push` rotates them
// like the cache: to their positions minus the current base.
struct stream {
    archive tokens;
    int64_t n_max;
    int64_t base = 0;

    std::vector<int64_t> bases; // base of each token

    std::vector<std::vector<float>> keys, values; // [layer], [token][head][n_embd]

    explicit stream(const archive_params & params, int64_t n_max = archive::max_pos, int n_token = 2304, float noise = 0.0f) : n_max(n_max) {
        tokens.make(params, { n_layer, { n_head, n_embd, n_embd, rope_of(GGML_ROPE_TYPE_NEOX) } });
        for (int l = 0; l < n_layer; ++l) {
            keys  .push_back(noise > 0.0f ? groups(n_token, n_dim, l, noise) : normal(n_token*n_dim, l));
            values.push_back(normal(n_token*n_dim, l + 10));
        }
    }

    const float * key  (int l, int head, int64_t i) const { return keys  [l].data() + (i*n_head + head)*n_embd; }
    const float * value(int l, int head, int64_t i) const { return values[l].data() + (i*n_head + head)*n_embd; }

    void start_over() {
        base = tokens.end();
        tokens.set_base(base);
    }

    void push(int n) {
        const int64_t pos = tokens.end();
        const evicted_tokens evicted = { nullptr, n, pos, n_max, pos + n - base };
        tokens.reserve(evicted);
        const int64_t first = tokens.start(evicted);
        bases.resize(pos);
        bases.resize(pos + n, base);
        for (int l = 0; l < n_layer; ++l) {
            std::vector<float> k(keys[l].begin() + pos*n_dim, keys[l].begin() + (pos + n)*n_dim);
            const float * v = value(l, 0, pos);
            for (int i = 0; i < n*n_head; ++i) {
                tokens.rotations_of(l).rotate(k.data() + i*n_embd, pos + i/n_head - base);
            }
            // tokens before `first` are too old for n_max, and are not stored
            const int64_t pos_0 = std::max(pos, first);
            const auto bytes = [&](const float * x) {
                return std::vector<uint8_t>((const uint8_t *) (x + (pos_0 - pos)*n_dim), (const uint8_t *) (x + n*n_dim));
            };
            const gathered cells = { GGML_TYPE_F32, GGML_TYPE_F32, bytes(k.data()), bytes(v) };
            tokens.put(l, pos_0, cells);
        }
        tokens.finish(evicted, first, 2);
    }
};

static std::vector<uint8_t> tokens_of(const archive & tokens, size_t layer, int64_t begin, int64_t end) {
    std::vector<uint8_t> res((end - begin)*tokens.token_bytes(layer));
    tokens.get(layer, res.data(), begin, end);
    return res;
}

// Expect that two archives have the same tokens and clusters, in the same order.
static void expect_same(const archive & a, const archive & b) {
    EXPECT(a.table() == b.table());
    EXPECT(a.clustered() == b.clustered());
    for (int l = 0; l < n_layer; ++l) {
        EXPECT(tokens_of(a, l, a.begin(), a.end()) == tokens_of(b, l, b.begin(), b.end()));
        for (int head = 0; head < n_head; ++head) {
            const auto & row_a = a.clusters_of(l, head);
            const auto & row_b = b.clusters_of(l, head);
            EXPECT(row_a.begin() == row_b.begin() && row_a.end() == row_b.end());
            EXPECT(row_a.clusters.packs == row_b.clusters.packs && row_a.clusters.sizes == row_b.clusters.sizes);
            for (int64_t block = row_a.begin(); block < row_a.end(); ++block) {
                EXPECT(row_a[block].order == row_b[block].order && row_a[block].origin == row_b[block].origin);
            }
        }
    }
}

CHECK(archive_returns_its_tokens_in_order) {
    stream s(params_of());
    s.push(100);
    s.push(900);
    s.push(600);
    EXPECT(s.tokens.begin() == 0 && s.tokens.end() == 1600);
    EXPECT(s.tokens.clusters_of(0, 0).end() == 6); // tokens of complete blocks are stored cluster by cluster
    std::vector<float> key(n_embd);
    for (int l = 0; l < n_layer; ++l) {
        const auto raw = tokens_of(s.tokens, l, 250, 1600);
        for (int64_t i = 250; i < 1600; ++i) {
            for (int head = 0; head < n_head; ++head) {
                const auto * got = (const float *) raw.data() + ((i - 250)*n_head + head)*2*n_embd;
                EXPECT(std::equal(got + n_embd, got + 2*n_embd, s.value(l, head, i)));

                s.tokens[l].keys(head, s.tokens.slot_of(l, head, i), 1, key.data());
                EXPECT(std::equal(got, got + n_embd, key.begin()));
                s.tokens.rotations_of(l).rotate(key.data(), -i);
                for (int e = 0; e < n_embd; ++e) {
                    EXPECT_NEAR(key[e], s.key(l, head, i)[e], 1e-3);
                }
            }
        }
    }
}

CHECK(a_full_archive_deletes_its_oldest_tokens_by_whole_blocks) {
    stream s(params_of(), 1500);
    s.push(1500);
    EXPECT(s.tokens.begin() == 0);
    s.push(10);
    EXPECT(s.tokens.begin() == 256 && s.tokens.end() == 1510);
    s.push(246);
    EXPECT(s.tokens.begin() == 256);
    EXPECT(s.tokens.clusters_of(1, 1).begin() == 1);

    stream few(params_of(), 500); // an archive as small as this has no clusters, and it deletes single tokens
    few.push(490);
    few.push(37);
    EXPECT(few.tokens.begin() == 27 && few.tokens.clusters_of(0, 0).end() == 0);
}

CHECK(rows_are_clustered_at_different_steps) {
    stream s(params_of());
    s.push(256);
    EXPECT(s.tokens.clusters_of(0, 0).end() == 1 && s.tokens.clusters_of(1, 1).end() == 0);
    s.push(64);
    EXPECT(s.tokens.clusters_of(1, 1).end() == 1);
}

CHECK(tokens_keep_the_base_of_their_segment) {
    stream s(params_of());
    s.push(300);
    s.start_over();
    s.push(500);
    s.start_over();
    s.push(10);
    EXPECT(s.tokens.base() == 800);
    for (const int64_t i : { 0, 299, 300, 799, 800, 809 }) {
        EXPECT(s.tokens.base_of(i) == s.bases[i]);
    }
    // stretches() must return each token in exactly one range. The range's delta must be -7 for the first 50 tokens,
    // and the newest base minus the token's base for all other tokens.
    std::vector<int64_t> delta;
    for (const auto & part : s.tokens.stretches(50, -7)) {
        EXPECT(part.begin == (int64_t) delta.size());
        delta.resize(part.end, part.delta);
    }
    EXPECT(delta.size() == 810);
    for (int64_t i = 0; i < 810; ++i) {
        EXPECT(delta[i] == (i < 50 ? -7 : 800 - s.bases[i]));
    }

    s.start_over();
    s.tokens.set_base(0); // no token was pushed after start_over, so the table does not have the new base
    EXPECT(s.tokens.table() == std::vector<int64_t>({ 0, 810, 0, 0, 0, 300, 300, 800, 800, 810, 0 }));
    s.n_max = 300;
    s.push(1); // deletes two blocks: the tokens before 512
    EXPECT(s.tokens.frames.front().base == 300);
}

CHECK(cutting_the_newest_tokens_restores_the_earlier_archive) {
    // Cut the archive inside a block, at the end of a block, and to fewer tokens than n_max.
    for (const int64_t end : { 1290, 1280, 800 }) {
        for (const int64_t n_max : { archive::max_pos, (int64_t) 1100 }) {
            stream a(params_of(GGML_TYPE_Q8_0, 128, 400), n_max), b(params_of(GGML_TYPE_Q8_0, 128, 400), n_max);
            for (auto * s : { &a, &b }) {
                s->push(700);
                s->start_over();
                s->push(end - 700);
            }
            const int64_t base = a.base;
            if (n_max > end) {
                a.push(100);
                a.start_over();
                a.push(500);
            } else {
                a.push(30); // so few tokens that n_max deletes no further block
            }
            const bool is_whole = a.tokens.begin() == b.tokens.begin();
            a.tokens.cut(end, end);
            a.tokens.set_base(base);
            a.base = base;
            EXPECT(a.tokens.end() == end);
            if (is_whole) {
                expect_same(a.tokens, b.tokens);
                a.push(300);
                b.push(300);
                expect_same(a.tokens, b.tokens);
            }
        }
    }
    stream s(params_of());
    s.push(300);
    s.tokens.cut(0, 0);
    EXPECT(s.tokens.size() == 0);
}

CHECK(saved_archive_is_restored_with_its_clusters) {
    stream a(params_of(GGML_TYPE_Q8_0)), b(params_of(GGML_TYPE_Q8_0));
    a.push(1300);
    a.start_over();
    a.push(900);

    const auto blocks = a.tokens.clustered();
    EXPECT(blocks[0] == 0 && blocks[1] == 0 && blocks[2] == 0 && blocks[3] == 2048);
    std::vector<uint8_t> saved(blocks[3]/256*a.tokens.cluster_bytes());
    EXPECT(a.tokens.get_clusters(saved.data(), 0, blocks[3], false));
    EXPECT(!a.tokens.get_clusters(saved.data(), 0, blocks[3], true));

    b.tokens.expect(0, 2200);
    for (int l = 0; l < n_layer; ++l) {
        const auto older = tokens_of(a.tokens, l, 0, 1000), newer = tokens_of(a.tokens, l, 1000, 2200);
        b.tokens.fill(l, { { older.data(), 0 }, { newer.data(), 1000 } }, 0, 2200, 2);
    }
    b.tokens.set_clusters(saved.data(), 0, blocks[3], false);
    EXPECT(b.tokens.set_table(a.tokens.table()).empty());
    EXPECT(b.tokens.seal_next_rows(archive::max_pos, 1) == n_layer*n_head - 2); // a call with one thread clusters two rows
    EXPECT(b.tokens.seal_next_rows(archive::max_pos, 1) == 0);
    expect_same(a.tokens, b.tokens);
}

CHECK(invalid_tables_are_refused) {
    stream s(params_of());
    s.push(300);
    const auto table = s.tokens.table();
    EXPECT(s.tokens.set_table(table).empty());
    for (const auto & wrong : std::vector<std::vector<int64_t>> {
            { 0, 299, 0, 0, 0 }, { 0, 300, 301, 0, 0 }, { 0, 300, -1, 0, 0 }, { 0, 300, 0 }, { 0, 300, 0, 1, 0 },
            { 0, 300, 0, 0, -1 }, { 0, 300, 0, 0, archive::max_pos }, { 0, 300, 0, 0, 0, 0, 5 }, { 0, 300, 0, 0, 0, 301, 5 } }) {
        EXPECT(!s.tokens.set_table(wrong).empty());
    }
    EXPECT(s.tokens.table() == table);
}

CHECK(deferred_clustering_gives_the_same_clusters) {
    stream a(params_of()), b(params_of());
    a.push(1100);
    b.tokens.defer_seal(true, 1);
    b.push(600);
    b.tokens.seal_row(0, 1);
    EXPECT(b.tokens.clusters_of(0, 1).end() == 2 && b.tokens.clusters_of(0, 0).end() == 0);
    b.push(500);
    b.tokens.defer_seal(false, 2);
    expect_same(a.tokens, b.tokens);
}

//
// attention
//

// Attention of a query to the archived tokens of a row, computed by definition.
struct defined {
    double              sum; // logarithm of the sum of all exponentials
    std::vector<double> value;
    std::vector<double> attn; // one number for each token of the archive
};

// query: the query before RoPE. rot: the position to which the cache would rotate it. is_far(i): true if RoPE must use
// the distance n_near + late for token i, instead of the true distance.
template <typename F>
static defined attention_by_definition(
        const stream & s, int l, int head, const std::vector<float> & query, int64_t rot, const logit_params & logits, F && is_far, int64_t late = 0) {
    std::vector<double> x;
    for (int64_t i = s.tokens.begin(); i < s.tokens.end(); ++i) {
        const int64_t distance = is_far(i) ? s.tokens.n_near + late : rot + s.tokens.base() - i;
        const auto q = rotated(query, distance, GGML_ROPE_TYPE_NEOX, n_embd, 0);
        const double logit = logits.scale*dot(q.data(), s.key(l, head, i), n_embd);
        x.push_back(logits.cap > 0.0f ? logits.cap*std::tanh(logit/logits.cap) : logit);
    }
    defined res = { 0.0, std::vector<double>(n_embd, 0.0), {} };
    const double max = *std::max_element(x.begin(), x.end());
    for (size_t i = 0; i < x.size(); ++i) {
        const double e = std::exp(x[i] - max);
        res.sum += e;
        res.attn.push_back(e);
        for (int d = 0; d < n_embd; ++d) {
            res.value[d] += e*s.value(l, head, s.tokens.begin() + i)[d];
        }
    }
    for (auto & v : res.value) {
        v /= res.sum;
    }
    for (auto & a : res.attn) {
        a /= res.sum;
    }
    res.sum = max + std::log(res.sum);
    return res;
}

// The queries of one head, all rotated to the position `rot`.
static std::vector<float> queries_at(const std::vector<std::vector<float>> & queries, int64_t rot) {
    std::vector<float> res;
    for (const auto & q : queries) {
        const auto rotated_query = rotated(q, rot, GGML_ROPE_TYPE_NEOX, n_embd, 0);
        res.insert(res.end(), rotated_query.begin(), rotated_query.end());
    }
    return res;
}

static std::vector<std::vector<float>> some_queries(int n, unsigned seed = 50) {
    std::vector<std::vector<float>> res;
    for (int q = 0; q < n; ++q) {
        res.push_back(normal(n_embd, seed + q));
    }
    return res;
}

// Return a function (head, i) that returns true if token i of layer 1 is far. A clustered block is far or near as a
// whole. Tokens without clusters are near.
static auto far_blocks(const stream & s) {
    return [&s](int head, int64_t i) {
        const auto & row = s.tokens.clusters_of(1, head);
        return i/256 < row.end() && row[i/256].origin.is_far;
    };
}

static const logit_params plain  = { 0.35f, 0.0f };
static const logit_params capped = { 0.35f, 3.0f };

// Attend with these queries, for all heads of layer 1. Compare the results with the definition.
template <typename F>
static void expect_attention(
        const stream & s, int n_query, int64_t rot, const logit_params & logits, int n_exact, double limit, F && is_far) {
    const auto queries = some_queries(n_query);
    const auto rotated_queries = queries_at(queries, rot);

    attention_work work;
    attention layer_attn(s.tokens, 1, rot, n_query, logits, n_exact, work);
    layer_attn.allocate();
    for (int head = 0; head < n_head; ++head) {
        layer_attn.find(head, rotated_queries.data());
    }
    for (int part = 0; part < layer_attn.n_part(); ++part) {
        layer_attn.attend(part);
    }
    std::vector<float> value(n_embd);
    for (int head = 0; head < n_head; ++head) {
        for (int q = 0; q < n_query; ++q) {
            const auto expected = attention_by_definition(s, 1, head, queries[q], rot, logits, [&](int64_t i) { return is_far(head, i); });
            EXPECT_NEAR(layer_attn.result(head, q, value.data()), expected.sum, limit);
            for (int e = 0; e < n_embd; ++e) {
                EXPECT_NEAR(value[e], expected.value[e], limit);
            }
        }
    }
}

CHECK(attention_to_all_tokens_equals_the_softmax) {
    stream s(params_of(GGML_TYPE_F32, 0));
    s.push(300);
    s.start_over();
    s.push(410);
    for (const int n_query : { 1, 8, 12 }) { // few queries and many queries are computed in different ways
        for (const auto & logits : { plain, capped }) {
            expect_attention(s, n_query, 420, logits, 0, 1e-3, [](int, int64_t) { return false; });
        }
    }
}

CHECK(far_tokens_have_the_maximum_distance) {
    stream s(params_of(GGML_TYPE_F32, 0, 200));
    s.push(300);
    s.start_over();
    s.push(250);
    EXPECT(s.tokens.far_end() == 350);
    for (const int n_query : { 2, 12 }) {
        expect_attention(s, n_query, 260, plain, 0, 1e-3, [&](int, int64_t i) { return i < s.tokens.far_end(); });
    }
}

CHECK(attention_to_all_clusters_equals_the_softmax) {
    stream s(params_of(GGML_TYPE_F32, 1 << 20, 600));
    s.push(1000);
    s.start_over();
    s.push(700);
    const auto is_far = far_blocks(s);
    EXPECT(is_far(0, 0) && !is_far(0, 1400));
    EXPECT(is_far(0, 700)); // this token was near when its block was first clustered
    for (const int n_query : { 1, 12 }) {
        expect_attention(s, n_query, 710, plain, 1 << 20, 2e-3, is_far);
    }
}

CHECK(attention_to_quantized_tokens_is_near_the_softmax) {
    for (const auto & [type, tolerance] : { std::pair(GGML_TYPE_Q8_0, 0.1), std::pair(GGML_TYPE_Q5_0, 0.3), std::pair(GGML_TYPE_Q4_1, 0.5), std::pair(GGML_TYPE_Q4_0, 0.5) }) {
        stream s(params_of(type, 1 << 20, 600));
        s.push(1700);
        for (const int n_query : { 1, 12 }) {
            const auto is_far = [&](int head, int64_t i) {
                const auto & row = s.tokens.clusters_of(1, head);
                return i/256 < row.end() && row[i/256].origin.is_far;
            };
            expect_attention(s, n_query, 1710, plain, 1 << 20, tolerance, is_far);
        }
    }
}

// One vector is added to all keys. Near and far blocks, and a block with two bases, are multiplied in different ways. With
// a longer vector, near blocks would outweigh far blocks
CHECK(keys_far_from_zero_lose_little_in_iq4_nl) {
    const auto away = normal(n_dim, 5);
    for (const int n_exact : { 0, 1 << 20 }) {
        stream s(params_of(GGML_TYPE_IQ4_NL, n_exact, 600));
        for (auto & keys : s.keys) {
            for (size_t e = 0; e < keys.size(); ++e) {
                keys[e] += 1.5f*away[e % n_dim];
            }
        }
        s.push(40);
        s.push(860);
        s.start_over();
        s.push(500);
        s.start_over();
        s.push(300);
        const auto is_far = [&](int head, int64_t i) {
            if (n_exact == 0) {
                return i < s.tokens.far_end();
            }
            const auto & row = s.tokens.clusters_of(1, head);
            return i/256 < row.end() && row[i/256].origin.is_far;
        };
        for (const int n_query : { 1, 7, 12 }) {
            expect_attention(s, n_query, 310, plain, n_exact, 0.6, is_far);
        }
    }
}

CHECK(key_with_one_large_element_loses_little_in_4_bits) {
    stream s(params_of(GGML_TYPE_Q4_1, 0));
    s.push(10);
    auto key = normal(n_dim, 1), value = normal(n_dim, 2);
    for (int head = 0; head < n_head; ++head) {
        key[head*n_embd + 3] = 30.0f;
    }
    auto stored_key = key, stored_value = value;
    archived_layer l = s.tokens[0];
    l.put(0, stored_key.data(), stored_value.data());

    std::vector<float> read(n_embd);
    for (int head = 0; head < n_head; ++head) {
        l.keys(head, 0, 1, read.data());
        double sum = 0.0;
        for (int e = 0; e < n_embd; ++e) {
            sum += std::pow(read[e] - key[head*n_embd + e], 2);
        }
        // Q4_1 has 16 levels per block. Without the Hadamard matrix, they would have to reach up to 30, and the error
        // would be 0.6.
        EXPECT(std::sqrt(sum/n_embd) < 0.4);
        l.values(head, 0, 1, read.data());
        for (int e = 0; e < n_embd; ++e) {
            EXPECT_NEAR(read[e], value[head*n_embd + e], 0.5);
        }
    }
}

// A stream in which the mean of a cluster represents its tokens: n_near is 1, so clustered blocks are far. Far blocks
// are clustered by their keys without RoPE, and these keys are in tight groups. The archive has enough blocks for a
// group of blocks. A group's clusters are divided into sets, and a search reads summaries of the sets first.
struct tight_stream : stream {
    tight_stream() : stream(params_of(GGML_TYPE_F32, 64, 1), archive::max_pos, 4608, 0.02f) {
        for (auto & k : keys) {
            for (auto & x : k) {
                x *= 0.08f;
            }
        }
        // All values of a cluster are equal. They are far from 0, so that a lost cluster changes the result.
        for (auto & v : values) {
            for (size_t i = 0; i < v.size(); ++i) {
                v[i] = i < n_cluster*n_dim ? v[i] + 5.0f : v[i % (n_cluster*n_dim)];
            }
        }
        push(4608);
        EXPECT(tokens.clusters_of(1, 0).is_grouped(0));
    }
};

CHECK(clusters_that_are_not_read_are_estimated_by_their_means) {
    const tight_stream s;
    const auto is_far = far_blocks(s);
    for (const int n_query : { 1, 12 }) {
        expect_attention(s, n_query, 4610, plain, 64, 0.1, is_far);
    }
}

CHECK(clusters_of_sets_next_to_ungrouped_clusters_are_attended_to) {
    stream s(params_of(GGML_TYPE_F32, 1 << 20, 2*n_ctx), 24*256, 34*256);
    s.push(24*256);
    for (const int64_t end : { 8252, 8448 }) {
        s.push(end - s.tokens.end());
        const auto & row = s.tokens.clusters_of(1, 1);
        // the archive begins in the middle of a group, and ends with a complete group
        EXPECT(row.begin() % n_grouped != 0 && row.end() % n_grouped == 0);
        for (const int n_query : { 1, 12 }) {
            expect_attention(s, n_query, end, plain, 1 << 20, 2e-3, far_blocks(s));
        }
    }
}

CHECK(search_finds_a_far_token_that_equals_the_query) {
    stream s(params_of(GGML_TYPE_F32, 64, 256), archive::max_pos, 4608);
    const auto query = normal(n_embd, 99);
    for (int e = 0; e < n_embd; ++e) { // token 300 is far; its key is the query, rotated by a far token's distance
        s.keys[1][(300*n_head + 1)*n_embd + e] = rotated(query, 256, GGML_ROPE_TYPE_NEOX, n_embd, 0)[e];
    }
    s.push(4608);
    const auto rotated_queries = queries_at({ query }, 4610);

    search searcher(s.tokens, 1, 4610, 1, plain, 64);
    searched_row searched;
    std::vector<float> estimate(2 + n_embd, 0.0f);
    searcher.find(1, rotated_queries.data(), searched, estimate.data(), estimate.size());

    std::set<int64_t> tokens;
    int64_t n_sealed = 0;
    for (const auto & range : searched.exact) {
        n_sealed += range.sealed ? range.n : 0;
        for (int64_t slot = range.begin; slot < range.begin + range.n; ++slot) {
            EXPECT(tokens.insert(searcher.pos_of(range, slot)).second);
        }
    }
    EXPECT((int64_t) tokens.size() == searched.n_exact_token);
    EXPECT(tokens.count(300) == 1);
    EXPECT(n_sealed >= 64 && n_sealed < 64 + 256);
    for (int64_t i = s.tokens.clusters_of(1, 1).end()*256; i < s.tokens.end(); ++i) {
        EXPECT(tokens.count(i) == 1); // the search reads all tokens that have no clusters
    }
    EXPECT(estimate[1] > 0.0f);
}

//
// staging
//

// Layers of a cache with one cell, in host memory.
struct cache_layers {
    ggml_context_ptr        ctx { ggml_init({ 2*n_layer*ggml_tensor_overhead(), nullptr, true }) };
    ggml_backend_buffer_ptr buffer;
    std::vector<layer>      layers;

    cache_layers() {
        for (int i = 0; i < n_layer; ++i) {
            layers.push_back({ i, n_head, i*n_head, 1, nullptr, nullptr, n_embd, n_embd, i });
            layers[i].k = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_dim);
            layers[i].v = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_dim);
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type()));
    }
};

// a row of keys or values on the device, without the Hadamard matrix
static std::vector<float> staged_row(const ggml_tensor * t, int64_t i, int n_map) {
    std::vector<float> res(n_embd);
    to_float(t->type, (const char *) t->data + i*t->nb[1], res.data(), n_embd);
    hadamard(res.data(), n_embd, n_map);
    return res;
}

static void expect_near(const std::vector<float> & x, const float * y, double limit) {
    for (size_t e = 0; e < x.size(); ++e) {
        EXPECT_NEAR(x[e], y[e], limit);
    }
}

// Stage layer 1 and expect the keys and values of all tokens. near_begin: tokens before it have the distance n_near from
// a query at position rot
static void expect_staged(stream & s, int64_t rot, int64_t near_begin, ggml_type type, double limit) {
    static constexpr int n_live = 3;

    const cache_layers cache;
    staging staged(s.tokens, cache.layers, false, 2048, 2);
    EXPECT(staged.keys(1)->type == type && staged.values(1)->type == type);

    const ggml_tensor nodes[2] = {};
    staged.begin({ { &nodes[0], &nodes[1], 1 } }, n_live, rot);
    staged.settle();
    for (int head = 0; head < n_head; ++head) {
        for (int64_t slot = s.tokens.begin(); slot < s.tokens.end(); ++slot) {
            const uint8_t * order = s.tokens.order_of(1, head, slot/256);

            const int64_t i   = order ? slot/256*256 + order[slot % 256] : slot;
            const int64_t row = head*staged.n_token() + n_live + slot - s.tokens.begin();
            const int64_t pos = i < near_begin ? rot - s.tokens.n_near : i - s.base;

            const std::vector<float> key(s.key(1, head, i), s.key(1, head, i) + n_embd);
            const auto rotated_key = rotated(key, pos, GGML_ROPE_TYPE_NEOX, n_embd, 0);
            expect_near(staged_row(staged.keys  (1), row, staged.key_map  (1)), rotated_key.data(),      limit);
            expect_near(staged_row(staged.values(1), row, staged.value_map(1)), s.value(1, head, i), limit);
        }
    }
}

CHECK(staged_tokens_have_the_distances_of_the_stream_until_gaps_are_closed) {
    stream s(params_of(GGML_TYPE_F32, 128, 300));
    s.push(900);
    expect_staged(s, 900, 0, GGML_TYPE_F32, 1e-4);
}

CHECK(staged_tokens_have_limited_distances_after_gaps_were_closed) {
    // some types are converted for the device
    for (const auto & [type, device_type, limit] : {
            std::tuple(GGML_TYPE_F32, GGML_TYPE_F32, 1e-3), std::tuple(GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, 0.05), std::tuple(GGML_TYPE_IQ4_NL, GGML_TYPE_Q8_0, 0.8) }) {
        for (const int n_exact : { 0, 128 }) { // without and with clusters
            stream s(params_of(type, n_exact, 1000));
            s.push(700);
            s.start_over();
            s.push(900);
            expect_staged(s, 905, 605, device_type, limit);
        }
    }
}

CHECK(staged_keys_and_values_of_different_types_are_converted) {
    auto params = params_of(GGML_TYPE_Q5_0);
    params.type_v = GGML_TYPE_Q4_0;
    stream s(params);
    s.push(700);
    expect_staged(s, 700, 0, GGML_TYPE_Q8_0, 0.6);
}

//
// residents
//

// The residents' cells of layer 1, with copies of the keys and values that a device would have.
struct device_cells {
    const stream    & s;
    kvtool::residents residents;

    std::vector<float> keys, values; // [cell][head][n_embd]

    size_t n_written = 0; // number of cells that the last update wrote

    device_cells(const stream & s, int n_mean, int n_token, int n_mean_set = 0)
        : s(s), residents(s.tokens, { n_mean, n_mean_set, n_token }), keys(residents.n.n_cell()*n_dim), values(residents.n.n_cell()*n_dim) {}

    void update(int64_t rot) {
        residents.begin(rot);
        n_written = 0;
        kvtool::residents::cells written;
        for (bool is_whole = false; !is_whole;) {
            written.clear();
            is_whole = residents.update(1, written);
            n_written += written.dst_rows.size();
            EXPECT(written.dst_rows.size() <= 1024 + 256); // the last cluster may exceed the limit of 1024
            for (size_t i = 0; i < written.dst_rows.size(); ++i) {
                std::copy_n(written.keys  .data() + i*n_embd, n_embd, keys  .data() + written.dst_rows[i]*n_embd);
                std::copy_n(written.values.data() + i*n_embd, n_embd, values.data() + written.dst_rows[i]*n_embd);
            }
        }
    }

    // Choose the residents of a head for queries at the position `rot`, and return `missed` of residents::choose.
    // live: logarithm of each query's softmax sum over the live cells.
    std::vector<float> choose(int head, const std::vector<std::vector<float>> & queries, int64_t rot, float live = -INFINITY) {
        std::vector<float> missed(queries.size(), NAN);
        const std::vector<float> sums(queries.size(), live);
        residents.choose(1, head, queries_at(queries, rot).data(), queries.size(), plain, sums.data(), missed.data());
        return missed;
    }

    // Let all heads choose residents. Return the largest share of attention that a query missed.
    float choose(const std::vector<std::vector<float>> & queries, int64_t rot) {
        float max_missed = 0.0f;
        for (int head = 0; head < n_head; ++head) {
            for (const float missed : choose(head, queries, rot)) {
                max_missed = std::max(max_missed, missed);
            }
        }
        return max_missed;
    }

    double mask(int head, int cell) const { return ggml_fp16_to_fp32(residents.mask(1, head)[cell]); }

    // Number of archived tokens that a head's cells represent.
    double n_token(int head) const {
        double n = 0.0;
        for (int c = 0; c < residents.n.n_cell(); ++c) {
            n += std::exp(mask(head, c));
        }
        return n;
    }

    // Expect that attention to these cells equals attention to the archive. For is_far and late, see
    // attention_by_definition.
    template <typename F>
    void expect_attention(int64_t rot, double limit, F && is_far, int64_t late = 0) const {
        for (const auto & query : some_queries(2)) {
            const auto rotated_queries = queries_at({ query }, rot);
            for (int head = 0; head < n_head; ++head) {
                double sum = 0.0;
                std::vector<double> value(n_embd, 0.0);
                for (int c = 0; c < residents.n.n_cell(); ++c) {
                    const size_t offset = (c*n_head + head)*n_embd;
                    const double e      = std::exp(plain.scale*dot(rotated_queries.data(), keys.data() + offset, n_embd) + mask(head, c));
                    sum += e;
                    for (int d = 0; d < n_embd; ++d) {
                        value[d] += e*values[offset + d];
                    }
                }
                const auto expected = attention_by_definition(s, 1, head, query, rot, plain, [&](int64_t i) { return is_far(head, i); }, late);
                EXPECT_NEAR(std::log(sum), expected.sum, limit);
                for (int d = 0; d < n_embd; ++d) {
                    EXPECT_NEAR(value[d]/sum, expected.value[d], limit);
                }
            }
        }
    }
};

CHECK(attention_to_a_fully_resident_archive_equals_the_softmax) {
    stream s(params_of(GGML_TYPE_F32, 64, 600));
    const auto is_far = far_blocks(s);
    device_cells cells(s, 16*n_cluster, 2304);
    s.push(900);
    int64_t anchor = -1;
    // Each push moves the queries on, and more blocks become far. Far keys are stored for queries at the position
    // `anchor`, so they are slightly farther from later queries. The cells keep these keys after the push of 5 tokens,
    // and get newly rotated keys after the push of 400 tokens.
    for (const int n : { 230, 5, 400 }) {
        s.push(n);
        const int64_t rot = s.tokens.end() + 2;
        EXPECT(cells.residents.unfit().empty());
        cells.update(rot);
        cells.choose(some_queries(2), rot);
        cells.update(rot);
        EXPECT(cells.choose(some_queries(2), rot) == 0.0f);
        anchor = n == 5 ? anchor : rot;
        cells.expect_attention(rot, 2e-3, is_far, rot - anchor);
    }
    s.start_over(); // the base changes, so all cells must be written again
    s.push(300);
    cells.choose(some_queries(2), 302);
    cells.update(302);
    cells.choose(some_queries(2), 302);
    cells.update(302);
    cells.expect_attention(302, 2e-3, is_far);
}

CHECK(means_represent_clusters_that_are_not_resident) {
    const tight_stream s;
    const auto is_far = far_blocks(s);
    device_cells cells(s, 20*n_cluster, 300);
    // nothing is resident in round 0; in rounds 1 and 2, the clusters that the queries chose are resident
    for (int i = 0; i < 3; ++i) {
        cells.update(4610);
        cells.expect_attention(4610, 0.1, is_far);
        EXPECT((cells.choose(some_queries(2), 4610) > 0.0f) == (i == 0));
    }
}

CHECK(means_of_sets_represent_clusters_without_cells) {
    const tight_stream s;
    const auto is_far = far_blocks(s);
    // 10 of the 18 pages have cells: the two blocks that are in no set, and 8 of the 16 sets
    device_cells cells(s, 10*n_cluster, 300, 2*n_set);
    // all keys are far, so they are rotated again for queries at another position
    for (const int64_t rot : { 4610, 4610, 4800 }) {
        EXPECT(cells.residents.unfit().empty());
        cells.update(rot);
        for (int head = 0; head < n_head; ++head) {
            EXPECT_NEAR(cells.n_token(head), 4608, 10.0); // the mask has the log of a set's size in half precision
        }
        cells.expect_attention(rot, 0.1, is_far);
        cells.update(rot);
        EXPECT(cells.n_written == 0);
        cells.choose(some_queries(2), rot);
    }
}

CHECK(cells_of_changing_sets_represent_each_token_once) {
    stream s(params_of(GGML_TYPE_F32, 64, 2*n_ctx), 10100, 16100);
    device_cells cells(s, 33*n_cluster, 200, 4*n_set);
    int n_fit = 0;
    for (int i = 0; s.tokens.end() < 16000; ++i) { // the stream gets so long that groups are deleted
        s.push(100);
        if (!cells.residents.unfit().empty()) {
            continue; // the first and the last group have too many blocks that are in no set
        }
        n_fit += s.tokens.size() > 33*256;
        cells.choose(some_queries(2, i), s.tokens.end() + 1);
        cells.update(s.tokens.end() + 1);
        for (int head = 0; head < n_head; ++head) {
            EXPECT_NEAR(cells.n_token(head), s.tokens.size(), 15.0);
        }
    }
    EXPECT(n_fit > 60);
}

CHECK(cells_represent_each_archived_token_once) {
    stream s(params_of(GGML_TYPE_F32, 64, 700), 1500);
    device_cells cells(s, 8*n_cluster, 200);
    for (int i = 0; i < 120; ++i) { // the stream gets so long that new blocks become far and are deleted
        s.push(17);
        if (s.tokens.end() > 2200) {
            break;
        }
        EXPECT(cells.residents.unfit().empty());
        cells.choose(some_queries(2, i), s.tokens.end() + 1);
        cells.update(s.tokens.end() + 1);
        for (int head = 0; head < n_head; ++head) {
            EXPECT_NEAR(cells.n_token(head), s.tokens.size(), 0.5);
        }
    }
    s.tokens.clear();
    cells.residents.drop();
    s.push(40);
    cells.update(41);
    EXPECT_NEAR(cells.n_token(1), 40, 1e-3);
}

// Return, for each element, the sum of the squared distances of a cluster's keys from `mean`. Layer 1 and head 0.
static std::vector<double> squares_of(const stream & s, const row_clusters & row, int i_cluster, const std::vector<float> & mean) {
    const int64_t block = row.block_of(i_cluster);
    const int     c     = row.index_in_block(i_cluster);

    std::vector<double> sums(n_embd, 0.0);
    for (int slot = row[block].start[c]; slot < row[block].start[c + 1]; ++slot) {
        const int64_t i = block*256 + row[block].order[slot];
        std::vector<float> key(s.keys[1].begin() + i*n_dim, s.keys[1].begin() + i*n_dim + n_embd);
        s.tokens.rotations_of(1).rotate(key.data(), s.tokens.rotation_to(row[block].origin, i) + i - s.tokens.base_of(i));
        for (int d = 0; d < n_embd; ++d) {
            sums[d] += (key[d] - mean[d])*(key[d] - mean[d]);
        }
    }
    return sums;
}

// A stream whose keys differ most in one half of their elements, and a query that is 0 in this half. The spread of the
// keys therefore changes the attention of this query less than the attention of other queries.
struct uneven_stream : stream {
    std::vector<float> query = normal(n_embd, 99);

    // The query is at position n + 1, and attends to the clusters of layer 1 and head 0.
    std::vector<double> attention; // Attention to each cluster, estimated from the mean and the spread of its keys.
    std::vector<double> gains;     // Logarithm of the factor by which the spread increases `attention`.
    double sum = 0.0;              // Sum of `attention`.

    // scale: factor of the query; with a small factor, the spread of keys counts little. n: number of archived tokens
    explicit uneven_stream(float scale, int n = 1300) : stream(params_of(GGML_TYPE_F32, 64, 2*n_ctx), archive::max_pos, 4608) {
        const auto is_wide = [](size_t i) { return i/2 % 2 == 0; };
        for (size_t i = 0; i < keys[1].size(); ++i) {
            keys[1][i] *= is_wide(i) ? 3.0f : 1.0f;
        }
        for (int d = 0; d < n_embd; ++d) {
            query[d] *= is_wide(d) ? 0.0f : scale;
        }
        push(n);

        const auto & row = tokens.clusters_of(1, 0);
        const auto rotated_queries = queries_at({ query }, n + 1);
        std::vector<double> spreads, variance(n_embd, 0.0), logits;
        std::vector<float> key(n_embd);
        for (int i = 0; i < (row.end() - row.begin())*n_cluster; ++i) {
            get_key(row.clusters.packs.data() + i/n_pack*row.pack_size(), i % n_pack, key.data(), n_embd);
            logits.push_back(plain.scale*dot(rotated_queries.data(), key.data(), n_embd));
            const auto squares = squares_of(*this, row, i, key);
            spreads.push_back(std::accumulate(squares.begin(), squares.end(), 0.0)/std::max<int>(row.clusters.sizes[i], 1));
            for (int d = 0; d < n_embd; ++d) {
                variance[d] += squares[d];
            }
        }
        double of_query = 0.0;
        for (int d = 0; d < n_embd; ++d) {
            of_query += variance[d]*rotated_queries[d]*rotated_queries[d]*plain.scale*plain.scale/std::accumulate(variance.begin(), variance.end(), 0.0);
        }
        for (size_t i = 0; i < logits.size(); ++i) {
            gains    .push_back(std::min(of_query*spreads[i], 16.0)/2.0);
            attention.push_back(row.clusters.sizes[i]*std::exp(logits[i] + gains[i]));
            sum += attention.back();
        }
    }

    // Return the indices of the clusters with the highest scores per token: as many clusters as have at most n tokens
    // together, or, if is_over, as few as have at least n tokens together.
    std::set<int> best(const std::vector<double> & scores, int n, bool is_over) const {
        const auto & sizes = tokens.clusters_of(1, 0).clusters.sizes;
        std::vector<std::pair<double, int>> ranks;
        for (size_t i = 0; i < scores.size(); ++i) {
            ranks.push_back({ -scores[i]/std::max<int>(sizes[i], 1), i });
        }
        std::sort(ranks.begin(), ranks.end());
        std::set<int> res;
        for (const auto & [rank, i] : ranks) {
            n -= sizes[i];
            if (n < 0 && !is_over) {
                break;
            }
            res.insert(i);
            if (n <= 0) {
                break;
            }
        }
        return res;
    }
};

static size_t n_other(const std::set<int> & a, const std::set<int> & b) {
    std::vector<int> res;
    std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(res));
    return res.size();
}

CHECK(clusters_may_be_cut_before_their_first_block) {
    row_clusters row(n_embd, n_embd);
    const auto keys = normal(256*n_embd, 3);
    row.set(n_grouped, 0, { false, 0 }, keys.data(), keys.data(), nullptr); // the first block of a group
    row.cut(n_grouped - 1);
    EXPECT(row.begin() == row.end());
    row.set(n_grouped - 1, 0, { false, 0 }, keys.data(), keys.data(), nullptr);
    EXPECT(row.begin() == n_grouped - 1 && row.end() == n_grouped);
}

CHECK(search_ranks_clusters_by_mean_and_spread_of_their_keys) {
    const uneven_stream s(1.5f);
    search searcher(s.tokens, 1, 1301, 1, plain, 100);
    searched_row searched;
    std::vector<float> estimate(2 + n_embd, 0.0f);
    searcher.find(0, queries_at({ s.query }, 1301).data(), searched, estimate.data(), estimate.size());

    const auto & row = s.tokens.clusters_of(1, 0);
    std::set<std::pair<int64_t, int64_t>> begins;
    for (const auto & range : searched.exact) {
        if (range.sealed) {
            begins.insert({ range.begin, range.n });
        }
    }
    std::set<int> clusters;
    for (size_t i = 0; i < s.attention.size(); ++i) {
        const auto & start = row[row.block_of(i)].start;
        const int    c     = row.index_in_block(i);
        if (begins.count({ row.block_of(i)*256 + start[c], start[c + 1] - start[c] })) {
            clusters.insert(i);
        }
    }
    EXPECT(clusters.size() == begins.size() && clusters.size() > 4);
    EXPECT(n_other(clusters, s.best(s.attention, 100, true)) <= 1);

    // the mean keys alone would choose other clusters
    auto means = s.attention;
    for (size_t i = 0; i < means.size(); ++i) {
        means[i] *= std::exp(-s.gains[i]);
    }
    EXPECT(n_other(clusters, s.best(means, 100, true)) > 2);
}

CHECK(residents_are_chosen_from_the_best_sets) {
    const uneven_stream s(0.5f, 4500);
    const auto & row = s.tokens.clusters_of(1, 0);
    EXPECT(row.is_grouped(0) && !row.is_grouped(16) && row.end() == 17);

    searched_row searched;
    ranking      ranked;
    const float  live = -INFINITY;
    search(s.tokens, 1, 4501, 1, plain, 0).rank(0, queries_at({ s.query }, 4501).data(), &live, 1000, searched, ranked);

    // `clusters` must have the clusters of the block that is in no set, and the clusters of the best sets. These sets
    // together have 1,000 tokens or slightly more.
    const std::set<size_t> clusters(ranked.clusters.begin(), ranked.clusters.end());
    std::map<size_t, double> of_set; // attention per token
    size_t n_found = 0;
    for (size_t set = 0; set < n_set; ++set) {
        double sum = 0.0;
        int64_t n = 0;
        for (size_t i_cluster = row.first_in_set(set); i_cluster < row.first_in_set(set) + n_pack; ++i_cluster) {
            sum += s.attention[i_cluster];
            n   += row.clusters.sizes[i_cluster];
            EXPECT(clusters.count(i_cluster) == clusters.count(row.first_in_set(set))); // all clusters of a set, or none
        }
        of_set[set] = sum/n;
        n_found += clusters.count(row.first_in_set(set)) ? n : 0;
    }
    EXPECT(n_found >= 1000 && n_found < 1600);
    EXPECT(clusters.size() == ranked.clusters.size() && clusters.count(16*n_cluster) == 1);
    const auto best = std::max_element(of_set.begin(), of_set.end(), [](const auto & a, const auto & b) { return a.second < b.second; });
    EXPECT(clusters.count(row.first_in_set(best->first)) == 1);

    // `missing` must be the attention that a cluster's mean misses. Its share of all attention is only estimated,
    // because sets represent the clusters that were not ranked.
    double sum = 0.0, expected = 0.0;
    for (size_t i = 0; i < ranked.clusters.size(); ++i) {
        const size_t i_cluster = ranked.clusters[i];
        const double missing = s.attention[i_cluster]*(1.0 - std::exp(-s.gains[i_cluster]))/s.sum;
        EXPECT_NEAR(ranked.missing[i], missing, 0.2*missing + 1e-6);
        sum      += ranked.missing[i];
        expected += missing;
    }
    EXPECT_NEAR(sum, expected, 0.1*expected);

    device_cells cells(s, 32*n_cluster, 300); // queries are compared with sets of 900 tokens
    cells.update(4501);
    EXPECT(cells.choose(0, { s.query }, 4501)[0] > 0.0f);
    cells.update(4501);
    EXPECT(cells.choose(0, { s.query }, 4501)[0] == 0.0f);
    EXPECT_NEAR(cells.n_token(0), 4500, 5.0);
}

// Return the sets whose clusters a query is compared with, if n_token tokens are resident. The first set is the one
// whose means miss the most attention. Layer 1 and head 0; block 16 of the stream is in no set.
static std::vector<size_t> ranked_sets_of(const stream & s, const std::vector<float> & query, int n_token) {
    searched_row searched;
    ranking      ranked;
    const float  live = -INFINITY;
    search(s.tokens, 1, 4501, 1, plain, 0).rank(0, queries_at({ query }, 4501).data(), &live, 3*n_token, searched, ranked);
    std::map<size_t, double> missing;
    for (size_t i = 0; i < ranked.clusters.size(); ++i) {
        if (ranked.clusters[i] < n_set*n_pack) {
            missing[ranked.clusters[i]/n_pack] += ranked.missing[i];
        }
    }
    std::vector<size_t> res;
    for (const auto & [set, sum] : missing) {
        res.push_back(set);
    }
    std::sort(res.begin(), res.end(), [&](size_t a, size_t b) { return missing[a] > missing[b]; });
    return res;
}

CHECK(sets_that_queries_attend_to_get_cells_for_their_clusters) {
    const uneven_stream s(0.5f, 4500);
    std::vector<float> opposite = s.query;
    for (float & x : opposite) {
        x = -x;
    }
    // Return the sets that have cells for their clusters. The cell with such a set's mean is hidden.
    const auto with_cells = [](const device_cells & cells) {
        std::set<size_t> res;
        for (size_t set = 0; set < n_set; ++set) {
            if (cells.mask(0, cells.residents.n.n_mean + set) == -INFINITY) {
                res.insert(set);
            }
        }
        return res;
    };

    // Block 16 and 8 of the 16 sets have cells. At first these are the newest sets. Later, the sets that queries were
    // compared with least recently are replaced
    device_cells cells(s, 9*n_cluster, 200, n_set);
    cells.update(4501);
    EXPECT(with_cells(cells) == std::set<size_t>({ 8, 9, 10, 11, 12, 13, 14, 15 }));
    std::set<size_t> ranked;
    for (const auto & query : { s.query, opposite }) {
        const auto ranked_sets = ranked_sets_of(s, query, 200);
        EXPECT(!ranked_sets.empty() && ranked_sets.size() <= 4);
        ranked.insert(ranked_sets.begin(), ranked_sets.end());
        EXPECT(cells.choose(0, { query }, 4501)[0] > 0.0f);
        cells.update(4501);
        EXPECT(cells.choose(0, { query }, 4501)[0] == 0.0f);
        const auto now = with_cells(cells);
        EXPECT(now.size() == 8 && std::includes(now.begin(), now.end(), ranked.begin(), ranked.end()));
    }
    EXPECT(ranked.size() > 4);

    // a choice gives cells to at most 4 sets, first to those with the most missing attention
    device_cells others(s, 9*n_cluster, 600, n_set);
    others.update(4501);
    const auto ranked_sets = ranked_sets_of(s, opposite, 600);
    const auto before      = with_cells(others);
    others.choose(0, { opposite }, 4501);
    others.update(4501);
    const auto now = with_cells(others);

    std::vector<size_t> absent;
    std::copy_if(ranked_sets.begin(), ranked_sets.end(), std::back_inserter(absent), [&](size_t set) { return before.count(set) == 0; });
    const size_t n_present = ranked_sets.size() - absent.size();
    EXPECT(absent.size() > 4 && before.size() - n_present >= 4);
    for (size_t i = 0; i < absent.size(); ++i) {
        EXPECT(now.count(absent[i]) == (i < 4));
    }
}

CHECK(residents_are_the_clusters_with_the_most_missing_attention) {
    const uneven_stream s(0.5f);
    // By definition, residents are the clusters whose means miss the most attention per token.
    auto scores = s.attention;
    for (size_t i = 0; i < scores.size(); ++i) {
        scores[i] *= 1.0 - std::exp(-s.gains[i]);
    }
    const auto best = s.best(scores, 100, false);
    const double share = std::accumulate(best.begin(), best.end(), 0.0, [&](double sum, int i) { return sum + scores[i]; })/s.sum;

    // Return the indices of the resident clusters of head 0. The cells with their means are hidden.
    const auto & sizes = s.tokens.clusters_of(1, 0).clusters.sizes;
    const auto resident_clusters = [&](const device_cells & cells) {
        std::set<int> res;
        for (size_t i = 0; i < sizes.size(); ++i) {
            const size_t cell = sizes.size() - n_cluster - i/n_cluster*n_cluster + i % n_cluster; // the newest block comes first
            if (sizes[i] > 0 && cells.mask(0, cell) == -INFINITY) {
                res.insert(i);
            }
        }
        return res;
    };

    device_cells cells(s, 8*n_cluster, 100);
    cells.update(1301);
    EXPECT(share > 0.04);
    EXPECT_NEAR(cells.choose(0, { s.query }, 1301)[0], share, 0.002);
    // if live cells get as much attention as all clusters together, the share of the residents is half as large
    device_cells other(s, 8*n_cluster, 100);
    other.update(1301);
    EXPECT_NEAR(other.choose(0, { s.query }, 1301, std::log(s.sum))[0], share/2.0, 0.001);
    cells.update(1301);
    EXPECT(cells.choose(0, { s.query }, 1301)[0] == 0.0f);

    EXPECT(n_other(resident_clusters(cells), best) == 0);
    EXPECT(n_other(resident_clusters(cells), s.best(s.attention, 100, false)) > 1);

    // in a choice for the next step, resident clusters count twice; in a choice for the same step, they do not
    for (const bool is_repeated : { false, true }) {
        device_cells later(s, 8*n_cluster, 100);
        later.update(1301);
        later.choose(0, some_queries(1), 1301);
        later.update(1301);
        const auto before = resident_clusters(later);
        EXPECT(later.choose(0, { s.query }, 1301)[0] > 0.0f);
        later.update(is_repeated ? 1301 : 1302);

        auto weighted_scores = scores;
        for (const int i : before) {
            weighted_scores[i] *= 2.0;
        }
        const auto best_weighted = s.best(weighted_scores, 100, false);
        EXPECT(n_other(before, best) > 1 && n_other(best_weighted, before) > 1 && n_other(best_weighted, best) > 1);
        EXPECT(n_other(resident_clusters(later), is_repeated ? best : best_weighted) == 0);
    }

    // with several queries, each has its share
    const auto missed = other.choose(0, { s.query, std::vector<float>(n_embd, 0.0f) }, 1301);
    EXPECT(missed[0] > missed[1] && missed[1] >= 0.0f);

    device_cells few(s, 4*n_cluster, 100);
    EXPECT(few.residents.unfit() == "more clusters than cells for means");
}

// The result of one query's attention in layer 1 and head 0.
static double attended(const stream & s, const std::vector<float> & query, std::vector<float> & value) {
    attention_work work;
    attention layer_attn(s.tokens, 1, 110, 1, plain, 0, work);
    layer_attn.allocate();
    for (int head = 0; head < n_head; ++head) {
        layer_attn.find(head, query.data());
    }
    for (int part = 0; part < layer_attn.n_part(); ++part) {
        layer_attn.attend(part);
    }
    value.resize(n_embd);
    return layer_attn.result(0, 0, value.data());
}

CHECK(non_finite_numbers_give_no_attention) {
    const auto queries = some_queries(1);
    auto rotated_queries = queries_at(queries, 110);

    // a key that is NaN must add nothing to the result
    stream s(params_of(GGML_TYPE_F32, 0));
    s.keys[1][5*n_dim] = NAN;
    s.push(100);
    std::vector<float> value;
    const double sum = attended(s, rotated_queries, value);
    std::fill_n(s.keys[1].begin() + 5*n_dim, n_embd, 0.0f);
    const auto expected = attention_by_definition(s, 1, 0, queries[0], 110, plain, [](int64_t) { return false; });
    EXPECT_NEAR(sum, expected.sum + std::log(1.0 - expected.attn[5]), 1e-3);

    const auto is_nothing = [&](double sum) {
        return sum == -INFINITY && std::all_of(value.begin(), value.end(), [](float x) { return x == 0.0f; });
    };
    for (const float wrong : { NAN, INFINITY }) {
        stream with_value(params_of(GGML_TYPE_F32, 0));
        with_value.values[1][7*n_dim] = wrong;
        with_value.push(100);
        EXPECT(is_nothing(attended(with_value, rotated_queries, value)));
    }
    rotated_queries[3] = NAN;
    EXPECT(is_nothing(attended(s, rotated_queries, value)));
}

CHECK(most_attended_tokens_equal_the_definition) {
    stream s(params_of(GGML_TYPE_F32, 0));
    s.push(200);
    s.start_over();
    s.push(200);
    constexpr int n_query = 3, k = 10;
    const auto queries = some_queries(n_query);
    const auto rotated_queries = queries_at(queries, 205);
    attention_work work;
    attention layer_attn(s.tokens, 1, 205, n_query, plain, 0, work);
    layer_attn.allocate();
    for (int head = 0; head < n_head; ++head) {
        layer_attn.find(head, rotated_queries.data());
    }
    for (int part = 0; part < layer_attn.n_part(); ++part) {
        layer_attn.attend(part);
    }
    std::vector<float> value(n_embd);
    for (int head = 0; head < n_head; ++head) {
        std::vector<std::pair<double, int64_t>> attn(400);
        for (int q = 0; q < n_query; ++q) {
            // let the live cells get as much attention as the archive
            layer_attn.set_sum(head, q, layer_attn.result(head, q, value.data()) + std::log(2.0));
            const auto expected = attention_by_definition(s, 1, head, queries[q], 205, plain, [](int64_t) { return false; });
            for (int64_t i = 0; i < 400; ++i) {
                attn[i] = { attn[i].first + expected.attn[i]/2.0, i };
            }
        }
        for (int part = 0; part < layer_attn.n_part(); ++part) {
            layer_attn.weigh(part);
        }
        std::sort(attn.rbegin(), attn.rend());
        std::map<int64_t, double> expected_attn;
        for (int i = 0; i < k; ++i) {
            expected_attn[attn[i].second] = attn[i].first;
        }
        auto next = expected_attn.begin();
        for (const auto & token : layer_attn.most_attended(head, k)) {
            EXPECT(token.pos == next->first && token.slot == token.pos);
            EXPECT_NEAR(token.attn, next->second, 1e-4);
            EXPECT(token.delta == s.bases[token.pos] - s.tokens.base());
            ++next;
        }
        EXPECT(next == expected_attn.end());
    }
}

// Make synthetic cells for these queries. Expect that each head's attention to the cells has the sum and the value that
// the archive would give.
static void expect_made(const std::vector<float> & queries, ggml_type type, const logit_params & logits, double limit) {
    constexpr int n = 4;
    const auto attn_out = normal(n*n_embd, 2);
    const double sums[n] = { 3.0, 5.5, 2.0, 4.0 };
    synthetic_cells cells(n, n_embd, n_embd, type, logits);
    cells.make(queries.data(), sums, attn_out.data());
    for (int h = 0; h < n; ++h) {
        double sum = 0.0;
        std::vector<double> value(n_embd, 0.0);
        for (int c = 0; c < n; ++c) {
            double x = logits.scale*dot(queries.data() + h*n_embd, cells.keys.data() + c*n_embd, n_embd);
            x = logits.cap > 0.0f ? logits.cap*std::tanh(x/logits.cap) : x;
            sum += std::exp(x);
            for (int e = 0; e < n_embd; ++e) {
                value[e] += std::exp(x)*cells.values[c*n_embd + e];
            }
        }
        EXPECT_NEAR(std::log(sum), sums[h], limit);
        for (int e = 0; e < n_embd; ++e) {
            EXPECT_NEAR(value[e]/sum, attn_out[h*n_embd + e], 2*limit);
        }
    }
}

CHECK(synthetic_cells_have_the_sum_and_value_of_the_archive) {
    auto queries = normal(4*n_embd, 1);
    for (const auto & logits : { plain, logit_params { 0.35f, 10.0f } }) {
        expect_made(queries, GGML_TYPE_F32,  logits, 1e-4);
        expect_made(queries, GGML_TYPE_F16,  logits, 0.01);
        expect_made(queries, GGML_TYPE_Q8_0, logits, 0.005);
    }
    // now the queries of two heads are nearly equal
    for (int e = 0; e < n_embd; ++e) {
        queries[n_embd + e] = queries[e] + 0.3f*queries[n_embd + e];
    }
    expect_made(queries, GGML_TYPE_F32, plain, 1e-4);
}

//
// operations
//

static ggml_context_ptr some_tensors() {
    return ggml_context_ptr(ggml_init({ 16u << 20, nullptr, false }));
}

// Push the first 600 tokens of the stream to the stream's archive and to the recaller's archive.
static void fill(recaller & recaller, stream & s) {
    s.push(600);
    const auto gather = [&](const int32_t * cells, int32_t n, const std::function<void (size_t, gathered &&)> & f) {
        for (int l = 0; l < n_layer; ++l) {
            gathered res = { GGML_TYPE_F32, GGML_TYPE_F32, {}, {} };
            for (int32_t c = 0; c < n; ++c) {
                std::vector<float> k(s.key(l, 0, cells[c]), s.key(l, 0, cells[c] + 1));
                for (int head = 0; head < n_head; ++head) {
                    s.tokens.rotations_of(l).rotate(k.data() + head*n_embd, cells[c]);
                }
                const auto add = [](std::vector<uint8_t> & bytes, const float * x) {
                    bytes.insert(bytes.end(), (const uint8_t *) x, (const uint8_t *) (x + n_dim));
                };
                add(res.k, k.data());
                add(res.v, s.value(l, 0, cells[c]));
            }
            f(l, std::move(res));
        }
        return true;
    };
    std::vector<int32_t> cells(600);
    std::iota(cells.begin(), cells.end(), 0);
    recaller.push(gather, { cells.data(), 600, 0, archive::max_pos, 600 }, 2, nullptr);
}

static std::vector<archive_shape> shapes() {
    return { n_layer, { n_head, n_embd, n_embd, rope_of(GGML_ROPE_TYPE_NEOX) } };
}

// Run an operation of layer 1 with n_thread threads.
static std::vector<float> computed(recaller & recaller, ggml_tensor * t, int n_thread) {
    std::vector<std::thread> threads;
    for (int ith = 0; ith < n_thread; ++ith) {
        threads.emplace_back([&, ith] { (recaller.params.n_synthetic > 0 ? synthesize_op : recall_op)(t, ith, n_thread, &recaller.recalled[1]); });
    }
    for (auto & thread : threads) {
        thread.join();
    }
    const auto * x = (const float *) t->data;
    return { x, x + ggml_nelements(t) };
}

CHECK(synthetic_cells_do_not_depend_on_the_number_of_threads) {
    constexpr int n_gqa = 2, n_tokens = 3;
    const auto params = params_of(GGML_TYPE_F32, 1 << 20, 300);
    stream s(params);
    recaller recaller(params, shapes());
    fill(recaller, s);
    expect_same(recaller.tokens, s.tokens);

    const auto ctx = some_tensors();
    ggml_tensor * k = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 1);
    ggml_tensor * q = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n_embd, n_gqa*n_head, n_tokens);
    ggml_tensor * rot = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n_tokens);
    for (int t = 0; t < n_tokens; ++t) {
        ((int32_t *) rot->data)[t] = 610 + t;
        const auto queries = queries_at(some_queries(n_gqa*n_head, 50 + 10*t), 610 + t);
        std::copy(queries.begin(), queries.end(), (float *) q->data + t*queries.size());
    }
    ggml_tensor * args[] = { q, rot, nullptr, nullptr };
    const int n_cell = n_tokens*n_gqa;
    ggml_tensor * t = recaller.build(ctx.get(), 1, k, args, GGML_TYPE_F32, n_cell*n_head*2*n_embd, plain);
    for (const bool is_separate : { false, true }) {
        recaller.is_separate = is_separate;
        const auto cells = computed(recaller, t, 1);
        EXPECT(cells == computed(recaller, t, 3));
        EXPECT(cells == computed(recaller, t, 5));

        // attention to a token's cells must have the same sum as attention to the archive
        for (int i = 0; i < n_tokens*n_head*n_gqa; ++i) {
            const int token = i/(n_head*n_gqa), head = i/n_gqa % n_head, g = i % n_gqa;
            const auto queries = some_queries(n_gqa*n_head, 50 + 10*token);
            const auto & row = s.tokens.clusters_of(1, head);
            const auto is_far = [&](int64_t i) { return i/256 < row.end() && row[i/256].origin.is_far; };
            // If several tokens attend together, far keys are at the distance n_near from the first of these tokens,
            // and so at the distance n_near + t from token t.
            const int64_t late = is_separate ? 0 : token;
            const auto expected = attention_by_definition(s, 1, head, queries[head*n_gqa + g], 610 + token, plain, is_far, late);
            double sum = 0.0;
            for (int c = 0; c < n_gqa; ++c) {
                const float * key = cells.data() + ((token*n_gqa + c)*n_head + head)*n_embd;
                sum += std::exp(plain.scale*dot((const float *) q->data + (token*n_head*n_gqa + head*n_gqa + g)*n_embd, key, n_embd));
            }
            EXPECT_NEAR(std::log(sum), expected.sum, 0.01);
        }
    }
}

static void expect_recalled(bool v_trans, ggml_type type, double tolerance) {
    constexpr int k = 7;
    auto params = params_of(type, 0);
    params.v_trans = v_trans;
    params.n_synthetic = 0;
    params.n_recall = k;
    stream s(params);
    recaller recaller(params, shapes());
    fill(recaller, s);
    recaller.tokens.set_base(600);

    const auto ctx = some_tensors();
    const auto floats = [&](int64_t n) { return ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n); };
    ggml_tensor * q   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n_embd, n_head, 1);
    ggml_tensor * rot = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 1);
    ((int32_t *) rot->data)[0] = 5;
    const auto queries = some_queries(n_head);
    const auto rotated_queries = queries_at(queries, 5);
    std::copy(rotated_queries.begin(), rotated_queries.end(), (float *) q->data);
    ggml_tensor * args[] = { q, rot, floats(n_head), floats(n_head) };
    for (int head = 0; head < n_head; ++head) {
        // there is one live cell: its product with the query is 0, and it gets all the probability
        ((float *) args[2]->data)[head] = 0.0f;
        ((float *) args[3]->data)[head] = 1.0f;
    }
    ggml_tensor * t = recaller.build(ctx.get(), 1, floats(1), args, GGML_TYPE_F32, k*n_head*2*n_embd, plain);
    const auto out = computed(recaller, t, 3);
    EXPECT(out == computed(recaller, t, 1));

    s.tokens.set_base(600);
    for (int head = 0; head < n_head; ++head) {
        const auto expected = attention_by_definition(s, 1, head, queries[head], 5, plain, [](int64_t) { return false; });
        std::vector<int64_t> order(600);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return expected.attn[a] > expected.attn[b]; });
        std::sort(order.begin(), order.begin() + k);
        for (int i = 0; i < k; ++i) {
            EXPECT(recaller.recalled[1].attended[head*k + i].pos == order[i]);
            const float * key   = out.data() + (i*n_head + head)*n_embd;
            const float * values = out.data() + k*n_dim;
            const auto expected_key = rotated({ s.key(1, head, order[i]), s.key(1, head, order[i]) + n_embd }, order[i] - 600, GGML_ROPE_TYPE_NEOX, n_embd, 0);
            for (int e = 0; e < n_embd; ++e) {
                EXPECT_NEAR(key[e], expected_key[e], 2e-3 + tolerance);
                const float value = values[v_trans ? (head*n_embd + e)*k + i : (i*n_head + head)*n_embd + e];
                EXPECT_NEAR(value, s.value(1, head, order[i])[e], tolerance);
            }
        }
    }
}

CHECK(recalled_tokens_are_those_with_the_most_attention) {
    for (const bool v_trans : { false, true }) {
        expect_recalled(v_trans, GGML_TYPE_F32, 0.0);
    }
}

CHECK(rewound_tokens_return_to_cells_rotated_to_the_new_base) {
    constexpr int n_cell = 16, cell = 3, n_back = 5;
    for (const bool v_trans : { false, true }) {
        auto params = params_of();
        params.v_trans = v_trans;
        stream s(params);
        recaller recaller(params, shapes());
        fill(recaller, s);

        const ggml_context_ptr ctx(ggml_init({ 8*ggml_tensor_overhead(), nullptr, true }));
        std::vector<layer> layers(n_layer);
        for (auto & l : layers) {
            l.k = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_dim, n_cell);
            l.v = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_dim, n_cell);
        }
        const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type()));
        ggml_backend_buffer_clear(buffer.get(), 0);

        recaller.rewind(layers, cell, n_back, 550, 100, 450);
        EXPECT(recaller.tokens.end() == 545 && recaller.tokens.base() == 100);
        for (int l = 0; l < n_layer; ++l) {
            const auto * k = (const float *) layers[l].k->data;
            const auto * v = (const float *) layers[l].v->data;
            for (int i = 0; i < n_cell*n_dim; ++i) {
                const int c = i/n_dim, head = i % n_dim/n_embd, e = i % n_embd;
                const float value = v[v_trans ? i % n_dim*n_cell + c : i];
                if (c < cell || c >= cell + n_back) {
                    EXPECT(k[i] == 0.0f && value == 0.0f); // all other cells must stay unchanged
                    continue;
                }
                const int64_t pos = 545 + c - cell;
                EXPECT(value == s.value(l, head, pos)[e]);
                const auto key = rotated({ s.key(l, head, pos), s.key(l, head, pos) + n_embd }, pos - 100, GGML_ROPE_TYPE_NEOX, n_embd, 0);
                EXPECT_NEAR(k[i], key[e], 2e-3);
            }
        }
    }
}

//
// threads
//

CHECK(work_is_done_once_by_any_number_of_threads) {
    for (const int n_thread : { 1, 3, 20 }) {
        std::vector<std::atomic<int>> done(10);
        parallel_for(n_thread, 10, [&](int i) { ++done[i]; });
        for (const auto & n : done) {
            EXPECT(n == 1);
        }
    }
    EXPECT(throws([] { parallel_for(3, 10, [](int i) { if (i == 7) throw std::runtime_error("7"); }); }));
}

CHECK(wait_finishes_the_work_of_a_group_and_returns_its_error) {
    std::vector<int> order;
    workers::group first, second;
    std::atomic<bool> all_are_queued(false);
    workers worker(1);
    for (int i = 0; i < 5; ++i) {
        worker.add(first, [&, i](size_t) {
            while (!all_are_queued) {
                std::this_thread::yield();
            }
            order.push_back(i);
        });
    }
    worker.add(second, [](size_t) { throw std::runtime_error("no room"); });
    all_are_queued = true;
    EXPECT(worker.wait(first).empty());
    EXPECT(order == std::vector<int>({ 0, 1, 2, 3, 4 }));
    EXPECT(worker.wait(second) == "no room");
    EXPECT(worker.wait(second).empty());
}

int main(int argc, char ** argv) {
    for (int i = 1; i < argc; ++i) {
        const auto check = checks().find(argv[i]);
        if (check == checks().end()) {
            printf("there is no check %s\n", argv[i]);
            return 1;
        }
        check->second();
    }
    return 0;
}
