// What a process tells of its devices: less memory than they have, and each of them more than once.

#pragma once

#include "ggml-backend.h"

#include <array>

namespace kvtool {

// two more of a worker's device, one for the graphs of edits and one for those that read keys: by graphs.h's kept_use
using spare_devices = std::array<ggml_backend_dev_t, 2>;

// false: llama_kvtool_use_spares has named none for this device
bool find_spares(ggml_backend_dev_t dev, spare_devices & spares);

// a worker's device for the archives of layers on this one; null: llama_kvtool_use_archive has named none
ggml_backend_dev_t archive_spare(ggml_backend_dev_t dev);

// a device like this one, whose backends are changed once they are made; it lives as long as the process
ggml_backend_dev_t changed_device(ggml_backend_dev_t dev, void (*change)(ggml_backend_t));

// reports the memory of a spare, which is none
void get_spare_memory(ggml_backend_dev_t, size_t * free, size_t * total);

} // namespace kvtool
