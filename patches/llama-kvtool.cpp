#include "llama-kvtool.h"
#include "llama-kvtool-digest.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

static thread_local std::string g_error;

static int32_t fail(const std::string & why) {
    g_error = why;
    return -1;
}

// [n, r, h] -> [n, 1, h]: the sum over the middle dimension, halving by adding views
// (a transpose for ggml_sum_rows would walk the tensor element by element; ggml_out_prod is not on every device)
static ggml_tensor * sum_middle(ggml_context * ctx, ggml_tensor * t) {
    ggml_tensor * rest = nullptr;

    const auto part = [ctx](ggml_tensor * a, int64_t i, int64_t r) {
        return ggml_view_3d(ctx, a, a->ne[0], r, a->ne[2], a->nb[1], a->nb[2], i*a->nb[1]);
    };

    int64_t r = t->ne[1];

    if (r == 1) {
        return ggml_cont(ctx, t);
    }

    while (r > 1) {
        const int64_t half = r/2;

        if (r % 2 == 1) {
            ggml_tensor * odd = part(t, r - 1, 1);
            rest = rest ? ggml_add(ctx, rest, odd) : odd;
        }

        t = ggml_add(ctx, part(t, 0, half), part(t, half, half));
        r = half;
    }

    return rest ? ggml_add(ctx, t, rest) : t;
}

struct llama_kvtool {
    struct layer {
        int il;
        int n_head;
        int row_0;

        ggml_tensor * k;
        ggml_tensor * v;
    };

    std::vector<layer> layers;
    std::vector<int>   layer_of_row;

    int n_row  = 0;
    int n_cell = 0;

    // sums and last values since the last edit [n_row][n_cell]
    std::vector<float> attention;
    std::vector<float> last;

    // copies under way from the device, one ubatch: [n_row][n_kv_async]
    std::vector<float> attention_async;
    std::vector<float> last_async;

    int n_kv_async = 0;

    // the edits' own scheduler: with the decode's, every edit would cost a rebuild of the decode graph
    ggml_backend_sched_ptr sched;
    std::vector<uint8_t>   buf_graph;

    static llama_kv_cache * cache(const llama_context & lctx) {
        return dynamic_cast<llama_kv_cache *>(lctx.memory.get());
    }

    // empty if the context can be used
    static std::string unsupported(const llama_context & lctx) {
        const auto & hparams = lctx.model.hparams;

        const auto * kv = cache(lctx);

        if (!kv) {
            return "this model has no plain KV cache (sliding-window, recurrent or hybrid memory)";
        }
        if (kv->other) {
            return "this model shares the KV cache of another context";
        }
        if (kv->n_stream != 1) {
            return "the context must have one sequence (n_seq_max = 1)";
        }
        if (hparams.is_mla()) {
            return "this model compresses its KV cache (MLA)";
        }
        if (hparams.use_alibi) {
            return "this model biases attention by position (ALiBi)";
        }
        if (hparams.n_pos_per_embd() > 1) {
            return "this model has several positions a token (M-RoPE)";
        }
        for (const auto & layer : kv->layers) {
            if (!layer.k || !layer.v) {
                return "a layer of this model has no keys or no values in its KV cache";
            }
        }

        return {};
    }

    static llama_kvtool * get(const llama_context * ctx) {
        if (!ctx || !ctx->kvtool) {
            g_error = "call llama_kvtool_enable on this context first";
            return nullptr;
        }
        return ctx->kvtool.get();
    }

    static int32_t enable(llama_context & lctx, uint32_t signals) {
        if (signals & ~(uint32_t) (LLAMA_KVTOOL_SIGNAL_ATTENTION | LLAMA_KVTOOL_SIGNAL_LAST)) {
            return fail(format("unknown signals %u", signals));
        }

        const auto why = unsupported(lctx);
        if (!why.empty()) {
            return fail(why);
        }

        const auto & hparams = lctx.model.hparams;

        const auto * kv = cache(lctx);

        auto res = std::make_shared<llama_kvtool>();

        for (const auto & layer : kv->layers) {
            const int n_head = hparams.n_head_kv(layer.il);

            res->layers.push_back({ (int) layer.il, n_head, res->n_row, layer.k, layer.v });
            res->layer_of_row.insert(res->layer_of_row.end(), n_head, layer.il);
            res->n_row += n_head;
        }

        res->n_cell = kv->get_size();

        const size_t n = (size_t) res->n_row*res->n_cell;

        res->attention.resize(signals & LLAMA_KVTOOL_SIGNAL_ATTENTION ? n : 0);
        res->last     .resize(signals & LLAMA_KVTOOL_SIGNAL_LAST      ? n : 0);

        lctx.synchronize();
        lctx.kvtool = std::move(res);

        if (lctx.cparams.kvtool_signals != signals) {
            lctx.cparams.kvtool_signals = signals;
            lctx.sched_need_reserve = true;
        }

        return lctx.kvtool->n_row;
    }

    void extract(llama_context & lctx, const std::vector<llama_kvtool_probe> & probes) {
        if (probes.empty()) {
            return;
        }

        fold(lctx);

        const auto copy = [&](ggml_tensor * t, std::vector<float> & dst, int row_0, size_t n) {
            if (dst.size() < (size_t) n_row*t->ne[0]) {
                dst.resize((size_t) n_row*n_cell);
            }

            ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(lctx.sched.get(), t);
            ggml_backend_tensor_get_async(backend, t, dst.data() + (size_t) row_0*t->ne[0], 0, n*t->ne[0]*sizeof(float));
        };

        for (const auto & probe : probes) {
            const auto it = std::find_if(layers.begin(), layers.end(), [&](const layer & l) { return l.il == probe.il; });
            GGML_ASSERT(it != layers.end());

            if (probe.attention) {
                copy(probe.attention, attention_async, it->row_0, it->n_head);
                n_kv_async = probe.attention->ne[0];
            }
            if (probe.last) {
                copy(probe.last, last_async, it->row_0, it->n_head);
                n_kv_async = probe.last->ne[0];
            }
        }
    }

    // add what the last ubatch has left
    void fold(llama_context & lctx) {
        if (n_kv_async == 0) {
            return;
        }

        lctx.synchronize();

        for (int row = 0; row < n_row; ++row) {
            if (!attention.empty()) {
                const float * src = attention_async.data() + (size_t) row*n_kv_async;
                float       * dst = attention.data()       + (size_t) row*n_cell;
                for (int i = 0; i < n_kv_async; ++i) {
                    dst[i] += src[i];
                }
            }
            if (!last.empty()) {
                memcpy(last.data() + (size_t) row*n_cell, last_async.data() + (size_t) row*n_kv_async, n_kv_async*sizeof(float));
            }
        }

        n_kv_async = 0;
    }

    void clear_signals(llama_context & lctx) {
        if (n_kv_async > 0) {
            lctx.synchronize();
            n_kv_async = 0;
        }
        std::fill(attention.begin(), attention.end(), 0.0f);
        std::fill(last     .begin(), last     .end(), 0.0f);
    }

    // which cells of each row an edit writes to
    struct writes {
        writes(int n_row, int n_cell) : n_cell(n_cell), seen((size_t) n_row*n_cell) {}

        bool first(int row, int cell) {
            auto ref = seen[(size_t) row*n_cell + cell];
            if (ref) {
                return false;
            }
            ref = true;
            return true;
        }

        int n_cell;
        std::vector<bool> seen;
    };

    std::string invalid(const llama_kvtool_edit & edit) const {
        if (edit.n_move < 0 || (edit.n_move > 0 && !edit.moves) || edit.n_term < 0 || (edit.n_term > 0 && !edit.terms)) {
            return "missing moves or terms";
        }
        if (edit.n_keep < 0 || edit.n_keep > n_cell) {
            return format("n_keep = %d is not in 0..%d", edit.n_keep, n_cell);
        }
        if (edit.pos_0 < 0 || edit.pos_0 > INT32_MAX - n_cell) {
            return format("pos_0 = %d is not in 0..%d", edit.pos_0, INT32_MAX - n_cell);
        }

        const auto inside = [&](int row, int dst, int src) {
            return row >= 0 && row < n_row && dst >= 0 && dst < n_cell && src >= 0 && src < n_cell;
        };

        writes moved(n_row, n_cell);

        for (int i = 0; i < edit.n_move; ++i) {
            const auto & m = edit.moves[i];
            if (!inside(m.row, m.dst, m.src)) {
                return format("move %d: row %d of %d, cells %d <- %d of %d", i, m.row, n_row, m.dst, m.src, n_cell);
            }
            if (!moved.first(m.row, m.dst)) {
                return format("move %d: cell %d of row %d is written twice", i, m.dst, m.row);
            }
        }

        writes merged(n_row, n_cell);

        for (int i = 0; i < edit.n_term; ++i) {
            const auto & t = edit.terms[i];
            if (!inside(t.row, t.dst, t.src) || !std::isfinite(t.weight)) {
                return format("term %d: row %d of %d, cells %d <- %d of %d, weight %f", i, t.row, n_row, t.dst, t.src, n_cell, t.weight);
            }
            const bool goes_on = i > 0 && edit.terms[i - 1].row == t.row && edit.terms[i - 1].dst == t.dst;
            if (!goes_on && !merged.first(t.row, t.dst)) {
                return format("term %d: the terms of row %d, cell %d are not neighbours", i, t.row, t.dst);
            }
        }

        return {};
    }

    // an edit sorted by layer
    struct layer_edit {
        std::vector<llama_kvtool_move> moves; // delta == 0, src != dst
        std::vector<llama_kvtool_move> turns; // delta != 0

        std::vector<llama_kvtool_term> terms;
    };

    std::vector<layer_edit> by_layer(const llama_hparams & hparams, const llama_kvtool_edit & edit) const {
        std::vector<layer_edit> res(layers.size());
        std::vector<int>        index(n_row);

        for (size_t i = 0; i < layers.size(); ++i) {
            std::fill_n(index.begin() + layers[i].row_0, layers[i].n_head, (int) i);
        }

        for (int i = 0; i < edit.n_move; ++i) {
            const auto & m = edit.moves[i];

            const int  at     = index[m.row];
            const bool rotary = hparams.rope_type != LLAMA_ROPE_TYPE_NONE && hparams.has_rope(layers[at].il);

            if (m.delta != 0 && rotary) {
                res[at].turns.push_back(m);
            } else if (m.src != m.dst) {
                res[at].moves.push_back(m);
            }
        }
        for (int i = 0; i < edit.n_term; ++i) {
            res[index[edit.terms[i].row]].terms.push_back(edit.terms[i]);
        }

        return res;
    }

    // move rows of a tensor that lies in host memory: `stride` bytes from cell to cell, `n` pieces of `size` bytes a row
    static void move_host(
            const std::vector<llama_kvtool_move> & moves, int row_0, ggml_tensor * t,
            size_t stride_cell, size_t stride_head, size_t stride_piece, size_t size, int n, std::vector<uint8_t> & tmp) {
        tmp.resize(moves.size()*size*n);

        uint8_t * data = (uint8_t *) t->data;
        uint8_t * at   = tmp.data();

        for (const auto & m : moves) {
            for (int i = 0; i < n; ++i, at += size) {
                memcpy(at, data + m.src*stride_cell + (m.row - row_0)*stride_head + i*stride_piece, size);
            }
        }

        at = tmp.data();

        for (const auto & m : moves) {
            for (int i = 0; i < n; ++i, at += size) {
                memcpy(data + m.dst*stride_cell + (m.row - row_0)*stride_head + i*stride_piece, at, size);
            }
        }
    }

    // inputs of an edit's graph: filled on the host first, one tensor a kind for all layers
    struct input {
        ggml_type type;

        std::vector<uint8_t> data;

        ggml_tensor * t = nullptr;

        // each layer's part starts at a multiple of what devices want views to be aligned to
        size_t start() {
            data.resize(GGML_PAD(data.size(), 256));
            return data.size();
        }

        template <typename T> void push(T value) {
            const auto * bytes = (const uint8_t *) &value;
            data.insert(data.end(), bytes, bytes + sizeof(T));
        }

        void create(ggml_context * ctx) {
            if (!data.empty()) {
                t = ggml_new_tensor_1d(ctx, type, data.size()/ggml_type_size(type));
                ggml_set_input(t);
            }
        }

        void upload() const {
            if (t && t->buffer) {
                ggml_backend_tensor_set(t, data.data(), 0, data.size());
            }
        }

        ggml_tensor * view(ggml_context * ctx, size_t start, int64_t n) const {
            return ggml_view_1d(ctx, t, n, start);
        }
    };

    // graph inputs and where each layer's part of them starts
    struct graph_inputs {
        input idx_src { GGML_TYPE_I32, {}, nullptr }; // rows to gather
        input idx_dst { GGML_TYPE_I64, {}, nullptr }; // rows to write
        input delta   { GGML_TYPE_I32, {}, nullptr };
        input weight  { GGML_TYPE_F32, {}, nullptr };
        input rot     { GGML_TYPE_F32, {}, nullptr };
    };

    struct layer_inputs {
        size_t k_src = 0, k_dst_moves = 0, k_dst_turns = 0, k_delta = 0;
        size_t v_src = 0, v_dst = 0;
        size_t m_src = 0, m_dst = 0, m_weight = 0;

        int64_t n_moved  = 0; // values that move
        int64_t n_merged = 0; // values that are merged, each of n_term terms
        int64_t n_term   = 0;
    };

    int32_t apply(llama_context & lctx, const llama_kvtool_edit & edit) {
        const auto why = invalid(edit);
        if (!why.empty()) {
            return fail(why);
        }

        auto * kv = cache(lctx);

        lctx.synchronize();

        const auto edits = by_layer(lctx.model.hparams, edit);

        bool host  = !edit.force_graph;
        bool turns = false;
        bool terms = false;

        for (size_t i = 0; i < layers.size(); ++i) {
            host  = host && ggml_backend_buffer_is_host(layers[i].k->buffer) && ggml_backend_buffer_is_host(layers[i].v->buffer);
            turns = turns || !edits[i].turns.empty();
            terms = terms || !edits[i].terms.empty();
        }

        const bool k_host = host && !turns;
        const bool v_host = host && !terms;

        if ((!k_host || !v_host) && !edit_graph(lctx, *kv, edits, !k_host, !v_host)) {
            return fail("the device failed to edit the cache");
        }

        edit_host(lctx, *kv, edits, k_host, v_host);

        auto & cells = kv->v_cells[0];

        cells.reset();
        for (int i = 0; i < edit.n_keep; ++i) {
            cells.pos_set(i, edit.pos_0 + i);
            cells.seq_add(i, 0);
        }
        kv->v_heads[0] = edit.n_keep;

        clear_signals(lctx);

        return 0;
    }

    void edit_host(
            const llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer_edit> & edits, bool with_k, bool with_v) const {
        const auto & hparams = lctx.model.hparams;

        std::vector<uint8_t> tmp;

        for (size_t i = 0; i < layers.size(); ++i) {
            const auto & l = layers[i];

            if (with_k) {
                const size_t size = ggml_row_size(l.k->type, hparams.n_embd_head_k(l.il));
                move_host(edits[i].moves, l.row_0, l.k, l.k->nb[1], size, 0, size, 1, tmp);
            }
            if (with_v) {
                const int64_t n_embd = hparams.n_embd_head_v(l.il);
                const size_t  size   = ggml_row_size(l.v->type, n_embd);

                const auto moves = values_moved(edits[i]);
                if (kv.v_trans) {
                    const size_t one = ggml_type_size(l.v->type);
                    move_host(moves, l.row_0, l.v, one, n_embd*n_cell*one, n_cell*one, one, n_embd, tmp);
                } else {
                    move_host(moves, l.row_0, l.v, l.v->nb[1], size, 0, size, 1, tmp);
                }
            }
        }
    }

    // a key that turns in its place moves no value
    static std::vector<llama_kvtool_move> values_moved(const layer_edit & edit) {
        auto res = edit.moves;
        std::copy_if(edit.turns.begin(), edit.turns.end(), std::back_inserter(res),
                [](const llama_kvtool_move & m) { return m.src != m.dst; });
        return res;
    }

    graph_inputs fill_inputs(
            const llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer_edit> & edits,
            bool with_k, bool with_v, std::vector<layer_inputs> & at) const {
        const auto & hparams = lctx.model.hparams;

        graph_inputs in;

        for (size_t i = 0; i < layers.size(); ++i) {
            const auto & l = layers[i];
            const auto & e = edits[i];

            auto & a = at[i];

            if (with_k) {
                const auto index = [&](int row, int cell) { return (int64_t) cell*l.n_head + row - l.row_0; };

                a.k_src       = in.idx_src.start();
                a.k_dst_moves = in.idx_dst.start();
                for (const auto & m : e.moves) {
                    in.idx_src.push<int32_t>(index(m.row, m.src));
                    in.idx_dst.push<int64_t>(index(m.row, m.dst));
                }

                a.k_dst_turns = in.idx_dst.start();
                a.k_delta     = in.delta.start();
                for (const auto & m : e.turns) {
                    in.idx_src.push<int32_t>(index(m.row, m.src));
                    in.idx_dst.push<int64_t>(index(m.row, m.dst));
                    in.delta.push<int32_t>(m.delta);
                }
            }

            if (with_v) {
                // transposed, a value is n_embd elements that lie n_cell apart
                const int64_t n_embd = hparams.n_embd_head_v(l.il);
                const int64_t n_part = kv.v_trans ? n_embd : 1;

                const auto push = [&](auto & list, auto type, int row, int cell) {
                    const int64_t head = row - l.row_0;
                    for (int64_t j = 0; j < n_part; ++j) {
                        list.template push<decltype(type)>(
                                kv.v_trans ? (head*n_embd + j)*n_cell + cell : cell*(int64_t) l.n_head + head);
                    }
                };

                for (size_t t = 0, n = 0; t < e.terms.size(); ++t) {
                    const bool goes_on = t > 0 && e.terms[t - 1].row == e.terms[t].row && e.terms[t - 1].dst == e.terms[t].dst;
                    n = goes_on ? n + 1 : 1;
                    a.n_merged += !goes_on;
                    a.n_term = std::max<int64_t>(a.n_term, n);
                }

                a.m_src    = in.idx_src.start();
                a.m_dst    = in.idx_dst.start();
                a.m_weight = in.weight.start();
                for (size_t t = 0; t < e.terms.size(); ) {
                    const auto & first = e.terms[t];

                    push(in.idx_dst, int64_t(), first.row, first.dst);
                    for (int64_t j = 0; j < a.n_term; ++j) {
                        const bool same = t < e.terms.size() && e.terms[t].row == first.row && e.terms[t].dst == first.dst;
                        push(in.idx_src, int32_t(), first.row, same ? e.terms[t].src : first.dst);
                        in.weight.push<float>(same ? e.terms[t].weight : 0.0f);
                        t += same;
                    }
                }

                const auto moved = values_moved(e);
                a.n_moved = moved.size();

                a.v_src = in.idx_src.start();
                a.v_dst = in.idx_dst.start();
                for (const auto & m : moved) {
                    push(in.idx_src, int32_t(), m.row, m.src);
                    push(in.idx_dst, int64_t(), m.row, m.dst);
                }
            }
        }

        return in;
    }

    // rotate keys [n_embd, n] by delta positions
    static ggml_tensor * build_turn(
            const llama_context & lctx, ggml_context * ctx, ggml_tensor * x, ggml_tensor * delta, ggml_tensor * rot, int il) {
        const auto & hparams = lctx.model.hparams;
        const auto & cparams = lctx.cparams;

        const float freq_base  = lctx.model.get_rope_freq_base (cparams, il);
        const float freq_scale = lctx.model.get_rope_freq_scale(cparams, il);

        // the key has its YaRN magnitude from its first rotation: this one must have none
        const float attn_factor = cparams.yarn_ext_factor != 0.0f ? 1.0f/(1.0f + 0.1f*logf(1.0f/freq_scale)) : 1.0f;

        x = ggml_reshape_3d(ctx, x, x->ne[0], 1, x->ne[1]);

        if (rot) {
            x = llama_mul_mat_hadamard(ctx, x, rot);
        }

        x = ggml_rope_ext(ctx, x, delta, lctx.model.get_rope_factors(cparams, il), hparams.n_rot(il), hparams.rope_type,
                cparams.n_ctx_orig_yarn, freq_base, freq_scale,
                cparams.yarn_ext_factor, attn_factor, cparams.yarn_beta_fast, cparams.yarn_beta_slow);

        if (rot) {
            x = llama_mul_mat_hadamard(ctx, x, rot);
        }

        return ggml_reshape_2d(ctx, x, x->ne[0], x->ne[2]);
    }

    static ggml_tensor * build_keys(
            const llama_context & lctx, ggml_context * ctx, const layer & l, const layer_edit & e,
            const graph_inputs & in, const layer_inputs & a, ggml_tensor * rot) {
        const int64_t n_moves = e.moves.size();
        const int64_t n_turns = e.turns.size();
        const int64_t n_embd  = l.k->ne[0]/l.n_head;

        ggml_tensor * k = ggml_reshape_2d(ctx, l.k, n_embd, l.n_head*l.k->ne[1]);

        // one gather for all, so that every key is read before one is written
        ggml_tensor * x = ggml_get_rows(ctx, k, in.idx_src.view(ctx, a.k_src, n_moves + n_turns));

        if (n_moves > 0) {
            ggml_tensor * moved = ggml_view_2d(ctx, x, n_embd, n_moves, x->nb[1], 0);
            k = ggml_set_rows(ctx, k, moved, in.idx_dst.view(ctx, a.k_dst_moves, n_moves));
        }
        if (n_turns > 0) {
            ggml_tensor * turned = ggml_view_2d(ctx, x, n_embd, n_turns, x->nb[1], n_moves*x->nb[1]);
            turned = build_turn(lctx, ctx, turned, in.delta.view(ctx, a.k_delta, n_turns), rot, l.il);
            k = ggml_set_rows(ctx, k, turned, in.idx_dst.view(ctx, a.k_dst_turns, n_turns));
        }

        return k;
    }

    static ggml_tensor * build_values(
            const llama_kv_cache & kv, ggml_context * ctx, const layer & l, int64_t n_embd, const graph_inputs & in, const layer_inputs & a) {
        const int64_t n_part = kv.v_trans ? n_embd : 1;

        ggml_tensor * v = ggml_reshape_2d(ctx, l.v, n_embd/n_part, ggml_nelements(l.v)/(n_embd/n_part));

        if (a.n_merged > 0) {
            const int64_t n = a.n_merged*a.n_term;

            ggml_tensor * w = ggml_reshape_3d(ctx, in.weight.view(ctx, a.m_weight, n), 1, a.n_term, a.n_merged);
            ggml_tensor * x;
            if (kv.v_trans) {
                // gathered element by element, value by value
                x = ggml_get_rows(ctx, v, in.idx_src.view(ctx, a.m_src, n*n_part));
            } else {
                x = ggml_get_rows(ctx, v, in.idx_src.view(ctx, a.m_src, n));
            }
            x = ggml_reshape_3d(ctx, x, n_embd, a.n_term, a.n_merged);
            x = sum_middle(ctx, ggml_mul(ctx, x, w));
            x = ggml_reshape_2d(ctx, x, n_embd/n_part, a.n_merged*n_part);
            v = ggml_set_rows(ctx, v, x, in.idx_dst.view(ctx, a.m_dst, a.n_merged*n_part));
        }
        if (a.n_moved > 0) {
            ggml_tensor * x = ggml_get_rows(ctx, v, in.idx_src.view(ctx, a.v_src, a.n_moved*n_part));
            v = ggml_set_rows(ctx, v, x, in.idx_dst.view(ctx, a.v_dst, a.n_moved*n_part));
        }

        return v;
    }

    bool edit_graph(
            llama_context & lctx, const llama_kv_cache & kv, const std::vector<layer_edit> & edits, bool with_k, bool with_v) {
        std::vector<layer_inputs> at(layers.size());

        graph_inputs in = fill_inputs(lctx, kv, edits, with_k, with_v, at);

        int64_t n_term = 1;
        for (const auto & a : at) {
            n_term = std::max(n_term, a.n_term);
        }

        const size_t max_nodes = layers.size()*(64 + 4*(size_t) std::ceil(std::log2(n_term))) + 16;

        buf_graph.resize(ggml_tensor_overhead()*max_nodes + ggml_graph_overhead_custom(max_nodes, false));

        ggml_context_ptr ctx_ptr { ggml_init({ buf_graph.size(), buf_graph.data(), true }) };

        ggml_context * ctx = ctx_ptr.get();
        ggml_cgraph  * gf  = ggml_new_graph_custom(ctx, max_nodes, false);

        auto & backends = lctx.backend_ptrs;
        sched.reset(ggml_backend_sched_new(backends.data(), lctx.backend_buft.data(), backends.size(), max_nodes, false, false));

        for (input * i : { &in.idx_src, &in.idx_dst, &in.delta, &in.weight }) {
            i->create(ctx);
        }

        ggml_tensor * rot = kv.build_input_k_rot(ctx);

        for (size_t i = 0; i < layers.size(); ++i) {
            const auto & l = layers[i];

            const int first = ggml_graph_n_nodes(gf);

            if (with_k && edits[i].moves.size() + edits[i].turns.size() > 0) {
                ggml_build_forward_expand(gf, build_keys(lctx, ctx, l, edits[i], in, at[i], rot));
            }
            if (with_v && at[i].n_moved + at[i].n_merged > 0) {
                ggml_build_forward_expand(gf, build_values(kv, ctx, l, lctx.model.hparams.n_embd_head_v(l.il), in, at[i]));
            }

            // the work is done where the cache lies; views stay with what they view, which may be an input on the host
            const auto buft = ggml_backend_buffer_get_type(l.k->buffer);
            const auto home = std::find_if(backends.begin(), backends.end(), [&](ggml_backend_t b) { return ggml_backend_supports_buft(b, buft); });
            for (int j = first; home != backends.end() && j < ggml_graph_n_nodes(gf); ++j) {
                ggml_tensor * node = ggml_graph_node(gf, j);
                if (!node->view_src && ggml_backend_supports_op(*home, node)) {
                    ggml_backend_sched_set_tensor_backend(sched.get(), node, *home);
                }
            }
        }

        if (ggml_graph_n_nodes(gf) == 0) {
            return true;
        }
        if (!ggml_backend_sched_alloc_graph(sched.get(), gf)) {
            return false;
        }

        for (const input * i : { &in.idx_src, &in.idx_dst, &in.delta, &in.weight }) {
            i->upload();
        }
        if (rot && rot->buffer) {
            kv.set_input_k_rot(rot);
        }

        return ggml_backend_sched_graph_compute(sched.get(), gf) == GGML_STATUS_SUCCESS;
    }
};

//
// hooks
//

void llama_kvtool_build(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * p,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
              float   kq_scale,
                int   il) {
    const uint32_t signals = graph.cparams.kvtool_signals;

    // keys that do not come from the cache belong to an encoder or to cross-attention
    if (signals == 0 || !k->view_src || strncmp(k->view_src->name, "cache_", 6) != 0) {
        return;
    }

    ggml_context * ctx = graph.ctx0;

    if (!p) {
        p = ggml_mul_mat(ctx, k, q);
        ggml_prec_set_acc(p, GGML_PREC_F32);

        if (graph.hparams.attn_soft_cap) {
            const float cap = graph.hparams.f_attn_logit_softcapping;
            p = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, p, 1.0f/cap)), cap);
        }

        p = ggml_soft_max_ext(ctx, p, kq_mask, kq_scale, graph.hparams.f_max_alibi_bias);
        ggml_soft_max_add_sinks(p, sinks);
    }

    const int64_t n_kv      = p->ne[0];
    const int64_t n_tokens  = p->ne[1];
    const int64_t n_head_kv = k->ne[2];
    const int64_t n_gqa     = p->ne[2]/n_head_kv;

    llama_kvtool_probe probe = { il, nullptr, nullptr };

    if (signals & LLAMA_KVTOOL_SIGNAL_ATTENTION) {
        probe.attention = sum_middle(ctx, ggml_reshape_3d(ctx, p, n_kv, n_tokens*n_gqa, n_head_kv));
    }
    if (signals & LLAMA_KVTOOL_SIGNAL_LAST) {
        probe.last = sum_middle(ctx, ggml_view_3d(ctx, p, n_kv, n_gqa, n_head_kv, p->nb[2], n_gqa*p->nb[2], (n_tokens - 1)*p->nb[1]));
    }

    // at once, so that the probabilities of one layer are freed before those of the next are made
    for (ggml_tensor * t : { probe.attention, probe.last }) {
        if (t) {
            ggml_set_output(t);
            ggml_build_forward_expand(graph.gf, t);
        }
    }

    graph.res->kvtool_probes.push_back(probe);
}

void llama_kvtool_extract(llama_context & lctx, const llm_graph_result & res) {
    if (lctx.kvtool) {
        lctx.kvtool->extract(lctx, res.kvtool_probes);
    }
}

uint32_t llama_kvtool_n_nodes(const llama_hparams & hparams, uint32_t signals, uint32_t n_tokens) {
    const uint32_t n_signal  = (signals & 1) + (signals >> 1 & 1);
    const uint32_t n_halving = std::ceil(std::log2(std::max(2u, n_tokens*hparams.n_head())));

    return n_signal == 0 ? 0 : hparams.n_layer()*(8 + n_signal*(2 + 5*n_halving));
}

//
// C API
//

int32_t llama_kvtool_abi(void) {
    return LLAMA_KVTOOL_ABI;
}

const char * llama_kvtool_digest(void) {
    return LLAMA_KVTOOL_DIGEST;
}

const char * llama_kvtool_error(void) {
    return g_error.c_str();
}

// nothing thrown may cross into C
template <typename F>
static auto guarded(F && f) -> decltype(f()) {
    try {
        return f();
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

int32_t llama_kvtool_enable(llama_context * ctx, uint32_t signals) {
    if (!ctx) {
        return fail("no context");
    }
    return guarded([&] { return llama_kvtool::enable(*ctx, signals); });
}

int32_t llama_kvtool_row_layers(const llama_context * ctx, int32_t * layers, int32_t n_row) {
    const auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!layers || n_row != kvtool->n_row) {
        return fail(format("there are %d rows, not %d", kvtool->n_row, n_row));
    }
    std::copy(kvtool->layer_of_row.begin(), kvtool->layer_of_row.end(), layers);
    return n_row;
}

int64_t llama_kvtool_cache_bytes(const llama_context * ctx) {
    const auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    int64_t res = 0;
    for (const auto & l : kvtool->layers) {
        res += ggml_nbytes(l.k) + ggml_nbytes(l.v);
    }
    return res;
}

int32_t llama_kvtool_read(llama_context * ctx, uint32_t signal, float * out, int32_t n_row, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!out || n_row != kvtool->n_row || n_cell < 0 || n_cell > kvtool->n_cell) {
        return fail(format("there are %d rows of %d cells, not %d of %d", kvtool->n_row, kvtool->n_cell, n_row, n_cell));
    }
    const auto & src = signal == LLAMA_KVTOOL_SIGNAL_ATTENTION ? kvtool->attention : kvtool->last;
    if (src.empty() || (signal != LLAMA_KVTOOL_SIGNAL_ATTENTION && signal != LLAMA_KVTOOL_SIGNAL_LAST)) {
        return fail(format("signal %u is not enabled", signal));
    }
    return guarded([&]() -> int32_t {
        kvtool->fold(*ctx);
        for (int32_t row = 0; row < n_row; ++row) {
            const float * from = src.data() + (size_t) row*kvtool->n_cell;
            std::copy(from, from + n_cell, out + (size_t) row*n_cell);
        }
        return 0;
    });
}

int32_t llama_kvtool_apply(llama_context * ctx, const llama_kvtool_edit * edit) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!edit) {
        return fail("no edit");
    }
    return guarded([&] { return kvtool->apply(*ctx, *edit); });
}
