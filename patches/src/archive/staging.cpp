#include "staging.h"

#include "convert.h"
#include "out-of-space.h"

#include "../ggml/src/ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace kvtool {

// Maximum number of copying threads. One thread reads host memory more slowly than a device receives it. Eight threads
// are fast enough for PCIe 5.0.
static constexpr unsigned n_max_copiers = 8;

// For every four threads of the context, one thread computes clusters. More threads would take processor time from the
// thread that starts the device's work. Fewer threads could not keep up with a device.
static constexpr int n_sealer_part = 4;

// Number of pinned buffers of a copying thread: the thread fills one buffer while the device reads the other buffer.
static constexpr size_t n_bounce = 2;

// Number of unused bytes after the rows, because devices may read past a tensor's end. Also the alignment of values, a
// multiple of what devices need
static constexpr size_t n_padding = 4096;

// Format of a layer's keys and values on the device. Attention needs keys and values of the same format. q8_0 is a format
// that all devices can read
static ggml_type device_type(const archived_layer & l) {
    if (!l.is_centered && (l.type_k == l.type_v || l.n_embd_v == 0)) {
        return l.type_k;
    }
    const int64_t n_group = ggml_blck_size(GGML_TYPE_Q8_0);
    return l.n_embd_k % n_group == 0 && l.n_embd_v % n_group == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
}

// Bytes of a token's keys and of its values on the device, all heads together.
struct token_bytes {
    size_t keys   = 0;
    size_t values = 0;

    size_t sum() const { return keys + values; }
};

static token_bytes device_bytes(const archived_layer & l) {
    const ggml_type type = device_type(l);
    return { l.n_head*ggml_row_size(type, l.n_embd_k), l.n_head*ggml_row_size(type, l.n_embd_v) };
}

static ggml_backend_dev_t device_of(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    // llama.cpp's own host memory belongs to no device, so return the CPU
    return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

static std::runtime_error no_device_memory(size_t n_bytes) {
    return std::runtime_error("a device has no " + std::to_string(n_bytes >> 20) + " MiB for archived tokens");
}

static bool lie_on_devices(const std::vector<layer> & layers) {
    return std::none_of(layers.begin(), layers.end(), [](const layer & l) {
        return ggml_backend_buffer_is_host(l.k->buffer) || (l.v && ggml_backend_buffer_is_host(l.v->buffer));
    });
}

static bool are_centered(const archive & tokens) {
    return tokens.n_layer() > 0 && tokens[0].is_centered;
}

staging::staging(archive & tokens, const std::vector<layer> & layers, bool v_trans, int64_t n_token, int n_thread)
    : tokens(tokens), layers(layers), n_staged(n_token), can_store(!v_trans && lie_on_devices(layers) && !are_centered(tokens))
    , copiers(std::clamp(std::thread::hardware_concurrency()/2, 1u, n_max_copiers))
    , sealers(tokens.has_clusters() ? std::max(n_thread/n_sealer_part, 1) : 0) {
    // for each device: the largest keys and the largest values of its layers
    std::map<ggml_backend_buffer_type_t, token_bytes> largest;
    for (size_t i = 0; i < layers.size(); ++i) {
        auto & l = largest[ggml_backend_buffer_get_type(layers[i].k->buffer)];

        const auto each = device_bytes(tokens[i]);

        l.keys   = std::max(l.keys,   each.keys);
        l.values = std::max(l.values, each.values);
    }

    for (const auto & [buft, most] : largest) {
        auto & d = devices[buft];

        const size_t n_align = n_padding*ggml_type_size(device_type(tokens[0]));

        d.offset_v = (most.keys*n_token + n_align - 1)/n_align*n_align;
        d.is_split = std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device_of(buft))), "Vulkan") == 0;

        const size_t n_bytes  = d.offset_v + most.values*n_token + n_padding;
        const size_t n_tensor = 2 + 2*layers.size();
        d.ctx.reset(ggml_init({ n_tensor*ggml_tensor_overhead(), nullptr, true }));

        for (int b = 0; b < 2; ++b) {
            d.buffers[b].reset(ggml_backend_buft_alloc_buffer(buft, n_bytes));
            if (!d.buffers[b]) {
                throw no_device_memory(2*n_bytes);
            }
            // clear all rows: rows that are never written could hold NaN, and attention would propagate it
            ggml_backend_buffer_clear(d.buffers[b].get(), 0);

            d.bytes[b] = ggml_new_tensor_1d(d.ctx.get(), GGML_TYPE_I8, n_bytes);
            ggml_backend_tensor_alloc(d.buffers[b].get(), d.bytes[b], ggml_backend_buffer_get_base(d.buffers[b].get()));
        }

        ggml_backend_dev_t         dev  = device_of(buft);
        ggml_backend_buffer_type_t host = ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_dev_host_buffer_type(dev);

        for (size_t t = 0; t < copiers.size(); ++t) {
            queue q;
            q.backend.reset(ggml_backend_dev_init(dev, nullptr));
            if (!q.backend) {
                throw std::runtime_error("a device gives no queue for copies");
            }
            for (size_t j = 0; j < n_bounce && host; ++j) {
                bounce b;
                b.buffer.reset(ggml_backend_buft_alloc_buffer(host, most.sum()*n_block));
                b.done  .reset(ggml_backend_event_new(dev));
                if (!b.buffer || !b.done) {
                    q.bounces.clear();
                    break;
                }
                q.bounces.push_back(std::move(b));
            }
            d.queues.push_back(std::move(q));
        }
    }

    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & l = tokens[i];

        auto & d = devices[ggml_backend_buffer_get_type(layers[i].k->buffer)];

        // layers are computed in order, so consecutive layers use different buffers
        ggml_tensor * bytes = d.bytes[i % 2];

        staged_layer s;
        s.device = &d;
        s.bytes  = bytes;
        s.type   = device_type(l);
        s.size_k = ggml_row_size(s.type, l.n_embd_k);
        s.size   = ggml_row_size(s.type, l.n_embd_v) + s.size_k;

        const auto rows = [&](int64_t n_embd, size_t offset) {
            ggml_tensor * t = ggml_new_tensor_2d(d.ctx.get(), s.type, n_embd, n_token*l.n_head);

            t->nb[1] = d.is_split ? ggml_row_size(s.type, n_embd) : s.size;
            t->nb[2] = t->nb[3] = t->nb[1]*t->ne[1];

            ggml_backend_tensor_alloc(bytes->buffer, t, (char *) bytes->data + offset);
            return t;
        };

        const size_t offset_v = d.is_split ? d.offset_v : s.size_k;

        s.k = rows(l.n_embd_k, 0);
        s.v = layers[i].v ? rows(l.n_embd_v, offset_v) : nullptr;
        if (d.is_split && s.v) {
            s.parts = { { 0, s.size_k, 0 }, { s.size_k, s.size - s.size_k, offset_v } };
        } else {
            s.parts = { { 0, s.size, 0 } };
        }
        staged.push_back(std::move(s));
    }
}

staging::~staging() {
    // copies to the buffers must end before the buffers are freed
    copiers.wait(arriving);
    copiers.wait(fetching);
    sealers.wait(sealing);
}

size_t staging::most_token_bytes(const archive & tokens) {
    size_t res = 0;
    for (size_t i = 0; i < tokens.n_layer(); ++i) {
        res = std::max(res, device_bytes(tokens[i]).sum());
    }
    return res;
}

int64_t staging::bytes() const {
    int64_t res = 0;
    for (const auto & entry : devices) {
        res += 2*ggml_backend_buffer_get_size(entry.second.buffers[0].get());
    }
    return res;
}

//
// copies of archived tokens to the device, during a step
//

void staging::begin(const std::vector<mark> & marks, int64_t n_live, int64_t rot) {
    // wait for copies that a failed step may have started
    copiers.wait(arriving);
    sealers.wait(sealing);
    forget_cells();
    failed.clear();

    this->marks  = marks;
    this->n_live = n_live;
    this->rot    = rot;
    n_reached    = 0;

    is_half_reached = false;

    if (!marks.empty()) {
        copy(marks[0].layer);
    }
}

bool staging::reach(ggml_tensor * node, bool ask, void * userdata) {
    auto & self = *(staging *) userdata;

    const staging::mark * mark = self.n_reached < self.marks.size() ? &self.marks[self.n_reached] : nullptr;
    const bool is_mark = mark && (node == mark->keys || node == mark->values);
    if (ask) {
        return is_mark; // true: ggml stops after this node
    }
    if (!is_mark) {
        return true; // ggml stopped at the end of a split: it goes on
    }

    const size_t layer = mark->layer;
    if (const auto why = self.copiers.wait(self.arriving); !why.empty()) {
        GGML_LOG_ERROR("%s\n", why.c_str());
        // ggml ends only the current split of the graph, and still reports success: see llama_kvtool_computed
        self.failed = why;
        return false;
    }
    self.is_half_reached = mark->values && !self.is_half_reached;
    if (self.is_half_reached) {
        return true;
    }
    self.staged[layer].is_stored = true;

    if (self.is_last(layer)) {
        self.fetch(layer);
        self.seal(layer);
    }
    // The previous layer has been computed, so its buffer is free. Layers that share cells read the same buffer
    if (++self.n_reached < self.marks.size() && self.marks[self.n_reached].layer != layer) {
        self.copy(self.marks[self.n_reached].layer);
    }
    return true;
}

// true if no later layer of the model reads the same cells
bool staging::is_last(size_t layer) const {
    return std::none_of(marks.begin() + n_reached + 1, marks.end(), [&](const mark & m) { return m.layer == layer; });
}

void staging::copy(size_t layer) {
    next_block = store::n_slab(tokens.begin(), tokens.end()) - 1;

    for (size_t t = 0; t < copiers.size(); ++t) {
        copiers.add(arriving, [this, layer](size_t thread) {
            const auto backend = staged[layer].device->queues[thread].backend.get();

            // Copy the newest block first, because it takes longest: tokens that were pushed before this step must
            // first be stored in the archive
            try {
                for (int64_t block; (block = next_block--) >= 0;) {
                    copy_block(thread, layer, block);
                }
            } catch (...) {
                // queued copies use buffers that may be freed after an error
                ggml_backend_synchronize(backend);
                throw;
            }
            ggml_backend_synchronize(backend);
        });
    }
}

void staging::copy_block(size_t thread, size_t layer, int64_t block) {
    const auto & l = tokens[layer];
    const auto & s = staged[layer];

    const int64_t first = (tokens.begin()/n_block + block)*n_block;
    const int64_t begin = std::max(first, tokens.begin());
    const int64_t end   = std::min(first + n_block, tokens.end());

    if (!s.is_stored) {
        store(layer, begin, end);
    }

    auto & q = s.device->queues[thread];

    bounce * b = q.bounces.empty() ? nullptr : &q.bounces[q.next++ % q.bounces.size()];
    if (b && b->is_used) {
        ggml_backend_event_synchronize(b->done.get());
    }
    const int64_t n = end - begin;

    // the block's tokens, head after head: `stride` bytes from one head to the next
    const bool is_same_type = s.type == l.type_k && (l.n_embd_v == 0 || s.type == l.type_v);
    const bool is_changed   = !is_same_type || is_rotated(begin, end);

    const std::vector<uint8_t> changed = is_changed ? converted(layer, begin, end) : std::vector<uint8_t>();

    const uint8_t * const block_tokens = is_changed ? changed.data() : l.raw_key(0, begin);
    const size_t          block_stride = is_changed ? n*s.size : n_block*s.size;

    // Collect the block's tokens in `memory`, part by part and head after head, before they are copied to the device.
    // `memory` is a pinned buffer, or ordinary memory if the device has no pinned buffers. `memory` is null if there
    // are no pinned buffers and tokens have a single part: the tokens are then copied directly
    std::vector<uint8_t> unpinned(b || s.parts.size() == 1 ? 0 : n*l.n_head*s.size);
    uint8_t * memory = b ? (uint8_t *) ggml_backend_buffer_get_base(b->buffer.get()) : unpinned.empty() ? nullptr : unpinned.data();

    for (const auto & [src_offset, size, dst_offset] : s.parts) {
        const size_t n_bytes = n*size; // bytes of this part for the tokens of one head
        const size_t offset  = dst_offset + (n_live + begin - tokens.begin())*size;

        const uint8_t * data   = block_tokens + src_offset;
        size_t          stride = block_stride;
        if (memory) {
            // Number of tokens per memcpy. The tokens of a head are consecutive, so whole tokens can be copied together.
            // Keys alone, or values alone, are not consecutive
            const int64_t n_run = size == s.size ? n : 1;
            for (int head = 0; head < l.n_head; ++head) {
                for (int64_t i = 0; i < n; i += n_run) {
                    std::memcpy(memory + head*n_bytes + i*size, data + head*stride + i*s.size, n_run*size);
                }
            }
            data    = memory;
            stride  = n_bytes;
            memory += n_bytes*l.n_head;
        }
        if (b) {
            ggml_backend_tensor_set_2d_async(q.backend.get(), s.bytes, data, offset, n_bytes, l.n_head, n_staged*size, stride);
        } else {
            ggml_backend_tensor_set_2d(s.bytes, data, offset, n_bytes, l.n_head, n_staged*size, stride);
        }
    }
    if (b) {
        ggml_backend_event_record(b->done.get(), q.backend.get());
        b->is_used = true;
    }
}

bool staging::is_rotated(int64_t begin, int64_t end) const {
    return tokens.base_of(begin) != tokens.base() || begin < std::min(end, tokens.near_begin(rot));
}

std::vector<uint8_t> staging::converted(size_t layer, int64_t begin, int64_t end) const {
    const auto & l = tokens[layer];
    const auto & s = staged[layer];

    const int64_t n     = end - begin;
    const int64_t block = begin/n_block;

    std::vector<uint8_t> res(n*l.n_head*s.size);
    std::vector<float>   keys(n*l.n_embd_k), value(l.n_embd_v);

    uint8_t * dst = res.data();
    for (int head = 0; head < l.n_head; ++head) {
        const uint8_t * order = tokens.order_of(layer, head, block);

        tokens.keys(layer, head, begin, n, order, keys.data());
        for (int64_t j = 0; j < n; ++j) {
            const int64_t i     = order ? block*n_block + order[(begin + j) % n_block] : begin + j;
            const int64_t delta = tokens.rotation_back(i, i < tokens.near_begin(rot), rot);
            if (delta != 0) {
                tokens.rotations_of(layer).rotate(keys.data() + j*l.n_embd_k, delta);
            }
        }
        hadamard(keys.data(), keys.size(), l.n_map_k);

        for (int64_t j = 0; j < n; ++j, dst += s.size) {
            from_float(s.type, keys.data() + j*l.n_embd_k, dst, l.n_embd_k);
            if (!value.empty()) {
                // values remain multiplied by the Hadamard matrix
                to_float(l.type_v, l.raw_value(head, begin + j), value.data(), value.size());
                from_float(s.type, value.data(), dst + s.size_k, value.size());
            }
        }
    }
    return res;
}

void staging::seal(size_t layer) {
    for (int head = 0; head < tokens[layer].n_head && sealers.size() > 0; ++head) {
        sealers.add(sealing, [this, layer, head](size_t) { tokens.seal_row(layer, head); });
    }
}

//
// copies of new tokens from the device to the host, and their archiving
//

// copy all cells of a layer to the host
void staging::fetch(size_t layer) {
    if (!can_store) {
        return;
    }
    copiers.add(fetching, [this, layer](size_t thread) {
        auto & s = staged[layer];

        const auto backend = s.device->queues[thread].backend.get();

        const auto get = [&](const ggml_tensor * t, std::vector<uint8_t> & out) {
            out.resize(ggml_nbytes(t));
            ggml_backend_tensor_get_async(backend, t, out.data(), 0, out.size());
        };
        get(layers[layer].k, s.cells_k);
        if (layers[layer].v) {
            get(layers[layer].v, s.cells_v);
        }
        ggml_backend_synchronize(backend);
        s.is_fetched = true;
    });
}

// archive the tokens begin .. end - 1 of a layer; tokens that are not in the last `push` are skipped
void staging::store(size_t layer, int64_t begin, int64_t end) {
    const auto & l = layers[layer];
    const auto & s = staged[layer];

    begin = std::max(begin, cells_pos);
    end   = std::min(end, cells_pos + (int64_t) cells.size());
    for (int64_t i = begin; i < end; ++i) {
        const size_t cell = cells[i - cells_pos];

        const uint8_t * k = s.cells_k.data() + cell*l.k->nb[1];
        tokens.put(layer, i, l.k->type, k, l.v ? l.v->type : l.k->type, l.v ? s.cells_v.data() + cell*l.v->nb[1] : nullptr);
    }
}

void staging::forget_cells() {
    // a failed copy is repeated by the next `push`
    copiers.wait(fetching);
    for (auto & s : staged) {
        s.is_fetched = false;
    }
}

void staging::settle() {
    std::string why;
    const auto note = [&](const std::string & error) {
        if (why.empty()) {
            why = error;
        }
    };
    note(copiers.wait(arriving));
    note(copiers.wait(fetching));
    note(sealers.wait(sealing));

    for (size_t i = 0; i < staged.size(); ++i) {
        if (!staged[i].is_stored) {
            copiers.add(fetching, [this, i](size_t) { store(i, tokens.begin(), tokens.end()); });
        }
    }
    const auto error = copiers.wait(fetching);
    note(error);
    for (auto & s : staged) {
        s.is_stored = error.empty();
    }
    if (!why.empty()) {
        throw std::runtime_error(why);
    }
}

bool staging::push(const evicted_tokens & evicted) {
    settle();
    if (!can_store) {
        return false;
    }

    for (size_t i = 0; i < staged.size(); ++i) {
        if (!staged[i].is_fetched) {
            fetch(i);
        }
    }
    if (const auto why = copiers.wait(fetching); !why.empty()) {
        throw std::runtime_error(why);
    }

    tokens.reserve(evicted);
    const int64_t first = tokens.start(evicted);

    cells.assign(evicted.cells, evicted.cells + evicted.n_cell);
    cells_pos = evicted.pos_0;
    for (auto & s : staged) {
        s.is_stored = false;
    }

    tokens.finish(evicted, first, 1);
    return true;
}

} // namespace kvtool
