// Attention of a layer in which each KV head has its own mask.

#pragma once

#include "layer.h"

struct llm_graph_context;

namespace kvtool {

// Flash attention of the queries q [n_embd, n_head, n_tokens] to all cells of a layer. mask: F16 [n_cell, n_tokens, 1,
// n_head_kv]. Returns [n_embd_v*n_head, n_tokens]
ggml_tensor * attend_rows(
        const llm_graph_context & graph, const layer & l, ggml_tensor * q, ggml_tensor * mask, ggml_tensor * sinks, float scale);

} // namespace kvtool
