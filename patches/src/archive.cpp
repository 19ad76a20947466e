#include "archive.h"

#include "convert.h"
#include "state.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

namespace kvtool {

//
// one layer
//

archived_layer::archived_layer(int n_head, int64_t n_embd_k, int64_t n_embd_v, ggml_type type_k, ggml_type type_v, int n_bit)
    : n_head(n_head), n_embd_k(n_embd_k), n_embd_v(n_embd_v), n_bit(n_bit)
    , type_k(type_k), type_v(type_v)
    , size_k(ggml_row_size(type_k, n_embd_k)), size_v(ggml_row_size(type_v, n_embd_v)), size_side(n_bit ? side_bytes(n_embd_k, n_bit) : 0) {}

void archived_layer::push(int64_t pos, const float * k_cur, const float * v_cur) {
    if (first == last) {
        blocks.clear();
        first = last = pos;
    }
    if (blocks.empty() || last % n_block == 0) {
        blocks.push_back(new_block());
    }

    auto & b = blocks.back();

    // the index is made of what is stored, so that a restored archive has the same one
    std::vector<float> stored(n_bit > 0 ? n_embd_k : 0);

    const int64_t i = last++;
    for (int head = 0; head < n_head; ++head) {
        const size_t j = head*n_block + i % n_block;
        from_float(type_k, k_cur + head*n_embd_k, b.k.data() + j*size_k, n_embd_k);
        from_float(type_v, v_cur + head*n_embd_v, b.v.data() + j*size_v, n_embd_v);
        if (n_bit > 0) {
            keys(head, i, 1, stored.data());
            set_index(head, i, stored.data());
        }
    }
}

void archived_layer::drop(int64_t to) {
    for (to = std::min(to, last); first/n_block < to/n_block && !blocks.empty(); first = block_end(first)) {
        blocks.pop_front();
    }
    first = std::max(first, to);
}

void archived_layer::clear() {
    first = last = 0;
    blocks.clear();
}

size_t archived_layer::copy(uint8_t * out, const uint8_t * in, int64_t begin, int64_t end) {
    const size_t size = n_head*(size_k + size_v);

    if (in) {
        clear();
        first = last = begin;
        blocks.resize(begin < end ? (end - 1)/n_block - begin/n_block + 1 : 0, new_block());
        last = end;
    }
    for (int64_t i = begin; i < end && (in || out); ++i) {
        auto & b = blocks[i/n_block - first/n_block];
        for (int head = 0; head < n_head; ++head) {
            const size_t j = head*n_block + i % n_block;
            for (const auto & part : { std::make_pair(&b.k, size_k), std::make_pair(&b.v, size_v) }) {
                uint8_t * own = part.first->data() + j*part.second;
                if (out) {
                    memcpy(out, own, part.second);
                    out += part.second;
                } else {
                    memcpy(own, in, part.second);
                    in += part.second;
                }
            }
        }
    }

    return (end - begin)*size;
}

archived_layer::block archived_layer::new_block() const {
    return {
        std::vector<uint8_t>(n_head*n_block*size_k),
        std::vector<uint8_t>(n_head*n_block*size_v),
        std::vector<uint8_t>(n_head*n_block/n_side*size_side),
    };
}

int64_t archived_layer::bytes() const {
    int64_t res = 0;
    for (const auto & b : blocks) {
        res += b.k.size() + b.v.size() + b.index.size();
    }
    return res;
}

const uint8_t * archived_layer::raw_key(int head, int64_t i) const {
    return at(i).k.data() + (head*n_block + i % n_block)*size_k;
}

const uint8_t * archived_layer::raw_value(int head, int64_t i) const {
    return at(i).v.data() + (head*n_block + i % n_block)*size_v;
}

void archived_layer::keys(int head, int64_t i, int n, float * out) const {
    to_float(type_k, raw_key(head, i), out, n*n_embd_k);
}

void archived_layer::value(int head, int64_t i, float * out) const {
    to_float(type_v, raw_value(head, i), out, n_embd_v);
}

const uint8_t * archived_layer::side(int head, int64_t i) const {
    return at(i).index.data() + (head*n_block + i % n_block)/n_side*size_side;
}

void archived_layer::set_index(int head, int64_t i, const float * key) {
    if (n_bit > 0) {
        set_key(const_cast<uint8_t *>(side(head, i)), i % n_side, key, n_embd_k, n_bit);
    }
}

//
// all layers
//

void archive::make(const llama_kvtool & kvtool, const llama_context & lctx) {
    const auto & hparams = lctx.get_model().hparams;
    const auto & params  = kvtool.params;

    n_near = params.n_near;

    layers.clear();
    rope  .clear();
    for (const auto & l : kvtool.layers) {
        const int64_t n_embd_k = hparams.n_embd_head_k(l.il);
        const int64_t n_embd_v = hparams.n_embd_head_v(l.il);

        layers.emplace_back(l.n_head, n_embd_k, n_embd_v, (ggml_type) params.type_k, (ggml_type) params.type_v, params.n_bit);
        rope  .emplace_back(lctx, l.il, llama_kvtool::key_map(*llama_kvtool::cache(lctx)), 2*n_near);
    }
}

void archive::push(const llama_kvtool & kvtool, llama_context & lctx, const int32_t * cells, int32_t n_cell, int64_t pos_0) {
    lctx.synchronize();

    if (frames.empty()) {
        set_base(0);
    }

    std::vector<uint8_t> raw;
    std::vector<float>   k;
    std::vector<float>   v;

    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & l = kvtool.layers[i];

        const int64_t n_embd_k = l.k->ne[0];
        const int64_t n_embd_v = l.v->ne[0];

        k.resize(n_embd_k);
        v.resize(n_embd_v);

        for (int32_t c = 0; c < n_cell; ++c) {
            raw.resize(l.k->nb[1]);
            ggml_backend_tensor_get(l.k, raw.data(), cells[c]*l.k->nb[1], l.k->nb[1]);
            to_float(l.k->type, raw.data(), k.data(), n_embd_k);

            raw.resize(l.v->nb[1]);
            if (kvtool.v_trans) {
                const size_t one = ggml_type_size(l.v->type);
                ggml_backend_tensor_get_2d(l.v, raw.data(), cells[c]*one, one, n_embd_v, one*l.n_cell, one);
            } else {
                ggml_backend_tensor_get(l.v, raw.data(), cells[c]*l.v->nb[1], l.v->nb[1]);
            }
            to_float(l.v->type, raw.data(), v.data(), n_embd_v);

            layers[i].push(pos_0 + c, k.data(), v.data());
        }
    }

    move_far(llama_kvtool::cache(lctx)->seq_pos_max(0) + 1 + base() - n_near);
}

void archive::set_base(int64_t base) {
    if (frames.empty() || frames.back().base != base) {
        // a frame in which nothing was archived is not needed
        if (!frames.empty() && frames.back().first == end()) {
            frames.pop_back();
        }
        frames.push_back({ end(), base });
    }
}

int64_t archive::base_of(int64_t i) const {
    auto f = frames.end() - 1;
    while (f != frames.begin() && f->first > i) {
        --f;
    }
    return f->base;
}

void archive::move_far(int64_t to) {
    std::vector<float> key;

    for (to = std::min(to, end()), far = std::max(far, begin()); far < to; ++far) {
        for (size_t i = 0; i < layers.size(); ++i) {
            auto & l = layers[i];

            key.resize(l.n_embd_k);
            for (int head = 0; head < l.n_head && l.n_bit > 0; ++head) {
                l.keys(head, far, 1, key.data());
                rope[i].turn(key.data(), base_of(far) - far);
                l.set_index(head, far, key.data());
            }
        }
    }
}

void archive::keep(int64_t n) {
    const int64_t to = std::max(begin(), end() - n);
    for (auto & l : layers) {
        l.drop(to);
    }
    far = std::max(far, to);
    while (frames.size() > 1 && frames[1].first <= to) {
        frames.erase(frames.begin());
    }
}

void archive::clear() {
    for (auto & l : layers) {
        l.clear();
    }
    far = 0;
    frames.clear();
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
    for (const auto & l : layers) {
        if (l.begin() != table[0] || l.end() != table[1]) {
            return "the table and the layers are not of one archive";
        }
    }
    if (size() > 0 && (table[2] > end() || table.size() == 3)) {
        return "the table is not of an archive";
    }
    frames.clear();
    for (size_t i = 3; i + 1 < table.size(); i += 2) {
        frames.push_back({ table[i], table[i + 1] });
    }

    std::vector<float> key;

    for (auto & l : layers) {
        key.resize(l.n_embd_k);
        for (int head = 0; head < l.n_head && l.n_bit > 0; ++head) {
            for (int64_t i = begin(); i < end(); ++i) {
                l.keys(head, i, 1, key.data());
                l.set_index(head, i, key.data());
            }
        }
    }
    far = begin();
    move_far(table[2]);

    return {};
}

int64_t archive::bytes() const {
    int64_t res = 0;
    for (const auto & l : layers) {
        res += l.bytes();
    }
    return res;
}

} // namespace kvtool
