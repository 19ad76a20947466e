// Clusters of a row's archived keys: what a search ranks, and what stands for the tokens that it does not look into.

#pragma once

#include "convert.h"
#include "index.h"
#include "store.h"

#include "ggml.h"

#include <array>
#include <cstdint>
#include <vector>

namespace kvtool {

// Of a block of archived tokens, and blocks of a group. A group's clusters are in as many sets as a side has keys, and a set has
// as many clusters.
constexpr int n_cluster = 16;
constexpr int n_set     = n_side;
constexpr int n_grouped = n_set*n_side/n_cluster;

// how the keys of a block are rotated, once they are turned to what its clusters' are
struct bearing {
    bool    is_far; // as before RoPE
    int64_t base;   // or to their positions less this

    bool operator==(const bearing & other) const { return is_far == other.is_far && (is_far || base == other.base); }
};

// which cluster each token of a block is in, two tokens a byte; 0 where there is none. All else follows from it.
using membership = std::array<uint8_t, store::n_block/2>;

// a block's tokens by their clusters
struct sealed_block {
    bearing to;
    int     first; // its first token: not 0 where the archive begins in it

    std::array<uint8_t,  store::n_block> order; // the token that lies in each place
    std::array<uint16_t, n_cluster + 1> start; // where a cluster's begin

    membership members() const;
};

// What is known of some clusters, or of sets of them: mean keys in 8 bits by sides, numbers of tokens, and mean values, which are
// in 8 bits as well where they can be.
struct means {
    means(int64_t n_embd_k, int64_t n_embd_v);

    std::vector<uint8_t>  sides;
    std::vector<uint16_t> sizes;
    std::vector<uint8_t>  values;

    void resize (size_t n);
    void reserve(size_t n);
    void erase  (size_t n); // the first n

    const uint8_t * value(size_t i) const { return values.data() + i*size_v; }

    void set_value(size_t i, const float * value) { from_float(type_v, value, values.data() + i*size_v, n_embd_v); }
    void get_value(size_t i, float * value) const { to_float  (type_v, values.data() + i*size_v, value, n_embd_v); }

    int64_t   n_embd_v;
    ggml_type type_v;
    size_t    size_k; // bytes of a side
    size_t    size_v; // of a value
};

// The clusters of a row's complete blocks, which follow each other. Clusters lie in places, n_cluster of them a block; those of
// a group are put in order of their sets once they are rotated alike.
class row_clusters {
public:
    row_clusters(int64_t n_embd_k, int64_t n_embd_v)
        : clusters(n_embd_k, n_embd_v), sets(n_embd_k, n_embd_v), n_embd_k(n_embd_k), n_embd_v(n_embd_v) {}

    // both 0 where there is none
    int64_t begin() const { return first; }
    int64_t end()   const { return first + (int64_t) blocks.size(); }

    const sealed_block & operator[](int64_t block) const { return blocks[block - first]; }

    // Clusters for a block that there is, or for the one that follows. keys: [256 - first][n_embd_k], rotated as said; values:
    // [256 - first][n_embd_v]; known: which cluster each token is in, or null. What the store has to be put in order of afterwards
    // is in the block.
    void set(int64_t block, int first, const bearing & to, const float * keys, const float * values, const membership * known);

    // takes the memory for clusters of these blocks at once: to grow by a few at a time takes longer than to make them
    void reserve(int64_t block, int64_t end);

    // forgets the blocks before this one
    void forget(int64_t block);

    // forgets the blocks from this one on
    void cut(int64_t block);

    void clear() { forget(end()); }

    // the places of a block begin here
    size_t place(int64_t block) const { return (block - first)*n_cluster; }

    // the block of the cluster in a place, and which of its clusters it is
    int64_t block_at(size_t place) const {
        const int64_t block = first + (int64_t) place/n_cluster;
        return is_grouped(block) ? block/n_grouped*n_grouped + member[place]/n_cluster : block;
    }
    int     cluster_at(size_t place) const { return member[place] % n_cluster; }

    // whether the group of a block is in order: then its sets are known
    bool is_grouped(int64_t block) const { return grouped[block/n_grouped - first/n_grouped]; }

    // where the clusters of a set begin, one of a group's
    size_t place_of_set(size_t set) const {
        const int64_t group = first/n_grouped + (int64_t) set/n_set;
        return place(group*n_grouped) + set % n_set*n_side;
    }

    // where the sets of a block's group begin
    size_t set_place(int64_t block) const { return (block/n_grouped - first/n_grouped)*n_set; }

    means clusters;
    means sets;

    size_t side_size() const { return side_bytes(n_embd_k); }

    // bytes of a block's clusters
    size_t block_bytes() const;

private:
    const int64_t n_embd_k;
    const int64_t n_embd_v;

    int64_t first = 0;

    std::vector<sealed_block> blocks;

    // of each place: the cluster that lies there, counted from the first of its group, or from the first of its block
    std::vector<uint8_t> member;

    std::vector<uint8_t> grouped; // one a group

    void group  (int64_t block);
    void ungroup(int64_t block);

    // puts the clusters of a group in this order: each place of the group gets the cluster from another one
    void permute(size_t at, const std::vector<uint8_t> & from);
};

} // namespace kvtool
