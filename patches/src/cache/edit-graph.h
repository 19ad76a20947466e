// Graphs that edit the cache or read its keys. They run on any device.

#pragma once

#include "graphs.h"
#include "layer.h"
#include "layer-edit.h"

#include <cstdint>
#include <vector>

class  llama_kv_cache;
struct llama_context;
struct llama_kvtool;

namespace kvtool {

// apply the edits to the layers of part p; returns false if a device failed
bool edit_graph(
        llama_kvtool & kvtool, llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, const part & p,
        const std::vector<layer_edit> & edits, bool with_k, bool with_v);

// see llama_kvtool_read_keys
int32_t read_keys(
        llama_kvtool & kvtool, llama_context & lctx, const int32_t * first, const int32_t * delta, float * out, int32_t n, int32_t n_dim);

// Append the positions that a layer's keys are rotated by. M-RoPE needs them once per section. In the last section they
// are zeros, because its position is always 0 in text
void push_deltas(const layer & l, const std::vector<int32_t> & deltas, input & list);

// number of entries that push_deltas appends for n keys
int64_t n_deltas(const layer & l, int64_t n);

// multiply quantized keys by the Hadamard matrix, which is its own inverse. k_rot: the matrix as a tensor of the graph,
// see graphs::build_t
ggml_tensor * mapped(ggml_context * ctx, const layer & l, ggml_tensor * keys, ggml_tensor * k_rot);

} // namespace kvtool
