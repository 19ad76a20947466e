#include "archive.h"

#include "convert.h"
#include "softmax.h"
#include "parallel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvtool {

//
// class archived_layer
//

// Round up to whole cache lines of the processor, so that the tokens of each layer begin at a cache line
static size_t padded(size_t n) {
    return (n + 63)/64*64;
}

archived_layer::archived_layer(const store & memory, size_t offset, const archive_shape & shape, const archive_params & params)
    : n_head(shape.n_head), n_embd_k(shape.n_embd_k), n_embd_v(shape.n_embd_v)
    , type_k((ggml_type) params.type_k), type_v((ggml_type) params.type_v)
    , n_map_k(params.is_plain || shape.rope.n_map > 0    ? 0 : hadamard_size(type_k, n_embd_k))
    , n_map_v(params.is_plain || shape.has_mapped_values ? 0 : hadamard_size(type_v, n_embd_v))
    , is_centered(type_k == GGML_TYPE_IQ4_NL)
    , size_k(ggml_row_size(type_k, n_embd_k)), size_v(ggml_row_size(type_v, n_embd_v)), size(size_k + size_v)
    , memory(memory), offset(offset) {}

size_t archived_layer::slab_end() const {
    return padded(center_offset() + n_center()*sizeof(ggml_fp16_t));
}

void archived_layer::set_span(int64_t begin, int64_t end) {
    first = begin;
    last  = end;
}

void archived_layer::put(int64_t i, float * k, float * v) {
    hadamard(k, n_head*n_embd_k, n_map_k);
    hadamard(v, n_head*n_embd_v, n_map_v);
    for (int head = 0; head < n_head; ++head) {
        from_float(type_k, k + head*n_embd_k, key_at  (head, i), n_embd_k);
        from_float(type_v, v + head*n_embd_v, value_at(head, i), n_embd_v);
    }
}

void archived_layer::keys(int head, int64_t slot, int n, float * out) const {
    for (int j = 0; j < n; ++j) {
        to_float(type_k, key_at(head, slot + j), out + j*n_embd_k, n_embd_k);
    }
    hadamard(out, n*n_embd_k, n_map_k);
}

void archived_layer::values(int head, int64_t slot, int n, float * out) const {
    for (int j = 0; j < n && n_embd_v > 0; ++j) {
        to_float(type_v, value_at(head, slot + j), out + j*n_embd_v, n_embd_v);
    }
    hadamard(out, n*n_embd_v, n_map_v);
}

//
// class archive
//

void archive::make(const archive_params & params, const std::vector<archive_shape> & shapes) {
    n_near = params.n_near;

    layers.clear();
    rope  .clear();

    size_t offset = 0;
    for (const auto & s : shapes) {
        layers.emplace_back(memory, offset, s, params);
        rope  .emplace_back(s.rope, s.n_embd_k, 2*n_near);
        rope.back().share(rope.front());

        offset = layers.back().slab_end();
    }
    memory.make(offset);

    clusters.clear();
    for (size_t i = 0; i < shapes.size() && params.n_exact > 0; ++i) {
        clusters.emplace_back(shapes[i].n_head, row_clusters(shapes[i].n_embd_k, shapes[i].n_embd_v, layers[i].n_map_v));
    }
}

int64_t archive::start(const evicted_tokens & evicted) {
    frames.reserve(frames.size() + 1);
    n_max = evicted.n_max;

    const int64_t first = first_of(evicted);

    memory.fit(first, evicted.end());

    if (size() == 0) {
        // A new stream begins. Its positions may be lower than the previous stream's positions, so the runs and
        // clusters of the previous stream are removed
        frames.assign(1, { first, base() });
        far = first;
        clear_clusters();
    }
    oldest = first;
    forget(first);

    return first;
}

void archive::put(size_t layer, int64_t pos, const gathered & cells) {
    const auto & l = layers[layer];

    const size_t size_k = ggml_row_size(cells.type_k, l.n_head*l.n_embd_k);
    const size_t size_v = ggml_row_size(cells.type_v, l.n_head*l.n_embd_v);

    const int64_t n = cells.k.size()/size_k;
    for (int64_t c = 0; c < n; ++c) {
        if (l.is_centered && ((pos + c) % n_block == 0 || pos + c == oldest)) {
            set_center(layer, pos + c, cells.type_k, cells.k.data() + c*size_k, n - c);
        }
        put(layer, pos + c, cells.type_k, cells.k.data() + c*size_k, cells.type_v, cells.v.data() + c*size_v);
    }
}

void archive::put(size_t layer, int64_t pos, ggml_type type_k, const uint8_t * k, ggml_type type_v, const uint8_t * v) {
    auto & l = layers[layer];

    thread_local std::vector<float> key, value, center;
    key  .resize(l.n_head*l.n_embd_k);
    value.resize(l.n_head*l.n_embd_v);

    to_float(type_k, k, key.data(), key.size());
    if (!value.empty()) {
        to_float(type_v, v, value.data(), value.size());
    }
    for (int head = 0; head < l.n_head && l.is_centered; ++head) {
        center.resize(l.n_embd_k);
        center_of(layer, head, pos, center.data());
        add(key.data() + head*l.n_embd_k, center.data(), l.n_embd_k, -1.0f);
    }
    l.put(pos, key.data(), value.data());
}

// The center of a block is the mean key of the block before it, or of the first tokens if there is none. In most models
// the keys of a head lie around a mean before they are rotated (RoPE), and this mean changes little from block to block.
// Therefore the mean is computed and stored at position 0, and center_of rotates it to a token's position.
void archive::set_center(size_t layer, int64_t i, ggml_type type, const uint8_t * k, int n) {
    auto & l = layers[layer];

    const int64_t d     = l.n_embd_k;
    const int64_t block = i/n_block;
    const int64_t first = std::max((block - 1)*n_block, oldest);
    const int64_t end   = first < block*n_block ? block*n_block : i + n;

    std::vector<float> key(l.n_head*d), mean(l.n_head*d);
    std::vector<double> sum(l.n_head*d);
    for (int64_t t = first; t < end; ++t) {
        if (t >= i) {
            to_float(type, k + (t - i)*ggml_row_size(type, l.n_head*d), key.data(), l.n_head*d);
        }
        for (int head = 0; head < l.n_head; ++head) {
            if (t < i) {
                this->key(layer, head, t, slot_of(layer, head, t), key.data() + head*d);
            }
            rope[layer].rotate(key.data() + head*d, base_of(t) - t);
        }
        for (size_t e = 0; e < sum.size(); ++e) {
            sum[e] += std::isfinite(key[e]) ? key[e] : 0.0f;
        }
    }
    std::transform(sum.begin(), sum.end(), mean.begin(), [&](double x) { return x/(end - first); });
    to_half(mean.data(), l.center(block), mean.size());
}

void archive::center_of(size_t layer, int head, int64_t i, float * out) const {
    const auto & l = layers[layer];
    to_float(GGML_TYPE_F16, l.center(i/n_block) + head*l.n_embd_k, out, l.n_embd_k);
    rope[layer].rotate(out, i - base_of(i));
}

void archive::key(size_t layer, int head, int64_t i, int64_t slot, float * out) const {
    const auto & l = layers[layer];

    l.keys(head, slot, 1, out);
    if (l.is_centered) {
        thread_local std::vector<float> center;
        center.resize(l.n_embd_k);
        center_of(layer, head, i, center.data());
        add(out, center.data(), l.n_embd_k, 1.0f);
    }
}

void archive::keys(size_t layer, int head, int64_t slot, int n, const uint8_t * order, float * out) const {
    const auto & l = layers[layer];

    l.keys(head, slot, n, out);
    if (!l.is_centered) {
        return;
    }
    thread_local std::vector<float> center;
    center.resize(l.n_embd_k);

    const int64_t begin = slot - slot % n_block; // first slot of the block
    for (int j = 0; j < n; ++j) {
        center_of(layer, head, order ? begin + order[slot - begin + j] : slot + j, center.data());
        add(out + j*l.n_embd_k, center.data(), l.n_embd_k, 1.0f);
    }
}

size_t archive::center_bytes() const {
    size_t n = 0;
    for (const auto & l : layers) {
        n += l.n_center();
    }
    return n*sizeof(ggml_fp16_t);
}

void archive::get_centers(uint8_t * out, int64_t begin, int64_t end) const {
    for (int64_t block = begin/n_block; block*n_block < end; ++block) {
        for (const auto & l : layers) {
            const size_t n = l.n_center()*sizeof(ggml_fp16_t);
            memcpy(out, l.center(block), n);
            out += n;
        }
    }
}

void archive::set_centers(const uint8_t * in, int64_t begin, int64_t end) {
    for (int64_t block = begin/n_block; block*n_block < end; ++block) {
        for (auto & l : layers) {
            const size_t n = l.n_center()*sizeof(ggml_fp16_t);
            memcpy(l.center(block), in, n);
            in += n;
        }
    }
}

void archive::finish(const evicted_tokens & evicted, int64_t first, int n_thread) {
    for (auto & l : layers) {
        l.set_span(first, evicted.end());
    }

    move_far(evicted.rot + base() - n_near);
    if (!is_deferred) {
        seal_all(n_thread);
    }
}

void archive::set_base(int64_t base) {
    if (frames.empty() || frames.back().base != base) {
        // remove the newest run if it has no archived tokens
        if (size() == 0) {
            frames.clear();
        } else if (!frames.empty() && frames.back().first == end()) {
            frames.pop_back();
        }
        frames.push_back({ end(), base });
    }
}

std::vector<stretch> archive::stretches(int64_t far_end, int64_t far_rotation) const {
    std::vector<stretch> res;

    const auto add = [&](int64_t begin, int64_t end, int64_t delta) {
        if (begin < end) {
            res.push_back({ begin, end, delta });
        }
    };

    add(begin(), far_end, far_rotation);
    for (size_t j = 0; j < frames.size(); ++j) {
        const int64_t stop = j + 1 < frames.size() ? frames[j + 1].first : end();
        add(std::max(frames[j].first, far_end), stop, base() - frames[j].base);
    }

    return res;
}

int64_t archive::base_of(int64_t i) const {
    if (frames.empty()) {
        return 0;
    }
    const auto f = std::upper_bound(frames.begin() + 1, frames.end(), i, [](int64_t t, const frame & f) { return t < f.first; });
    return f[-1].base;
}

void archive::move_far(int64_t end) {
    far = std::max(std::max(far, begin()), std::min(end, this->end()));
}

void archive::forget(int64_t first) {
    for (auto & l : layers) {
        if (l.begin() < l.end()) {
            l.set_span(std::max(l.begin(), std::min(l.end(), first)), l.end());
        }
    }
    far = std::max(far, first);
    while (frames.size() > 1 && frames[1].first <= first) {
        frames.erase(frames.begin());
    }
}

void archive::clear() {
    for (auto & l : layers) {
        l.set_span(0, 0);
    }
    memory.clear();
    far = 0;
    frames.clear();
    clear_clusters();
}

void archive::expect(int64_t begin, int64_t end) {
    memory.fit(begin, end);

    for (auto & l : layers) {
        if (l.begin() != begin || l.end() != end) {
            l.set_span(0, 0);
            // temporary values, until set_table is called
            frames.clear();
            far = begin;
        }
    }
    clear_clusters();
    n_unsealed = n_row();
}

void archive::fill(size_t layer, const std::vector<archive_part> & in, int64_t begin, int64_t end, int n_thread) {
    auto & l = layers[layer];
    l.set_span(begin, end);

    // Each work item fills one slab, so that the page faults of new memory are spread over the threads
    const int64_t first_slab = begin/store::n_block;
    parallel_for(n_thread, store::n_slab(begin, end), [&](int i) {
        const int64_t t_begin = std::max(begin, (first_slab + i)*store::n_block);
        const int64_t t_end   = std::min(end, archived_layer::block_end(t_begin));
        for (int head = 0; head < l.n_head; ++head) {
            auto part = std::upper_bound(in.begin(), in.end(), t_begin, [](int64_t t, const archive_part & p) { return t < p.first; });
            for (int64_t t = t_begin; t < t_end; ++t) {
                for (; part != in.end() && part->first <= t; ++part) {}
                memcpy(l.raw_key(head, t), part[-1].data + ((t - part[-1].first)*l.n_head + head)*l.size, l.size);
            }
        }
    });
}

std::vector<int64_t> archive::table() const {
    std::vector<int64_t> res = { begin(), end(), far };
    for (const auto & f : frames) {
        res.push_back(f.first);
        res.push_back(f.base);
    }
    return res;
}

std::string archive::set_table(const std::vector<int64_t> & table) {
    const int64_t begin = table[0];
    const int64_t end   = table[1];

    for (const auto & l : layers) {
        if (l.begin() != begin || l.end() != end) {
            return "the table and the layers are not of one archive";
        }
    }

    bool ok = table[2] >= 0 && table[2] <= end && (begin == end || (table.size() > 3 && table[3] <= begin));
    for (size_t i = 3; ok && i < table.size(); i += 2) {
        ok = table[i] >= (i > 3 ? table[i - 2] + 1 : 0) && table[i] <= end && table[i + 1] >= 0 && table[i + 1] < max_pos;
    }
    if (!ok) {
        return "the table is not of an archive";
    }

    std::vector<frame> saved_frames;
    for (size_t i = 3; i < table.size(); i += 2) {
        saved_frames.push_back({ table[i], table[i + 1] });
    }
    frames = std::move(saved_frames);

    far = begin;
    move_far(table[2]);
    n_unsealed = n_row();

    return {};
}

} // namespace kvtool
