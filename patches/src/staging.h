// Archived keys and values on their way to a device and from it, while a long text is read.
//
// There are two buffers on the device: while attention of one layer reads the first, threads copy the next layer's archived tokens to
// the second. Meanwhile others copy new cells of the layers before to the host, and cluster tokens that have been archived there. So the
// device waits for nothing but the first layer.

#pragma once

#include "archive.h"
#include "layer.h"
#include "workers.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

namespace kvtool {

class staging {
public:
    // Why these layers cannot be staged; empty: they can.
    static std::string unsupported(const archive & tokens, const std::vector<layer> & layers);

    // n_token: rows that each head has room for, archived tokens and live cells together. n_thread: those that cluster. Throws no_room
    // where a device lacks memory.
    staging(archive & tokens, const std::vector<layer> & layers, bool v_trans, int64_t n_token, int n_thread);
    ~staging();

    staging(const staging &) = delete;

    // A layer's keys, or its values, as rows of one head after the other: [n_embd, n_token*n_head].
    ggml_tensor * keys  (size_t i) const { return staged[i].k; }
    ggml_tensor * values(size_t i) const { return staged[i].v; }

    int64_t n_token() const { return n_room; }

    // Bytes that the buffers take on devices.
    int64_t bytes() const;

    // Begins a step: archived tokens go behind the first n_live rows of each head. `marks` has a node of the graph for each layer that
    // attends, in their order: behind it, attention reads the layer's rows.
    struct mark {
        const ggml_tensor * node;
        size_t              layer;
    };
    void begin(const std::vector<mark> & marks, int64_t n_live);

    // The scheduler calls this for each node of the step's graph, see ggml_backend_sched_set_eval_callback, and stops behind marked
    // nodes. This then waits until the layer's archived tokens are there, and starts to copy the next layer's.
    static bool reach(ggml_tensor * node, bool ask, void * self);

    // Archives cells of all layers, as recaller::push does. Their keys and values are stored when the layer is next copied. False: the
    // cells lie on the host, where push stores them at once.
    bool push(const leaving & some);

    // Returns once the archive holds all that was pushed, and nothing reads or changes it any more. Throws where something failed.
    void settle();

private:
    // Pinned memory that a thread copies through: from other memory a device copies more slowly, and while nothing else happens.
    struct bounce {
        ggml_backend_buffer_ptr buffer;
        ggml_backend_event_ptr  done; // what was copied from it last has arrived

        bool is_used = false;
    };

    // What a thread copies to one device with: a queue of its own there.
    struct queue {
        ggml_backend_ptr    backend;
        std::vector<bounce> bounces; // none: the device takes what lies anywhere

        size_t next = 0;
    };

    struct device {
        ggml_backend_buffer_ptr buffers[2];
        ggml_context_ptr        ctx;
        ggml_tensor           * bytes[2]; // all of a buffer
        std::vector<queue>      queues;   // [thread]
    };

    struct staged_layer {
        device      * home;
        ggml_tensor * bytes;
        ggml_tensor * k;
        ggml_tensor * v;

        // its cells on the host, as they are stored
        std::vector<uint8_t> cells_k;
        std::vector<uint8_t> cells_v;

        bool is_fetched = false; // after the last step
        bool is_stored  = true;  // what was pushed last
    };

    archive &                  tokens;
    const std::vector<layer> & layers;

    const int64_t n_room;
    const bool    is_apart; // the cells lie on devices

    std::map<ggml_backend_buffer_type_t, device> devices;
    std::vector<staged_layer>                    staged;

    // of the step
    std::vector<mark> marks;
    int64_t           n_live    = 0;
    size_t            n_reached = 0;

    // what was pushed last
    std::vector<int32_t> cells;
    int64_t              cells_pos = 0; // of the first of them

    std::atomic<int64_t> next { 0 }; // block of the layer that nobody copies yet

    workers::group arriving;
    workers::group fetching;
    workers::group sealing;

    // last, so that they end first
    workers copiers;
    workers sealers;

    bool is_last(size_t layer) const;

    void copy(size_t layer);
    void copy_block(size_t thread, size_t layer, int64_t block);
    void fetch(size_t layer);
    void store(size_t layer, int64_t begin, int64_t end);
    void seal(size_t layer);
};

} // namespace kvtool
