// Edits of a cache in host memory, without a graph.

#pragma once

#include "layer-edit.h"

#include <vector>

struct llama_kvtool;

namespace kvtool {

// apply moves and merges, not rotations
void edit_host(const llama_kvtool & kvtool, const std::vector<layer_edit> & edits, bool with_k, bool with_v);

} // namespace kvtool
