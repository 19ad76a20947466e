// Attention to archived tokens on the host: per query a value, and the logarithm of the softmax's denominator.

#pragma once

#include "archive.h"
#include "meeting.h"
#include "search.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// data shared by the threads of a layer's attention
class attention_work : public meeting {
public:
    std::vector<searched_row> rows;

    // partial softmax sums [row][part of the row's tokens][query]: maximum logit, sum of the exponentials relative to
    // it, and sum of the values weighted by them
    std::vector<float> parts;

    // sums: logarithm of the softmax's denominator per row and query; attn: per row, the attention of each token
    // that is attended to exactly
    std::vector<double>             sums;
    std::vector<std::vector<float>> attn;
};

// an archived token and a row's attention to it
struct attended_token {
    int64_t pos;
    int64_t place;
    int64_t turn; // positions by which its key is rotated to have the right distance from the first query

    float attn; // summed over the row's queries
};

struct attention_memory {
    // consecutive tokens of the current batch
    struct piece {
        int64_t begin;
        int     n;
        int     at; // index of the first one in the batch
    };

    std::vector<piece> pieces;

    // queries rotated for the last token of a block
    std::vector<float> turned;

    std::vector<float> keys;   // [token][n_embd_k]
    std::vector<float> values; // [token][n_value]
    std::vector<float> powers; // exponentials of the logits: [token][n_column]; with few queries [query][n_together]

    std::vector<float> most, factor, sum; // per query
};

// one thread's share of a layer's attention; attention.cpp describes the order of calls
class attention : used_again<attention_memory> {
public:
    // rot: position that the first query is rotated to; n_query: queries of each row; n_exact: see search
    attention(
            const archive & all, size_t i, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact, attention_work & work);

    // called by one thread before all else
    void make_room();

    // choose the tokens that a row attends to exactly; called by one thread per row, before any thread calls
    // attend. queries: [n_query][n_embd_k]
    void find(int head, const float * queries);

    // Number of parts that the work is divided into; each is done by one thread. The division depends on the
    // numbers of rows and tokens only, so that sums do not depend on the number of threads.
    int n_part() const { return l.n_head*n_span; }

    void attend(int part);

    // Combine all parts: value[n_embd_v] of a query; returns the logarithm of its softmax's denominator. Keys that
    // are NaN add nothing. If a result is not finite nevertheless, value becomes 0 and -INFINITY is returned.
    double result(int head, int query, float * value) const;

    // Compute the attention of each token that is attended to exactly: call set_sum for all queries, then weigh for
    // all parts. sum: logarithm of the denominator over live cells and archive; -INFINITY: the query is ignored
    void set_sum(int head, int query, double sum) { work.sums[head*n_query + query] = sum; }
    void weigh(int part);

    // after weigh: the k tokens with the most attention, the oldest first; among equals the newer is chosen
    std::vector<attended_token> most_attended(int head, int k) const;

private:
    const archive        & all;
    const archived_layer & l;
    const turns          & rope;

    const int  n_query;
    const bool is_few;   // few queries: keys and values are multiplied in their stored format
    const int  n_column; // padded number of queries
    const int  n_value;  // padded length of a value
    const int  n_span;   // parts of a row

    const float least;   // minimum exponential for which a token's value is added

    const logit_params logits;

    attention_work & work;

    search looking;

    // block and query rotation that `turned` was made for
    int64_t turned_block = -1;
    int     turned_way   = -1;

    // partial sums of a row's parts; index n_span holds the search's estimate
    float * part_of(int head, int span, int query) const {
        return work.parts.data() + ((size_t) (head*(n_span + 1) + span)*n_query + query)*(2 + n_value);
    }

    // read the tokens of a part of a row in batches; done(n) is called when n tokens have been read
    template <typename F>
    void read_part(int head, int span, F && done);

    void clear(float * part) const;
    void read(int head, const token_range & range, int64_t begin, int n, int at);
    void add(int head, int span, int n);
    void add_few(int head, int span, int n);
    void add_values(int head, float * to);
};

} // namespace kvtool
