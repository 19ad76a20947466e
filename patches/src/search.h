// What a step looks into: archived tokens that its queries attend to, and clusters that stand for the others.

#pragma once

#include "archive.h"
#include "meeting.h"
#include "softmax.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// how a layer's products become logits
struct logit_params {
    float scale = 0.0f;
    float cap   = 0.0f; // cap*tanh(logit/cap); 0: they stay as they are
};

// some of a row's archived tokens, whose keys are rotated alike
struct token_range {
    int64_t begin;
    int     n;
    int64_t delta; // how far a query turns that is to be multiplied with them

    const uint8_t * order; // they are begin + order[0 .. n - 1]; null: begin, begin + 1, ...

    int64_t at(int i) const { return order ? begin + order[i] : begin + i; }
};

// What threads share that search in a layer. Of each row:
class search_work {
public:
    struct row {
        std::vector<token_range> looked; // what is looked into
        int64_t                  n_looked = 0;

        std::vector<uint8_t>      seen;   // [cluster]: whether it is looked into
        std::vector<float>        powers; // [query][cluster]: e^(logit - the highest one of the part)
        std::vector<softmax_part> parts;  // [query][part]
        std::vector<float>        score;  // [cluster]
    };

    std::vector<row> rows;
};

// a thread's share in a layer's search
class search {
public:
    // rot: what the first query is rotated to; n_exact: tokens that are looked into beside those without clusters; 0: all
    // n_part: into how many parts a row's clusters are cut
    search(const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact, int n_part,
            search_work & work);

    // one thread calls it, before any ranks
    void make_room();

    // ranks a part of the row's clusters; queries: [n_query][n_embd_k]
    void rank(int head, int part, const std::vector<float> & queries);

    // once all parts are ranked, one thread for each row says what is looked into
    void choose(int head);

    // the clusters of a part: adds those that are not looked into to a query's sum and value, as the tokens that they have
    void estimate(int head, int part, int query, float & most, float & sum, float * value) const;

private:
    const archive        & all;
    const size_t           i_layer;
    const archived_layer & l;
    const turns          & rope;

    const int          n_query;
    const logit_params logits;
    const int64_t      n_exact;
    const int          n_part;

    search_work & work;

    std::vector<stretch> stretches;

    // a block whose clusters are of use: all its keys are rotated alike
    struct place {
        int64_t block;
        int64_t delta;
    };

    std::vector<std::vector<place>> places; // of each head, by the stream's order

    const row_clusters & clusters_of(int head) const { return *all.clusters_of(i_layer, head); }

    // where the clusters of a part begin; n_part: where the last one ends
    size_t begin_of(int head, int part) const { return places[head].size()*part/n_part*n_cluster; }

    // what a token range says of the nth cluster
    token_range range_of(int head, size_t nth) const;
};

} // namespace kvtool
