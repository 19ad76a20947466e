// An archive in this process's memory, and what recalls from it while a graph is computed.

#pragma once

#include "archive-part.h"
#include "attention.h"
#include "choice.h"

namespace kvtool {

class recaller;

// what recall of one layer reads
struct recalled_layer {
    recaller * all;
    size_t     i;

    logit_params logits; // in the graph that was made last
    ggml_type    type_k; // of the cache there

    std::vector<int64_t> chosen; // [n_head][n_recall]
};

// Recalls tokens, as an operation of ggml's; userdata: a recalled_layer. dst: K [k][n_head][n_embd_k], then V
// [k][n_head][n_embd_v] or transposed, as F16 or F32; src: the queries [n_embd_k, n_head_q, n_tokens], where the first of them
// is rotated to, and of their logits with the live cells the highest one and its probability, both [n_head_q][n_tokens]
void recall_into(ggml_tensor * dst, int ith, int nth, void * userdata);

// The same with made cells, n_made a token; src: the queries, and where the first of them is rotated to
void make_into(ggml_tensor * dst, int ith, int nth, void * userdata);

class recaller : public archive_part {
public:
    recaller(const archive_params & params, const std::vector<archive_shape> & shapes);

    // see archive
    void open(const std::string & path) { tokens.open(path); }

    void reserve(const leaving & some) override { tokens.reserve(some); }
    void push(const std::vector<const layer *> & from, const leaving & some) override;

    void set_base(int64_t base) override { tokens.set_base(base); }
    void keep(int64_t n) override { tokens.keep(n); }
    void clear() override;

    std::pair<int64_t, int64_t> span(size_t i) const override { return { tokens[i].begin(), tokens[i].end() }; }

    size_t token_bytes(size_t i) const override { return tokens.token_bytes(i); }

    void get(size_t i, uint8_t * out, int64_t begin, int64_t end) override { tokens.get(i, out, begin, end); }
    void expect(int64_t begin, int64_t end) override { tokens.expect(begin, end); }
    void fill(size_t i, const uint8_t * in, int64_t begin, int64_t end) override { tokens.fill(i, in, begin, end - begin, begin, end); }

    std::vector<int64_t> table() const override { return tokens.table(); }
    std::string set_table(const std::vector<int64_t> & table) override { return tokens.set_table(table); }

    int64_t bytes()      const override { return tokens.bytes(); }
    int64_t slab_bytes() const override { return tokens.slab_bytes(); }
    int64_t free_bytes() const override { return -1; }

    std::vector<int64_t> chosen(size_t i) override { return recalled[i].chosen; }

    ggml_tensor * build(
            const llm_graph_context & graph, size_t i, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n,
            const logit_params & logits) override;

    const archive_params params;

    archive        tokens;
    choice_work    work;
    attention_work attending;

    std::vector<recalled_layer> recalled; // one a layer
};

} // namespace kvtool
