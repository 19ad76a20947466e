// What a process tells of its devices: less memory than they have, and each of them more than once.

#pragma once

#include "ggml-backend.h"

#include <array>

namespace kvtool {

// two more of a worker's device, one for the graphs of edits and one for those that read from the cache
using spare_devices = std::array<ggml_backend_dev_t, 2>;

// false: llama_kvtool_use_spares has named none for this device
bool find_spares(ggml_backend_dev_t dev, spare_devices & spares);

} // namespace kvtool
