#include "archive.h"

#include "convert.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>

namespace kvtool {

//
// one layer
//

// parts of a slab begin where a line of the processor's cache does
static size_t padded(size_t n) {
    return (n + 63)/64*64;
}

archived_layer::archived_layer(
        const store & memory, size_t at, int n_head, int64_t n_embd_k, int64_t n_embd_v, ggml_type type_k, ggml_type type_v, int n_bit)
    : n_head(n_head), n_embd_k(n_embd_k), n_embd_v(n_embd_v), n_bit(n_bit)
    , type_k(type_k), type_v(type_v)
    , memory(memory)
    , size_k(ggml_row_size(type_k, n_embd_k)), size_v(ggml_row_size(type_v, n_embd_v)), size_side(n_bit ? side_bytes(n_embd_k, n_bit) : 0)
    , at_k(at), at_v(at_k + padded(n_head*n_block*size_k)), at_side(at_v + padded(n_head*n_block*size_v)) {}

size_t archived_layer::slab_end() const {
    return at_side + padded(n_head*n_block/n_side*size_side);
}

void archived_layer::set_span(int64_t begin, int64_t end) {
    first = begin;
    last  = end;
}

void archived_layer::put(int64_t i, const float * k, const float * v, std::vector<float> & tmp) {
    tmp.resize(n_embd_k);

    for (int head = 0; head < n_head; ++head) {
        from_float(type_k, k + head*n_embd_k, key_at  (head, i), n_embd_k);
        from_float(type_v, v + head*n_embd_v, value_at(head, i), n_embd_v);
        if (n_bit > 0) {
            // the index is made of what is stored, so that a restored archive has the same one
            keys(head, i, 1, tmp.data());
            set_index(head, i, tmp.data());
        }
    }
}

size_t archived_layer::copy(uint8_t * out, const uint8_t * in, int64_t begin, int64_t end) const {
    const auto move = [&](uint8_t * own, size_t size) {
        if (out) {
            memcpy(out, own, size);
            out += size;
        } else {
            memcpy(own, in, size);
            in += size;
        }
    };

    for (int64_t i = begin; i < end && (in || out); ++i) {
        for (int head = 0; head < n_head; ++head) {
            move(key_at  (head, i), size_k);
            move(value_at(head, i), size_v);
        }
    }

    return (end - begin)*n_head*(size_k + size_v);
}

void archived_layer::keys(int head, int64_t i, int n, float * out) const {
    to_float(type_k, key_at(head, i), out, n*n_embd_k);
}

void archived_layer::values(int head, int64_t i, int n, float * out) const {
    if (n_embd_v > 0) {
        to_float(type_v, value_at(head, i), out, n*n_embd_v);
    }
}

const uint8_t * archived_layer::side(int head, int64_t i) const {
    return memory.at(i) + at_side + (head*n_block + i % n_block)/n_side*size_side;
}

void archived_layer::set_index(int head, int64_t i, const float * key) {
    if (n_bit > 0) {
        set_key(const_cast<uint8_t *>(side(head, i)), i % n_side, key, n_embd_k, n_bit);
    }
}

//
// all layers
//

void archive::make(const archive_params & params, const std::vector<archive_shape> & shapes) {
    n_near  = params.n_near;
    v_trans = params.v_trans != 0;

    layers.clear();
    rope  .clear();

    size_t at = 0;
    for (const auto & s : shapes) {
        layers.emplace_back(memory, at, s.n_head, s.n_embd_k, s.n_embd_v, (ggml_type) params.type_k, (ggml_type) params.type_v, params.n_bit);
        rope  .emplace_back(s.turns, s.n_embd_k, 2*n_near);

        at = layers.back().slab_end();
    }
    memory.make(at);

    clusters.clear();
    for (size_t i = 0; i < shapes.size() && params.n_exact > 0; ++i) {
        clusters.emplace_back(shapes[i].n_head, row_clusters(shapes[i].n_embd_k, shapes[i].n_embd_v));
    }
}

int64_t archive::bytes() const {
    int64_t res = memory.bytes();
    for (const auto & rows : clusters) {
        for (const auto & own : rows) {
            res += (own.end() - own.begin())*own.block_bytes();
        }
    }
    return res;
}

int64_t archive::slab_bytes() const {
    int64_t res = memory.slab_bytes();
    for (const auto & rows : clusters) {
        for (const auto & own : rows) {
            res += own.block_bytes();
        }
    }
    return res;
}

void archive::clear_clusters() {
    for (auto & rows : clusters) {
        for (auto & own : rows) {
            own.clear();
        }
    }
}

void archive::cluster() {
    int n_row = 0;
    for (const auto & rows : clusters) {
        n_row += rows.size();
    }

    std::vector<float> keys, values;

    int row = 0;
    for (size_t i = 0; i < clusters.size(); ++i) {
        const auto & l = layers[i];
        for (int head = 0; head < l.n_head; ++head, ++row) {
            auto & own = clusters[i][head];

            // rows take turns, so that no step waits for all of them; but soon, as tokens without clusters are all looked into
            const int64_t late = (int64_t) row*(l.n_block/4)/n_row;
            const int64_t from = (begin() + l.n_block - 1)/l.n_block;
            const int64_t to   = std::max((end() - late)/l.n_block, from);
            const int64_t near = (far - late)/l.n_block;

            own.forget(from);
            own.cut(to);
            const auto read = [&](int64_t block, bool is_far) {
                keys  .resize(l.n_block*l.n_embd_k);
                values.resize(l.n_block*l.n_embd_v);
                l.keys  (head, block*l.n_block, l.n_block, keys  .data());
                l.values(head, block*l.n_block, l.n_block, values.data());
                for (int64_t j = 0; j < l.n_block && is_far; ++j) {
                    const int64_t t = block*l.n_block + j;
                    rope[i].turn(keys.data() + j*l.n_embd_k, base_of(t) - t);
                }
            };
            for (int64_t block = own.begin(); block < own.end(); ++block) {
                const bool is_far = block < near;
                if (own.is_far(block) != is_far) {
                    read(block, is_far);
                    own.set(block, keys.data(), values.data(), is_far);
                }
            }
            for (int64_t block = own.begin() < own.end() ? own.end() : from; block < to; ++block) {
                read(block, block < near);
                own.add(block, keys.data(), values.data(), block < near);
            }
        }
    }
}

void archive::start(const leaving & some) {
    frames.reserve(frames.size() + 1);

    const int64_t first = first_of(some);

    memory.fit(first, some.end());

    if (size() == 0) {
        // another stream, whose tokens may be before those that were here
        frames.assign(1, { first, base() });
        far = first;
        clear_clusters();
    }
    forget(first);
}

void archive::put(size_t layer, const ggml_tensor * k, const ggml_tensor * v, const leaving & some) {
    auto & l = layers[layer];

    const int64_t n_embd_k = l.n_head*l.n_embd_k;
    const int64_t n_embd_v = l.n_head*l.n_embd_v;

    std::vector<uint8_t> raw;
    std::vector<float>   key  (n_embd_k);
    std::vector<float>   value(n_embd_v);
    std::vector<float>   tmp;

    // what is to be forgotten at once is not stored
    for (int32_t c = std::max<int64_t>(0, first_of(some) - some.pos_0); c < some.n_cell; ++c) {
        const size_t cell = some.cells[c];

        raw.resize(k->nb[1]);
        ggml_backend_tensor_get(k, raw.data(), cell*k->nb[1], k->nb[1]);
        to_float(k->type, raw.data(), key.data(), n_embd_k);

        if (v) {
            raw.resize(v->nb[1]);
            if (v_trans) {
                const size_t one = ggml_type_size(v->type);
                ggml_backend_tensor_get_2d(v, raw.data(), cell*one, one, n_embd_v, one*k->ne[1], one);
            } else {
                ggml_backend_tensor_get(v, raw.data(), cell*v->nb[1], v->nb[1]);
            }
            to_float(v->type, raw.data(), value.data(), n_embd_v);
        }

        l.put(some.pos_0 + c, key.data(), value.data(), tmp);
    }
}

void archive::finish(const leaving & some) {
    const int64_t first = first_of(some);

    for (auto & l : layers) {
        l.set_span(first, some.end());
    }

    move_far(some.next + base() - n_near);
    cluster();
}

void archive::set_base(int64_t base) {
    if (frames.empty() || frames.back().base != base) {
        // a frame in which nothing was archived is not needed
        if (size() == 0) {
            frames.clear();
        } else if (!frames.empty() && frames.back().first == end()) {
            frames.pop_back();
        }
        frames.push_back({ end(), base });
    }
}

std::vector<stretch> archive::stretches(int64_t rot) const {
    std::vector<stretch> res;

    const auto add = [&](int64_t begin, int64_t end, int64_t delta) {
        if (begin < end) {
            res.push_back({ begin, end, delta });
        }
    };

    add(begin(), far, n_near - rot);
    for (size_t j = 0; j < frames.size(); ++j) {
        const int64_t stop = j + 1 < frames.size() ? frames[j + 1].first : end();
        add(std::max(frames[j].first, far), stop, base() - frames[j].base);
    }

    return res;
}

int64_t archive::base_of(int64_t i) const {
    if (frames.empty()) {
        return 0;
    }
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

void archive::forget(int64_t to) {
    for (auto & l : layers) {
        if (l.begin() < l.end()) {
            l.set_span(std::max(l.begin(), std::min(l.end(), to)), l.end());
        }
    }
    far = std::max(far, to);
    while (frames.size() > 1 && frames[1].first <= to) {
        frames.erase(frames.begin());
    }
}

void archive::keep(int64_t n) {
    if (n < size()) {
        memory.fit(end() - n, end());
        memory.trim();
        forget(end() - n);
        cluster();
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
            // until the table says more
            frames.clear();
            far = begin;
        }
    }
    clear_clusters();
}

void archive::fill(size_t layer, const uint8_t * in, int64_t i, int64_t n, int64_t begin, int64_t end) {
    layers[layer].set_span(begin, end);
    layers[layer].copy(nullptr, in, i, i + n);
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
        ok = table[i] >= (i > 3 ? table[i - 2] + 1 : 0) && table[i] <= end && table[i + 1] >= 0 && table[i + 1] < most;
    }
    if (!ok) {
        return "the table is not of an archive";
    }

    std::vector<frame> own;
    for (size_t i = 3; i < table.size(); i += 2) {
        own.push_back({ table[i], table[i + 1] });
    }
    frames = std::move(own);

    std::vector<float> key;

    for (auto & l : layers) {
        key.resize(l.n_embd_k);
        for (int head = 0; head < l.n_head && l.n_bit > 0; ++head) {
            for (int64_t i = begin; i < end; ++i) {
                l.keys(head, i, 1, key.data());
                l.set_index(head, i, key.data());
            }
        }
    }
    far = begin;
    move_far(table[2]);
    cluster();

    return {};
}

} // namespace kvtool
