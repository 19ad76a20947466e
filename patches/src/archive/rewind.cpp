// Rewinding: the last tokens before the stream's new end return from the archive to the cache, and later tokens are
// deleted.

#include "convert.h"
#include "recaller.h"

#include "ggml-backend.h"

#include <algorithm>

namespace kvtool {

void archive::cut(int64_t end, int64_t next) {
    if (end <= begin()) {
        clear();
        return;
    }

    // the value of `far` when the stream's next position was `next`
    far = std::max(begin(), std::min({ far, end, next - n_near }));

    for (auto & l : layers) {
        l.set_span(begin(), end);
    }
    memory.fit(begin(), end);
    memory.trim();

    while (frames.size() > 1 && frames.back().first >= end) {
        frames.pop_back();
    }

    seal_all(1);
}

// copy the tokens first .. first + n - 1 of a layer to its cells, from cell `cell` on
static void fill_cells(const archive & tokens, size_t i, const layer & cached, bool v_trans, int32_t cell, int32_t n, int64_t first, int64_t base) {
    const auto & l = tokens[i];

    const int64_t n_embd_k = l.n_head*l.n_embd_k;
    const int64_t n_embd_v = l.n_head*l.n_embd_v;

    std::vector<float>   x(std::max(n_embd_k, n_embd_v));
    std::vector<uint8_t> raw(cached.k->nb[1]*n);

    for (int32_t j = 0; j < n; ++j) {
        const int64_t t = first + j;
        for (int head = 0; head < l.n_head; ++head) {
            float * key = x.data() + head*l.n_embd_k;
            tokens.key(i, head, t, tokens.slot_of(i, head, t), key);
            if (const int64_t delta = tokens.base_of(t) - base) {
                tokens.rotations_of(i).rotate(key, delta);
            }
        }
        from_float(cached.k->type, x.data(), raw.data() + j*cached.k->nb[1], n_embd_k);
    }
    ggml_backend_tensor_set(cached.k, raw.data(), cell*cached.k->nb[1], raw.size());

    if (!cached.v) {
        return;
    }
    // A transposed cache stores the first element of all cells, then the second element of all cells, and so on. The
    // values are therefore transposed before they are written
    const size_t elem_size = v_trans ? ggml_type_size(cached.v->type) : 0;
    const size_t stride    = v_trans ? elem_size*n_embd_v : cached.v->nb[1];

    raw.resize(stride*n);
    for (int32_t j = 0; j < n; ++j) {
        for (int head = 0; head < l.n_head; ++head) {
            l.values(head, tokens.slot_of(i, head, first + j), 1, x.data() + head*l.n_embd_v);
        }
        from_float(cached.v->type, x.data(), raw.data() + j*stride, n_embd_v);
    }
    if (!v_trans) {
        ggml_backend_tensor_set(cached.v, raw.data(), cell*stride, raw.size());
        return;
    }
    std::vector<uint8_t> transposed(raw.size());
    transpose(raw.data(), transposed.data(), n, n_embd_v, elem_size);
    ggml_backend_tensor_set_2d(cached.v, transposed.data(), cell*elem_size, elem_size*n, n_embd_v, elem_size*cached.k->ne[1], elem_size*n);
}

void recaller::rewind(const std::vector<layer> & layers, int32_t cell, int32_t n_cell, int64_t end, int64_t base, int64_t next) {
    const int64_t first = end - n_cell;
    for (size_t i = 0; i < layers.size() && n_cell > 0; ++i) {
        fill_cells(tokens, i, layers[i], params.v_trans != 0, cell, n_cell, first, base);
    }
    tokens.cut(first, next);
    tokens.set_base(base);
}

} // namespace kvtool
