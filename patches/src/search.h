// What a step looks into: archived tokens that its queries attend to, and clusters that stand for the others.

#pragma once

#include "archive.h"
#include "meeting.h"
#include "softmax.h"
#include "stored.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace kvtool {

// how a layer's products become logits
struct logit_params {
    float scale = 0.0f;
    float cap   = 0.0f; // cap*tanh(logit/cap); 0: they stay as they are
};

// some of a row's archived tokens, which lie side by side in one block
struct token_range {
    int64_t begin; // the first one's place in the archive
    int     n;
    int     way; // how queries are turned for them

    bool                 is_far;
    const sealed_block * sealed; // null: they lie in the stream's order
};

// what threads share that search in a layer, of one row
struct searched_row {
    std::vector<float> turned;  // the queries: [way][query][n_embd_k]
    std::vector<float> columns; // the same [way][n_embd_k][query], where many are multiplied at once
    byte_columns       bytes;   // the same in 8 bits, if the search has them

    std::vector<token_range> looked; // what is looked into
    int64_t                  n_looked = 0;
};

// What a thread's searches and attention use one after the other: memory that is taken anew in each layer takes time.
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
    std::vector<int64_t> ways; // how far queries turn

    // clusters or sets of them that lie side by side, whose keys are rotated alike
    struct run {
        const means * all;

        size_t place; // of the first
        int    n;
        int    way;
        bool   is_set;
    };

    std::vector<run> runs;

    // of what the runs have, one after the other: x has logits or powers of a query every n_room numbers
    std::vector<float>   x;
    std::vector<float>   logs;
    std::vector<float>   inverse; // of their numbers of tokens
    std::vector<float>   score;
    std::vector<int32_t> size;
    std::vector<uint8_t> chosen;

    std::vector<int>          looked; // the items that are looked into
    std::vector<weighted_row> some;   // values that count

    // of many queries: [value][columns(n_embd_v)], [query][value]; powers are those of sets before
    std::vector<float> values;
    std::vector<float> powers;

    std::vector<small_query> small; // [way][query]
};

// a thread's search in a layer, for queries of one step
class search : used_again<search_memory> {
public:
    // rot: what the first query is rotated to; n_exact: tokens that are looked into beside those without clusters; 0: all
    search(const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact);

    // Says what a row looks into. queries: [n_query][n_embd_k]. Clusters that are not looked into are added up as the tokens that
    // they have: of each query the highest logit, the sum of the exponentials beside it, and the values by them, in estimate +
    // query*stride, where nothing is yet
    void find(int head, const float * queries, searched_row & row, float * estimate, int64_t stride);

    // whether a row's queries are given in 8 bits as well
    bool has_bytes() const { return is_few && n_exact > 0 && can_multiply_bytes(l.type_k, l.n_embd_k); }

    // how far the key of a token in a range has to be turned
    int64_t turn_of(const token_range & range, int64_t place) const {
        const int64_t i = pos_of(range, place);
        if (range.sealed) {
            return all.turn_to(range.sealed->to, i);
        }
        return range.is_far ? all.base_of(i) - i : 0;
    }

    // the token in a place of a range
    int64_t pos_of(const token_range & range, int64_t place) const {
        return range.sealed ? place - place % l.n_block + range.sealed->order[place % l.n_block] : place;
    }

    // how far the key of a range's token turns, to have its distance from the first query
    int64_t turn_back(const token_range & range, int64_t i) const {
        return all.base_of(i) - (range.is_far ? i + far_turn : all.base());
    }

private:
    const archive        & all;
    const size_t           i_layer;
    const archived_layer & l;
    const turns          & rope;

    const int          n_query;
    const bool         is_few; // queries: keys and values are multiplied where they lie
    const logit_params logits;
    const int64_t      n_exact;

    int64_t far_turn; // for keys as before RoPE

    size_t n_item = 0;
    size_t n_room = 0;

    int  way_of(int64_t delta);
    void add_run(const means & some, size_t place, int n, int way, bool is_set);
    void multiply_runs(size_t first, size_t item);
    void set_scores(const std::vector<float> & powers, const std::vector<softmax_part> & parts);
    void choose(size_t begin, size_t end, int64_t wanted);

    void turn(const float * queries, searched_row & row);
    void pick_sets(const row_clusters & own, size_t n_sets);
    void look_into_unsealed(int head, searched_row & row);
    void look_into_clusters(const row_clusters & own, searched_row & row);
    void estimate_rest(const std::vector<softmax_part> & parts, float * estimate, int64_t stride);
};

} // namespace kvtool
