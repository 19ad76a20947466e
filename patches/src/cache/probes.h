// A layer's attention probabilities, and their reductions to signals.

#pragma once

#include "hooks/llama-kvtool.h"

#include "ggml.h"

#include <cstdint>

struct llama_hparams;

namespace kvtool {

// true if a signal is a maximum over queries and heads instead of a sum
bool is_maximum(int s);

// attention probabilities [n_kv, n_tokens, n_head] of the queries q [n_embd, n_tokens, n_head] to the keys k [n_embd,
// n_kv, n_head_kv]. is_grok: true for Grok, which scales its logits before their soft cap
ggml_tensor * probabilities(
        ggml_context * ctx, const llama_hparams & hparams, bool is_grok, ggml_tensor * k, ggml_tensor * q, ggml_tensor * mask,
        ggml_tensor * sinks, float scale);

// reductions of one layer's probabilities p [n_kv, n_tokens, n_head] to values per row
class reducer {
public:
    // n_seen: F32 [1, n_tokens], the tokens that each query has seen; only for signals that count hits
    reducer(ggml_context * ctx, const llama_kvtool_params & params, ggml_tensor * p, int64_t n_head_kv, ggml_tensor * n_seen);

    // Signal s of one layer: [n_kv, 1, n_head_kv]. The recent signal and squares have one value per query: [n_kv, n,
    // n_head_kv]. For squares, the values are not squared yet: `finished` squares them after the values of all layers
    // that read the cells have been added
    ggml_tensor * signal(int s) const;

    // Return signal s. t: the results of signal(s), combined over all layers that read the cells. For squares, the
    // elements of t are squared and summed over the queries. For all other signals, t is returned unchanged
    ggml_tensor * finished(int s, ggml_tensor * t) const;

private:
    ggml_context              * ctx;
    const llama_kvtool_params & params;

    ggml_tensor * p;
    ggml_tensor * a   = nullptr; // Probabilities per group of heads, or per head if the group is summed later.
    ggml_tensor * hit = nullptr; // 1 where a cell is important to a query, else 0.

    int64_t n_kv;
    int64_t n_tokens;
    int64_t n_head_kv;
    int64_t n_gqa;

    ggml_tensor * last_queries(ggml_tensor * t, int64_t n) const;
    ggml_tensor * per_query(ggml_tensor * t, int64_t n) const;
    ggml_tensor * reduce_group(uint32_t group) const;
};

} // namespace kvtool
