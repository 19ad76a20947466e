// Cells of a row that represent its archive while tokens are generated on a device. There is one cell for the mean of
// each cluster, for each token that has no cluster yet, and for each resident token. The resident tokens are the tokens
// of the clusters that the last queries attended to most. If a cluster is resident, the cell of its mean is masked.
//
// The queries of earlier steps choose which clusters are resident. If the queries of a step attend strongly to other
// clusters, the step has to be repeated: see `choose`.

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
    // n_mean: number of cells for means, a multiple of n_cluster. n_token: number of cells for resident tokens
    residents(const archive & tokens, int n_mean, int n_token);

    // Number of cells for tokens without clusters. This is more than one block, because a block may be clustered up to
    // a quarter of a block late. Another quarter is a reserve.
    static constexpr int n_tail = 3*(int) n_block/2;

    // number of cells of a row: first the means, then the tokens without clusters, then the resident tokens
    int n_cell() const { return n_mean + n_tail + n_token; }

    // Reason why the cells cannot represent the archive; empty if they can
    std::string unfit() const;

    // Forget the contents of all cells
    void drop();

    // Keys and values that have to be written to cells of a layer
    struct cells {
        std::vector<int64_t> at; // cell*n_head + head

        std::vector<float> keys;   // [cell][n_embd_k]
        std::vector<float> values; // [cell][n_embd_v]
    };

    // Call this before `update` of the layers. rot: position that the next query is rotated to
    void begin(int64_t rot);

    // Collect the new contents of a layer's cells, and set the layer's mask. Returns false if there are too many cells
    // for one call: the caller must then write the collected cells and call this again. Several layers may be updated
    // at the same time
    bool update(size_t layer, cells & out);

    // The number that is added to the logit of each cell: [n_head][n_cell]. It is 0 for a token, log n for the mean of
    // n tokens, and -INFINITY for an empty cell
    const ggml_fp16_t * mask(size_t layer) const { return masks[layer].data(); }

    // Choose the clusters of a row that become resident at the next update: the clusters with the most attention per
    // token that their means do not represent. Recent queries have more weight.
    // queries: [n_query][n_embd_k], from the step that was computed last.
    // live: [n_query], logarithm of each query's softmax sum over the live cells.
    // missed: [n_query], receives each query's attention to chosen clusters that are not resident yet, without the part
    // that their means represent
    void choose(size_t layer, int head, const float * queries, int n_query, const logit_params & logits, const float * live, float * missed);

private:
    // The cells of means are a ring of n_ring blocks: block b is at position b % n_ring. The index of a cluster is
    // n_cluster*(position of its block) + its index in the block. The cell of its mean has the same index
    struct row {
        std::vector<int64_t> held;     // The block at each position of the ring; -1 if there is no block.
        std::vector<bearing> bearings; // The rotation of the block's keys when the block's means were written.
        std::vector<int64_t> anchors;  // The value of `anchor` when the block's means were written.

        std::vector<float>   score;
        std::vector<int32_t> sizes;   // The number of tokens in each cluster.
        std::vector<uint8_t> wanted;  // True if the cluster is chosen.
        std::vector<uint8_t> is_here; // True if the cluster is resident.
        std::vector<uint8_t> is_new;  // True if no query has been compared with the cluster yet.

        // a cell for a resident token
        struct slot {
            int64_t place  = -1; // The place of the token in the archive; -1 if the cell is free.
            int64_t anchor = -1; // The value of `anchor` when the cell was written.
            int32_t next   = -1; // The next slot of the same cluster; -1 if there is none.
        };
        std::vector<slot>    slots; // [n_token]
        std::vector<int32_t> heads; // For each cluster: its first slot; -1 if it is not resident.
        std::vector<int32_t> free;  // Slots without a token.

        int64_t anchor = -1; // All slots were written with this value of `anchor`, or do not depend on it.

        int64_t tail = 0;  // The tokens before this position have been written to cells.
        int64_t base = -1; // The value of tokens.base() when the cells were written.
    };

    const archive & tokens;

    const int n_mean;
    const int n_token;
    const int n_ring; // blocks

    // Keys beyond n_near are rotated to the right distance from a query at this position. The position follows the
    // stream in steps, because all these keys must be written again when it changes
    int64_t anchor = -1;

    std::vector<std::vector<row>>         rows;  // [layer][head]
    std::vector<std::vector<ggml_fp16_t>> masks; // [layer]

    void clear(row & r, ggml_fp16_t * mask);
    void remove(row & r, int cluster, ggml_fp16_t * mask) const;
    void update_means(row & r, size_t layer, int head, cells & out);
    void update_tail (row & r, size_t layer, int head, cells & out);
    void update_slots(row & r, size_t layer, int head, cells & out);

    void put_mean (size_t layer, int head, size_t place, int cell, cells & out) const;
    void put_token(size_t layer, int head, int64_t place, int64_t turn, int cell, cells & out) const;

    // maximum number of cells per update: as floats, keys and values take much memory
    static constexpr size_t n_most = 1024;
    static bool is_full(const cells & out) { return out.at.size() >= n_most; }

    // index (see `row`) of the cluster at this place of `own`
    int number_of(const row_clusters & own, size_t place) const {
        return own.block_at(place) % n_ring*n_cluster + own.cluster_at(place);
    }
};

} // namespace kvtool
