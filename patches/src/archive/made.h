// Synthetic cells. For one token and one row there is one synthetic cell per query head of the row. Their keys and
// values are computed such that attention to the live cells and the synthetic ones equals attention to the live cells
// and the whole archive.

#pragma once

#include "attention.h"

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// Keys and values of a token's synthetic cells in one row. Each key is a combination of the row's queries. Keys are
// chosen such that the exponentials of a head's logits on the cells add up to the archive's softmax sum of that head,
// most of it on the head's own cell. The values are the solution of a linear system: weighted by these
// exponentials they give each head's attention output over the archive.
class made_cells {
public:
    // n_head: query heads of the row; type_k: type of the cache's keys, to which keys are rounded
    made_cells(int n_head, int64_t n_embd_k, int64_t n_embd_v, ggml_type type_k, const logit_params & logits);

    // queries: [n_head][n_embd_k]; sums[n_head]: logarithm of the archive's softmax sum, -INFINITY if it adds
    // nothing; found: [n_head][n_embd_v], attention output over the archive
    void make(const float * queries, const double * sums, const float * found);

    std::vector<float> keys;   // [n_head][n_embd_k]
    std::vector<float> values; // [n_head][n_embd_v]

private:
    const int     n_head;
    const int64_t n_embd_k;
    const int64_t n_embd_v;

    const ggml_type    type_k;
    const logit_params logits;

    std::vector<float>       rounded; // queries, rounded as the cache's attention rounds them
    std::vector<ggml_fp16_t> halves;
    std::vector<uint8_t>     bytes;   // buffer of the last quantization
    std::vector<double>      gram;    // Gram matrix of the queries [n_head][n_head]
    std::vector<double>      root;    // Cholesky factor of the Gram matrix plus a ridge
    std::vector<double>      weights; // [cell][n_head]: a cell's key is the sum of the queries with these weights
    std::vector<double>      target;  // [n_head]: correction of each head's products
    std::vector<double>      share;   // [head][cell]: share of the head's sum in each cell

    // conversions between a logit and a product (query . key)
    double product(double logit) const;
    double logit(double product) const;

    // set `share` for keys with these products
    template <typename F> void find_shares(const std::vector<double> & sums, F && product_of);

    void set_keys();
    void round(float * x, int64_t n, ggml_type type);

    // Improve k, the quantized form of the key of cell c. An element of k moves to the neighbouring quantized value on
    // the other side of the exact value if that brings k's products with the queries closer to the exact key's. The
    // scales stay, so the cache quantizes k without further change
    void nudge(float * k, const std::vector<double> & key, int c) const;

    // own: intended share of a head's sum in its own cell; elsewhere: intended share in each other head's cell
    void set_values(const float * found, double elsewhere, double own);
};

} // namespace kvtool
