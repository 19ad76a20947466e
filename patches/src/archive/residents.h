// Cells of a row that represent its archive while tokens are generated on a device. There is one cell for the mean of
// each cluster, for each token that has no cluster yet, and for each resident token. The resident tokens are the tokens
// of the clusters that the last queries attended to most. If a cluster is resident, the cell of its mean is masked.
//
// In a long archive, not all clusters have cells. Each set of clusters then has a cell for its mean. Only the sets that
// queries attended to most also have cells for their clusters; the mean of such a set is masked.
//
// The queries of the last step choose which clusters are resident. If the queries of a step attend strongly to other
// clusters, the step has to be repeated: see `choose`. In the choice for the next step, resident clusters count more
// than others. Then fewer cells of a row change: 113 instead of 191 (Qwen2.5 0.5B, 7,168 tokens, 2,048 resident
// tokens).

#pragma once

#include "archive.h"
#include "resident-row.h"
#include "search.h"

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

namespace kvtool {

class residents {
public:
    residents(const archive & tokens, const resident_sizes & n);

    // Reason why the cells cannot represent the archive; empty if they can
    std::string unfit() const;

    // Forget the contents of all cells
    void drop();

    // Keys and values that have to be written to cells of a layer
    struct cells {
        std::vector<int64_t> dst_rows; // cell*n_head + head

        // Keys [cell][n_embd_k] and values [cell][n_embd_v]. The vectors never become shorter, so that collecting cells
        // again and again allocates no memory
        std::vector<float> keys;
        std::vector<float> values;

        void clear() { dst_rows.clear(); }
    };

    // Call this before `update` of the layers. rot: position that the next query is rotated to. If it is the same as in
    // the previous call, the step is repeated, and the clusters that its queries need become resident
    void begin(int64_t rot);

    // Add the new contents of a layer's cells to `out`, and set the layer's mask. Returns false if there are too many
    // cells for one call: the caller must then write the collected cells, clear `out` and call this again. Several
    // layers may be updated at the same time
    bool update(size_t layer, cells & out);

    // The number that is added to the logit of each cell of a row: [n.n_cell()]. It is 0 for a token, log n for the
    // mean of n tokens, and -INFINITY for an empty or hidden cell
    const std::vector<ggml_fp16_t> & mask(size_t layer, int head) const { return rows[layer][head].mask; }

    // Choose the clusters of a row that become resident at the next update. These have the most missing attention per
    // token: attention that their means do not represent. Unless the step is repeated, resident clusters count twice.
    // queries: [n_query][n_embd_k], from the step that was computed last.
    // live: [n_query], logarithm of each query's softmax sum over the live cells.
    // missed: [n_query], receives each query's attention to the clusters that a repeated step would add, without the
    // part that their means represent
    void choose(size_t layer, int head, const float * queries, int n_query, const logit_params & logits, const float * live, float * missed);

    const resident_sizes n;

private:
    const archive & tokens;

    // Keys beyond n_near are rotated to the right distance from a query at this position. The position follows the
    // stream in steps, because all these keys must be written again when it changes
    int64_t anchor = -1;

    int64_t rot         = -1;
    bool    is_repeated = false;

    std::vector<std::vector<resident_row>> rows; // [layer][head]

    void update_sets  (resident_row & resident, size_t layer, int head, cells & out);
    void update_means (resident_row & resident, size_t layer, int head, cells & out);
    void update_tail  (resident_row & resident, size_t layer, int head, cells & out);
    void update_tokens(resident_row & resident, size_t layer, int head, cells & out);

    void put_mean (size_t layer, int head, const means & means, size_t i_mean, const key_origin & origin, int cell, cells & out) const;
    void put_token(size_t layer, int head, int64_t i, int64_t slot, bool is_far, int cell, cells & out) const;

    // maximum number of cells per update. It limits the memory, because keys and values are stored as floats
    static constexpr size_t n_max = 1024;
    static bool is_full(const cells & out) { return out.dst_rows.size() >= n_max; }
};

} // namespace kvtool
