// Edits of the cache. An edit is checked, split by layer, and carried out in host memory or as a graph.

#pragma once

#include "hooks/llama-kvtool.h"

#include <cstdint>

struct llama_context;
struct llama_kvtool;

namespace kvtool {

// see llama_kvtool_apply
int32_t apply(llama_kvtool & kvtool, llama_context & lctx, const llama_kvtool_edit & edit);

} // namespace kvtool
