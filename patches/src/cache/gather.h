// Copies of cells to host memory, from any device.

#pragma once

#include "archive/archive.h"
#include "graphs.h"

#include <cstdint>
#include <functional>
#include <vector>

struct llama_context;

namespace kvtool {

// Call f(i, contents) for each layer i, with the contents of these cells. A device gets one request for all its layers,
// and sends only these cells. Returns false if a device failed
bool gather(
        graphs & graphs, llama_context & lctx, const std::vector<layer> & layers, const int32_t * cells, int32_t n,
        const std::function<void (size_t, gathered &&)> & f);

} // namespace kvtool
