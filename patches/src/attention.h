// Attention over archived tokens where they lie: of each query a value, and the logarithm of its softmax's sum.

#pragma once

#include "archive.h"
#include "meeting.h"
#include "search.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// what the threads that attend for a layer share
class attention_work : public meeting {
public:
    search_work search;

    // of each row and part of the tokens, for each query: the highest logit, the sum of the exponentials beside it, and the
    // sum of the values by them
    std::vector<float> parts;
};

// a thread's share in one layer's attention
class attention {
public:
    // rot: what the first query is rotated to; n_query: queries of each row; n_exact: see search
    attention(
            const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact, attention_work & work);

    // one thread calls it, before any attends
    void make_room();

    // The work of a row is cut into parts, each of which is for one thread, in two rounds: `rank` and `attend`; between them
    // `choose` is called once for each row. Parts depend on the numbers of rows and tokens alone, so that a sum does not
    // depend on the threads.
    int n_part() const { return l.n_head*n_span; }
    int head_of(int part) const { return part/n_span; }

    // queries: of the part's row [n_query][n_embd_k]
    void rank  (int part, const std::vector<float> & queries) { looking.rank(head_of(part), part % n_span, queries); }
    void choose(int head) { looking.choose(head); }
    void attend(int part, const std::vector<float> & queries);

    // Once all parts are there: value[n_embd_v] of a query, and the logarithm of its sum. Keys, queries or values that are no
    // numbers give -INFINITY.
    double result(int head, int query, float * value) const;

private:
    const archive        & all;
    const archived_layer & l;
    const turns          & rope;

    const int n_query;
    const int n_column; // of queries
    const int n_value;  // columns of a value
    const int n_span;   // parts of a row

    const float least;  // what a token's power has to be for its value to count

    const logit_params logits;

    attention_work & work;

    search looking;

    // of some tokens
    std::vector<int64_t> tokens;

    std::vector<float> keys;   // [token][n_embd_k]
    std::vector<float> values; // [token][n_value]
    std::vector<float> powers; // [token][n_column]

    std::vector<float> turned; // the queries, a query a column: to what the tokens' keys are rotated to

    std::vector<float> most, factor, sum; // of each query

    float * part_of(int part, int query) const { return work.parts.data() + ((size_t) part*n_query + query)*(2 + n_value); }

    void turn(const std::vector<float> & queries, int64_t delta);
    void read(int head, const token_range & range, int first, int n, int at);
    void add(int part, int n);

    // of those that count, the powers and the values; returns how many they are
    int read_values(int head, int n);
};

} // namespace kvtool
