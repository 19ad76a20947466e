// Devices of a process: limits of the memory that they report, and spares, which are second handles of devices.

#pragma once

#include "layer.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <array>

namespace kvtool {

// the two spares of a worker's device (an RPC server): one for the graphs of edits, and one for graphs that read the
// cache
using spare_devices = std::array<ggml_backend_dev_t, 2>;

// get the spares of this device; returns false if llama_kvtool_use_spares was not called for it
bool find_spares(ggml_backend_dev_t dev, spare_devices & spares);

// true if the layer's cells lie on a worker
bool lies_on_worker(const layer & l);

// Memory on the host for copies to and from a device with this type of buffers. It is pinned if the device has pinned
// memory: copies from other memory are slower and block the device. Throws out_of_space if there is no memory
ggml_backend_buffer_ptr host_buffer(ggml_backend_buffer_type_t buft, size_t n_bytes);

} // namespace kvtool
