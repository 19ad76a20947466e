#include "clusters.h"

#include "convert.h"
#include "hadamard.h"
#include "kmeans.h"
#include "softmax.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtool {

// number of blocks for which a full list gets additional room
static constexpr size_t n_more = 16;

// Resize a list to n entries of n_each elements. If it has to grow, it grows in small steps: by default, its capacity
// might double
template <typename T>
static void grow(std::vector<T> & list, size_t n, size_t n_each) {
    if (list.capacity() < n*n_each) {
        list.reserve((n + n_more*n_cluster)*n_each);
    }
    list.resize(n*n_each);
}

static ggml_type type_of(int64_t n_embd_v, int n_map_v) {
    if (n_map_v > 0) {
        return GGML_TYPE_Q4_1;
    }
    return n_embd_v % ggml_blck_size(GGML_TYPE_Q8_0) == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
}

means::means(int64_t n_embd_k, int64_t n_embd_v, int n_map_v)
    : n_embd_v(n_embd_v), n_map_v(n_map_v), type_v(type_of(n_embd_v, n_map_v))
    , size_k(side_bytes(n_embd_k)), size_v(ggml_row_size(type_v, n_embd_v)) {}

void means::set_value(size_t i, std::vector<float> value) {
    hadamard(value.data(), n_embd_v, n_map_v);
    from_float(type_v, value.data(), values.data() + i*size_v, n_embd_v);
}

void means::get_value(size_t i, float * value) const {
    to_float(type_v, values.data() + i*size_v, value, n_embd_v);
    hadamard(value, n_embd_v, n_map_v);
}

void means::resize(size_t n) {
    grow(sides,   n/n_side, size_k);
    grow(sizes,   n, 1);
    grow(spreads, n, 1);
    grow(values,  n, size_v);
}

void means::reserve(size_t n) {
    sides  .reserve(n/n_side*size_k);
    sizes  .reserve(n);
    spreads.reserve(n);
    values .reserve(n*size_v);
}

void means::erase(size_t n) {
    sides  .erase(sides  .begin(), sides  .begin() + n/n_side*size_k);
    sizes  .erase(sizes  .begin(), sizes  .begin() + n);
    spreads.erase(spreads.begin(), spreads.begin() + n);
    values .erase(values .begin(), values .begin() + n*size_v);
}

membership sealed_block::members() const {
    membership res {};
    for (int c = 0; c < n_cluster; ++c) {
        for (int at = start[c]; at < start[c + 1]; ++at) {
            res[order[at]/2] |= c << 4*(order[at] % 2);
        }
    }
    return res;
}

void row_clusters::reserve(int64_t block, int64_t end) {
    const size_t n       = end - block;
    const size_t n_group = (end - 1)/n_grouped - block/n_grouped + 1;

    blocks  .reserve(n);
    member  .reserve(n*n_cluster);
    grouped .reserve(n_group);
    clusters.reserve(n*n_cluster);
    sets    .reserve(n_group*n_set);
}

void row_clusters::set(
        int64_t block, int from, const bearing & to, const float * keys, const float * vs, const membership * known) {
    if (blocks.empty()) {
        first = block;
        shares.assign(n_embd_k, 0);
    }
    if (block == end()) {
        blocks.emplace_back();
        const size_t n = blocks.size()*n_cluster;
        clusters.resize(n);
        grow(member, n, 1);
        const size_t n_group = block/n_grouped - first/n_grouped + 1;
        if (n_group > grouped.size()) {
            grouped.push_back(0);
            sets.resize(n_group*n_set);
        }
    }
    ungroup(block);

    const int n = store::n_block - from;

    std::vector<int> of(n);
    if (known) {
        for (int i = 0; i < n; ++i) {
            of[i] = (*known)[(from + i)/2] >> 4*((from + i) % 2) & 0x0F;
        }
    } else {
        of = kmeans(keys, n, n_embd_k, n_cluster);
    }

    auto & own = blocks[block - first];
    drop_shares(own);
    own.to    = to;
    own.first = from;
    std::iota(own.order.begin(), own.order.end(), 0);

    uint8_t * sides = clusters.sides.data() + (block - first)*(n_cluster/n_side)*side_size();

    own.start.fill(0);
    for (const int c : of) {
        own.start[c + 1]++;
    }
    own.start[0] = from;
    std::partial_sum(own.start.begin(), own.start.end(), own.start.begin());
    auto next = own.start;
    for (int i = 0; i < n; ++i) {
        own.order[next[of[i]]++] = from + i;
    }

    std::vector<float> key(n_embd_k), value(n_embd_v), squares(n_embd_k);

    for (int c = 0; c < n_cluster; ++c) {
        std::fill(key  .begin(), key  .end(), 0.0f);
        std::fill(value.begin(), value.end(), 0.0f);

        for (int at = own.start[c]; at < own.start[c + 1]; ++at) {
            const int i = own.order[at] - from;
            add(key  .data(), keys + i*n_embd_k, n_embd_k, 1.0f);
            add(value.data(), vs   + i*n_embd_v, n_embd_v, 1.0f);
        }
        const int size = own.start[c + 1] - own.start[c];
        for (float & x : key) {
            x /= std::max(size, 1);
        }
        for (float & x : value) {
            x /= std::max(size, 1);
        }

        float spread = 0.0f;
        for (int at = own.start[c]; at < own.start[c + 1]; ++at) {
            const float * x = keys + (own.order[at] - from)*n_embd_k;
            for (int64_t e = 0; e < n_embd_k; ++e) {
                const float square = (x[e] - key[e])*(x[e] - key[e]);
                squares[e] += square;
                spread     += square;
            }
        }
        const size_t to_place = place(block) + c;
        member[to_place] = c;
        clusters.sizes  [to_place] = size;
        clusters.spreads[to_place] = std::isfinite(spread) ? spread/std::max(size, 1) : 0.0f;
        set_key(sides + c/n_side*side_size(), c % n_side, key.data(), n_embd_k);
        clusters.set_value(to_place, value);
    }

    add_shares(own, squares);
    group(block);
}

// set the shares of a block (see sealed_block), and add them to the row's sums
void row_clusters::add_shares(sealed_block & own, const std::vector<float> & squares) {
    const float sum = std::accumulate(squares.begin(), squares.end(), 0.0f);
    own.shares.assign(n_embd_k, 0);
    for (int64_t e = 0; e < n_embd_k && sum > 0.0f && std::isfinite(sum); ++e) {
        own.shares[e] = std::lround(squares[e]/sum*UINT16_MAX);
        shares[e] += own.shares[e];
    }
}

void row_clusters::drop_shares(const sealed_block & own) {
    for (size_t e = 0; e < own.shares.size(); ++e) {
        shares[e] -= own.shares[e];
    }
}

float row_clusters::variance(const float * query) const {
    float res = 0.0f, sum = 0.0f;
    for (size_t e = 0; e < shares.size(); ++e) {
        res += shares[e]*query[e]*query[e];
        sum += shares[e];
    }
    return sum > 0.0f ? res/sum : 0.0f;
}

void row_clusters::permute(size_t at, const std::vector<uint8_t> & from) {
    const size_t n = from.size();

    const auto old_member  = std::vector<uint8_t>(member.begin() + at, member.begin() + at + n);
    const auto old_sizes   = std::vector<uint16_t>(clusters.sizes.begin() + at, clusters.sizes.begin() + at + n);
    const auto old_spreads = std::vector<float>(clusters.spreads.begin() + at, clusters.spreads.begin() + at + n);
    const auto old_values  = std::vector<uint8_t>(clusters.value(at), clusters.value(at + n));

    uint8_t * sides = clusters.sides.data() + at/n_side*side_size();
    const auto old_sides = std::vector<uint8_t>(sides, sides + n/n_side*side_size());

    for (size_t i = 0; i < n; ++i) {
        member          [at + i] = old_member [from[i]];
        clusters.sizes  [at + i] = old_sizes  [from[i]];
        clusters.spreads[at + i] = old_spreads[from[i]];
        std::copy_n(old_values.begin() + from[i]*clusters.size_v, clusters.size_v, clusters.values.begin() + (at + i)*clusters.size_v);
        copy_key(sides + i/n_side*side_size(), i % n_side, old_sides.data() + from[i]/n_side*side_size(), from[i] % n_side, n_embd_k);
    }
}

void row_clusters::group(int64_t block) {
    const int64_t begin = block/n_grouped*n_grouped;

    if (begin < first || begin + n_grouped > end()) {
        return;
    }
    for (int64_t b = begin; b < begin + n_grouped; ++b) {
        if (!((*this)[b].to == (*this)[begin].to)) {
            return;
        }
    }

    constexpr int n  = n_grouped*n_cluster;
    const size_t  at = place(begin);

    // All clusters have the same weight, except that empty clusters have weight 0. If larger clusters had more weight,
    // a cluster of one token might not get into a set of similar clusters
    std::vector<float> keys(n*n_embd_k), weight(n);
    for (int i = 0; i < n; ++i) {
        member[at + i] = i;
        weight[i] = clusters.sizes[at + i] > 0 ? 1.0f : 0.0f;
        get_key(clusters.sides.data() + (at + i)/n_side*side_size(), (at + i) % n_side, keys.data() + i*n_embd_k, n_embd_k);
    }
    const auto order = halved(keys.data(), weight.data(), n, n_embd_k, n_set);
    permute(at, { order.begin(), order.end() });

    const size_t to = set_place(block);

    std::vector<float> key(n_embd_k), value(n_embd_v), one(n_embd_v);
    for (int s = 0; s < n_set; ++s) {
        std::fill(key  .begin(), key  .end(), 0.0f);
        std::fill(value.begin(), value.end(), 0.0f);

        float all = 0.0f;
        for (int i = s*n_side; i < (s + 1)*n_side; ++i) {
            all += clusters.sizes[at + i];
        }
        for (int i = s*n_side; i < (s + 1)*n_side && all > 0.0f; ++i) {
            clusters.get_value(at + i, one.data());
            add(key  .data(), keys.data() + order[i]*n_embd_k, n_embd_k, clusters.sizes[at + i]/all);
            add(value.data(), one.data(), n_embd_v, clusters.sizes[at + i]/all);
        }
        // law of total variance: the mean spread of the clusters, plus the spread of their mean keys
        float spread = 0.0f;
        for (int i = s*n_side; i < (s + 1)*n_side && all > 0.0f; ++i) {
            float square = clusters.spreads[at + i];
            for (int64_t e = 0; e < n_embd_k; ++e) {
                const float x = keys[order[i]*n_embd_k + e] - key[e];
                square += x*x;
            }
            spread += square*clusters.sizes[at + i]/all;
        }
        sets.sizes  [to + s] = all;
        sets.spreads[to + s] = std::isfinite(spread) ? spread : 0.0f;
        set_key(sets.sides.data() + to/n_side*side_size(), s, key.data(), n_embd_k);
        sets.set_value(to + s, value);
    }
    grouped[block/n_grouped - first/n_grouped] = 1;
}

void row_clusters::ungroup(int64_t block) {
    const int64_t g = block/n_grouped;
    if (!grouped[g - first/n_grouped]) {
        return;
    }
    const size_t at = place(g*n_grouped);

    std::vector<uint8_t> from(n_grouped*n_cluster);
    for (size_t i = 0; i < from.size(); ++i) {
        from[member[at + i]] = i;
    }
    permute(at, from);
    for (size_t i = 0; i < from.size(); ++i) {
        member[at + i] = i % n_cluster;
    }
    grouped[g - first/n_grouped] = 0;
}

void row_clusters::forget(int64_t block) {
    const int64_t n = std::min(std::max<int64_t>(block - first, 0), (int64_t) blocks.size());
    if (n == 0) {
        return;
    }
    if (n < (int64_t) blocks.size()) {
        ungroup(block);
    }
    const int64_t n_group = n < (int64_t) blocks.size() ? block/n_grouped - first/n_grouped : grouped.size();

    std::for_each(blocks.begin(), blocks.begin() + n, [&](const sealed_block & own) { drop_shares(own); });
    blocks .erase(blocks .begin(), blocks .begin() + n);
    member .erase(member .begin(), member .begin() + n*n_cluster);
    grouped.erase(grouped.begin(), grouped.begin() + n_group);
    clusters.erase(n*n_cluster);
    sets.erase(n_group*n_set);

    first = blocks.empty() ? 0 : first + n;
}

void row_clusters::cut(int64_t block) {
    const int64_t n = std::max<int64_t>(block - first, 0);
    if (n >= (int64_t) blocks.size()) {
        return;
    }
    ungroup(first + n);
    const int64_t n_group = n > 0 ? (block - 1)/n_grouped - first/n_grouped + 1 : 0;

    std::for_each(blocks.begin() + n, blocks.end(), [&](const sealed_block & own) { drop_shares(own); });
    blocks .resize(n);
    member .resize(n*n_cluster);
    grouped.resize(n_group);
    clusters.resize(n*n_cluster);
    sets.resize(n_group*n_set);

    first = blocks.empty() ? 0 : first;
}

size_t row_clusters::block_bytes() const {
    const size_t one = side_bytes(n_embd_k)/n_side + sizeof(uint16_t) + sizeof(float) + clusters.size_v;
    return sizeof(sealed_block) + n_embd_k*sizeof(uint16_t) + n_cluster*(one + 1) + n_set*one/n_grouped;
}

} // namespace kvtool
