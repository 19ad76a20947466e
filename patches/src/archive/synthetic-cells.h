// Synthetic cells. For each token and each row, there is one synthetic cell per query head of the row. Attention to the
// live cells and the synthetic cells equals attention to the live cells and the whole archive.

#pragma once

#include "attention.h"

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// Computes the keys and values of a token's synthetic cells in one row.
//
// Each key is a combination of the row's queries. For each head, the exponentials of the logits on all cells must add
// up to the head's softmax sum over the archive. Most of this sum should be on the head's own cell.
//
// The values are the solution of a linear system: for each head, the mean of the values, weighted by these
// exponentials, must be the head's attention output over the archive.
class synthetic_cells {
public:
    // n_head: number of query heads of the row. type_k: type of the cache's keys; the synthetic keys are rounded to it
    synthetic_cells(int n_head, int64_t n_embd_k, int64_t n_embd_v, ggml_type type_k, const logit_params & logits);

    // queries: [n_head][n_embd_k]. log_sums: [n_head], logarithm of the archive's softmax sum; -INFINITY if the archive
    // adds nothing. attn_out: [n_head][n_embd_v], attention output over the archive
    void make(const float * queries, const double * log_sums, const float * attn_out);

    // keys and values of the synthetic cells: [n_head][n_embd_k] and [n_head][n_embd_v]
    std::vector<float> keys;
    std::vector<float> values;

private:
    const int     n_head;
    const int64_t n_embd_k;
    const int64_t n_embd_v;

    const ggml_type    type_k;
    const logit_params logits;

    std::vector<float>       rounded; // queries, rounded in the same way as attention to the cache rounds them
    std::vector<ggml_fp16_t> halves;
    std::vector<uint8_t>     bytes;   // The last quantized key.
    std::vector<double>      gram;    // Gram matrix of the queries: [n_head][n_head].
    std::vector<double>      root;    // Cholesky factor of the Gram matrix plus the ridge.
    std::vector<double>      weights; // Weights of the row's queries in a cell's key: [cell][n_head].
    std::vector<double>      target;  // Correction of each head's products, later the queries' weights: [n_head].
    std::vector<double>      shares;  // Share of a head's softmax sum that is on a cell: [head][cell].

    // conversions between a logit and a product (query . key)
    double product(double logit) const;
    double logit(double product) const;

    // set `shares` from the products of keys and queries
    template <typename F> void set_shares(const std::vector<double> & sums, F && product_of);

    void set_keys();
    void round(float * x, int64_t n, ggml_type type);

    // Improve the quantized key k of cell c. `key` is the exact key. An element of k is replaced by the quantized value
    // on the other side of its exact value if the products of k and the queries then come closer to the exact products.
    // The scales do not change, so the cache quantizes k without further rounding
    void refine(float * k, const std::vector<double> & key, int c) const;

    // diagonal, off_diagonal: intended shares of a head's softmax sum on the head's cell, and on the cell of each other
    // head
    void set_values(const float * attn_out, double off_diagonal, double diagonal);
};

} // namespace kvtool
