#include "clusters.h"

#include "convert.h"
#include "hadamard.h"
#include "kmeans.h"
#include "softmax.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvtool {

// number of blocks for which a full list gets additional memory
static constexpr size_t n_growth = 16;

// Resize a list to n entries of n_element elements. If it has to grow, it grows in small steps: by default, its
// capacity might double
template <typename T>
static void grow(std::vector<T> & list, size_t n, size_t n_element) {
    if (list.capacity() < n*n_element) {
        list.reserve((n + n_growth*n_cluster)*n_element);
    }
    list.resize(n*n_element);
}

static ggml_type type_of(int64_t n_embd_v, int n_map_v) {
    if (n_map_v > 0) {
        return GGML_TYPE_Q4_1;
    }
    return n_embd_v % ggml_blck_size(GGML_TYPE_Q8_0) == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
}

means::means(int64_t n_embd_k, int64_t n_embd_v, int n_map_v)
    : n_embd_v(n_embd_v), n_map_v(n_map_v), type_v(type_of(n_embd_v, n_map_v))
    , size_k(pack_bytes(n_embd_k)), size_v(ggml_row_size(type_v, n_embd_v)) {}

void means::set_value(size_t i, std::vector<float> value) {
    hadamard(value.data(), n_embd_v, n_map_v);
    from_float(type_v, value.data(), values.data() + i*size_v, n_embd_v);
}

void means::get_value(size_t i, float * value) const {
    to_float(type_v, values.data() + i*size_v, value, n_embd_v);
    hadamard(value, n_embd_v, n_map_v);
}

void means::resize(size_t n) {
    grow(packs,   n/n_pack, size_k);
    grow(sizes,   n, 1);
    grow(spreads, n, 1);
    grow(values,  n, size_v);
}

void means::reserve(size_t n) {
    packs  .reserve(n/n_pack*size_k);
    sizes  .reserve(n);
    spreads.reserve(n);
    values .reserve(n*size_v);
}

void means::erase(size_t n) {
    packs  .erase(packs  .begin(), packs  .begin() + n/n_pack*size_k);
    sizes  .erase(sizes  .begin(), sizes  .begin() + n);
    spreads.erase(spreads.begin(), spreads.begin() + n);
    values .erase(values .begin(), values .begin() + n*size_v);
}

membership sealed_block::members() const {
    membership res {};
    for (int c = 0; c < n_cluster; ++c) {
        for (int slot = start[c]; slot < start[c + 1]; ++slot) {
            res[order[slot]/2] |= c << 4*(order[slot] % 2);
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
        int64_t block, int first_token, const key_origin & origin, const float * keys, const float * values, const membership * members) {
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

    const int n = store::n_block - first_token;

    std::vector<int> assigned(n); // the cluster of each token
    if (members) {
        for (int i = 0; i < n; ++i) {
            assigned[i] = (*members)[(first_token + i)/2] >> 4*((first_token + i) % 2) & 0x0F;
        }
    } else {
        assigned = kmeans(keys, n, n_embd_k, n_cluster);
    }

    auto & sealed = blocks[block - first];
    drop_shares(sealed);
    sealed.origin = origin;
    sealed.first  = first_token;
    std::iota(sealed.order.begin(), sealed.order.end(), 0);

    uint8_t * packs = clusters.packs.data() + (block - first)*(n_cluster/n_pack)*pack_size();

    sealed.start.fill(0);
    for (const int c : assigned) {
        sealed.start[c + 1]++;
    }
    sealed.start[0] = first_token;
    std::partial_sum(sealed.start.begin(), sealed.start.end(), sealed.start.begin());
    auto next = sealed.start;
    for (int i = 0; i < n; ++i) {
        sealed.order[next[assigned[i]]++] = first_token + i;
    }

    std::vector<float> key(n_embd_k), value(n_embd_v), squares(n_embd_k);

    for (int c = 0; c < n_cluster; ++c) {
        std::fill(key  .begin(), key  .end(), 0.0f);
        std::fill(value.begin(), value.end(), 0.0f);

        for (int slot = sealed.start[c]; slot < sealed.start[c + 1]; ++slot) {
            const int i = sealed.order[slot] - first_token;
            add(key  .data(), keys   + i*n_embd_k, n_embd_k, 1.0f);
            add(value.data(), values + i*n_embd_v, n_embd_v, 1.0f);
        }
        const int size = sealed.start[c + 1] - sealed.start[c];
        for (float & x : key) {
            x /= std::max(size, 1);
        }
        for (float & x : value) {
            x /= std::max(size, 1);
        }

        float spread = 0.0f;
        for (int slot = sealed.start[c]; slot < sealed.start[c + 1]; ++slot) {
            const float * x = keys + (sealed.order[slot] - first_token)*n_embd_k;
            for (int64_t e = 0; e < n_embd_k; ++e) {
                const float square = (x[e] - key[e])*(x[e] - key[e]);
                squares[e] += square;
                spread     += square;
            }
        }
        const size_t i_cluster = first_cluster(block) + c;
        member[i_cluster] = c;
        clusters.sizes  [i_cluster] = size;
        clusters.spreads[i_cluster] = std::isfinite(spread) ? spread/std::max(size, 1) : 0.0f;
        set_key(packs + c/n_pack*pack_size(), c % n_pack, key.data(), n_embd_k);
        clusters.set_value(i_cluster, value);
    }

    add_shares(sealed, squares);
    group(block);
}

// set the shares of a block (see sealed_block), and add them to the row's sums
void row_clusters::add_shares(sealed_block & sealed, const std::vector<float> & squares) {
    const float sum = std::accumulate(squares.begin(), squares.end(), 0.0f);
    sealed.shares.assign(n_embd_k, 0);
    for (int64_t e = 0; e < n_embd_k && sum > 0.0f && std::isfinite(sum); ++e) {
        sealed.shares[e] = std::lround(squares[e]/sum*UINT16_MAX);
        shares[e] += sealed.shares[e];
    }
}

void row_clusters::drop_shares(const sealed_block & sealed) {
    for (size_t e = 0; e < sealed.shares.size(); ++e) {
        shares[e] -= sealed.shares[e];
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

void row_clusters::permute(size_t offset, const std::vector<uint8_t> & src) {
    const size_t n = src.size();

    const auto old_member  = std::vector<uint8_t>(member.begin() + offset, member.begin() + offset + n);
    const auto old_sizes   = std::vector<uint16_t>(clusters.sizes.begin() + offset, clusters.sizes.begin() + offset + n);
    const auto old_spreads = std::vector<float>(clusters.spreads.begin() + offset, clusters.spreads.begin() + offset + n);
    const auto old_values  = std::vector<uint8_t>(clusters.value(offset), clusters.value(offset + n));

    uint8_t * packs = clusters.packs.data() + offset/n_pack*pack_size();
    const auto old_packs = std::vector<uint8_t>(packs, packs + n/n_pack*pack_size());

    for (size_t i = 0; i < n; ++i) {
        member          [offset + i] = old_member [src[i]];
        clusters.sizes  [offset + i] = old_sizes  [src[i]];
        clusters.spreads[offset + i] = old_spreads[src[i]];
        std::copy_n(old_values.begin() + src[i]*clusters.size_v, clusters.size_v, clusters.values.begin() + (offset + i)*clusters.size_v);
        copy_key(packs + i/n_pack*pack_size(), i % n_pack, old_packs.data() + src[i]/n_pack*pack_size(), src[i] % n_pack, n_embd_k);
    }
}

void row_clusters::group(int64_t block) {
    const int64_t begin = block/n_grouped*n_grouped;

    if (begin < first || begin + n_grouped > end()) {
        return;
    }
    for (int64_t b = begin; b < begin + n_grouped; ++b) {
        if (!((*this)[b].origin == (*this)[begin].origin)) {
            return;
        }
    }

    constexpr int n      = n_grouped*n_cluster;
    const size_t  offset = first_cluster(begin);

    // All clusters have the same weight, except that empty clusters have weight 0. If larger clusters had more weight,
    // a cluster of one token might not get into a set of similar clusters
    std::vector<float> keys(n*n_embd_k), weight(n);
    for (int i = 0; i < n; ++i) {
        member[offset + i] = i;
        weight[i] = clusters.sizes[offset + i] > 0 ? 1.0f : 0.0f;
        get_key(clusters.packs.data() + (offset + i)/n_pack*pack_size(), (offset + i) % n_pack, keys.data() + i*n_embd_k, n_embd_k);
    }
    const auto order = halved(keys.data(), weight.data(), n, n_embd_k, n_set);
    permute(offset, { order.begin(), order.end() });

    std::vector<float> key(n_embd_k), value(n_embd_v), cluster_value(n_embd_v);
    for (int s = 0; s < n_set; ++s) {
        std::fill(key  .begin(), key  .end(), 0.0f);
        std::fill(value.begin(), value.end(), 0.0f);

        float n_token = 0.0f;
        for (int i = s*n_pack; i < (s + 1)*n_pack; ++i) {
            n_token += clusters.sizes[offset + i];
        }
        for (int i = s*n_pack; i < (s + 1)*n_pack && n_token > 0.0f; ++i) {
            clusters.get_value(offset + i, cluster_value.data());
            add(key  .data(), keys.data() + order[i]*n_embd_k, n_embd_k, clusters.sizes[offset + i]/n_token);
            add(value.data(), cluster_value.data(), n_embd_v, clusters.sizes[offset + i]/n_token);
        }
        // law of total variance: the mean spread of the clusters, plus the spread of their mean keys
        float spread = 0.0f;
        for (int i = s*n_pack; i < (s + 1)*n_pack && n_token > 0.0f; ++i) {
            float square = clusters.spreads[offset + i];
            for (int64_t e = 0; e < n_embd_k; ++e) {
                const float x = keys[order[i]*n_embd_k + e] - key[e];
                square += x*x;
            }
            spread += square*clusters.sizes[offset + i]/n_token;
        }
        const size_t i_set = first_set(block) + s;
        sets.sizes  [i_set] = n_token;
        sets.spreads[i_set] = std::isfinite(spread) ? spread : 0.0f;
        set_key(sets.packs.data() + i_set/n_pack*pack_size(), s, key.data(), n_embd_k);
        sets.set_value(i_set, value);
    }
    grouped[block/n_grouped - first/n_grouped] = 1;
}

void row_clusters::ungroup(int64_t block) {
    const int64_t g = block/n_grouped;
    if (!grouped[g - first/n_grouped]) {
        return;
    }
    const size_t offset = first_cluster(g*n_grouped);

    std::vector<uint8_t> src(n_grouped*n_cluster);
    for (size_t i = 0; i < src.size(); ++i) {
        src[member[offset + i]] = i;
    }
    permute(offset, src);
    for (size_t i = 0; i < src.size(); ++i) {
        member[offset + i] = i % n_cluster;
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

    std::for_each(blocks.begin(), blocks.begin() + n, [&](const sealed_block & sealed) { drop_shares(sealed); });
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

    std::for_each(blocks.begin() + n, blocks.end(), [&](const sealed_block & sealed) { drop_shares(sealed); });
    blocks .resize(n);
    member .resize(n*n_cluster);
    grouped.resize(n_group);
    clusters.resize(n*n_cluster);
    sets.resize(n_group*n_set);

    first = blocks.empty() ? 0 : first;
}

size_t row_clusters::block_bytes() const {
    const size_t mean_bytes = pack_bytes(n_embd_k)/n_pack + sizeof(uint16_t) + sizeof(float) + clusters.size_v;
    return sizeof(sealed_block) + n_embd_k*sizeof(uint16_t) + n_cluster*(mean_bytes + 1) + n_set*mean_bytes/n_grouped;
}

} // namespace kvtool
