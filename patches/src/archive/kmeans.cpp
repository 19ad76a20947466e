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
static std::vector<float> initial_means(const float * x, int n, int64_t d, int n_cluster) {
    std::vector<float> res(n_cluster*d);
    std::vector<float> point(d, 0.0f);
    std::vector<float> squares(n), products(n), distances(n, INFINITY);
    for (int i = 0; i < n; ++i) {
        add(point.data(), x + i*d, d, 1.0f/n);
        for (int64_t e = 0; e < d; ++e) {
            squares[i] += x[i*d + e]*x[i*d + e];
        }
    }
    for (int c = 0; c < n_cluster; ++c) {
        // squared distance between each point x and one point p: x.x - 2 x.p + p.p
        float point_square = 0.0f;
        for (const float e : point) {
            point_square += e*e;
        }
        multiply_rows(GGML_TYPE_F32, (const uint8_t *) x, d*sizeof(float), n, d, point.data(), 1, products.data(), n);
        int farthest = 0;
        for (int i = 0; i < n; ++i) {
            const float distance = squares[i] - 2.0f*products[i] + point_square;
            distances[i] = c > 1 ? std::min(distances[i], distance) : distance;
            farthest = distances[i] > distances[farthest] ? i : farthest;
        }
        std::copy_n(x + farthest*d, d, point.begin());
        std::copy_n(x + farthest*d, d, res.begin() + c*d);
    }
    return res;
}

std::vector<int> kmeans(const float * x, int n, int64_t d, int n_cluster) {
    std::vector<float> mean = initial_means(x, n, d, n_cluster);
    std::vector<float> columns(d*n_cluster);
    std::vector<float> scores(n*n_cluster); // larger for nearer means
    std::vector<int>   assigned(n);
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
                scores[i*n_cluster + c] = -0.5f*square;
            }
        }
        multiply_add(scores.data(), n_cluster, x, d, 1, columns.data(), n_cluster, n, d, n_cluster);

        std::fill(size.begin(), size.end(), 0);
        std::fill(mean.begin(), mean.end(), 0.0f);
        for (int i = 0; i < n; ++i) {
            const float * point_scores = scores.data() + i*n_cluster;
            assigned[i] = std::max_element(point_scores, point_scores + n_cluster) - point_scores;
            size[assigned[i]]++;
            add(mean.data() + assigned[i]*d, x + i*d, d, 1.0f);
        }
        for (int c = 0; c < n_cluster; ++c) {
            for (int64_t e = 0; e < d && size[c] > 0; ++e) {
                mean[c*d + e] /= size[c];
            }
        }
    }
    return assigned;
}

// coordinates of these points along the direction of their largest variance
static std::vector<float> project(const float * x, const float * weight, const int * points, int n, int64_t d) {
    std::vector<float> mean(d, 0.0f);
    float weight_sum = 0.0f;
    for (int i = 0; i < n; ++i) {
        add(mean.data(), x + points[i]*d, d, weight[points[i]]);
        weight_sum += weight[points[i]];
    }
    for (float & m : mean) {
        m /= std::max(weight_sum, 1e-30f);
    }

    std::vector<float> centered(n*d);
    std::vector<float> squares(n);
    for (int i = 0; i < n; ++i) {
        for (int64_t e = 0; e < d; ++e) {
            centered[i*d + e] = x[points[i]*d + e] - mean[e];
        }
    }
    // compute several sums at once, so that an addition need not wait for the previous one
    constexpr int n_sum = 8;
    for (int begin = 0; begin < n; begin += n_sum) {
        const int n_point = std::min(n - begin, n_sum);
        float sums[n_sum] = {};
        for (int64_t e = 0; e < d; ++e) {
            for (int i = 0; i < n_point; ++i) {
                const float r = centered[(begin + i)*d + e];
                sums[i] += r*r*weight[points[begin + i]];
            }
        }
        std::copy_n(sums, n_point, squares.begin() + begin);
    }

    // power method; it starts with the point farthest from the mean
    const float * farthest = centered.data() + (std::max_element(squares.begin(), squares.end()) - squares.begin())*d;
    std::vector<float> direction(farthest, farthest + d);
    std::vector<float> coordinates(n);
    for (int i_iteration = 0; i_iteration <= n_iteration; ++i_iteration) {
        float largest = 0.0f;
        for (const float e : direction) {
            largest = std::max(largest, std::fabs(e));
        }
        for (float & e : direction) {
            e /= std::max(largest, 1e-30f);
        }
        multiply_rows(GGML_TYPE_F32, (const uint8_t *) centered.data(), d*sizeof(float), n, d, direction.data(), 1, coordinates.data(), 1);
        std::fill(direction.begin(), direction.end(), 0.0f);
        for (int i = 0; i < n; ++i) {
            add(direction.data(), centered.data() + i*d, d, coordinates[i]*weight[points[i]]);
        }
    }
    return coordinates;
}

std::vector<int> halved(const float * x, const float * weight, int n, int64_t d, int n_set) {
    std::vector<int> res(n);
    std::iota(res.begin(), res.end(), 0);

    for (int size = n; size > n/n_set; size /= 2) {
        for (int begin = 0; begin < n; begin += size) {
            const auto coordinates = project(x, weight, res.data() + begin, size, d);

            std::vector<int> order(size);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return coordinates[a] < coordinates[b]; });

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
