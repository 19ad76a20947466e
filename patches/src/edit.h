// An edit: checked, sorted by layer, and done in host memory or as a graph.

#pragma once

#include "layer.h"
#include "llama-kvtool.h"

#include <cstdint>
#include <vector>

class  llama_kv_cache;
struct llama_context;
struct llama_kvtool;

namespace kvtool {

struct part;

// one layer's share of an edit
struct layer_edit {
    std::vector<llama_kvtool_move> moves; // delta == 0, src != dst
    std::vector<llama_kvtool_move> turns; // delta != 0

    std::vector<llama_kvtool_term> terms;
};

// the moves of values: all but those of keys that turn where they are
std::vector<llama_kvtool_move> values_moved(const layer_edit & edit);

// see llama_kvtool_apply
int32_t apply(llama_kvtool & kvtool, llama_context & lctx, const llama_kvtool_edit & edit);

// see llama_kvtool_read_keys
int32_t read_keys(
        llama_kvtool & kvtool, llama_context & lctx, const int32_t * first, const int32_t * delta, float * out, int32_t n, int32_t n_dim);

// in host memory; turns nothing
void edit_host(const llama_kvtool & kvtool, const std::vector<layer_edit> & edits, bool with_k, bool with_v);

// as a graph, over the part's layers; false: a device has failed
bool edit_graph(
        llama_kvtool & kvtool, llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, const part & p,
        const std::vector<layer_edit> & edits, bool with_k, bool with_v);

} // namespace kvtool
