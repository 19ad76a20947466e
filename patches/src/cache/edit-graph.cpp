#include "edit-graph.h"

#include "hooks/error.h"
#include "reduce-middle.h"
#include "hooks/memory.h"
#include "hooks/state.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"

#include <algorithm>

namespace kvtool {

// Inputs of an edit's graph. Each of them is one tensor with the entries of all layers
struct graph_inputs {
    input idx_src { GGML_TYPE_I32, {}, nullptr }; // Rows of the K and V tensors to read.
    input idx_dst { GGML_TYPE_I32, {}, nullptr }; // Rows of the K and V tensors to write.
    input delta   { GGML_TYPE_I32, {}, nullptr }; // Positions by which keys are rotated, see rope::build.
    input weight  { GGML_TYPE_F32, {}, nullptr };
};

// offsets in the input tensors at which the entries of one layer begin
struct edit_offsets {
    size_t k_src = 0, k_dst_moves = 0, k_dst_rotated = 0, k_delta = 0;
    size_t v_src = 0, v_dst = 0;
    size_t m_dst = 0, m_src[n_level] = {}, m_weight[n_level] = {};
};

// Call f n times: for each entry, and then for the last entry again and again. Writing an entry twice changes nothing
template <typename T, typename F>
static void repeated(const std::vector<T> & list, int64_t n, F && f) {
    for (int64_t i = 0; i < n; ++i) {
        f(list[std::min<size_t>(i, list.size() - 1)]);
    }
}

void push_deltas(const layer & l, const std::vector<int32_t> & deltas, input & list) {
    for (int s = 0; s < (l.rope.is_multi() ? GGML_MROPE_SECTIONS : 1); ++s) {
        for (const int32_t delta : deltas) {
            list.push<int32_t>(s < GGML_MROPE_SECTIONS - 1 ? delta : 0);
        }
    }
}

int64_t n_deltas(const layer & l, int64_t n) {
    return l.rope.is_multi() ? GGML_MROPE_SECTIONS*n : n;
}

static graph_inputs fill_inputs(
        const std::vector<layer> & layers, const part & p, const std::vector<layer_edit> & edits,
        const std::vector<layer_shape> & shapes, bool v_trans, std::vector<edit_offsets> & offsets) {
    const size_t align = p.align();

    graph_inputs in;

    for (size_t i = 0; i < shapes.size(); ++i) {
        const auto & l = layers[p.layers[i]];
        const auto & e = edits [p.layers[i]];
        const auto & s = shapes[i];

        auto & o = offsets[i];

        const auto index = [&](int row, int cell) { return cell*l.n_head + row - l.row_0; };

        o.k_src       = in.idx_src.start(align);
        o.k_dst_moves = in.idx_dst.start(align);
        repeated(e.moves, s.n_moves, [&](const llama_kvtool_move & m) {
            in.idx_src.push<int32_t>(index(m.row, m.src));
            in.idx_dst.push<int32_t>(index(m.row, m.dst));
        });

        o.k_dst_rotated = in.idx_dst.start(align);
        o.k_delta       = in.delta.start(align);
        std::vector<int32_t> deltas;
        repeated(e.rotated, s.n_rotated, [&](const llama_kvtool_move & m) {
            in.idx_src.push<int32_t>(index(m.row, m.src));
            in.idx_dst.push<int32_t>(index(m.row, m.dst));
            deltas.push_back(m.delta);
        });
        push_deltas(l, deltas, in.delta);

        // a transposed value consists of n_embd elements that are n_cell apart
        const int64_t n_embd = l.n_embd_v;

        const auto push = [&](input & list, int row, int cell) {
            if (!v_trans) {
                list.push<int32_t>(index(row, cell));
                return;
            }
            for (int64_t j = 0; j < n_embd; ++j) {
                list.push<int32_t>(((row - l.row_0)*n_embd + j)*l.n_cell + cell);
            }
        };

        const auto merges = merges_of(e.terms);

        o.m_dst = in.idx_dst.start(align);
        repeated(merges, s.n_merged[0], [&](const merge & m) { push(in.idx_dst, e.terms[m.first].row, e.terms[m.first].dst); });

        for (int level = 0; level < n_level && s.n_merged[level] > 0; ++level) {
            o.m_src   [level] = in.idx_src.start(align);
            o.m_weight[level] = in.weight.start(align);
            repeated(merges, s.n_merged[level], [&](const merge & m) {
                const auto & first = e.terms[m.first];
                for (int64_t j = level_first(level); j < level_first(level) + level_width(level); ++j) {
                    const bool has = j < m.n_term;
                    push(in.idx_src, first.row, has ? e.terms[m.first + j].src : first.dst);
                    in.weight.push<float>(has ? e.terms[m.first + j].weight : 0.0f);
                }
            });
        }

        if (s.shared) {
            o.v_src = o.k_src;
            o.v_dst = o.k_dst_moves;
            continue;
        }
        o.v_src = in.idx_src.start(align);
        o.v_dst = in.idx_dst.start(align);
        repeated(values_moved(e), s.n_moved, [&](const llama_kvtool_move & m) {
            push(in.idx_src, m.row, m.src);
            push(in.idx_dst, m.row, m.dst);
        });
    }

    return in;
}

ggml_tensor * mapped(ggml_context * ctx, const layer & l, ggml_tensor * keys, ggml_tensor * k_rot) {
    return k_rot && l.rope.is_mapped ? llama_mul_mat_hadamard(ctx, keys, k_rot) : keys;
}

// rotate stored keys [n_embd, n] by delta positions
static ggml_tensor * build_rotation(ggml_context * ctx, const layer & l, ggml_tensor * keys, ggml_tensor * delta, ggml_tensor * k_rot) {
    return mapped(ctx, l, l.rope.build(ctx, mapped(ctx, l, keys, k_rot), delta), k_rot);
}

static ggml_tensor * build_keys(
        ggml_context * ctx, const layer & l, const layer_shape & s, const graph_inputs & in, const edit_offsets & o, ggml_tensor * k_rot) {
    const int64_t n_moves   = s.n_moves;
    const int64_t n_rotated = s.n_rotated;
    const int64_t n_embd    = l.n_embd_k;

    ggml_tensor * k = ggml_reshape_2d(ctx, l.k, n_embd, l.n_head*l.k->ne[1]);

    // gather all keys in one operation, so that every key is read before any key is written
    ggml_tensor * x = ggml_get_rows(ctx, k, in.idx_src.view(ctx, o.k_src, n_moves + n_rotated));

    if (n_moves > 0) {
        ggml_tensor * moved = ggml_view_2d(ctx, x, n_embd, n_moves, x->nb[1], 0);
        k = ggml_set_rows(ctx, k, moved, in.idx_dst.view(ctx, o.k_dst_moves, n_moves));
    }
    if (n_rotated > 0) {
        ggml_tensor * rotated = ggml_view_2d(ctx, x, n_embd, n_rotated, x->nb[1], n_moves*x->nb[1]);
        rotated = build_rotation(ctx, l, rotated, in.delta.view(ctx, o.k_delta, n_deltas(l, n_rotated)), k_rot);
        k = ggml_set_rows(ctx, k, rotated, in.idx_dst.view(ctx, o.k_dst_rotated, n_rotated));
    }

    return k;
}

static ggml_tensor * build_values(
        ggml_context * ctx, const layer & l, int64_t n_embd, const layer_shape & s,
        const graph_inputs & in, const edit_offsets & o, bool v_trans) {
    const int64_t n_part = v_trans ? n_embd : 1;

    ggml_tensor * v = ggml_reshape_2d(ctx, l.v, n_embd/n_part, ggml_nelements(l.v)/(n_embd/n_part));

    ggml_tensor * sum = nullptr;

    for (int level = 0; level < n_level && s.n_merged[level] > 0; ++level) {
        const int64_t n_term = level_width(level);
        const int64_t n      = s.n_merged[level];

        // transposed values are gathered element by element
        ggml_tensor * x = ggml_get_rows(ctx, v, in.idx_src.view(ctx, o.m_src[level], n*n_term*n_part));
        ggml_tensor * w = ggml_reshape_3d(ctx, in.weight.view(ctx, o.m_weight[level], n*n_term), 1, n_term, n);

        x = sum_middle(ctx, ggml_mul(ctx, ggml_reshape_3d(ctx, x, n_embd, n_term, n), w));
        x = ggml_reshape_2d(ctx, x, n_embd, n);
        // Only the first n merges have terms on this level: merges are sorted by their number of terms, longest first
        sum = sum ? ggml_acc(ctx, sum, x, sum->nb[1], sum->nb[2], sum->nb[3], 0) : x;
    }
    if (sum) {
        const int64_t n = s.n_merged[0]*n_part;
        v = ggml_set_rows(ctx, v, ggml_reshape_2d(ctx, sum, n_embd/n_part, n), in.idx_dst.view(ctx, o.m_dst, n));
    }
    if (s.n_moved > 0) {
        ggml_tensor * x = ggml_get_rows(ctx, v, in.idx_src.view(ctx, o.v_src, s.n_moved*n_part));
        v = ggml_set_rows(ctx, v, x, in.idx_dst.view(ctx, o.v_dst, s.n_moved*n_part));
    }

    return v;
}

bool edit_graph(
        llama_kvtool & kvtool, llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer> & layers, const part & p,
        const std::vector<layer_edit> & edits, bool with_k, bool with_v) {
    const bool v_trans = kvtool.v_trans;

    std::vector<layer_shape> shapes;
    bool is_empty = true;
    for (const size_t i : p.layers) {
        const auto s = shape_of(edits[i], with_k, with_v && layers[i].v, v_trans);
        is_empty = is_empty && s.n_moves + s.n_rotated + s.n_moved + s.n_merged[0] == 0;
        shapes.push_back(s);
    }
    if (is_empty) {
        // The edit changes nothing in these layers. Return before `fit_shapes`, which might drop a cached graph
        return true;
    }

    if (p.graph) {
        fit_shapes(layers, p, v_trans, shapes);
    }

    std::vector<edit_offsets> offsets(shapes.size());

    graph_inputs in = fill_inputs(layers, p, edits, shapes, v_trans, offsets);

    size_t max_nodes = 64;
    for (const auto & s : shapes) {
        max_nodes += 64;
        for (int level = 0; level < n_level && s.n_merged[level] > 0; ++level) {
            max_nodes += 16 + 4*level;
        }
    }

    const std::vector<input *> inputs = { &in.idx_src, &in.idx_dst, &in.delta, &in.weight };

    const auto build = [&](ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor * k_rot) -> ggml_tensor * {
        const auto & l = layers[p.layers[i]];
        const auto & s = shapes[i];

        if (s.n_moves + s.n_rotated > 0) {
            ggml_build_forward_expand(gf, build_keys(ctx, l, s, in, offsets[i], k_rot));
        }
        if (s.n_moved + s.n_merged[0] > 0) {
            ggml_build_forward_expand(gf, build_values(ctx, l, l.n_embd_v, s, in, offsets[i], v_trans));
        }
        return nullptr;
    };

    if (!kvtool.graphs.compute(lctx, kv, layers, p, max_nodes, inputs, build)) {
        return false;
    }
    if (p.graph && p.graph->gf) {
        p.graph->shapes = std::move(shapes);
    }

    return true;
}

//
// reading keys
//

static bool read_keys(
        llama_kvtool & kvtool, llama_context & lctx, const part & p,
        const int32_t * first, const int32_t * delta, float * out, int32_t n, int32_t n_dim) {
    const auto & layers = kvtool.layers;

    input in_src   { GGML_TYPE_I32, {}, nullptr };
    input in_delta { GGML_TYPE_I32, {}, nullptr };

    std::vector<size_t> src_offsets;
    std::vector<size_t> delta_offsets;
    for (const size_t i : p.layers) {
        const auto & l = layers[i];

        src_offsets  .push_back(in_src  .start(p.align()));
        delta_offsets.push_back(in_delta.start(p.align()));
        std::vector<int32_t> deltas;
        for (int head = 0; head < l.n_head; ++head) {
            for (int j = 0; j < n; ++j) {
                const int row = l.row_0 + head;
                in_src.push<int32_t>((first[row] + j)*l.n_head + head);
                deltas.push_back(delta[(size_t) row*n + j]);
            }
        }
        push_deltas(l, deltas, in_delta);
    }

    if (p.graph && (p.graph->shapes.empty() || p.graph->shapes[0].n_moves != n)) {
        p.graph->clear();
    }

    const auto build = [&](ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor * k_rot) {
        const auto & l = layers[p.layers[i]];

        const int64_t n_key = (int64_t) l.n_head*n;

        ggml_tensor * k = ggml_reshape_2d(ctx, l.k, l.n_embd_k, l.n_head*l.k->ne[1]);

        k = ggml_get_rows(ctx, k, in_src.view(ctx, src_offsets[i], n_key));
        k = mapped(ctx, l, k, k_rot);
        if (l.rope.is_rotary()) {
            k = l.rope.build(ctx, k, in_delta.view(ctx, delta_offsets[i], n_deltas(l, n_key)));
        }

        ggml_set_output(k);
        ggml_build_forward_expand(gf, k);

        return k;
    };

    const auto read = [&](const std::vector<ggml_tensor *> & keys) {
        std::vector<float> tmp;
        for (size_t i = 0; i < keys.size(); ++i) {
            tmp.resize(ggml_nelements(keys[i]));
            ggml_backend_tensor_get(keys[i], tmp.data(), 0, tmp.size()*sizeof(float));

            const int64_t n_embd = keys[i]->ne[0];
            for (int64_t j = 0; j < keys[i]->ne[1]; ++j) {
                std::copy(&tmp[j*n_embd], &tmp[j*n_embd] + n_embd, out + ((size_t) layers[p.layers[i]].row_0*n + j)*n_dim);
            }
        }
    };

    const size_t max_nodes = p.layers.size()*32 + 16;

    if (!kvtool.graphs.compute(lctx, *memory::cache(lctx), layers, p, max_nodes, { &in_src, &in_delta }, build, read)) {
        return false;
    }
    if (p.graph && p.graph->gf) {
        p.graph->shapes = { { n } };
    }

    return true;
}

int32_t read_keys(
        llama_kvtool & kvtool, llama_context & lctx, const int32_t * first, const int32_t * delta, float * out, int32_t n, int32_t n_dim) {
    const int n_row = kvtool.n_row;

    const auto n_cell = kvtool.row_cells();
    for (int row = 0; row < n_row; ++row) {
        if (first[row] < 0 || first[row] > n_cell[row] - n) {
            return fail(format("row %d has %d cells, of which cells %d..%lld were asked for",
                    row, n_cell[row], first[row], (long long) first[row] + n - 1));
        }
    }

    std::fill(out, out + (size_t) n_row*n*n_dim, 0.0f);
    if (n == 0) {
        return 0;
    }

    for (const auto & p : kvtool.graphs.parts(kvtool.layers, GRAPH_KEYS)) {
        if (!read_keys(kvtool, lctx, p, first, delta, out, n, n_dim)) {
            return fail("the device failed to read keys");
        }
    }

    return 0;
}

} // namespace kvtool
