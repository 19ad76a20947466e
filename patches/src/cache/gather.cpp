#include "gather.h"

#include "hooks/memory.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvtool {

static bool is_host(const layer & l) {
    return ggml_backend_buffer_is_host(l.k->buffer) && (!l.v || ggml_backend_buffer_is_host(l.v->buffer));
}

static gathered gather_host(const layer & l, bool v_trans, const int32_t * cells, int32_t n) {
    const auto copy = [&](const ggml_tensor * t, size_t size, std::vector<uint8_t> & out) {
        out.resize(n*size);
        for (int32_t c = 0; c < n; ++c) {
            memcpy(out.data() + c*size, (const char *) t->data + cells[c]*size, size);
        }
    };

    gathered res = { l.k->type, l.v ? l.v->type : GGML_TYPE_F32, {}, {} };

    copy(l.k, l.k->nb[1], res.k);
    if (!l.v) {
        return res;
    }
    if (!v_trans) {
        copy(l.v, l.v->nb[1], res.v);
        return res;
    }

    const size_t  elem_size = ggml_type_size(l.v->type);
    const int64_t n_embd    = l.v->ne[0];

    res.v.resize(n*n_embd*elem_size);
    for (int32_t c = 0; c < n; ++c) {
        for (int64_t e = 0; e < n_embd; ++e) {
            memcpy(res.v.data() + (c*n_embd + e)*elem_size, (const char *) l.v->data + (e*l.n_cell + cells[c])*elem_size, elem_size);
        }
    }
    return res;
}

//
// copies from a device
//

// view a tensor's bytes from `offset` on as n numbers of another type
static ggml_tensor * view_as(ggml_context * ctx, ggml_tensor * t, ggml_type type, int64_t n, size_t offset) {
    ggml_tensor * res = ggml_view_1d(ctx, t, 1, offset);

    res->type  = type;
    res->ne[0] = n;
    res->nb[0] = ggml_type_size(type);
    res->nb[1] = res->nb[2] = res->nb[3] = n*res->nb[0];

    return res;
}

// Copies of a layer's keys or values, cell by cell. Cells that are not transposed and consist of whole 32-bit words are
// copied unchanged, as words. Transposed f16 stays f16. In all other cases the device converts the numbers to f32.
struct cell_rows {
    cell_rows(const ggml_tensor * t, bool trans) : t(t), trans(trans), is_words(!trans && t->nb[1] % sizeof(int32_t) == 0) {}

    // type of the copies
    ggml_type type() const { return is_words || (trans && t->type == GGML_TYPE_F16) ? t->type : GGML_TYPE_F32; }

    // bytes of a copied cell
    size_t size() const { return ggml_row_size(type(), t->ne[0]); }

    // result: [elements of a cell, n], or transposed
    ggml_tensor * build(ggml_context * ctx, ggml_tensor * idx) const {
        auto * src = const_cast<ggml_tensor *>(t);

        const int64_t n_embd = t->ne[0];
        const int64_t n_cell = t->ne[1];
        if (trans) {
            const size_t elem_size = ggml_type_size(t->type);
            // each row of a transposed tensor has one element of all cells, so read the same indices from every row
            ggml_tensor * idx_all = ggml_view_1d(ctx, idx, idx->ne[0], 0);
            idx_all->ne[1] = n_embd;
            idx_all->nb[1] = idx_all->nb[2] = idx_all->nb[3] = 0;
            return ggml_get_rows(ctx, ggml_view_3d(ctx, src, 1, n_cell, n_embd, elem_size, n_cell*elem_size, 0), idx_all);
        }
        ggml_tensor * rows = ggml_view_2d(ctx, src, n_embd, n_cell, t->nb[1], 0);
        if (is_words) {
            rows->type  = GGML_TYPE_I32;
            rows->ne[0] = t->nb[1]/sizeof(int32_t);
            rows->nb[0] = sizeof(int32_t);
        }
        return ggml_get_rows(ctx, rows, idx);
    }

    // type of the elements that the device copies
    ggml_type word() const { return is_words ? GGML_TYPE_I32 : type(); }

    const ggml_tensor * t;

    const bool trans;
    const bool is_words;
};

static bool gather_device(
        graphs & graphs, llama_context & lctx, const std::vector<layer> & layers, const part & p, const int32_t * cells, int32_t n,
        const std::function<void (size_t, gathered &&)> & f) {
    const auto & kv = *memory::cache(lctx);

    const bool v_trans = memory::is_transposed(kv);

    input in_cells { GGML_TYPE_I32, {}, nullptr };
    for (int32_t c = 0; c < n; ++c) {
        in_cells.push<int32_t>(cells[c]);
    }

    if (p.graph && (p.graph->shapes.empty() || p.graph->shapes[0].n_moves != n)) {
        p.graph->clear();
    }

    // offset at which the values begin, after the keys
    const auto begin_v = [&](const layer & l) { return GGML_PAD(n*cell_rows(l.k, false).size(), p.align()); };

    const auto build = [&](ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor *) {
        const auto & l = layers[p.layers[i]];

        const size_t size_v = l.v ? n*cell_rows(l.v, v_trans).size() : 0;

        ggml_tensor * out = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, (begin_v(l) + size_v + 3)/sizeof(int32_t));
        ggml_set_output(out);

        const auto write = [&](const cell_rows & rows, size_t offset) {
            ggml_tensor * x = rows.build(ctx, in_cells.t);
            ggml_build_forward_expand(gf, ggml_cpy(ctx, x, view_as(ctx, out, rows.word(), ggml_nelements(x), offset)));
        };
        write(cell_rows(l.k, false), 0);
        if (l.v) {
            write(cell_rows(l.v, v_trans), begin_v(l));
        }
        return out;
    };

    const auto read = [&](const std::vector<ggml_tensor *> & results) {
        std::vector<uint8_t> raw;
        for (size_t i = 0; i < results.size(); ++i) {
            const auto & l = layers[p.layers[i]];

            raw.resize(ggml_nbytes(results[i]));
            ggml_backend_tensor_get(results[i], raw.data(), 0, raw.size());

            const cell_rows k(l.k, false);

            gathered res = { k.type(), GGML_TYPE_F32, { raw.begin(), raw.begin() + n*k.size() }, {} };
            if (l.v) {
                const cell_rows v(l.v, v_trans);

                const auto * values = raw.data() + begin_v(l);

                res.type_v = v.type();
                res.v.assign(values, values + n*v.size());
                const int64_t n_embd    = l.v->ne[0];
                const size_t  elem_size = v.size()/n_embd;
                for (int64_t e = 0; v.trans && e < n_embd; ++e) {
                    for (int32_t c = 0; c < n; ++c) {
                        memcpy(res.v.data() + (c*n_embd + e)*elem_size, values + (e*n + c)*elem_size, elem_size);
                    }
                }
            }
            f(p.layers[i], std::move(res));
        }
    };

    const size_t max_nodes = p.layers.size()*16 + 16;

    if (!graphs.compute(lctx, kv, layers, p, max_nodes, { &in_cells }, build, read)) {
        return false;
    }
    if (p.graph && p.graph->gf) {
        p.graph->shapes = { { n } };
    }

    return true;
}

bool gather(
        graphs & graphs, llama_context & lctx, const std::vector<layer> & layers, const int32_t * cells, int32_t n,
        const std::function<void (size_t, gathered &&)> & f) {
    const bool v_trans = memory::is_transposed(*memory::cache(lctx));

    for (size_t i = 0; i < layers.size(); ++i) {
        if (is_host(layers[i])) {
            f(i, gather_host(layers[i], v_trans, cells, n));
        }
    }

    for (auto p : graphs.parts(layers, GRAPH_CELLS)) {
        auto & part_layers = p.layers;
        part_layers.erase(std::remove_if(part_layers.begin(), part_layers.end(), [&](size_t i) { return is_host(layers[i]); }), part_layers.end());
        if (!part_layers.empty() && !gather_device(graphs, lctx, layers, p, cells, n, f)) {
            return false;
        }
    }

    return true;
}

} // namespace kvtool
