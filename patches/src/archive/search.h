// Choice of the archived tokens that a step attends to exactly. The means of clusters represent all other tokens.

#pragma once

#include "archive.h"
#include "barrier.h"
#include "softmax.h"
#include "row-products.h"

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvtool {

// conversion of a layer's products (query . key) to logits
struct logit_params {
    float scale = 0.0f;
    float cap   = 0.0f; // soft cap: see `capped`; 0 if there is no cap

    // x: the scaled product
    template <typename T>
    T capped(T x) const { return cap > 0.0f ? cap*std::tanh(x/cap) : x; }
};

// consecutively stored tokens of a row, within one block
struct token_range {
    int64_t begin; // slot of the first token
    int     n;
    int     i_rotation; // index of the query rotation that these tokens need

    bool                 is_far;
    const sealed_block * sealed; // null if the block is not clustered
};

// search results of one row, shared by the threads of a layer
struct searched_row {
    // The row's queries, once for each rotation in search_memory::deltas.
    std::vector<float> rotated; // Rotated queries: [rotation][query][n_embd_k].
    std::vector<float> columns; // Only for many queries: `rotated`, transposed to [rotation][n_embd_k][columns(n_query)].
    std::vector<float> mapped;  // Only for few queries: `rotated`, multiplied by the Hadamard matrix of stored keys.
    byte_columns       bytes;   // Only if search::has_bytes: `mapped` (or `rotated` if there is no matrix) in 8 bits.

    std::vector<token_range> exact; // tokens that are attended to exactly
    int64_t                  n_exact_token = 0;
};

// results of search::rank
struct ranking {
    std::vector<size_t> clusters; // indices of the clusters in their row

    // [query][cluster]: attention to each cluster, without the part that the cluster's mean represents
    std::vector<float> missing;
};

// Buffers of type T. A thread uses them again in each layer, because allocation takes time.
template <typename T>
class used_again : public T {
public:
    used_again() : T(std::move(last())) {}
    ~used_again() { last() = std::move(*static_cast<T *>(this)); }

    used_again(const used_again &) = delete;

private:
    static T & last() {
        static thread_local T res;
        return res;
    }
};

struct search_memory {
    std::vector<int64_t> deltas; // rotations of the queries, as numbers of positions; i_rotation is an index in this list

    // consecutive clusters, or sets of clusters, whose keys have the same rotation
    struct run {
        const kvtool::means * means;

        size_t first; // index of the first cluster or set
        int    n;
        int    i_rotation;
        bool   is_set;
    };

    std::vector<run> runs;

    // Arrays over the items: the clusters and sets of all runs, one run after the other. mean_logits and spread_logits
    // have a list of items for each query: the entries of query q begin at q*item_stride. An entry is first a logit,
    // later an exponential; for few queries, an entry of mean_logits is at last the weight of the item's mean value.
    // mean_logits has the logits of the mean keys. spread_logits has the same logits plus a term that grows with the
    // spread of the keys
    std::vector<float>   mean_logits;
    std::vector<float>   spread_logits;
    std::vector<float>   size_logs;
    std::vector<float>   inverse_sizes; // 1/number of tokens
    std::vector<float>   scores;
    std::vector<int32_t> sizes;
    std::vector<uint8_t> chosen;

    std::vector<int>          exact_items;  // Indices of the items whose tokens are attended to exactly.
    std::vector<weighted_row> added_values; // Mean values that are added to the estimate, with their weights.

    // only for many queries: the mean values of added_values as floats, [value][columns(n_embd_v)]
    std::vector<float> values;

    // Exponentials of spread_logits. Later, only for many queries: weights of added_values, [query][value]
    std::vector<float> exps;

    std::vector<byte_query> byte_queries; // rotated queries in 8 bits, which are multiplied with mean keys: [rotation][query]

    std::vector<float> variances; // variance of a rotated query's logits over keys with the spread 1: [rotation][query]
};

// One thread's search in one layer, for the queries of a step.
//
// `find` runs on ggml's threads, one row per thread, within the operation of recaller.cpp. `rank` runs on the threads
// of resident_cells, between steps. The memory of a thread's search is used again by its next search.
// searched_row::exact points to the archive's means and to its clustered blocks. These pointers are valid until clusters
// are computed again, which no step does while it runs.
// n_pack divides the index of a run's first item and the number of its items. So the number of items and item_stride
// are multiples of 16, on which the functions of softmax.h rely.
class search : used_again<search_memory> {
public:
    // rot: position that the first query is rotated to. n_exact: number of clustered tokens that are attended to
    // exactly, in addition to all tokens without clusters. If n_exact is 0, all tokens are attended to exactly
    search(const archive & tokens, size_t i_layer, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact);

    // Choose the tokens that a row attends to exactly. queries: [n_query][n_embd_k]. The remaining clusters are added
    // up as if each of their tokens had the mean key and the mean value. The result of each query is added to
    // `estimate + query*stride`: the maximum logit, the sum of the exponentials relative to this maximum, and the sum
    // of the values weighted by these exponentials. The caller sets them to -INFINITY, 0, 0, ... before
    void find(int head, const float * queries, searched_row & searched, float * estimate, int64_t stride);

    // Estimate the attention to a row's clusters with their mean keys and spreads. In a long archive, only the clusters
    // of the best sets are in the result. These sets have n or more tokens together.
    // queries: [n_query][n_embd_k].
    // live: [n_query], logarithm of each query's softmax sum over the live cells
    void rank(int head, const float * queries, const float * live, int64_t n, searched_row & searched, ranking & out);

    // true if a row's queries are also needed in 8 bits
    bool has_bytes() const { return is_few && n_exact > 0 && can_multiply_bytes(l.type_k, l.n_embd_k); }

    // number of positions by which the key of a token in a range is rotated before it is multiplied with the range's
    // queries
    int64_t rotation_of(const token_range & range, int64_t slot) const {
        const int64_t i = pos_of(range, slot);
        if (range.sealed) {
            return tokens.rotation_to(range.sealed->origin, i);
        }
        return range.is_far ? tokens.base_of(i) - i : 0;
    }

    // position of the token in a slot of a range
    int64_t pos_of(const token_range & range, int64_t slot) const {
        return range.sealed ? slot - slot % l.n_block + range.sealed->order[slot % l.n_block] : slot;
    }

    // number of positions by which the key of a token is rotated, so that it gets the right distance from the first
    // query
    int64_t rotation_back(const token_range & range, int64_t i) const { return tokens.rotation_back(i, range.is_far, rot); }

private:
    const archive        & tokens;
    const size_t           i_layer;
    const archived_layer & l;
    const rotations      & rope;

    const int64_t      rot; // position that the first query is rotated to
    const int          n_query;
    const bool         is_few; // true for few queries: keys and values are then multiplied in their stored format
    const logit_params logits;
    const int64_t      n_exact;

    size_t n_item      = 0;
    size_t item_stride = 0;

    int  rotation_index(int64_t delta);

    // Append n items to `runs`. They extend the last run if they continue it, unless its index is below first_run
    void add_run(size_t first_run, const means & means, size_t first, int n, int i_rotation, bool is_set);

    void multiply_runs(size_t first_run, size_t item);
    void set_scores(std::vector<float> & exps);

    void rotate(const float * queries, searched_row & searched);
    size_t multiply_clusters(const row_clusters & row, const float * queries, int64_t n, searched_row & searched);
    void expand_sets(const row_clusters & row, size_t n_sets, int64_t n);
    void add_unsealed(int head, searched_row & searched);
    void add_clusters(const row_clusters & row, searched_row & searched);
    void estimate_others(const std::vector<softmax_part> & parts, float * estimate, int64_t stride);
};

} // namespace kvtool
