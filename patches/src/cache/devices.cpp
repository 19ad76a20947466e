#include "devices.h"

#include "archive/out-of-space.h"
#include "hooks/error.h"
#include "hooks/llama-kvtool.h"

#include "../ggml/src/ggml-backend-impl.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace kvtool {

//
// limits of the memory that devices report
//

struct device_limit {
    void (*get_memory)(ggml_backend_dev_t, size_t *, size_t *);

    size_t n_bytes;
};

static std::mutex                                 g_limits_mutex;
static std::map<ggml_backend_dev_t, device_limit> g_limits;

static void get_limited_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    std::lock_guard<std::mutex> lock(g_limits_mutex);

    const auto & limit = g_limits.at(dev);

    limit.get_memory(dev, free, total);
    *total = std::min(*total, limit.n_bytes);
    *free  = std::min(*free,  limit.n_bytes);
}

//
// spares, which are second handles of devices
//

static std::mutex                                  g_spares_mutex;
static std::map<ggml_backend_dev_t, spare_devices> g_spares; // in a worker's client: spares of the worker's devices

bool find_spares(ggml_backend_dev_t dev, spare_devices & spares) {
    std::lock_guard<std::mutex> lock(g_spares_mutex);

    const auto it = g_spares.find(dev);
    if (it == g_spares.end()) {
        return false;
    }
    spares = it->second;

    return true;
}

static std::map<ggml_backend_dev_t, ggml_backend_dev_t> g_real; // in a worker: the device behind each spare

// The total must not be 0: llama.cpp would assume that the device has the host's memory
static void get_spare_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free  = 0;
    *total = LLAMA_KVTOOL_SPARE_BYTES;
}

static ggml_backend_t init_spare(ggml_backend_dev_t spare, const char * params) {
    ggml_backend_dev_t dev = nullptr;
    {
        std::lock_guard<std::mutex> lock(g_spares_mutex);
        dev = g_real.at(spare);
    }
    ggml_backend_t res = dev->iface.init_backend(dev, params);
    if (res) {
        // The RPC server asks a backend's device how much memory it has. The spare must answer, not the device itself
        res->device = spare;
    }
    return res;
}

bool lies_on_worker(const layer & l) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(l.k->buffer));
    return dev && std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC") == 0;
}

ggml_backend_buffer_ptr host_buffer(ggml_backend_buffer_type_t buft, size_t n_bytes) {
    ggml_backend_dev_t         dev  = ggml_backend_buft_get_device(buft);
    ggml_backend_buffer_type_t host = dev ? ggml_backend_dev_host_buffer_type(dev) : nullptr;

    ggml_backend_buffer_ptr res { ggml_backend_buft_alloc_buffer(host ? host : ggml_backend_cpu_buffer_type(), n_bytes) };
    if (!res) {
        throw out_of_space("the host has no memory for copies to a device");
    }
    return res;
}

} // namespace kvtool

using namespace kvtool;

int32_t llama_kvtool_limit(ggml_backend_dev_t dev, uint64_t n_bytes) {
    if (!dev || n_bytes == 0) {
        return fail("dev must not be null, and n_bytes must be 1 or more");
    }
    return guarded([&]() -> int32_t {
        std::lock_guard<std::mutex> lock(g_limits_mutex);
        const auto it = g_limits.find(dev);
        if (it != g_limits.end()) {
            it->second.n_bytes = n_bytes;
        } else {
            g_limits[dev] = { dev->iface.get_memory, (size_t) n_bytes };
            dev->iface.get_memory = get_limited_memory;
        }
        return 0;
    });
}

ggml_backend_dev_t llama_kvtool_spare(ggml_backend_dev_t dev) {
    if (!dev) {
        fail("dev must not be null");
        return nullptr;
    }
    auto * res = new ggml_backend_device(*dev);

    res->iface.init_backend = init_spare;
    res->iface.get_memory   = get_spare_memory;

    std::lock_guard<std::mutex> lock(g_spares_mutex);
    g_real[res] = dev;

    return res;
}

int32_t llama_kvtool_use_spares(ggml_backend_dev_t dev, ggml_backend_dev_t edits, ggml_backend_dev_t reads) {
    if (!dev || !edits || !reads) {
        return fail("dev, edits and reads must not be null");
    }
    return guarded([&]() -> int32_t {
        std::lock_guard<std::mutex> lock(g_spares_mutex);
        g_spares[dev] = { edits, reads };
        return 0;
    });
}
