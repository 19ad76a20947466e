#include "devices.h"

#include "error.h"
#include "llama-kvtool.h"

#include "../ggml/src/ggml-backend-impl.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace kvtool {

//
// less memory
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
// spares
//

static std::mutex                                       g_spares_mutex;
static std::map<ggml_backend_dev_t, spare_devices>      g_spares;   // a client's: of each of a worker's devices
static std::map<ggml_backend_dev_t, ggml_backend_dev_t> g_archives; // a client's: for the archives of each

bool find_spares(ggml_backend_dev_t dev, spare_devices & spares) {
    std::lock_guard<std::mutex> lock(g_spares_mutex);

    const auto it = g_spares.find(dev);
    if (it == g_spares.end()) {
        return false;
    }
    spares = it->second;

    return true;
}

ggml_backend_dev_t archive_spare(ggml_backend_dev_t dev) {
    std::lock_guard<std::mutex> lock(g_spares_mutex);

    const auto it = g_archives.find(dev);
    return it == g_archives.end() ? nullptr : it->second;
}

// llama.cpp takes the host's memory for a device that reports none at all
void get_spare_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free  = 0;
    *total = LLAMA_KVTOOL_SPARE_BYTES;
}

//
// changed devices
//

struct change {
    ggml_backend_dev_t dev;
    void (*make)(ggml_backend_t);
};

static std::mutex                           g_changes_mutex;
static std::map<ggml_backend_dev_t, change> g_changes;

static change change_of(ggml_backend_dev_t own) {
    std::lock_guard<std::mutex> lock(g_changes_mutex);
    return g_changes.at(own);
}

static void get_own_memory(ggml_backend_dev_t own, size_t * free, size_t * total) {
    ggml_backend_dev_memory(change_of(own).dev, free, total);
}

static ggml_backend_t init_changed(ggml_backend_dev_t own, const char * params) {
    const auto [dev, make] = change_of(own);

    ggml_backend_t res = dev->iface.init_backend(dev, params);
    if (res) {
        // a server asks this device for its memory
        res->device = own;
        make(res);
    }
    return res;
}

ggml_backend_dev_t changed_device(ggml_backend_dev_t dev, void (*make)(ggml_backend_t)) {
    auto * res = new ggml_backend_device(*dev);

    res->iface.init_backend = init_changed;
    res->iface.get_memory   = get_own_memory;

    std::lock_guard<std::mutex> lock(g_changes_mutex);
    g_changes[res] = { dev, make };

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
    ggml_backend_dev_t res = changed_device(dev, [](ggml_backend_t) {});
    res->iface.get_memory = get_spare_memory;

    return res;
}

int32_t llama_kvtool_use_spares(ggml_backend_dev_t dev, ggml_backend_dev_t edits, ggml_backend_dev_t keys) {
    if (!dev || !edits || !keys) {
        return fail("dev, edits and keys must not be null");
    }
    return guarded([&]() -> int32_t {
        std::lock_guard<std::mutex> lock(g_spares_mutex);
        g_spares[dev] = { edits, keys };
        return 0;
    });
}

int32_t llama_kvtool_use_archive(ggml_backend_dev_t dev, ggml_backend_dev_t archive) {
    if (!dev || !archive) {
        return fail("dev and archive must not be null");
    }
    return guarded([&]() -> int32_t {
        std::lock_guard<std::mutex> lock(g_spares_mutex);
        g_archives[dev] = archive;
        return 0;
    });
}
