// The inputs that kvtool adds to the decode's graph: they change from batch to batch, so that the graph need not.

#pragma once

#include "hooks.h"
#include "staging.h"

#include "llama-graph.h"

#include <vector>

class llama_kvtool_input : public llm_graph_input_i {
public:
    llama_kvtool_input(llama_kvtool & kvtool) : kvtool(kvtool) {}

    // of one layer, where rows are ragged
    struct rows {
        int i; // the layer's index in the cache

        ggml_tensor * k_idx; // I64 [n_head*n_tokens]
        ggml_tensor * v_idx; // I64 [n_embd*n_head*n_tokens], null unless V is transposed
        ggml_tensor * limit; // F32 [1, n_tokens, n_head]: the last cell that a query sees; of even rows [1, n_tokens, 1]
    };

    // of one layer, with ALiBi
    struct distances {
        int i;

        ggml_tensor * keys; // F32 [n_kv, 1, n_head]: where they stand
    };

    void set_input(const llama_ubatch * ubatch) override;

    // a batch or a cache of another size makes llama.cpp build the graph anew
    bool can_reuse(const llm_graph_params &) override;

    llama_kvtool & kvtool;

    ggml_tensor * seen  = nullptr; // F32 [1, n_tokens]: the tokens that each query has seen, itself included
    ggml_tensor * scale = nullptr; // F32 [1, 1, n_tokens]: log_512 of the same

    ggml_tensor * slots = nullptr; // I64 [q]: where the last q queries' attention is stored

    ggml_tensor * asked = nullptr; // I64 [q]: where the last q queries are stored themselves

    ggml_tensor * rot  = nullptr; // I32 [1]: the position that the first query is rotated to
    ggml_tensor * live = nullptr; // [n_live, n_tokens]: the mask of the live cells, which is made of llama.cpp's

    std::vector<rows> ragged;

    std::vector<distances> biased;

    // made cells, of the rows with so many query heads
    struct made {
        int64_t n_gqa;

        ggml_tensor * seen; // F32 [n_kv, n_tokens]: 0 where a query sees a cell, else -INFINITY
        ggml_tensor * mask; // the same added to llama.cpp's
    };

    std::vector<made> made;

    // the cells that a step fills from the archive, of layers where they begin at the same one
    struct filled {
        int64_t first;

        ggml_tensor * idx; // I64 [n]: first, first + 1, ...
    };

    std::vector<filled> filled;

    // attention to archived tokens that are copied to the device, see staged.cpp
    struct staged {
        // of layers with so many heads
        struct rows_of {
            int     n_head;
            int64_t n_token; // rows of a head

            ggml_tensor * idx; // I64 [n_head*n_live]: the row of each live cell
        };

        int64_t n_live     = 0;
        int64_t n_archived = 0;

        ggml_tensor * tail = nullptr; // [n_all - n_live]: 0 for archived tokens, then -INFINITY
        ggml_tensor * mask = nullptr; // [n_all, n_tokens]: llama.cpp's, then for each query the tail

        std::vector<rows_of>                rows;
        std::vector<kvtool::staging::mark>  marks;

        void set_input(kvtool::staging & to) const;
    };

    staged stage;

    bool is_apart = false; // the signals of guesses are kept apart

    ggml_tensor * queries = nullptr; // F32 [1, n_tokens]: where they stand, with ALiBi
};

namespace kvtool {

// the graph's inputs of ours, made at the first call
llama_kvtool_input & graph_input(const llm_graph_context & graph);

ggml_tensor * new_input(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2);

} // namespace kvtool
