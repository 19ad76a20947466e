// Attention to archived tokens on the host. For each query it computes a value, and the logarithm of the softmax's
// denominator.

#pragma once

#include "archive.h"
#include "barrier.h"
#include "search.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// data shared by the threads of a layer's attention
class attention_work : public barrier {
public:
    std::vector<searched_row> searched; // one per row

    // Partial softmax sums: [row][part of the row's tokens][query]. Each has the maximum logit, the sum of the
    // exponentials relative to this maximum, and the sum of the values weighted by these exponentials
    std::vector<float> parts;

    // sums: for each row and query, the logarithm of the softmax's denominator. attn: for each row, the attention to
    // each token that is attended to exactly
    std::vector<double>             sums;
    std::vector<std::vector<float>> attn;
};

// an archived token and a row's attention to it
struct attended_token {
    int64_t pos;
    int64_t slot;
    // number of positions by which the token's key is rotated, so that it has the right distance from the first query
    int64_t delta;

    float attn; // attention to the token, summed over the row's queries
};

struct attention_memory {
    // consecutively stored tokens of the current batch
    struct piece {
        int64_t begin;   // slot of the first token
        int     n;
        int     i_batch; // index of the first token in the batch
    };

    std::vector<piece> pieces;

    // queries, rotated to the right distance from the last token of a block; see attention::read
    std::vector<float> rotated;

    // a block's center, a query, and the products of all queries with the center: see attention::add_center
    std::vector<float> center, query, pairs;

    std::vector<float> keys;   // Keys of the current batch: [token][n_embd_k].
    std::vector<float> values; // Values of the current batch: [token][n_value].

    // Products of the current batch's keys with the queries; later the exponentials of the logits. The shape is
    // [query][n_batch] for few queries, otherwise [token][n_column]
    std::vector<float> kq;

    std::vector<float> max, factor, sum; // [n_column], see exponential_columns
};

// one thread's share of a layer's attention; attention.cpp describes the order of calls
class attention : used_again<attention_memory> {
public:
    // rot: position that the first query is rotated to. n_query: number of queries of each row. n_exact: see class
    // search
    attention(
            const archive & tokens, size_t i_layer, int64_t rot, int n_query, const logit_params & logits, int64_t n_exact, attention_work & work);

    // Allocate the buffers in `work`. One thread calls this before any thread calls another function
    void allocate();

    // Choose the tokens that a row attends to exactly. One thread calls this for each row, before any thread calls
    // attend. queries: [n_query][n_embd_k]
    void find(int head, const float * queries);

    // Number of parts that the work is divided into; each part is done by one thread. The division depends only on the
    // numbers of rows and tokens, so that sums do not depend on the number of threads.
    int n_part() const { return l.n_head*n_split; }

    void attend(int part);

    // Combine all parts for a query. Writes its attention output to value[n_embd_v], and returns the logarithm of its
    // softmax's denominator. Keys that are NaN add nothing. If a result is still not finite, value becomes 0 and the
    // function returns -INFINITY.
    double result(int head, int query, float * value) const;

    // set_sum and weigh compute the attention to each token that is attended to exactly. First call set_sum for all
    // queries, then weigh for all parts. sum: logarithm of the softmax's denominator over live cells and archive. A
    // query is ignored if its sum is -INFINITY
    void set_sum(int head, int query, double sum) { work.sums[head*n_query + query] = sum; }
    void weigh(int part);

    // Call this after weigh: returns the k tokens with the most attention, the oldest first. If tokens have equal
    // attention, newer tokens are chosen first
    std::vector<attended_token> most_attended(int head, int k) const;

private:
    const archive        & tokens;
    const size_t           i_layer;
    const archived_layer & l;
    const rotations      & rope;

    const int  n_query;
    const bool is_few;   // True for few queries: keys and values are then multiplied in their stored format.
    const int  n_column; // Number of queries, padded for products of matrices.
    const int  n_value;  // Number of elements of a value, padded in the same way.
    const int  n_split;   // Number of parts into which a row's tokens are divided.

    const float min_exp; // minimum exponential for which a token's value is added

    const logit_params logits;

    attention_work & work;

    search searcher;

    // block, and index of the query rotation, for which `rotated` was computed
    int64_t rotated_block = -1;
    int     rotated_index = -1;

    // block for which `pairs` was computed, and the products of the elements that are not rotated
    int64_t centered_block = -1;
    float   unrotated[n_few_columns];

    // partial softmax sums of part `split` of a row's tokens; part n_split has the search's estimate for the other
    // clusters
    float * part_of(int head, int split, int query) const {
        return work.parts.data() + ((size_t) (head*(n_split + 1) + split)*n_query + query)*(2 + n_value);
    }

    // read the tokens of a part of a row in batches; call done(n) after each batch of n tokens
    template <typename F>
    void read_part(int head, int split, F && done);

    void clear(float * part) const;
    void read(int head, const token_range & range, int64_t begin, int n, int i_batch);
    void add_center(int head, const token_range & range, int64_t begin, int n, const float * queries, float * out);
    void add(int head, int split, int n);
    void add_few(int head, int split, int n);
    void add_values(int head, float * sums);
};

} // namespace kvtool
