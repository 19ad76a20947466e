// Staging: while a long text is read, archived keys and values are copied to a device, and new keys and values are
// copied back to the host.
//
// The device has two buffers. While attention of one layer reads the first buffer, threads copy the next layer's
// archived tokens to the second buffer. They also copy the cells of earlier layers to the host, where other threads
// cluster archived tokens. The device therefore waits only for the copy of the first layer.
//
// A device needs flash attention or products with keys in the archive's format, writes of rows (set_rows) in this
// format, queues for copies in addition to the scheduler's, and tensors with other bytes between their rows; without the
// last, see device::is_split. Pinned memory and events only save time.
//
// Most tokens are copied as they are archived. The threads convert tokens whose format devices cannot read, and tokens
// whose keys have to be rotated to another position because gaps between positions were closed.

#pragma once

#include "archive.h"
#include "cache/layer.h"
#include "workers.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kvtool {

class staging {
public:
    // n_token: number of rows of each head, for archived tokens and live cells together. n_thread: number of threads of
    // the context; it determines the number of clustering threads. Throws std::runtime_error if a device lacks memory.
    staging(archive & tokens, const std::vector<layer> & layers, bool v_trans, int64_t n_token, int n_thread);
    ~staging();

    staging(const staging &) = delete;

    // A layer's keys or values as rows, head after head: [n_embd, n_token*n_head]. `values` is null if values are a part
    // of the keys (MLA).
    ggml_tensor * keys  (size_t i) const { return staged[i].k; }
    ggml_tensor * values(size_t i) const { return staged[i].v; }

    // Sizes of the Hadamard matrices by which keys and values are multiplied; 0 if there is no matrix.
    int key_map  (size_t i) const { return tokens[i].n_map_k; }
    int value_map(size_t i) const { return values(i) ? tokens[i].n_map_v : tokens[i].n_map_k; }

    int64_t n_token() const { return n_staged; }

    // Size of the buffers on devices, in bytes.
    int64_t bytes() const;

    // Bytes that an archived token of the largest layer takes on a device.
    static size_t most_token_bytes(const archive & tokens);

    // Begin a step. Archived tokens are copied to the rows after the first n_live rows of each head. Their keys get the
    // right distances from a query at position `rot`, the step's first. `marks` has one entry per attention operation,
    // in the order of the graph. The operation reads the keys of layer `layer` after the node `keys` is computed, and
    // the values after `values`, which is null if values are a part of the keys. Devices may compute either node first,
    // and may read keys before they compute `values`.
    struct mark {
        const ggml_tensor * keys;
        const ggml_tensor * values;
        size_t              layer;
    };
    void begin(const std::vector<mark> & marks, int64_t n_live, int64_t rot);

    // Callback of the scheduler for each node of the step's graph, see ggml_backend_sched_set_eval_callback. It stops
    // at marked nodes. There it waits until the layer's archived tokens are copied, and then starts to copy the next
    // layer's tokens.
    static bool reach(ggml_tensor * node, bool ask, void * userdata);

    // Reason why a copy of the step failed, or an empty string. ggml reports success, but the step's results are wrong.
    const std::string & failure() const { return failed; }

    // Wait for copies of cells to the host, and drop these copies. Call this before cells change.
    void forget_cells();

    // Archive cells of all layers, like recaller::push. But a layer's keys and values are stored only when that layer
    // is next copied to the device. Returns false if `can_store` is false; the caller must then store them.
    bool push(const evicted_tokens & evicted);

    // Wait until the archive holds all pushed tokens and no thread uses it. Then throw if background work failed.
    void settle();

private:
    // Pinned memory for the copies of a thread. Copies from other memory are slower and block the device.
    struct bounce {
        ggml_backend_buffer_ptr buffer;
        ggml_backend_event_ptr  done; // event after the last copy from this buffer; the buffer is then free again

        bool is_used = false;
    };

    // A thread's queue of copies to one device.
    struct queue {
        ggml_backend_ptr    backend;
        std::vector<bounce> bounces; // empty if the device has no pinned memory; copies then use ordinary memory

        size_t next = 0;
    };

    struct device {
        // True if all rows of keys come before all rows of values. Vulkan needs this, because its kernels read tensors
        // only at aligned offsets. On other devices, each key is followed by its value, as in the archive: blocks are
        // copied without changes
        bool is_split = false;

        // First byte of the values if is_split is true. It is the same for all layers, and a multiple of the block size:
        // an unused row of a layer may hold blocks of another layer, but not parts of blocks, which may read as NaN
        size_t offset_v = 0;

        ggml_backend_buffer_ptr buffers[2];
        ggml_context_ptr        ctx;
        ggml_tensor           * bytes[2]; // The complete buffers, as tensors of bytes.
        std::vector<queue>      queues;   // One queue per copying thread.
    };

    // A part of each token that is copied to the device: its key, its value, or both. A token is a key followed by a
    // value. The part has `size` bytes, from byte src_offset of the token on. On the device, the parts of all tokens are
    // rows in the layer's tensor `bytes`: head after head, from byte dst_offset on.
    struct part {
        size_t src_offset;
        size_t size;
        size_t dst_offset;
    };

    struct staged_layer {
        staging::device * device;
        ggml_tensor     * bytes;
        ggml_tensor     * k;
        ggml_tensor     * v;

        ggml_type type;   // Format of keys and values on the device.
        size_t    size_k; // Bytes of a key on the device.
        size_t    size;   // Bytes of a key and a value on the device.

        std::vector<part> parts;

        // copies of the layer's cells on the host, in the format of the cache
        std::vector<uint8_t> cells_k;
        std::vector<uint8_t> cells_v;

        bool is_fetched = false; // True if the layer's cells were copied to the host in this step.
        bool is_stored  = true;  // True if the archive has this layer's keys and values of the cells pushed last.
    };

    archive &                  tokens;
    const std::vector<layer> & layers;

    const int64_t n_staged; // number of rows of each head

    // True if `store` can archive cells: they lie on devices (not on the host), values are not transposed, and keys are
    // not centered. The center of a block depends on the block before it, but `store` stores blocks in any order
    const bool can_store;

    std::map<ggml_backend_buffer_type_t, device> devices;
    std::vector<staged_layer>                    staged;

    // state of the current step
    std::vector<mark> marks;
    bool              is_half_reached = false; // True if only one of a mark's two nodes is computed.
    int64_t           n_live          = 0;
    int64_t           rot             = 0;
    size_t            n_reached       = 0;
    std::string       failed; // Why copies of a step failed. ggml reports success, so `settle` throws this reason.

    // cells that were pushed last
    std::vector<int32_t> cells;
    int64_t              cells_pos = 0; // position of the token in the first of these cells
    // until is_stored is true, only cells_k and cells_v have these tokens, although the archive already counts them

    std::atomic<int64_t> next_block { 0 }; // next block of the layer to copy

    workers::group arriving;
    workers::group fetching;
    workers::group sealing;

    // declared last, so that the threads end before the other members, which they use, are destroyed
    workers copiers;
    workers sealers;

    bool is_last(size_t layer) const;

    void copy(size_t layer);
    void copy_block(size_t thread, size_t layer, int64_t block);

    // True if the keys of some of these tokens, which are in one block, have to be rotated for this step.
    bool is_rotated(int64_t begin, int64_t end) const;

    // Tokens of a block in the device's format: keys, each followed by its value, head after head.
    std::vector<uint8_t> converted(size_t layer, int64_t begin, int64_t end) const;

    void fetch(size_t layer);
    void store(size_t layer, int64_t begin, int64_t end);
    void seal(size_t layer);
};

} // namespace kvtool
