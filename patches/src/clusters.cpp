#include "clusters.h"

#include "convert.h"
#include "products.h"

#include <algorithm>
#include <cmath>

namespace kvtool {

// blocks that memory is taken for at once
static constexpr size_t n_more = 16;

// how often means are computed anew
static constexpr int n_round = 4;

void row_clusters::add(int64_t block, const float * keys, const float * vs, bool is_far) {
    if (far.empty()) {
        first = block;
    }
    const size_t n = far.size() + 1;

    // not twice what is needed, as a vector would grow by itself
    const auto resize = [&](auto & list, size_t n_each) {
        if (list.capacity() < n*n_each) {
            list.reserve((n + n_more)*n_each);
        }
        list.resize(n*n_each);
    };
    resize(far,    1);
    resize(means,  side_bytes(n_embd_k, 8));
    resize(logs,   n_cluster);
    resize(values, n_cluster*n_embd_v);
    resize(tokens, n_token);
    resize(starts, n_cluster + 1);

    set(block, keys, vs, is_far);
}

void row_clusters::set(int64_t block, const float * keys, const float * vs, bool is_far) {
    const int64_t at = block - first;
    const int64_t d  = n_embd_k;

    // k-means; it begins with tokens that lie far apart in the text
    std::vector<float> mean(n_cluster*d);
    std::vector<float> columns(d*n_cluster);
    std::vector<float> near(n_token*n_cluster);
    std::vector<int>   of(n_token);
    std::vector<int>   size(n_cluster);

    for (int c = 0; c < n_cluster; ++c) {
        std::copy_n(keys + (c*n_token/n_cluster + n_token/n_cluster/2)*d, d, mean.begin() + c*d);
    }
    for (int round = 0; round <= n_round; ++round) {
        // the nearest mean m of x: that with the highest x m - m m/2
        for (int c = 0; c < n_cluster; ++c) {
            float square = 0.0f;
            for (int64_t e = 0; e < d; ++e) {
                columns[e*n_cluster + c] = mean[c*d + e];
                square += mean[c*d + e]*mean[c*d + e];
            }
            for (int i = 0; i < n_token; ++i) {
                near[i*n_cluster + c] = -0.5f*square;
            }
        }
        multiply_add(near.data(), n_cluster, keys, d, 1, columns.data(), n_cluster, n_token, d, n_cluster);

        std::fill(size.begin(), size.end(), 0);
        std::fill(mean.begin(), mean.end(), 0.0f);
        for (int i = 0; i < n_token; ++i) {
            const float * own = near.data() + i*n_cluster;
            of[i] = std::max_element(own, own + n_cluster) - own;
            size[of[i]]++;
            for (int64_t e = 0; e < d; ++e) {
                mean[of[i]*d + e] += keys[i*d + e];
            }
        }
        for (int c = 0; c < n_cluster; ++c) {
            for (int64_t e = 0; e < d && size[c] > 0; ++e) {
                mean[c*d + e] /= size[c];
            }
        }
    }

    far[at] = is_far;

    uint8_t  * order = tokens.data() + at*n_token;
    uint16_t * start = starts.data() + at*(n_cluster + 1);
    uint8_t  * side  = means .data() + at*side_bytes(d, 8);

    std::vector<float> value(n_embd_v);

    int n = 0;
    for (int c = 0; c < n_cluster; ++c) {
        start[c] = n;
        std::fill(value.begin(), value.end(), 0.0f);
        for (int i = 0; i < n_token; ++i) {
            if (of[i] == c) {
                order[n++] = i;
                for (int64_t e = 0; e < n_embd_v; ++e) {
                    value[e] += vs[i*n_embd_v + e]/size[c];
                }
            }
        }
        logs[at*n_cluster + c] = size[c] > 0 ? std::log((float) size[c]) : -INFINITY;
        set_key(side, c, mean.data() + c*d, d, 8);
        to_half(value.data(), values.data() + (at*n_cluster + c)*n_embd_v, n_embd_v);
    }
    start[n_cluster] = n;
}

void row_clusters::forget(int64_t block) {
    const int64_t n = std::min(std::max<int64_t>(block - first, 0), (int64_t) far.size());
    if (n == 0) {
        return;
    }
    far   .erase(far   .begin(), far   .begin() + n);
    means .erase(means .begin(), means .begin() + n*side_bytes(n_embd_k, 8));
    logs  .erase(logs  .begin(), logs  .begin() + n*n_cluster);
    values.erase(values.begin(), values.begin() + n*n_cluster*n_embd_v);
    tokens.erase(tokens.begin(), tokens.begin() + n*n_token);
    starts.erase(starts.begin(), starts.begin() + n*(n_cluster + 1));

    first += n;
}

void row_clusters::cut(int64_t block) {
    const int64_t n = std::max<int64_t>(block - first, 0);
    if (n >= (int64_t) far.size()) {
        return;
    }
    far   .resize(n);
    means .resize(n*side_bytes(n_embd_k, 8));
    logs  .resize(n*n_cluster);
    values.resize(n*n_cluster*n_embd_v);
    tokens.resize(n*n_token);
    starts.resize(n*(n_cluster + 1));
}

size_t row_clusters::block_bytes() const {
    return 1 + side_bytes(n_embd_k, 8) + n_cluster*sizeof(float) + n_cluster*n_embd_v*sizeof(ggml_fp16_t)
        + n_token + (n_cluster + 1)*sizeof(uint16_t);
}

} // namespace kvtool
