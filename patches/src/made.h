// Made cells: a row's cells for one token, one for each of its query heads, that stand for all that the archive adds to them.

#pragma once

#include "attention.h"

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace kvtool {

// The keys and values of a token's made cells in one row. Softmax over the live cells and these is softmax over the live cells
// and the archive: the keys give each head logits whose exponentials add up to the archive's sum, nearly all of it in the
// head's own cell, and the values are solved for what the heads find together.
class made_cells {
public:
    // n_head: query heads of the row; type_k: of the cache that keys are rounded to
    made_cells(int n_head, int64_t n_embd_k, int64_t n_embd_v, ggml_type type_k, const logit_params & logits);

    // queries: [n_head][n_embd_k]; sums[n_head]: the logarithm of the archive's sum, -INFINITY where it adds nothing;
    // found: [n_head][n_embd_v], the archive's attention
    void make(const float * queries, const double * sums, const float * found);

    std::vector<float> keys;   // [n_head][n_embd_k]
    std::vector<float> values; // [n_head][n_embd_v]

private:
    const int     n_head;
    const int64_t n_embd_k;
    const int64_t n_embd_v;

    const ggml_type    type_k;
    const logit_params logits;

    std::vector<float>       rounded; // the queries, as the cache's keys are multiplied with them
    std::vector<ggml_fp16_t> halves;
    std::vector<uint8_t>     bytes;   // of what was quantized last
    std::vector<double>      gram;    // of the queries [n_head][n_head]
    std::vector<double>      root;    // of that with a ridge
    std::vector<double>      weights; // [cell][n_head]: of the queries, whose sum a key is
    std::vector<double>      target;  // of one cell: the logit of each head
    std::vector<double>      share;   // [head][cell]: of the head's sum, in each cell

    // the logits of a cell to the heads become products with the queries
    double product(double logit) const;
    double logit(double product) const;

    // the shares of keys that have these products with the queries
    template <typename F> void find_shares(const std::vector<double> & sums, F && product_of);

    void set_keys();
    void round(float * x, int64_t n, ggml_type type);

    // Numbers of k, which is key as round has left it, go to the next ones on key's other side where that brings the heads'
    // products nearer to those with key. The cache's rounding leaves them as they are. c: the cell
    void nudge(float * k, const std::vector<double> & key, int c) const;

    // elsewhere, own: a head's share of its sum in the cells of other heads and in its own, as it was wanted
    void set_values(const float * found, double elsewhere, double own);
};

} // namespace kvtool
