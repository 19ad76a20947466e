// Cells copied to host memory, on whatever device the cache lies.

#pragma once

#include "archive.h"
#include "graphs.h"

#include <cstdint>
#include <functional>
#include <vector>

struct llama_context;

namespace kvtool {

// f(i, what these cells of layer i hold) for each layer: a device is asked once a layer, and for these cells alone. False: a
// device has failed
bool gather(
        graphs & graphs, llama_context & lctx, const std::vector<layer> & layers, const int32_t * cells, int32_t n,
        const std::function<void (size_t, gathered &&)> & f);

} // namespace kvtool
