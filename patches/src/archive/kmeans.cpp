#include "kmeans.h"

#include "products.h"
#include "softmax.h"
#include "row-products.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtool {

// iterations after the first assignment
static constexpr int n_round = 4;

// iterations of the power method
static constexpr int n_iteration = 3;

// Choose the initial means. The first is the point farthest from the mean of all points. Each next one is the point
// farthest from all points chosen so far. In this way an unusual point, such as a number in a text, gets a separate
// cluster, and the search finds it.
static std::vector<float> far_apart(const float * x, int n, int64_t d, int n_some) {
    std::vector<float> res(n_some*d);
    std::vector<float> from(d, 0.0f);
    std::vector<float> square(n), product(n), least(n, INFINITY);
    for (int i = 0; i < n; ++i) {
        add(from.data(), x + i*d, d, 1.0f/n);
        for (int64_t e = 0; e < d; ++e) {
            square[i] += x[i*d + e]*x[i*d + e];
        }
    }
    for (int c = 0; c < n_some; ++c) {
        // squared distance between each point x and one point p: x.x - 2 x.p + p.p
        float own = 0.0f;
        for (const float e : from) {
            own += e*e;
        }
        multiply_rows(GGML_TYPE_F32, (const uint8_t *) x, d*sizeof(float), n, d, from.data(), 1, product.data(), n);
        int farthest = 0;
        for (int i = 0; i < n; ++i) {
            const float distance = square[i] - 2.0f*product[i] + own;
            least[i] = c > 1 ? std::min(least[i], distance) : distance;
            farthest = least[i] > least[farthest] ? i : farthest;
        }
        std::copy_n(x + farthest*d, d, from.begin());
        std::copy_n(x + farthest*d, d, res.begin() + c*d);
    }
    return res;
}

std::vector<int> kmeans(const float * x, int n, int64_t d, int n_cluster) {
    std::vector<float> mean = far_apart(x, n, d, n_cluster);
    std::vector<float> columns(d*n_cluster);
    std::vector<float> near(n*n_cluster);
    std::vector<int>   of(n);
    std::vector<int>   size(n_cluster);

    for (int round = 0; round <= n_round; ++round) {
        // the mean m that is nearest to x maximizes x.m - m.m/2
        for (int c = 0; c < n_cluster; ++c) {
            float square = 0.0f;
            for (int64_t e = 0; e < d; ++e) {
                columns[e*n_cluster + c] = mean[c*d + e];
                square += mean[c*d + e]*mean[c*d + e];
            }
            for (int i = 0; i < n; ++i) {
                near[i*n_cluster + c] = -0.5f*square;
            }
        }
        multiply_add(near.data(), n_cluster, x, d, 1, columns.data(), n_cluster, n, d, n_cluster);

        std::fill(size.begin(), size.end(), 0);
        std::fill(mean.begin(), mean.end(), 0.0f);
        for (int i = 0; i < n; ++i) {
            const float * own = near.data() + i*n_cluster;
            of[i] = std::max_element(own, own + n_cluster) - own;
            size[of[i]]++;
            add(mean.data() + of[i]*d, x + i*d, d, 1.0f);
        }
        for (int c = 0; c < n_cluster; ++c) {
            for (int64_t e = 0; e < d && size[c] > 0; ++e) {
                mean[c*d + e] /= size[c];
            }
        }
    }
    return of;
}

// coordinates of some points along the direction of their largest variance
static std::vector<float> along(const float * x, const float * weight, const int * some, int n, int64_t d) {
    std::vector<float> mean(d, 0.0f);
    float all = 0.0f;
    for (int i = 0; i < n; ++i) {
        add(mean.data(), x + some[i]*d, d, weight[some[i]]);
        all += weight[some[i]];
    }
    for (float & m : mean) {
        m /= std::max(all, 1e-30f);
    }

    std::vector<float> rest(n*d);
    std::vector<float> far(n);
    for (int i = 0; i < n; ++i) {
        for (int64_t e = 0; e < d; ++e) {
            rest[i*d + e] = x[some[i]*d + e] - mean[e];
        }
    }
    // compute several sums at once, so that an addition need not wait for the previous one
    constexpr int n_sum = 8;
    for (int begin = 0; begin < n; begin += n_sum) {
        const int n_own = std::min(n - begin, n_sum);
        float sums[n_sum] = {};
        for (int64_t e = 0; e < d; ++e) {
            for (int i = 0; i < n_own; ++i) {
                const float r = rest[(begin + i)*d + e];
                sums[i] += r*r*weight[some[begin + i]];
            }
        }
        std::copy_n(sums, n_own, far.begin() + begin);
    }

    // power method; it starts with the point farthest from the mean
    const float * farthest = rest.data() + (std::max_element(far.begin(), far.end()) - far.begin())*d;
    std::vector<float> direction(farthest, farthest + d);
    std::vector<float> at(n);
    for (int i_iteration = 0; i_iteration <= n_iteration; ++i_iteration) {
        float most = 0.0f;
        for (const float e : direction) {
            most = std::max(most, std::fabs(e));
        }
        for (float & e : direction) {
            e /= std::max(most, 1e-30f);
        }
        multiply_rows(GGML_TYPE_F32, (const uint8_t *) rest.data(), d*sizeof(float), n, d, direction.data(), 1, at.data(), 1);
        std::fill(direction.begin(), direction.end(), 0.0f);
        for (int i = 0; i < n; ++i) {
            add(direction.data(), rest.data() + i*d, d, at[i]*weight[some[i]]);
        }
    }
    return at;
}

std::vector<int> halved(const float * x, const float * weight, int n, int64_t d, int n_set) {
    std::vector<int> res(n);
    std::iota(res.begin(), res.end(), 0);

    for (int size = n; size > n/n_set; size /= 2) {
        for (int begin = 0; begin < n; begin += size) {
            const auto at = along(x, weight, res.data() + begin, size, d);

            std::vector<int> order(size);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return at[a] < at[b]; });

            std::vector<int> sorted(size);
            for (int i = 0; i < size; ++i) {
                sorted[i] = res[begin + order[i]];
            }
            std::copy(sorted.begin(), sorted.end(), res.begin() + begin);
        }
    }
    return res;
}

} // namespace kvtool
