// Attention over archived tokens where they lie: of each query a value, and the logarithm of its softmax's sum.

#pragma once

#include "archive.h"
#include "meeting.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// how a layer's products become logits
struct logit_params {
    float scale = 0.0f;
    float cap   = 0.0f; // cap*tanh(logit/cap); 0: they stay as they are
};

// what the threads that attend for a layer share
class attention_work : public meeting {
public:
    // of each row and part of the tokens, for each query: the highest logit, the sum of the exponentials beside it, and the
    // sum of the values by them
    std::vector<float> parts;
};

// a thread's share in one layer's attention
class attention {
public:
    // rot: what the first query is rotated to; n_query: queries of each row
    attention(const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, attention_work & work);

    // one thread calls it, before any attends
    void make_room();

    // The tokens are attended to in so many parts for each row, whatever the threads are: part i of them is for a thread.
    // They depend on the numbers of tokens and rows alone, so that a sum does not depend on the threads.
    int n_part() const { return l.n_head*n_span; }

    // attends with all queries of a row to its part of the tokens; queries: of that row [n_query][n_embd_k]
    int  head_of(int part) const { return part/n_span; }
    void attend(int part, const std::vector<float> & queries);

    // Once all parts are there: value[n_embd_v] of a query, and the logarithm of its sum. Keys, queries or values that are no
    // numbers give -INFINITY.
    double result(int head, int query, float * value) const;

private:
    const archive        & all;
    const archived_layer & l;
    const turns          & rope;

    const int n_query;
    const int n_value; // columns of a value

    const logit_params logits;

    attention_work & work;

    // tokens of one stretch and one block
    struct tile {
        stretch from;
        int64_t begin;
        int     n;
    };

    std::vector<tile> tiles;

    int n_span = 1; // parts of a row

    // of a tile
    std::vector<float> keys;
    std::vector<float> columns; // keys, a token a column
    std::vector<float> values;

    std::vector<float> turned; // the queries, to what the tile's keys are rotated to
    std::vector<float> powers;

    float * part_of(int part, int query) const { return work.parts.data() + ((size_t) part*n_query + query)*(2 + n_value); }

    void read(int head, const tile & t);
};

} // namespace kvtool
