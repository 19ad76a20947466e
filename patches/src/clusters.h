// Clusters of a row's archived keys: what a search ranks, and what stands for the tokens that it does not look into.

#pragma once

#include "index.h"

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// of a block of archived tokens: as many as the index compares at once
constexpr int n_cluster = n_side;

// The clusters of some of a row's blocks, which follow each other. A block's clusters never change while its keys are
// rotated alike.
class row_clusters {
public:
    row_clusters(int64_t n_embd_k, int64_t n_embd_v) : n_embd_k(n_embd_k), n_embd_v(n_embd_v) {}

    int64_t begin() const { return first; }
    int64_t end()   const { return first + (int64_t) far.size(); }

    // clusters for the block that follows, or for the first one; keys: [n_block][n_embd_k], values: [n_block][n_embd_v];
    // is_far: the keys are as before RoPE
    void add(int64_t block, const float * keys, const float * values, bool is_far);

    // the same anew for a block that there is
    void set(int64_t block, const float * keys, const float * values, bool is_far);

    // forgets the blocks before this one
    void forget(int64_t block);

    // forgets the blocks from this one on
    void cut(int64_t block);

    void clear() { forget(end()); }

    bool is_far(int64_t block) const { return far[block - first]; }

    // the mean keys in 8 bits, and the logarithms of the sizes [n_cluster] a block; -INFINITY: the cluster is empty
    const uint8_t * sides(int64_t block) const { return means.data() + (block - first)*side_bytes(n_embd_k, 8); }
    const float   * sizes(int64_t block) const { return logs .data() + (block - first)*n_cluster; }

    // a cluster's mean value
    const ggml_fp16_t * value(int64_t block, int c) const { return values.data() + ((block - first)*n_cluster + c)*n_embd_v; }

    // the block's tokens by their clusters, and where a cluster's begin in them
    const uint8_t  * order(int64_t block) const { return tokens.data() + (block - first)*n_token; }
    const uint16_t * start(int64_t block) const { return starts.data() + (block - first)*(n_cluster + 1); }

    // bytes of a block's clusters
    size_t block_bytes() const;

private:
    static constexpr int n_token = 256; // of a block

    const int64_t n_embd_k;
    const int64_t n_embd_v;

    int64_t first = 0;

    std::vector<uint8_t>     far; // one a block
    std::vector<uint8_t>     means;
    std::vector<float>       logs;
    std::vector<ggml_fp16_t> values;
    std::vector<uint8_t>     tokens;
    std::vector<uint16_t>    starts;
};

} // namespace kvtool
