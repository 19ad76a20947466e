// Cells of a row that stand for its archive while tokens are written on a device: the mean of every cluster, the tokens
// that have no cluster yet, and the resident tokens. These are the tokens of the clusters that the last queries attended
// to most. The cell of a resident cluster's mean is masked.
//
// Which clusters are resident is chosen from the queries of earlier steps. A step whose queries attended strongly to other
// clusters has to be repeated: see `choose`.

#pragma once

#include "archive.h"
#include "search.h"

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

namespace kvtool {

class residents {
public:
    // n_mean: cells for means, a multiple of n_cluster; n_token: cells for resident tokens
    residents(const archive & tokens, int n_mean, int n_token);

    // Cells for tokens without clusters. Blocks are clustered as much as a quarter of a block late, and a step may end
    // with tokens that are archived only after the next one.
    static constexpr int n_tail = 3*(int) n_block/2;

    // cells of a row: first the means, then the tokens without clusters, then the resident tokens
    int n_cell() const { return n_mean + n_tail + n_token; }

    // Reason why the cells cannot stand for the archive; empty if they can
    std::string unfit() const;

    // Forget the contents of all cells
    void drop();

    // Keys and values that have to be written to cells of a layer
    struct cells {
        std::vector<int64_t> at; // cell*n_head + head

        std::vector<float> keys;   // [cell][n_embd_k]
        std::vector<float> values; // [cell][n_embd_v]
    };

    // Before `update` of the layers. rot: position that the next query is rotated to
    void begin(int64_t rot);

    // Collect the new contents of a layer's cells, and set the layer's mask. Returns false if there are many: then write
    // these cells, and call this again. Several layers may be updated at the same time
    bool update(size_t layer, cells & out);

    // Number that is added to the logit of each cell: [n_head][n_cell]. 0 for a token, log n for the mean of n tokens,
    // -INFINITY for a cell that holds nothing
    const ggml_fp16_t * mask(size_t layer) const { return masks[layer].data(); }

    // Choose the clusters of a row that become resident at the next update: those to which queries attended most per
    // token, recent queries counting more. queries: [n_query][n_embd_k], of the step that was computed last; live[n_query]:
    // logarithm of each query's softmax sum over the live cells. Returns the largest share of a query's attention that fell
    // on chosen clusters which are not resident yet
    float choose(size_t layer, int head, const float * queries, int n_query, const logit_params & logits, const float * live);

private:
    // Blocks have places in a ring. A cluster's number is n_cluster*(place of its block) + its number in the block; it
    // is also the cell of the cluster's mean
    struct row {
        std::vector<int64_t> held;     // block at each place of the ring; -1: none
        std::vector<bearing> bearings; // rotation of its keys when its means were written
        std::vector<int64_t> anchors;  // `anchor` when its means were written

        std::vector<float>    score;  // per cluster
        std::vector<uint16_t> sizes;  // tokens
        std::vector<float>    spread; // mean squared distance of its keys from their mean, divided by n_embd_k
        std::vector<uint8_t>  wanted; // chosen
        std::vector<uint8_t>  is_here; // resident
        std::vector<uint8_t>  is_new;  // no query has scored it yet

        struct slot {
            int32_t cluster = -1; // -1: the cell is free
            int64_t place   = 0;  // of its token
            int64_t anchor  = -1; // `anchor` when it was written
        };
        std::vector<slot> slots; // [n_token]

        int64_t tail = 0;  // tokens before this one were written
        int64_t base = -1; // base of the keys in all cells
    };

    const archive & tokens;

    const int n_mean;
    const int n_token;
    const int n_ring; // blocks

    // position of a query for which keys beyond n_near have the right distance
    int64_t anchor = -1;

    std::vector<std::vector<row>>         rows;  // [layer][head]
    std::vector<std::vector<ggml_fp16_t>> masks; // [layer]

    void clear(row & r, ggml_fp16_t * mask);
    void update_means(row & r, size_t layer, int head, std::vector<uint8_t> & gone, cells & out);
    void update_tail (row & r, size_t layer, int head, cells & out);
    void choose_slots(row & r, size_t layer, int head, std::vector<uint8_t> & gone, cells & out);

    float spread_of(size_t layer, int head, size_t place) const;

    void put_mean (size_t layer, int head, size_t place, int cell, cells & out) const;
    void put_token(size_t layer, int head, int64_t place, int64_t turn, int cell, cells & out) const;

    // keys and values of many cells take much memory as floats
    static constexpr size_t n_most = 1024;
    static bool is_full(const cells & out) { return out.at.size() >= n_most; }

    // number of the cluster at a place of a row's clusters
    int number_of(const row_clusters & own, size_t place) const {
        return own.block_at(place) % n_ring*n_cluster + own.cluster_at(place);
    }
};

} // namespace kvtool
