// Functions that hooks.patch calls from llama.cpp's own files. They are defined in
// - state.cpp: llama_kvtool_prepare
// - cache/ragged.cpp: llama_kvtool_store, _mask, _ragged, _dense
// - cache/probes.cpp: llama_kvtool_scale, _add_signals, _extract, _n_nodes
// - join.cpp: _attend; recall.cpp: _recall; resident.cpp: _resident; staged.cpp: _staged, _computed

#pragma once

#include "ggml.h"

#include <cstdint>
#include <initializer_list>
#include <vector>

class  llama_kvtool_input;
class  llm_graph_input_attn_k;
class  llm_graph_input_attn_kv;
class  llm_graph_input_attn_kv_iswa;
class  llm_graph_result;
struct llama_context;
struct llama_hparams;
struct llama_kvtool;
struct llm_graph_context;

namespace kvtool {

class joint_input;

} // namespace kvtool

// kvtool's part of a graph
struct llama_kvtool_graph {
    static constexpr int n_signal = 7;

    // signals of the rows of one layer
    struct probe {
        int i; // index of the layer in llama_kvtool::layers

        ggml_tensor * t[n_signal]; // [n_kv, 1, n_head_kv]
    };

    // For each layer, the step's signals that the host adds to its sums. t[s] is null if the device adds up signal s
    std::vector<probe> probes;

    // If several layers read the same cells, their signals are combined. There is one entry for such layers, with the
    // signals of those layers that are already in the graph. The last of these layers removes the entry. The recent
    // signal and squares have one value per query: [n_kv, q, n_head_kv]
    std::vector<probe> shared;

    // the graph stores queries, and their signals are computed later
    bool is_deferred = false;

    // the graph attends to residents, and stores its queries
    bool is_resident = false;

    llama_kvtool_input * input = nullptr;

    // inputs of a joint step, else null; in a joint step the signals are in the member graphs of this object
    kvtool::joint_input * joint = nullptr;
};

// Note how the new keys are rotated. If rows are ragged, also store the new keys and values at the end of each row, set
// k and v to views of the layer's cells, and return true. Otherwise return false. v is unchanged if values are a part
// of the keys. k_cur is null if the layer reads an earlier layer's cells.
// unused: inputs that no operation reads if rows are ragged. These inputs must stay in the graph, because some of
// llama.cpp's memories always fill them
bool llama_kvtool_store(
        const llm_graph_context & graph,
        ggml_tensor * k_cur,
        ggml_tensor * v_cur,
        ggml_tensor * & k,
        ggml_tensor * & v,
                int   il,
        std::initializer_list<ggml_tensor *> unused = {});

// If there is an archive, compute the attention of the queries q to it, and write the result to the layer's last cells.
// The result is synthetic cells if llama_kvtool_params::n_synthetic is above 0, otherwise the archived tokens with the
// most attention
void llama_kvtool_recall(
        const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * mask, ggml_tensor * sinks, float scale, int il);

// Return the mask of a layer. It is kq_mask except in three cases. If rows have different lengths (ragged), or if the
// distances to keys differ between rows (ALiBi), each row has a separate mask. If there are synthetic cells, a token
// sees only the synthetic cells that were computed for it
ggml_tensor * llama_kvtool_mask(const llm_graph_context & graph, ggml_tensor * kq_mask, int il);

// Attention of the queries q to all archived tokens and to the live cells; null unless archived tokens are staged.
// v: values of the step's tokens, which only MLA needs; v_mla: matrices that decompress values (MLA), or null
ggml_tensor * llama_kvtool_staged(
        const llm_graph_context & graph, ggml_tensor * live_mask, ggml_tensor * q, ggml_tensor * v, ggml_tensor * sinks,
        ggml_tensor * v_mla, float scale, int il);

// attention of the queries q to the live cells and to residents; null if the step has no residents
ggml_tensor * llama_kvtool_resident(
        const llm_graph_context & graph, ggml_tensor * live_mask, ggml_tensor * q, ggml_tensor * sinks, float scale, int il);

// flash attention of the queries q to rows of different lengths; null if llama.cpp computes the layer's attention
ggml_tensor * llama_kvtool_ragged(
        const llm_graph_context & graph, ggml_tensor * live_mask, ggml_tensor * q, ggml_tensor * sinks, float scale, int il);

// Compute a layer's attention in place of llama.cpp; null if llama.cpp should compute it. In a joint step, each
// context's tokens attend to the cells of that context, and the results are concatenated. In other steps, the result
// comes from llama_kvtool_staged, llama_kvtool_resident or llama_kvtool_ragged
ggml_tensor * llama_kvtool_attend(
        const llm_graph_context & graph, llm_graph_input_attn_kv * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il);
ggml_tensor * llama_kvtool_attend(
        const llm_graph_context & graph, llm_graph_input_attn_k * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il);
ggml_tensor * llama_kvtool_attend(
        const llm_graph_context & graph, llm_graph_input_attn_kv_iswa * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il);

// If `logn` is set, multiply each query by log_512 of the number of tokens that it has seen. Otherwise return q
ggml_tensor * llama_kvtool_scale(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k);

// True if kvtool is enabled. Attention then ignores the model's index, which chooses cells for each query. The index
// would choose all cells anyway, because a layer never has more cells than the index chooses (see
// llama_kvtool_most_cells). Therefore, edits need not move the index's keys along with the cells
bool llama_kvtool_dense(const llm_graph_context & graph);

// add one layer's signals to the graph; p: the probabilities [n_kv, n_tokens, n_head], null with flash attention
void llama_kvtool_add_signals(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * p,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
              float   kq_scale,
                int   il);

// Prepare a step of n_tokens tokens: compute deferred signals, and fill cells from the archive. Returns false if the
// step cannot be decoded: the context is unusable, or a row has too few free cells. llama.cpp cannot check for free
// cells, because it knows neither the lengths of ragged rows nor which cells are reserved for recalled tokens
bool llama_kvtool_prepare(llama_context & lctx, uint32_t n_tokens);

// Return the status of a computed graph: `status`, or GGML_STATUS_FAILED if archived tokens could not be copied to a device.
// llama.cpp then removes the tokens of the step
ggml_status llama_kvtool_computed(const llama_context & lctx, ggml_status status);

// count the queries of a computed graph and start to copy the signals that the host adds up
void llama_kvtool_extract(llama_context & lctx, const llm_graph_result & res, uint32_t n_tokens);

// maximum number of nodes that kvtool adds to a graph
uint32_t llama_kvtool_n_nodes(const llama_hparams & hparams, const llama_kvtool * kvtool, uint32_t n_tokens);
