// Signals of several steps, computed together.
//
// Flash attention gives no probabilities, so signals need a second product of queries and keys. This takes many small
// operations in each layer, too many to repeat for every single token. Steps therefore store their queries here. The
// signals of all these steps are computed together, when they are read, or when there is no room for more queries.
// Before that, rejected draft tokens are removed. The result equals the signals of one batch with all tokens, because
// cells are only appended between two edits.

#include "devices.h"
#include "graphs.h"
#include "reduce-middle.h"
#include "masks.h"
#include "probes.h"
#include "hooks/memory.h"
#include "hooks/state.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvtool {

static constexpr int n_signal = llama_kvtool_graph::n_signal;

static constexpr int recent_signal = 2;
static_assert(1u << recent_signal == LLAMA_KVTOOL_SIGNAL_RECENT, "the recent signal has a ring of its own");

namespace {

// inputs of the graph that computes the deferred signals of all layers
struct deferred_inputs {
    input idx       { GGML_TYPE_I32, {}, nullptr }; // Slots of the stored queries.
    input recent    { GGML_TYPE_I64, {}, nullptr }; // Slots of kvtool::recent that receive the attention of the queries.
    input n_seen    { GGML_TYPE_F32, {}, nullptr }; // Number of tokens that each query has seen.
    input limit     { GGML_TYPE_F32, {}, nullptr }; // Layer by layer: the last cell that each query sees.
    input key_pos   { GGML_TYPE_F32, {}, nullptr }; // Only with ALiBi, layer by layer: the position of each key.
    input query_pos { GGML_TYPE_F32, {}, nullptr }; // Only with ALiBi: the position of each query.

    struct layer_offsets {
        size_t limit;
        size_t key_pos;
        int    n_head; // number of masks: one per row, or 1 for all rows
        int    n_kv;
    };

    std::vector<layer_offsets> offsets;

    deferred_inputs(const llama_kvtool & kvtool) {
        const int n = kvtool.deferred.n;

        const size_t align = part {}.align();

        for (int t = 0; t < n; ++t) {
            idx   .push<int32_t>(t);
            n_seen.push<float>(kvtool.deferred.n_seen[t]);
        }
        for (int t = std::max(n - kvtool.params.n_query, 0); t < n && kvtool.recent.is_on(); ++t) {
            recent.push<int64_t>(kvtool.recent.slot(t));
        }

        const bool is_ragged = kvtool.params.ragged;

        for (size_t i = 0; i < kvtool.layers.size(); ++i) {
            const auto & l = kvtool.layers[i];

            const auto n_live_of = [&](int head) { return is_ragged ? kvtool.n_live_row[l.row_0 + head] : kvtool.n_live; };

            const int n_head = is_ragged && !kvtool.is_even(l) ? l.n_head : 1;
            const int n_kv   = is_ragged ? kvtool.most_live(l) : kvtool.n_live;

            offsets.push_back({ limit.start(align), key_pos.start(align), n_head, n_kv });
            for (int head = 0; head < n_head; ++head) {
                for (int t = 0; t < n; ++t) {
                    limit.push<float>(n_live_of(head) - n + t);
                }
            }
            for (int head = 0; head < l.n_head && kvtool.positions.is_on(); ++head) {
                for (int c = 0; c < n_kv; ++c) {
                    key_pos.push<float>(c < n_live_of(head) ? kvtool.positions.get(i, head, c) : 0);
                }
            }
            for (int t = 0; t < n && i == 0 && kvtool.positions.is_on(); ++t) {
                query_pos.push<float>(kvtool.positions.get(0, 0, n_live_of(0) - n + t));
            }
        }
    }

    std::vector<input *> inputs() { return { &idx, &recent, &n_seen, &limit, &key_pos, &query_pos }; }
};

} // namespace

// the layer's mask for all query heads
static ggml_tensor * mask_of(ggml_context * ctx, const deferred_inputs & in, const layer & l, size_t i, int64_t n, int64_t n_gqa) {
    const auto & offsets = in.offsets[i];

    ggml_tensor * x = mask_below(ctx, offsets.n_kv, ggml_reshape_3d(ctx, in.limit.view(ctx, offsets.limit, n*offsets.n_head), 1, n, offsets.n_head));
    if (in.key_pos.t) {
        ggml_tensor * key_pos   = ggml_reshape_3d(ctx, in.key_pos.view(ctx, offsets.key_pos, (int64_t) offsets.n_kv*l.n_head), offsets.n_kv, 1, l.n_head);
        ggml_tensor * distances = minus_distances(ctx, key_pos, ggml_reshape_2d(ctx, in.query_pos.t, 1, n));
        x = ggml_add(ctx, distances, x);
    }
    return repeat_rows(ctx, x, n_gqa);
}

} // namespace kvtool

using namespace kvtool;

bool llama_kvtool::sum_deferred(llama_context & lctx) {
    auto & kvtool   = *this;
    auto & deferred = kvtool.deferred;

    const int n = deferred.n;
    if (n == 0) {
        return true;
    }

    lctx.synchronize();
    // The host adds the deferred signals to its sums. It must add the earlier signals first, so collect them from the
    // devices
    kvtool.signals.collect(lctx);

    const auto & model  = lctx.get_model();

    deferred_inputs in(kvtool);

    const auto is_summed = [&](int s) { return kvtool.signals.has(s); };

    // signals of layer i: [n_kv, number of summed signals, n_head], or null
    const auto build = [&](ggml_context * ctx, ggml_cgraph * gf, size_t i, ggml_tensor *) {
        const auto & l = layers[i];

        const int64_t n_kv = in.offsets[i].n_kv;

        ggml_tensor * k = ggml_view_3d(ctx, l.k, l.n_embd_k, n_kv, l.n_head, l.k->nb[1], ggml_row_size(l.k->type, l.n_embd_k), 0);

        ggml_tensor * sums[n_signal] = {};
        ggml_tensor * res = nullptr;

        for (const auto & a : deferred.attn_layers) {
            if (a.i != i) {
                continue;
            }
            ggml_tensor * q = ggml_reshape_3d(ctx, ggml_get_rows(ctx, a.t, in.idx.t), a.n_embd, a.n_head, n);
            q = ggml_cont(ctx, ggml_permute(ctx, q, 0, 2, 1, 3));

            ggml_tensor * p = probabilities(ctx, model.hparams, model.arch == LLM_ARCH_GROK, k, q,
                    mask_of(ctx, in, l, i, n, a.n_head/l.n_head), a.sinks, a.scale);

            const reducer reduced(ctx, params, p, l.n_head, ggml_reshape_2d(ctx, in.n_seen.t, 1, n));

            for (int s = 0; s < n_signal; ++s) {
                if (!(params.signals >> s & 1)) {
                    continue;
                }
                ggml_tensor * t = reduced.signal(s);
                sums[s] = !sums[s] ? t : is_maximum(s) ? max_of(ctx, sums[s], t) : ggml_add(ctx, sums[s], t);
                if (a.il < l.il_last) {
                    // Add the sum to the graph now. The probabilities of this layer can then be freed before the next
                    // layer's probabilities are computed
                    ggml_build_forward_expand(gf, sums[s]);
                } else if (s == recent_signal) {
                    ggml_build_forward_expand(gf, kvtool.recent.build(ctx, i, sums[s], in.recent.t));
                } else {
                    t   = reduced.finished(s, sums[s]);
                    res = res ? ggml_concat(ctx, res, t, 1) : t;
                }
            }
        }
        if (res) {
            ggml_set_output(res);
            ggml_build_forward_expand(gf, res);
        }
        return res;
    };

    size_t max_nodes = 16;
    for (const auto & a : deferred.attn_layers) {
        // see llama_kvtool_n_nodes for the number of halvings
        const auto n_halving = (size_t) std::log2(n*a.n_head/layers[a.i].n_head);
        max_nodes += 40 + n_signal*(24 + 9*n_halving);
    }

    const auto read = [&](size_t i, const float * values) {
        const auto & l = layers[i];

        for (int row = l.row_0; row < l.row_0 + l.n_head; ++row) {
            for (int s = 0; s < n_signal; ++s) {
                if (is_summed(s)) {
                    kvtool.signals.add(s, row, values, in.offsets[i].n_kv, n);
                    values += in.offsets[i].n_kv;
                }
            }
        }
    };
    if (!kvtool.graphs.compute_each(lctx, *memory::cache(lctx), layers, max_nodes, in.inputs(), build, read)) {
        return false;
    }

    kvtool.recent.decoded(n);
    kvtool.n_removable = 0;
    deferred.remove(n);

    return true;
}

bool llama_kvtool::make_deferred(const llama_context & lctx, const std::vector<stored_queries::attn_layer> & new_layers) {
    // In two cases, only the signals of steps with draft tokens are deferred. Without flash attention, a step computes
    // the probabilities anyway. And a worker keeps only one graph per device: the graph of the step and the graph of
    // deferred signals would replace each other there, and both would be sent each time
    defers_all = lctx.cparams.flash_attn && std::none_of(layers.begin(), layers.end(), lies_on_worker);
    // with an archive no signals are deferred, because recalled cells differ from step to step
    if (params.signals != 0 && params.n_recall == 0) {
        deferred.n_slot = std::max(defers_all ? params.n_defer : 0, params.n_draft > 0 ? params.n_draft + 1 : 0);
    }
    defers_all = defers_all && params.n_defer > 0;
    return deferred.n_slot == 0 || deferred.make(new_layers, layers, deferred.n_slot);
}

bool llama_kvtool::defers(int64_t n_tokens) const {
    // no signals are deferred while cells are hidden: the mask, which is computed later, would show these cells
    return is_watching && n_hidden == 0 && n_tokens <= deferred.n_slot && (defers_all || n_marked > 0);
}

bool llama_kvtool::collect(llama_context & lctx) {
    if (!sum_deferred(lctx)) {
        return false;
    }
    signals.collect(lctx);
    recent.collect(lctx);
    return true;
}

bool llama_kvtool::watch(llama_context & lctx, bool on) {
    if (on == is_watching || (params.signals == 0 && !queries.is_on())) {
        return true;
    }
    if (!sum_deferred(lctx)) {
        return false;
    }
    is_watching = on;
    n_removable = 0;
    // graphs with signals need larger buffers
    forget_graphs(lctx, on);
    return true;
}
