// What hooks.patch calls from llama.cpp's own files.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

class  llama_kvtool_input;
class  llm_graph_input_attn_k;
class  llm_graph_input_attn_kv;
class  llm_graph_input_attn_kv_iswa;
class  llm_graph_result;
struct ggml_tensor;
struct llama_context;
struct llama_hparams;
struct llama_kvtool;
struct llm_graph_context;

namespace kvtool {

class joint_input;

} // namespace kvtool

// what kvtool has added to a graph
struct llama_kvtool_graph {
    static constexpr int n_signal = 7;

    // the signals of the rows of one layer
    struct probe {
        int i; // the layer's index in the cache

        ggml_tensor * t[n_signal]; // [n_kv, 1, n_head_kv], or of each query [n_kv, n_tokens, n_head_kv]
    };

    // those that the host adds up; null where the device does
    std::vector<probe> probes;

    // those that later layers, which read the same cells, add to; of the recent signal and of squares [n_kv, q, n_head_kv]
    std::vector<probe> shared;

    llama_kvtool_input * input = nullptr;

    // of a joint step, whose members have signals of their own
    kvtool::joint_input * joint = nullptr;
};

// Notes how the new keys are rotated; they are null where a layer reads an earlier layer's cells. Ragged rows: stores keys
// and values at each row's own end and sets k and v to views of the layer's cells; returns false where rows are not ragged.
// v stays as it is where values are a part of the keys. unused: inputs that nothing reads then; some of llama.cpp's memories
// fill them all the same
bool llama_kvtool_store(
        const llm_graph_context & graph,
        ggml_tensor * k_cur,
        ggml_tensor * v_cur,
        ggml_tensor * & k,
        ggml_tensor * & v,
                int   il,
        std::initializer_list<ggml_tensor *> unused = {});

// with an archive: fills the layer's last cells with the archived tokens that the queries q attend to most
void llama_kvtool_recall(
        const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * mask, ggml_tensor * sinks, float scale, int il);

// ragged rows: a mask with each row's own length; ALiBi: with each row's own distances; else kq_mask
ggml_tensor * llama_kvtool_mask(const llm_graph_context & graph, ggml_tensor * kq_mask, int il);

// while archived tokens are staged: attention of the queries q to all of them and to the live cells; else null
ggml_tensor * llama_kvtool_staged(
        const llm_graph_context & graph, ggml_tensor * live_mask, ggml_tensor * q, ggml_tensor * sinks, float scale, int il);

// a step of several contexts: the attention of each one's tokens to its own cells, one after the other; null in other steps
ggml_tensor * llama_kvtool_join(
        const llm_graph_context & graph, llm_graph_input_attn_kv * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il);
ggml_tensor * llama_kvtool_join(
        const llm_graph_context & graph, llm_graph_input_attn_k * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il);
ggml_tensor * llama_kvtool_join(
        const llm_graph_context & graph, llm_graph_input_attn_kv_iswa * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
        ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale, int il);

// log n: the queries scaled by log_512(t); else q
ggml_tensor * llama_kvtool_scale(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k);

// Whether a model's index has nothing to choose, as it may choose all cells that there are: with kvtool there are no more. So
// its keys need not follow when cells move
bool llama_kvtool_dense(const llm_graph_context & graph);

// adds one layer's signals to the graph; p: the probabilities [n_kv, n_tokens, n_head], null with flash attention
void llama_kvtool_build(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * p,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
              float   kq_scale,
                int   il);

// whether n_tokens more can be decoded: every row has cells for them, beside those for recalled tokens, which llama.cpp's
// own table does not know, nor what ragged rows hold; and the context may still be used
bool llama_kvtool_fits(const llama_context & lctx, uint32_t n_tokens);

// counts the queries of a computed graph, and starts to copy the signals that the host adds up
void llama_kvtool_extract(llama_context & lctx, const llm_graph_result & res, uint32_t n_tokens);

// the most nodes that kvtool adds to a graph
uint32_t llama_kvtool_n_nodes(const llama_hparams & hparams, const llama_kvtool * kvtool, uint32_t n_tokens);
