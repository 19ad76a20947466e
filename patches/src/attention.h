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
    std::vector<searched_row> rows;

    // of each row and part of the tokens, for each query: the highest logit, the sum of the exponentials beside it, and the
    // sum of the values by them
    std::vector<float> parts;

    // of each row and query, what its softmax adds up to, as a logarithm; and of each row the attention that the tokens that are
    // looked into get, one after the other
    std::vector<double>             sums;
    std::vector<std::vector<float>> attn;
};

// an archived token that a row attends to
struct attended_token {
    int64_t pos;
    int64_t place;
    int64_t turn; // how far its key turns, to have its distance from the first query

    float attn; // the sum over the row's queries
};

struct attention_memory {
    // what is attended to at once: some tokens that lie side by side
    struct piece {
        int64_t begin;
        int     n;
        int     at; // of them all
    };

    std::vector<piece> pieces;

    // the queries, turned to the end of a block
    std::vector<float> turned;

    std::vector<float> keys;   // [token][n_embd_k]
    std::vector<float> values; // [token][n_value]
    std::vector<float> powers; // [token][n_column]; of few queries [query][n_together]

    std::vector<float> most, factor, sum; // of each query
};

// a thread's share in one layer's attention
class attention : used_again<attention_memory> {
public:
    // rot: what the first query is rotated to; n_query: queries of each row; n_exact: see search
    attention(
            const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact, attention_work & work);

    // one thread calls it, before any attends
    void make_room();

    // what a row looks into; one thread calls it for each row, before any attends to it. queries: [n_query][n_embd_k]
    void find(int head, const float * queries);

    // The work of a row is cut into parts, each of which is for one thread. They depend on the numbers of rows and tokens alone,
    // so that a sum does not depend on the threads.
    int n_part() const { return l.n_head*n_span; }

    void attend(int part);

    // Once all parts are there: value[n_embd_v] of a query, and the logarithm of its sum. Keys, queries or values that are no
    // numbers give -INFINITY.
    double result(int head, int query, float * value) const;

    // Then how much attention each token gets, in parts as before: `set_sum` first, of all queries. sum: of the whole softmax, as a
    // logarithm; -INFINITY: the query counts for nothing
    void set_sum(int head, int query, double sum) { work.sums[head*n_query + query] = sum; }
    void weigh(int part);

    // and the k tokens that get most, the oldest first; among equal ones the newer one is chosen
    std::vector<attended_token> most_attended(int head, int k) const;

private:
    const archive        & all;
    const archived_layer & l;
    const turns          & rope;

    const int  n_query;
    const bool is_few;   // queries: keys and values are multiplied where they lie
    const int  n_column; // of queries
    const int  n_value;  // columns of a value
    const int  n_span;   // parts of a row

    const float least;   // what a token's power has to be for its value to count

    const logit_params logits;

    attention_work & work;

    search looking;

    // what `turned` is for
    int64_t turned_block = -1;
    int     turned_way   = -1;

    // of a row those of the parts, then of what the search has estimated
    float * part_of(int head, int span, int query) const {
        return work.parts.data() + ((size_t) (head*(n_span + 1) + span)*n_query + query)*(2 + n_value);
    }

    // the row's tokens that are a part's, some at a time: done(n) once n of them are read
    template <typename F>
    void read_part(int head, int span, F && done);

    void clear(float * part) const;
    void read(int head, const token_range & range, int64_t begin, int n, int at);
    void add(int head, int span, int n);
    void add_few(int head, int span, int n);
    void add_values(int head, float * to);
};

} // namespace kvtool
