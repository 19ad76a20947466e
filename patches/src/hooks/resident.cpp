// Attention of a step to residents. These are cells at the end of each row that represent the archive. With residents,
// no operation of the step runs on the host.

#include "cache/ragged.h"
#include "cache/resident-cells.h"
#include "error.h"
#include "hooks.h"
#include "input.h"
#include "memory.h"
#include "state.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>

using namespace kvtool;

//
// attention in the decode's graph
//

// Return the mask for all rows on a layer's device. It has llama.cpp's mask of the live cells, followed by the
// residents' mask
static ggml_tensor * mask_of(const llm_graph_context & graph, const llama_kvtool & kvtool, ggml_tensor * live_mask, size_t i) {
    ggml_context * ctx = graph.ctx0;

    ggml_tensor * device_mask = kvtool.resident->mask(i);

    auto & masks = graph_input(graph).resident_masks;
    const auto it = std::find_if(masks.begin(), masks.end(), [&](const auto & m) { return m.device_mask == device_mask; });
    if (it != masks.end()) {
        return it->mask;
    }

    const int64_t n_live   = kvtool.layers[i].n_cell - kvtool.params.n_recall;
    const int64_t n_tokens = live_mask->ne[1];

    ggml_tensor * live_f16 = ggml_view_2d(ctx, live_mask, n_live, n_tokens, live_mask->nb[1], 0);
    live_f16 = live_f16->type == GGML_TYPE_F16 ? ggml_cont(ctx, live_f16) : ggml_cast(ctx, live_f16, GGML_TYPE_F16);
    live_f16 = ggml_repeat_4d(ctx, live_f16, n_live, n_tokens, 1, device_mask->ne[3]);

    ggml_tensor * resident_mask = n_tokens > 1 ? ggml_repeat_4d(ctx, device_mask, device_mask->ne[0], n_tokens, 1, device_mask->ne[3]) : device_mask;

    masks.push_back({ device_mask, ggml_concat(ctx, live_f16, resident_mask, 0) });
    return masks.back().mask;
}

ggml_tensor * llama_kvtool_resident(
        const llm_graph_context & graph, ggml_tensor * live_mask, ggml_tensor * q, ggml_tensor * sinks, float scale, int il) {
    auto * kvtool = graph.cparams.kvtool;

    if (!kvtool || !kvtool->uses_residents(q->ne[2]) || !kvtool->find(il)) {
        return nullptr;
    }

    ggml_context * ctx = graph.ctx0;

    const auto & l = *kvtool->find(il);
    const size_t i = &l - kvtool->layers.data();

    // llama.cpp's mask covers all cells, because the last cell is in use
    GGML_ASSERT(live_mask->ne[0] == l.n_cell);

    auto & input = graph_input(graph);
    if (!input.resident_slots) {
        input.resident_slots = new_input(ctx, GGML_TYPE_I64, q->ne[2], 1, 1);
    }
    graph.res->kvtool.is_resident = true;
    input.is_resident = true;

    ggml_build_forward_expand(graph.gf, kvtool->resident->store(ctx, il, q, input.resident_slots, scale));

    ggml_tensor * mask = mask_of(graph, *kvtool, live_mask, i);
    mask = ggml_view_4d(ctx, mask, mask->ne[0], mask->ne[1], 1, l.n_head, mask->nb[1], mask->nb[2], mask->nb[3],
            kvtool->resident->first_row(i)*mask->nb[3]);

    return attend_rows(graph, l, q, mask, sinks, scale);
}

//
// residents of a context
//

bool llama_kvtool::uses_residents(int64_t n_tokens) const {
    // Only steps of one token (plus draft tokens) use residents. Longer steps read prompts. For prompts, it does more
    // harm if a cluster is not resident
    return resident && resident->is_fit && n_tokens == 1 + n_marked && n_archived() > 0 && !is_staging() &&
        n_hidden == 0 && archive->n_traced == 0;
}

std::string llama_kvtool::no_residents(const llama_context & lctx) const {
    if (const std::string why = resident_cells::unsupported(layers, v_trans, lctx.cparams.flash_attn); !why.empty()) {
        return why;
    }
    if (n_indexed < INT32_MAX) {
        return "an index chooses cells of this model, and residents would be among them";
    }
    if (!states.empty() && (int) lctx.cparams.n_rs_seq <= params.n_draft) {
        return "the recurrent layers of this model cannot drop a token, so no step could be repeated with other residents";
    }
    if (params.signals != 0 || params.logn || params.n_synthetic == 0) {
        return "a policy that reads attention, or scales it by log n, has no residents";
    }
    return {};
}

int64_t llama_kvtool::resident_bytes(const llama_context & lctx, const resident_sizes & n) const {
    if (const std::string why = no_residents(lctx); !why.empty()) {
        return fail(why);
    }
    int64_t cell_bytes = 0;
    for (const auto & l : layers) {
        cell_bytes += (ggml_nbytes(l.k) + ggml_nbytes(l.v))/l.n_cell;
    }
    return cell_bytes*resident_cells::region(n);
}

int64_t llama_kvtool::reside(llama_context & lctx, const resident_sizes & n) {
    lctx.synchronize();

    if (const std::string why = no_residents(lctx); !why.empty()) {
        return fail(why);
    }

    const int n_old = n_resident;
    const int n_new = n.n_token > 0 ? resident_cells::region(n) : 0;

    std::unique_ptr<resident_cells> cells;
    if (n_new > 0) {
        cells = std::make_unique<resident_cells>(
                archive->tokens, layers, attn_layers(lctx), n, params.n_draft + 1, params.n_recall - n_old,
                std::max<int>(lctx.n_threads(), 1));
    }

    const std::vector<int32_t> n_cell(layers.size(), layers[0].n_cell - n_old + n_new);
    resident.reset();
    if (resize(lctx, n_cell.data(), n_new) < 0) {
        return -1;
    }
    resident = std::move(cells);
    forget_graphs(lctx, true);

    return resident ? resident->bytes() : 0;
}

float llama_kvtool::missed(llama_context & lctx) {
    if (!resident || resident->n_stored == 0) {
        return 0.0f;
    }
    lctx.synchronize();
    const auto & hparams = lctx.model.hparams;
    return resident->choose(n_live, hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f);
}

void llama_kvtool::drop_residents() {
    if (resident) {
        resident->selection.drop();
        resident->forget_live();
        resident->n_stored = 0;
    }
}

// Keep the recurrent state before a step, so that the step can be undone. The step overwrites states 0 .. n_tokens - 1
// of each tensor with the states after its tokens. Therefore, copy the state before the step to state n_tokens
bool llama_kvtool::keep_states(llama_context & lctx, int n_tokens) const {
    const auto * mem = memory::recurrent(lctx);
    if (!mem || memory::n_dropped(*mem) == n_tokens) {
        return true;
    }
    const int i_src = memory::n_dropped(*mem);

    std::vector<ggml_tensor *> pending = states;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(lctx.get_sched()) && !pending.empty(); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(lctx.get_sched(), i);

        const auto on_backend = std::stable_partition(pending.begin(), pending.end(),
                [&](const auto * t) { return !ggml_backend_supports_buft(backend, ggml_backend_buffer_get_type(t->buffer)); });
        const size_t n = pending.end() - on_backend;

        ggml_context_ptr ctx { ggml_init({ 3*n*ggml_tensor_overhead() + ggml_graph_overhead_custom(3*n, false), nullptr, true }) };
        ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 3*n, false);

        for (auto it = on_backend; it != pending.end(); ++it) {
            ggml_tensor * t = *it;
            const auto state = [&](int i_state) { return ggml_view_1d(ctx.get(), t, t->ne[0], i_state*t->nb[1]); };

            ggml_tensor * copy = ggml_cpy(ctx.get(), state(i_src), state(n_tokens));
            for (ggml_tensor * view : { copy->src[0], copy->src[1], copy }) {
                ggml_backend_view_init(view);
            }
            ggml_build_forward_expand(graph, copy);
        }
        if (n > 0 && ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            return false;
        }
        pending.erase(on_backend, pending.end());
    }
    return true;
}

bool llama_kvtool::update_residents(llama_context & lctx, int n_tokens) {
    missed(lctx);
    lctx.synchronize();
    bool is_updated = false;
    try {
        is_updated = keep_states(lctx, n_tokens) && resident->update(lctx, memory::cache(lctx)->seq_pos_max(0) + 1);
    } catch (...) {
        drop_residents();
        throw;
    }
    if (!is_updated) {
        drop_residents(); // some cells of residents were not written
        return false;
    }
    memory::fill_recalled(*memory::cache(lctx), params.n_recall, params.n_recall - 1, params.n_recall);
    return true;
}
