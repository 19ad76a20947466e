// Choice of the archived tokens that a step attends to exactly. All other tokens are represented by their clusters'
// means.

#pragma once

#include "archive.h"
#include "meeting.h"
#include "softmax.h"
#include "stored.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace kvtool {

// conversion of a layer's products (query . key) to logits
struct logit_params {
    float scale = 0.0f;
    float cap   = 0.0f; // soft cap: cap*tanh(logit/cap); 0: none
};

// consecutive places of a row's archived tokens in one block
struct token_range {
    int64_t begin; // place of the first token
    int     n;
    int     way; // index of the query rotation used for them

    bool                 is_far;
    const sealed_block * sealed; // null if the block is not clustered
};

// search results of one row, shared by the threads of a layer
struct searched_row {
    std::vector<float> turned;  // rotated queries: [way][query][n_embd_k]
    std::vector<float> columns; // transposed: [way][n_embd_k][query], for steps with many queries
    std::vector<float> mapped;  // multiplied by the Hadamard matrix, for products with stored keys; if there is one
    byte_columns       bytes;   // in 8 bits, if search::has_bytes

    std::vector<token_range> looked; // tokens that are attended to exactly
    int64_t                  n_looked = 0;
};

// Buffers of type T that a thread uses again in each layer, as allocation takes time.
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
    std::vector<int64_t> ways; // rotations of the queries, in positions

    // consecutive clusters, or sets of clusters, whose keys have the same rotation
    struct run {
        const means * all;

        size_t place; // place of the first cluster or set
        int    n;
        int    way;
        bool   is_set;
    };

    std::vector<run> runs;

    // Arrays over the items: the clusters and sets of all runs, one after the other. x holds the logits or exponentials
    // of query q from x[q*n_room] on
    std::vector<float>   x;
    std::vector<float>   logs;
    std::vector<float>   inverse; // 1/number of tokens
    std::vector<float>   score;
    std::vector<int32_t> size;
    std::vector<uint8_t> chosen;

    std::vector<int>          looked; // items that are attended to exactly
    std::vector<weighted_row> some;   // mean values that are added, with their weights

    // values: for steps with many queries, the mean values that are added, [value][columns(n_embd_v)]. powers: first
    // the exponentials of the sets; later, for steps with many queries, the values' weights [query][value]
    std::vector<float> values;
    std::vector<float> powers;

    std::vector<small_query> small; // [way][query]
};

// search of one thread in one layer, for the queries of a step
class search : used_again<search_memory> {
public:
    // rot: position that the first query is rotated to. n_exact: number of clustered tokens to attend to exactly, in
    // addition to all tokens without clusters; 0: all tokens
    search(const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact);

    // Choose the tokens that a row attends to exactly. queries: [n_query][n_embd_k]. The other clusters are added
    // up as if each of their tokens had the mean key and value: estimate + query*stride receives per query the
    // maximum logit, the sum of the exponentials relative to it, and the sum of the values weighted by them
    void find(int head, const float * queries, searched_row & row, float * estimate, int64_t stride);

    // true if a row's queries are also provided in 8 bits
    bool has_bytes() const { return is_few && n_exact > 0 && can_multiply_bytes(l.type_k, l.n_embd_k); }

    // positions by which the key of a token in a range is rotated before it is multiplied with the range's
    // queries
    int64_t turn_of(const token_range & range, int64_t place) const {
        const int64_t i = pos_of(range, place);
        if (range.sealed) {
            return all.turn_to(range.sealed->to, i);
        }
        return range.is_far ? all.base_of(i) - i : 0;
    }

    // position of the token at a place of a range
    int64_t pos_of(const token_range & range, int64_t place) const {
        return range.sealed ? place - place % l.n_block + range.sealed->order[place % l.n_block] : place;
    }

    // positions by which the key of a token is rotated so that it has the right distance from the first query
    int64_t turn_back(const token_range & range, int64_t i) const { return all.turn_back(i, range.is_far, rot); }

private:
    const archive        & all;
    const size_t           i_layer;
    const archived_layer & l;
    const turns          & rope;

    const int64_t      rot; // position that the first query is rotated to
    const int          n_query;
    const bool         is_few; // few queries: keys and values are multiplied in their stored format
    const logit_params logits;
    const int64_t      n_exact;

    size_t n_item = 0;
    size_t n_room = 0;

    int  way_of(int64_t delta);
    void add_run(const means & some, size_t place, int n, int way, bool is_set);
    void multiply_runs(size_t first, size_t item);
    void set_scores(const std::vector<float> & powers, const std::vector<softmax_part> & parts);

    void turn(const float * queries, searched_row & row);
    void pick_sets(const row_clusters & own, size_t n_sets);
    void look_into_unsealed(int head, searched_row & row);
    void look_into_clusters(const row_clusters & own, searched_row & row);
    void estimate_rest(const std::vector<softmax_part> & parts, float * estimate, int64_t stride);
};

} // namespace kvtool
