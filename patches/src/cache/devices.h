// Devices of a process: limits of the memory that they report, and spare copies of them.

#pragma once

#include "ggml-backend.h"

#include <array>

namespace kvtool {

// spare copies of a worker's device: one for the graphs of edits, one for the graphs that read the cache
using spare_devices = std::array<ggml_backend_dev_t, 2>;

// returns false if llama_kvtool_use_spares has set none for this device
bool find_spares(ggml_backend_dev_t dev, spare_devices & spares);

} // namespace kvtool
