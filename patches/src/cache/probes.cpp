// The signals in the decode's graph: each layer's attention probabilities, reduced to a few floats per row and cell.

#include "halving.h"
#include "hooks/hooks.h"
#include "hooks/input.h"
#include "hooks/state.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-hparams.h"

#include <algorithm>
#include <cmath>

using namespace kvtool;

ggml_tensor * llama_kvtool_scale(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k) {
    const auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || !kvtool->params.log_n || !kvtool->has_keys(k)) {
        return q;
    }

    auto & scale = graph_input(graph).scale;
    if (!scale) {
        scale = new_input(graph.ctx0, GGML_TYPE_F32, 1, 1, q->ne[2]);
    }

    return ggml_mul(graph.ctx0, q, scale);
}

// true if a signal is a maximum over queries and heads instead of a sum
static bool is_maximum(int s) {
    return 1u << s == LLAMA_KVTOOL_SIGNAL_IMPORTANT || 1u << s == LLAMA_KVTOOL_SIGNAL_HIGHEST;
}

// index of a signal
static int index_of(uint32_t signal) {
    int s = 0;
    while (signal >> (s + 1)) {
        ++s;
    }
    return s;
}

void llama_kvtool_build(
        const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * p,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
              float   kq_scale,
                int   il) {
    auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || !kvtool->is_watching || !kvtool->has_keys(k)) {
        return;
    }

    const auto & params = kvtool->params;

    ggml_context * ctx = graph.ctx0;

    if (kvtool->queries.is_on()) {
        auto & asked = graph_input(graph).asked;
        if (!asked) {
            asked = new_input(ctx, GGML_TYPE_I64, std::min<int64_t>(kvtool->queries.n_slot(), q->ne[1]), 1, 1);
        }
        ggml_build_forward_expand(graph.gf, kvtool->queries.build(ctx, il, q, asked, kq_scale));
    }
    if (params.signals == 0) {
        return;
    }

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

    const auto & l = *kvtool->find(il);

    const size_t i_layer = &l - kvtool->layers.data();

    // sums of earlier layers that read the same cells; a later layer takes them over
    auto & shared = graph.res->kvtool.shared;

    const auto before = std::find_if(shared.begin(), shared.end(), [&](const auto & x) { return x.i == (int) i_layer; });

    llama_kvtool_graph::probe sums = before == shared.end() ? llama_kvtool_graph::probe { (int) i_layer, {} } : *before;
    if (before != shared.end()) {
        shared.erase(before);
    }

    const bool is_last  = il >= l.last;
    const bool is_apart = kvtool->is_apart();

    if (params.n_ahead > 0) {
        graph_input(graph).is_apart = is_apart;
    }

    const auto has = [&](uint32_t signal) { return (params.signals & signal) != 0; };

    // the last r queries as [n_kv, r*h, n_head_kv]; h: heads of the group, 1 if it is reduced
    const auto queries = [&](ggml_tensor * t, int64_t r) {
        const int64_t h = t->ne[2]/n_head_kv;
        if (r == n_tokens) {
            return ggml_reshape_3d(ctx, t, n_kv, n_tokens*h, n_head_kv);
        }
        t = ggml_cont(ctx, ggml_view_3d(ctx, t, n_kv, r, t->ne[2], t->nb[1], t->nb[2], (n_tokens - r)*t->nb[1]));
        return ggml_reshape_3d(ctx, t, n_kv, r*h, n_head_kv);
    };

    // [n_kv*n_tokens, n_gqa, n_head_kv] -> [n_kv, n_tokens, n_head_kv]
    const auto reduce_group = [&](uint32_t group) {
        ggml_tensor * t = ggml_reshape_3d(ctx, p, n_kv*n_tokens, n_gqa, n_head_kv);
        switch (group) {
            case LLAMA_KVTOOL_GROUP_MAX:   t = max_middle(ctx, t); break;
            case LLAMA_KVTOOL_GROUP_FIRST: t = ggml_cont(ctx, ggml_view_3d(ctx, t, t->ne[0], 1, n_head_kv, t->nb[1], t->nb[2], 0)); break;
            default:                       t = sum_middle(ctx, t); break;
        }
        return ggml_reshape_3d(ctx, t, n_kv, n_tokens, n_head_kv);
    };

    llama_kvtool_graph::probe probe = { (int) i_layer, {} };

    // Combine a signal of this layer with that of earlier layers reading the same cells. Returns null if a later
    // layer continues. The result is added to the graph at once, so that one layer's probabilities are freed
    // before the next layer's are computed
    const auto joined = [&](int s, ggml_tensor * t) -> ggml_tensor * {
        if (sums.t[s]) {
            t = is_maximum(s) ? max_of(ctx, sums.t[s], t) : ggml_add(ctx, sums.t[s], t);
        }
        if (is_last) {
            return t;
        }
        sums.t[s] = t;
        ggml_build_forward_expand(graph.gf, t);
        return nullptr;
    };

    const auto finish = [&](uint32_t signal, ggml_tensor * t) {
        const int s = index_of(signal);

        if (ggml_tensor * sum = is_apart ? nullptr : kvtool->signals.build_sum(ctx, i_layer, s, t, n_tokens)) {
            ggml_build_forward_expand(graph.gf, sum);
            return;
        }
        // a view uses the memory of the tensor that it views
        for (ggml_tensor * x = t; x; x = x->view_src) {
            ggml_set_output(x);
        }
        ggml_build_forward_expand(graph.gf, t);
        probe.t[s] = t;
    };

    const auto put = [&](uint32_t signal, ggml_tensor * t) {
        t = joined(index_of(signal), t);
        if (t) {
            finish(signal, t);
        }
    };

    // per query, summed over the group's heads
    const auto each = [&](ggml_tensor * t) {
        t = ggml_reshape_3d(ctx, t, n_kv*n_tokens, t->ne[2]/n_head_kv, n_head_kv);
        return ggml_reshape_3d(ctx, sum_middle(ctx, t), n_kv, n_tokens, n_head_kv);
    };

    const bool summed = params.group == LLAMA_KVTOOL_GROUP_SUM || n_gqa == 1;

    // a sum over the group is computed together with the sum over queries
    ggml_tensor * a = summed ? p : reduce_group(params.group);

    if (has(LLAMA_KVTOOL_SIGNAL_ATTENTION)) {
        put(LLAMA_KVTOOL_SIGNAL_ATTENTION, is_apart ? each(a) : sum_middle(ctx, queries(a, n_tokens)));
    }
    if (has(LLAMA_KVTOOL_SIGNAL_LAST)) {
        put(LLAMA_KVTOOL_SIGNAL_LAST, is_apart ? each(a) : sum_middle(ctx, queries(a, 1)));
    }
    if (has(LLAMA_KVTOOL_SIGNAL_RECENT)) {
        const int64_t r = is_apart ? n_tokens : std::min<int64_t>(params.n_query, n_tokens);

        auto & slots = graph_input(graph).slots;
        if (!slots) {
            slots = new_input(ctx, GGML_TYPE_I64, r, 1, 1);
        }
        // per query: only the group is reduced
        ggml_tensor * t = ggml_reshape_3d(ctx, queries(a, r), n_kv*r, a->ne[2]/n_head_kv, n_head_kv);
        t = joined(index_of(LLAMA_KVTOOL_SIGNAL_RECENT), ggml_reshape_3d(ctx, sum_middle(ctx, t), n_kv, r, n_head_kv));
        if (t) {
            ggml_build_forward_expand(graph.gf, kvtool->recent.build(ctx, i_layer, t, slots));
        }
    }
    if (has(LLAMA_KVTOOL_SIGNAL_SQUARES)) {
        // the square is taken of the sum over all layers that read a cell, so layers are added query by query
        // first
        ggml_tensor * one = joined(index_of(LLAMA_KVTOOL_SIGNAL_SQUARES), summed && n_gqa > 1 ? reduce_group(LLAMA_KVTOOL_GROUP_SUM) : a);
        if (one) {
            finish(LLAMA_KVTOOL_SIGNAL_SQUARES, is_apart ? ggml_sqr(ctx, one) : sum_middle(ctx, ggml_sqr(ctx, one)));
        }
    }

    // per query, maximum over the group's heads
    const auto each_highest = [&](ggml_tensor * t) {
        t = max_middle(ctx, ggml_reshape_3d(ctx, t, n_kv*n_tokens, n_gqa, n_head_kv));
        return ggml_reshape_3d(ctx, t, n_kv, n_tokens, n_head_kv);
    };

    if (has(LLAMA_KVTOOL_SIGNAL_HIGHEST)) {
        put(LLAMA_KVTOOL_SIGNAL_HIGHEST, is_apart ? each_highest(p) : max_middle(ctx, queries(p, n_tokens)));
    }
    if (has(LLAMA_KVTOOL_SIGNAL_HITS) || has(LLAMA_KVTOOL_SIGNAL_IMPORTANT)) {
        auto & seen = graph_input(graph).seen;
        if (!seen) {
            seen = new_input(ctx, GGML_TYPE_F32, 1, n_tokens, 1);
        }

        // 1 where p*t >= 1
        ggml_tensor * hit = ggml_scale_bias(ctx, ggml_step(ctx, ggml_scale_bias(ctx, ggml_mul(ctx, p, seen), -1.0f, 1.0f)), -1.0f, 1.0f);

        if (has(LLAMA_KVTOOL_SIGNAL_HITS)) {
            put(LLAMA_KVTOOL_SIGNAL_HITS, is_apart ? each(hit) : sum_middle(ctx, queries(hit, n_tokens)));
        }
        if (has(LLAMA_KVTOOL_SIGNAL_IMPORTANT) && is_apart) {
            put(LLAMA_KVTOOL_SIGNAL_IMPORTANT, each_highest(hit));
        } else if (has(LLAMA_KVTOOL_SIGNAL_IMPORTANT)) {
            ggml_tensor * order = ggml_reshape_2d(ctx, ggml_arange(ctx, 1, n_tokens + 1, 1), 1, n_tokens);
            put(LLAMA_KVTOOL_SIGNAL_IMPORTANT, max_middle(ctx, queries(ggml_mul(ctx, hit, order), n_tokens)));
        }
    }

    if (is_last) {
        graph.res->kvtool.probes.push_back(probe);
    } else {
        shared.push_back(sums);
    }
}

void llama_kvtool_extract(llama_context & lctx, const llm_graph_result & res, uint32_t n_tokens) {
    if (res.kvtool.joint) {
        for (size_t i = 0; i < res.kvtool.joint->parts.size(); ++i) {
            const auto & part = *res.kvtool.joint->parts[i];
            res.kvtool.joint->own.members[i].lctx->kvtool->decoded(lctx, part.res->kvtool, part.n);
        }
    } else if (lctx.kvtool) {
        lctx.kvtool->decoded(lctx, res.kvtool, n_tokens);
    }
}

uint32_t llama_kvtool_n_nodes(const llama_hparams & hparams, const llama_kvtool * kvtool, uint32_t n_tokens) {
    if (!kvtool) {
        return 0;
    }

    const auto & params = kvtool->params;

    const bool hits = (params.signals & (LLAMA_KVTOOL_SIGNAL_HITS | LLAMA_KVTOOL_SIGNAL_IMPORTANT)) != 0;

    // a close bound: ggml and its scheduler allocate about a kilobyte per possible node
    uint32_t res = kvtool->joint ? kvtool->joint->n_most*kvtool->joint->n_node : 0;
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        const auto n_halving = [&](uint32_t n) { return (uint32_t) std::log2(std::max(1u, n*hparams.n_gqa(il))); };

        // probabilities if there is flash attention, and scaled queries; stores, views and masks of ragged
        // rows
        res += 8 + 4*llama_kvtool_graph::n_signal + (params.ragged ? 24 : 0) + (hparams.use_alibi ? 14 : 0) + (params.n_recall > 0 ? 30 : 0) + (hits ? 8 : 0);
        for (int s = 0; s < llama_kvtool_graph::n_signal; ++s) {
            // a halving takes two views and a sum, plus a view and a sum for an odd number; a maximum
            // takes three operations
            const bool is_max = params.group == LLAMA_KVTOOL_GROUP_MAX || is_maximum(s);

            res += kvtool->signals.has(s) ? (is_max ? 16 + 9*n_halving(n_tokens) : 8 + 5*n_halving(n_tokens)) : 0;
        }
        res += kvtool->queries.is_on() ? 8 : 0;
        if (kvtool->recent.is_on()) {
            // a group's maximum is computed once for all signals
            res += 16 + 9*n_halving(1);
        }
    }

    return res;
}
