// Norms of cached values.

#pragma once

#include <cstdint>

struct llama_context;
struct llama_kvtool;

namespace kvtool {

// see llama_kvtool_read_value_norms
int32_t read_value_norms(llama_kvtool & kvtool, llama_context & lctx, float * out, int32_t n_cell);

} // namespace kvtool
