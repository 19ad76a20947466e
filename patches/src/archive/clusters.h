// Clusters of a row's archived keys. A search ranks clusters by their mean keys, and by how much their keys differ. The
// means also represent all tokens that are not attended to exactly.

#pragma once

#include "index.h"
#include "store.h"

#include "ggml.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace kvtool {

constexpr int n_cluster = 16;                     // Number of clusters in a block of archived tokens.
constexpr int n_set     = n_pack;                 // Number of sets in a group of blocks. A set has n_pack clusters.
constexpr int n_grouped = n_set*n_pack/n_cluster; // Number of blocks in a group.

static_assert(n_cluster <= 16,          "a membership has 4 bits for a token's cluster");
static_assert(n_cluster % n_pack == 0,  "the mean keys of a block fill whole packs");
static_assert(n_set*n_pack <= 256,      "row_clusters::member has 8 bits for a cluster of a group");
static_assert(n_grouped == n_set,       "residents give the blocks and the sets of a group the same numbers");
static_assert(store::n_block <= 256,    "sealed_block::order has 8 bits for a token of a block");

// how a block's keys are rotated (RoPE) while they are clustered
struct key_origin {
    bool    is_far; // True for tokens beyond n_near: RoPE is undone, so their keys are at position 0.
    int64_t base;   // If is_far is false, keys are rotated to their positions minus this base.

    bool operator==(const key_origin & other) const { return is_far == other.is_far && (is_far || base == other.base); }
};

// Cluster of each token of a block, two tokens per byte; 0 for tokens before the archive's first token. All other data
// of a clustered block can be computed from these numbers and the block's keys and values.
using membership = std::array<uint8_t, store::n_block/2>;

// a clustered block: its tokens are stored in the order of their clusters
struct sealed_block {
    key_origin origin;
    int        first; // index of the block's first archived token; not 0 if the archive begins inside the block

    std::array<uint8_t,  store::n_block> order; // Index of the token that is stored in each slot of the block.
    std::array<uint16_t, n_cluster + 1> start; // First slot of each cluster's tokens.

    std::vector<uint16_t> shares; // Share of each key element in the clusters' spread; the sum is about UINT16_MAX.

    membership members() const;
};

// Summaries of clusters, or of sets of clusters. A summary has a mean key, a mean value, the number of tokens, and the
// spread of the keys: their variance, summed over all elements. Mean keys have 8 bits and are stored in packs of 16
// keys (see index.h). If archived values are multiplied by a Hadamard matrix, mean values are multiplied by the same
// matrix and have 4 bits. Otherwise mean values have 8 bits, or are F16 if the value length does not allow 8 bits
struct means {
    // n_map_v: size of the Hadamard matrix; 0 if there is no matrix
    means(int64_t n_embd_k, int64_t n_embd_v, int n_map_v);

    std::vector<uint8_t>  packs;
    std::vector<uint16_t> sizes;
    std::vector<float>    spreads;
    std::vector<uint8_t>  values;

    void resize (size_t n);
    void reserve(size_t n);
    void erase  (size_t n); // remove the first n summaries

    // a mean value in its stored format
    const uint8_t * value(size_t i) const { return values.data() + i*size_v; }

    void set_value(size_t i, std::vector<float> value);
    void get_value(size_t i, float * value) const;

    int64_t   n_embd_v;
    int       n_map_v;
    ggml_type type_v;
    size_t    size_k; // Size of a pack in bytes. A pack has 16 mean keys.
    size_t    size_v; // Size of a mean value in bytes.
};

// Clusters of a row's complete blocks, which are consecutive. `clusters` has n_cluster consecutive entries per block.
// i_cluster is the index of an entry. When all n_grouped blocks of a group have clusters and their keys have the same
// origin, the clusters of the group are reordered set by set. An entry of one block may then hold a cluster of another
// block of the group.
class row_clusters {
public:
    // n_map_v: see `means`
    row_clusters(int64_t n_embd_k, int64_t n_embd_v, int n_map_v = 0)
        : clusters(n_embd_k, n_embd_v, n_map_v), sets(n_embd_k, n_embd_v, n_map_v), n_embd_k(n_embd_k), n_embd_v(n_embd_v) {}

    // index of the first block, and index after the last block; both are 0 if there are no blocks
    int64_t begin() const { return first; }
    int64_t end()   const { return first + (int64_t) blocks.size(); }

    const sealed_block & operator[](int64_t block) const { return blocks[block - first]; }

    // Compute the clusters of the next block, or of an existing block again. keys: [256 - first_token][n_embd_k],
    // rotated according to `origin`. values: [256 - first_token][n_embd_v]. members: the cluster of each token, or null
    // to compute it. The caller must then reorder the block's tokens according to its `order`.
    void set(int64_t block, int first_token, const key_origin & origin, const float * keys, const float * values, const membership * members);

    // allocate memory for the clusters of these blocks; growing in small steps would take longer than clustering
    void reserve(int64_t block, int64_t end);

    // remove the blocks before `block`
    void forget(int64_t block);

    // remove `block` and the blocks after it
    void cut(int64_t block);

    void clear() { forget(end()); }

    // index of the first of a block's n_cluster entries in `clusters`
    size_t first_cluster(int64_t block) const { return (block - first)*n_cluster; }

    // block_of returns the block of a cluster. index_in_block returns the cluster's index in its block
    int64_t block_of(size_t i_cluster) const {
        const int64_t block = first + (int64_t) i_cluster/n_cluster;
        return is_grouped(block) ? block/n_grouped*n_grouped + member[i_cluster]/n_cluster : block;
    }
    int index_in_block(size_t i_cluster) const { return member[i_cluster] % n_cluster; }

    // true if the block's group is ordered set by set; its sets then have summaries
    bool is_grouped(int64_t block) const { return grouped[block/n_grouped - first/n_grouped]; }

    // index of a set's first cluster
    size_t first_in_set(size_t i_set) const {
        const int64_t group = first/n_grouped + (int64_t) i_set/n_set;
        return first_cluster(group*n_grouped) + i_set % n_set*n_pack;
    }

    // index of the first set of a block's group in `sets`
    size_t first_set(int64_t block) const { return (block/n_grouped - first/n_grouped)*n_set; }

    means clusters;
    means sets;

    size_t pack_size() const { return pack_bytes(n_embd_k); }

    // Variance of the products (query . key) over the keys of a cluster with spread 1. Keys differ more in some
    // elements than in others; the proportions are assumed to be the same for all clusters of the row
    float variance(const float * query) const;

    // bytes of a block's clusters
    size_t block_bytes() const;

private:
    const int64_t n_embd_k;
    const int64_t n_embd_v;

    int64_t first = 0;

    std::vector<sealed_block> blocks;

    // For each entry of `clusters`, the index of its cluster. The index counts from the start of the group if the group
    // is ordered set by set, otherwise from the start of the block
    std::vector<uint8_t> member;

    std::vector<uint8_t> grouped; // for each group: 1 if the group is ordered set by set, else 0

    std::vector<uint64_t> shares; // for each element of a key: the sum of its shares in all blocks

    void add_shares (sealed_block & sealed, const std::vector<float> & squares);
    void drop_shares(const sealed_block & sealed);

    void group  (int64_t block);
    void ungroup(int64_t block);

    // reorder the clusters of a group: entry offset + src[i] moves to offset + i
    void permute(size_t offset, const std::vector<uint8_t> & src);
};

// A cluster's keys get more attention than as many copies of their mean key. Return the logarithm of the ratio. exp is
// convex, so the ratio grows with the variance of the logits. For normally distributed logits, the logarithm is half of
// the variance. Without the limit, a cluster with a few very different keys would always be chosen
inline float spread_gain(float variance) { return 0.5f*std::min(variance, 16.0f); }

} // namespace kvtool
