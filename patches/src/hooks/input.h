// Inputs that kvtool adds to the decode's graph. They hold everything that changes with every batch, so the graph can
// be reused.

#pragma once

#include "hooks.h"
#include "archive/staging.h"

#include "llama-graph.h"

#include <vector>

class llama_kvtool_input : public llm_graph_input_i {
public:
    llama_kvtool_input(llama_kvtool & kvtool) : kvtool(kvtool) {}

    // inputs of one layer with ragged rows
    struct rows {
        int i; // index of the layer in llama_kvtool::layers

        // I64 [n_head*n_tokens]: where the new keys are written, and the new values if V is not transposed
        ggml_tensor * k_idx;
        // I64 [n_embd*n_head*n_tokens]: where the elements of the new values are written; null unless V is transposed
        ggml_tensor * v_idx;
        // F32 [1, n_tokens, n_head]: last cell that a query sees; [1, n_tokens, 1] if all rows have equal lengths
        ggml_tensor * limit;
    };

    // inputs of one layer with ALiBi
    struct alibi_input {
        int i;

        ggml_tensor * key_pos; // F32 [n_kv, 1, n_head]: positions of the keys
    };

    void set_input(const llama_ubatch * ubatch) override;

    // The sizes of the batch and of the cache are not checked here. If they change, llama.cpp builds a new graph anyway
    bool can_reuse(const llm_graph_params &) override;

    llama_kvtool & kvtool;

    // F32 [1, n_tokens]: number of tokens that each query has seen, including its own token
    ggml_tensor * n_seen = nullptr;
    // F32 [1, 1, n_tokens]: log_512 of the number of tokens that each query has seen
    ggml_tensor * scale  = nullptr;

    ggml_tensor * recent_slots = nullptr; // I64 [q]: slots of kvtool::recent that receive the attention of the last q queries

    ggml_tensor * query_slots = nullptr; // I64 [q]: slots of kvtool::queries that receive the last q queries

    ggml_tensor * rot       = nullptr; // I32 [1]: position that the first query is rotated to.
    ggml_tensor * live_mask = nullptr; // [n_live, n_tokens]: mask of the live cells, computed from llama.cpp's mask.

    std::vector<rows> ragged;

    std::vector<alibi_input> alibi_inputs;

    // masks of synthetic cells, for rows with n_gqa query heads
    struct synthetic_mask {
        int64_t n_gqa;

        ggml_tensor * visible; // F32 [n_kv, n_tokens]: 0 where a query sees a cell, else -INFINITY.
        ggml_tensor * mask;    // Sum of llama.cpp's mask and `visible`.
    };

    std::vector<synthetic_mask> synthetic_masks;

    // Indices of the cells that a step fills from the archive. If the first such cell has the same index in several
    // layers, these layers share the input
    struct filled_range {
        int64_t first;

        ggml_tensor * idx; // I64 [n]: first, first + 1, ...
    };

    std::vector<filled_range> filled_cells;

    // inputs of attention to staged tokens, which are archived tokens that are copied to the device: see staged.cpp
    struct staged_inputs {
        // input of all layers with n_head KV heads
        struct index_input {
            int     n_head;
            int64_t n_token; // number of tokens per head in the device's buffer

            ggml_tensor * idx; // I64 [n_head*n_live]: where each live cell is written in the device's buffer
        };

        int64_t n_live     = 0;
        int64_t n_archived = 0;

        // mask of the rest of the device's buffer, after the live cells: [n_all - n_live]. 0 for archived tokens,
        // -INFINITY for unused space
        ggml_tensor * tail = nullptr;
        // mask of the tokens in the device's buffer, [n_all, n_tokens]: llama.cpp's mask of the live cells, then `tail`
        ggml_tensor * mask = nullptr;

        std::vector<ggml_tensor *> maps; // F32 [n, n]: Hadamard matrices, divided by the root of n

        std::vector<index_input>           indices;
        std::vector<kvtool::staging::mark> marks;

        // rot: position that the step's first query is rotated to
        void set_input(kvtool::staging & staging, int64_t rot) const;
    };

    staged_inputs staged;

    ggml_tensor * deferred_slots = nullptr; // I64 [n_tokens]: slots of kvtool::deferred that receive the queries

    bool is_deferred = false;

    // inputs of attention to residents, see resident.cpp
    struct resident_mask {
        const ggml_tensor * device_mask; // the residents' mask on a device

        // F16 [n_cell, n_tokens, 1, rows on the device]: llama.cpp's mask of the live cells, then `device_mask`
        ggml_tensor * mask;
    };

    std::vector<resident_mask> resident_masks;

    ggml_tensor * resident_slots = nullptr; // I64 [n_tokens]: slots of kvtool::resident_cells that receive the queries

    bool is_resident = false;

    ggml_tensor * query_pos = nullptr; // F32 [1, n_tokens]: positions of the queries, with ALiBi
};

namespace kvtool {

// kvtool's inputs of the graph, created by the first call
llama_kvtool_input & graph_input(const llm_graph_context & graph);

ggml_tensor * new_input(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2);

} // namespace kvtool
