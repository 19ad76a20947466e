#include "state.h"

#include "error.h"
#include "hooks.h"
#include "memory.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>

using namespace kvtool;

static uint64_t next_version() {
    static std::atomic<uint64_t> n;
    return ++n;
}

//
// enabling kvtool for a context
//

// reason why these parameters are invalid; empty if they are valid
static std::string invalid(const llama_kvtool_params & params) {
    if (params.signals >> llama_kvtool_graph::n_signal) {
        return format("signals must be in 0..%u, got %u", (1u << llama_kvtool_graph::n_signal) - 1, params.signals);
    }
    if (params.group > LLAMA_KVTOOL_GROUP_FIRST) {
        return format("group must be in 0..%d, got %u", LLAMA_KVTOOL_GROUP_FIRST, params.group);
    }
    if (params.n_query < 1) {
        return format("n_query must be 1 or more, got %d", params.n_query);
    }
    if (params.n_draft < 0) {
        return format("n_draft must be 0 or more, got %d", params.n_draft);
    }
    if (params.n_defer < 0) {
        return format("n_defer must be 0 or more, got %d", params.n_defer);
    }
    if (params.n_future < 0) {
        return format("n_future must be 0 or more, got %d", params.n_future);
    }
    if (params.n_recall < 0 || (params.n_recall > 0 && params.ragged)) {
        return format("n_recall must be 0 or more, and 0 where rows are ragged, got %d", params.n_recall);
    }
    if (params.n_recall > 0 && params.logn) {
        return "attention to an archive is not scaled by log n: logn must be false where n_recall is above 0";
    }
    if (params.n_exact < 0) {
        return format("n_exact must be 0 or more, got %d", params.n_exact);
    }
    if (params.n_synthetic < 0 || params.n_synthetic > params.n_recall) {
        return format("n_synthetic must be in 0..%d, which is n_recall, got %d", params.n_recall, params.n_synthetic);
    }

    return {};
}

// reason why these layers cannot have an archive; empty if they can
std::string llama_kvtool::no_archive(const llama_hparams & hparams) const {
    if (hparams.use_alibi) {
        return "tokens cannot be recalled by their keys where attention falls with distance (ALiBi)";
    }
    if (params.n_near < 1 || (uint32_t) params.n_near > hparams.n_ctx_train) {
        return format("n_near must be in 1..%u, got %d", hparams.n_ctx_train, params.n_near);
    }
    for (const int32_t type : { params.type_k, params.type_v }) {
        if (type < 0 || type >= GGML_TYPE_COUNT || (type != GGML_TYPE_F32 && !ggml_get_type_traits((ggml_type) type)->from_float_ref)) {
            return format("keys and values of type %d cannot be archived", type);
        }
    }
    for (int il = 0; il < (int) index_of_il.size() && params.n_synthetic > 0; ++il) {
        const auto * l = find(il);
        if (l && !l->v) {
            return "values are a part of the keys (MLA), so no cells can be made: n_synthetic must be 0";
        }
        if (l && (int64_t) params.n_synthetic*l->n_head < (int64_t) hparams.n_head(il)) {
            return format("n_synthetic must be %d or more, got %d", (int) hparams.n_head(il)/l->n_head, params.n_synthetic);
        }
    }
    for (const auto & l : layers) {
        if (l.n_embd_k % ggml_blck_size((ggml_type) params.type_k) != 0 || l.n_embd_v % ggml_blck_size((ggml_type) params.type_v) != 0) {
            return format("heads of %d and %d numbers are not archived as %s; choose f16",
                    l.n_embd_k, l.n_embd_v, ggml_type_name((ggml_type) params.type_k));
        }
        if (params.n_exact > 0 && l.n_embd_k % 8 != 0) {
            return format("clusters are for keys of a multiple of 8 numbers, not %d; choose search=all", l.n_embd_k);
        }
        if (params.n_recall >= l.n_cell) {
            return format("n_recall must be less than the %d cells, got %d", l.n_cell, params.n_recall);
        }
    }

    return {};
}

int32_t llama_kvtool::enable(llama_context & lctx, const llama_kvtool_params & params, std::unique_ptr<kvtool::joint> joint) {
    auto why = lctx.kvtool ? lctx.kvtool->broken : std::string();
    if (why.empty()) {
        why = invalid(params);
    }
    if (why.empty()) {
        why = memory::unsupported(lctx);
    }
    if (!why.empty()) {
        return fail(why);
    }

    const auto & hparams = lctx.model.hparams;

    const auto & kv = *memory::cache(lctx);

    const auto n_cells = memory::layer_cells(kv);

    const auto differ = [&](const std::vector<int> & layer_cells) {
        return !params.ragged && std::any_of(layer_cells.begin(), layer_cells.end(), [&](int n) { return n != n_cells[0]; });
    };
    if (differ(n_cells)) {
        return fail("the layers have different numbers of cells, which is for ragged rows only");
    }
    if (const auto * idx = memory::index_cache(lctx); idx && differ(memory::layer_cells(*idx))) {
        return fail("the index has another number of cells than the layers, which is for ragged rows only");
    }

    auto res = std::make_shared<llama_kvtool>(params);

    res->v_trans   = memory::is_transposed(kv);
    res->n_indexed = memory::most_indexed(lctx.model, lctx.memory.get());

    res->add_layers(lctx);
    if (params.n_recall > 0) {
        why = res->no_archive(hparams);
        if (!why.empty()) {
            return fail(why);
        }
    }
    res->n_live_row.resize(res->n_row);
    res->signals.resize();
    if (hparams.use_alibi && !joint) {
        res->positions.make(res->layers);
    }

    recent::ring_buffers buffers;
    if (!res->recent.make(buffers, res->layer_cells().data())) {
        return fail(format("no memory for the attention of the last %d queries", params.n_query));
    }
    res->recent.replace(std::move(buffers));
    if (!res->keep_queries(lctx)) {
        return fail(format("no memory for the last %d queries", params.n_query));
    }

    lctx.synchronize();

    if (lctx.kvtool && lctx.kvtool->staging) {
        // the context must not call the old state's staging again
        lctx.kvtool->stage(lctx, 0);
    }
    lctx.memory->clear(false);
    if (!params.ragged) {
        // with ragged rows the table keeps its size, because it holds only the tokens since the last edit
        memory::resize_tables(lctx, n_cells[0], 0);
    }

    res->joint          = std::move(joint);
    res->version        = next_version();
    lctx.kvtool         = res;
    lctx.cparams.kvtool = res.get();

    // the graph built here shows how keys are rotated and which layers can take part in joint steps
    lctx.sched_need_reserve = true;
    lctx.sched_reserve();

    why = res->no_rotation();
    if (!why.empty()) {
        lctx.kvtool.reset();
        lctx.cparams.kvtool     = nullptr;
        lctx.sched_need_reserve = true;
        return fail(why);
    }

    if (params.n_recall > 0) {
        res->make_archive(kv);
    }

    return res->n_row;
}

bool llama_kvtool::keep_queries(const llama_context & lctx) {
    const auto new_layers = attn_layers(lctx);
    mean_rotations.resize(layers.size());

    return (!queries.is_on() || queries.make(new_layers, layers)) && make_deferred(lctx, new_layers);
}

void llama_kvtool::make_archive(const llama_kv_cache & kv) {
    const auto & p = params;

    archive_params common {};
    common.n_recall = p.n_recall;
    common.n_near   = p.n_near;
    common.type_k   = p.type_k;
    common.type_v   = p.type_v;
    common.v_trans  = v_trans;
    common.n_synthetic   = p.n_synthetic;
    common.n_exact  = p.n_exact;
    common.is_plain = p.plain;

    std::vector<archive_shape> shapes;
    for (const auto & l : layers) {
        // llama.cpp multiplies quantized values by a Hadamard matrix, just as it multiplies quantized keys
        const bool has_mapped_values = l.v && ggml_is_quantized(l.v->type);
        shapes.push_back({ l.n_head, l.n_embd_k, l.n_embd_v, rotation(l, memory::key_map(kv)), has_mapped_values });
    }
    archive = std::make_unique<recaller>(common, shapes);
}

void llama_kvtool::add_layers(const llama_context & lctx) {
    const auto & kv = *memory::cache(lctx);

    layers      = memory::layers(lctx.model, kv);
    index_of_il = memory::owners(lctx.model, kv);

    for (auto & l : layers) {
        l.row_0 = n_row;
        n_row  += l.n_head;
        layer_of_row.insert(layer_of_row.end(), l.n_head, l.il);
    }
    for (int il = 0; il < (int) index_of_il.size(); ++il) {
        if (index_of_il[il] >= 0) {
            layers[index_of_il[il]].il_last = il;
        }
    }

    if (const auto * swa = memory::sliding_cache(lctx)) {
        sliding = memory::layers(lctx.model, *swa);
    }
    if (const auto * idx = memory::index_cache(lctx)) {
        index = memory::index_layers(*idx);
    }
    if (const auto * mem = memory::recurrent(lctx)) {
        for (const auto * layer_states : { &mem->r_l, &mem->s_l, &mem->p_l }) {
            std::copy_if(layer_states->begin(), layer_states->end(), std::back_inserter(states), [](const ggml_tensor * t) { return t; });
        }
    }
}

void llama_kvtool::read_rope(int il, const ggml_tensor * keys) {
    for (auto * cache_layers : { &layers, &sliding }) {
        for (auto & l : *cache_layers) {
            if (l.il != il || l.rope.is_known) {
                continue;
            }
            const auto why = l.rope.read(keys);
            if (!why.empty()) {
                rope_error = format("layer %d: how its keys depend on positions is not known: %s", il, why.c_str());
            }
        }
    }
}

std::string llama_kvtool::no_rotation() const {
    if (!rope_error.empty()) {
        return rope_error;
    }
    for (const auto * cache_layers : { &layers, &sliding }) {
        for (const auto & l : *cache_layers) {
            if (!l.rope.is_known) {
                return format("layer %d has a cache, but this model does not attend to it", l.il);
            }
            if (l.rope.scale) {
                std::vector<float> scale(l.rope.scale->ne[0]);
                ggml_backend_tensor_get(l.rope.scale, scale.data(), 0, scale.size()*sizeof(float));
                if ((int) scale.size() != l.n_embd_k || std::find(scale.begin(), scale.end(), 0.0f) != scale.end()) {
                    return format("layer %d: its keys are scaled behind their rotation in a way that cannot be undone", l.il);
                }
            }
        }
    }
    return {};
}

llama_kvtool * llama_kvtool::get(const llama_context * ctx) {
    if (!ctx || !ctx->kvtool) {
        fail("call llama_kvtool_enable on this context first");
        return nullptr;
    }
    if (!ctx->kvtool->broken.empty()) {
        fail(ctx->kvtool->broken);
        return nullptr;
    }
    return ctx->kvtool.get();
}

//
// contents of the context
//

const layer * llama_kvtool::find(int il) const {
    const int i = il >= 0 && il < (int) index_of_il.size() ? index_of_il[il] : -1;
    return i < 0 ? nullptr : &layers[i];
}

std::vector<stored_queries::attn_layer> llama_kvtool::attn_layers(const llama_context & lctx) const {
    std::vector<stored_queries::attn_layer> res;
    for (int il = 0; il < (int) index_of_il.size(); ++il) {
        if (const auto * l = find(il)) {
            res.push_back({ il, (size_t) index_of_il[il], l->n_embd_k, (int) lctx.model.hparams.n_head(il) });
        }
    }
    return res;
}

bool llama_kvtool::has_keys(const ggml_tensor * k) const {
    return std::any_of(layers.begin(), layers.end(), [&](const layer & l) { return l.k == k->view_src; });
}

int llama_kvtool::most_cells() const {
    int res = 0;
    for (const auto & l : layers) {
        res = std::max(res, l.n_cell);
    }
    return res;
}

int llama_kvtool::most_live(const layer & l) const {
    return *std::max_element(n_live_row.begin() + l.row_0, n_live_row.begin() + l.row_0 + l.n_head);
}

bool llama_kvtool::is_even(const layer & l) const {
    const auto begin = n_live_row.begin() + l.row_0;
    return std::all_of(begin, begin + l.n_head, [&](int n) { return n == *begin; });
}

std::vector<int> llama_kvtool::layer_cells() const {
    std::vector<int> res;
    for (const auto & l : layers) {
        res.push_back(l.n_cell);
    }
    return res;
}

std::vector<int> llama_kvtool::row_cells() const {
    std::vector<int> res;
    for (const auto & l : layers) {
        res.insert(res.end(), l.n_head, l.n_cell);
    }
    return res;
}

int64_t llama_kvtool::n_bytes() const {
    int64_t res = 0;
    for (const auto * cache_layers : { &layers, &sliding, &index }) {
        for (const auto & l : *cache_layers) {
            res += ggml_nbytes(l.k) + (l.v ? ggml_nbytes(l.v) : 0);
        }
    }
    for (const auto * t : states) {
        res += ggml_nbytes(t);
    }
    return res;
}

int32_t llama_kvtool::n_dim() const {
    int32_t res = 0;
    for (const auto & l : layers) {
        res = std::max(res, l.n_embd_k);
    }
    return res;
}

int32_t llama_kvtool::n_fixed_state() const {
    return (sliding.empty() ? 0 : 1 + sliding[0].n_cell) + (states.empty() ? 0 : 1);
}

void llama_kvtool::decoded(llama_context & lctx, const llama_kvtool_graph & graph, int n_tokens) {
    if (graph.is_deferred) {
        deferred.add(n_tokens, n_seen);
    } else {
        signals.extract(lctx, graph, n_tokens);
        recent.decoded(is_watching ? n_tokens : 0);
    }
    queries.decoded(is_watching ? n_tokens : 0);
    if (resident) {
        resident->n_stored = graph.is_resident ? n_tokens : 0;
    }

    if (params.ragged) {
        for (int32_t & n : n_live_row) {
            n += n_tokens;
        }
    }
    n_live += n_tokens;
    n_seen += n_tokens;
    if (params.signals == 0 && states.empty()) {
        n_removable += n_tokens;
    } else {
        // Only tokens of this step can be removed, because llama.cpp keeps recurrent states only for the last step:
        // - no token, if the step's attention is already in the signals
        // - all tokens, if the step used residents, because the recurrent state before the step is kept
        // - otherwise, the draft tokens
        const bool is_in_signals = params.signals != 0 && is_watching && !graph.is_deferred;
        n_removable = is_in_signals ? 0 : graph.is_resident ? n_tokens : std::min(n_marked, n_tokens - 1);
    }
    mark_drafts(0);
}

void llama_kvtool::mark_drafts(int n) {
    n_marked = n;
    if (archive) {
        archive->is_separate = n > 0;
    }
}

int32_t llama_kvtool::drop(llama_context & lctx, int n) {
    // with residents, all tokens of a step can be removed, because the step may have to be repeated
    const int n_max = std::min(std::max(params.n_draft, resident ? resident->n_query : 0), n_removable);
    if (n < 0 || n > n_max) {
        return fail(format("n must be in 0..%d, got %d", n_max, n));
    }
    if (n == 0) {
        return 0;
    }
    lctx.synchronize();

    auto & memory = *lctx.memory;
    if (!memory.seq_rm(0, memory.seq_pos_max(0) - n + 1, -1)) {
        return fail("llama.cpp cannot free the cells");
    }

    if (is_watching) {
        deferred.remove(params.signals == 0 ? 0 : n);
        queries.remove(n);
    }

    if (params.ragged) {
        for (int32_t & live : n_live_row) {
            live -= n;
        }
    }
    n_live -= n;
    if (resident) {
        resident->forget_live(n_live);
    }
    n_seen -= n;
    n_removable = states.empty() ? n_removable - n : 0;

    return 0;
}

int64_t llama_kvtool::stage(llama_context & lctx, int64_t n) {
    lctx.synchronize();

    if (staging) {
        // end staging even if a copy has failed: otherwise the context would call an object that is gone
        lctx.cparams.cb_eval           = nullptr;
        lctx.cparams.cb_eval_user_data = nullptr;
        forget_graphs(lctx, true);

        const auto old_staging = std::move(staging);
        std::string why;
        try {
            old_staging->settle();
        } catch (const std::exception & e) {
            why = e.what();
        }
        archive->tokens.defer_seal(false, std::max(lctx.n_threads(), 1u));
        fill_recalled(lctx);
        if (!why.empty()) {
            return fail(why);
        }
    }
    if (n == 0) {
        return 0;
    }
    if (params.signals != 0 || params.logn) {
        return fail("a policy that reads attention, or scales it by log n, stages nothing");
    }
    if (n_indexed < INT32_MAX && !layers[0].v) {
        return fail("an index chooses the cells of a model with MLA");
    }
    if (lctx.cparams.cb_eval) {
        return fail("the context calls somebody else for each node of a graph");
    }
    // archived tokens and cells are each rounded up, because flash attention reads keys in groups of 256
    const int64_t n_row = GGML_PAD(n, 256) + GGML_PAD(layers[0].n_cell, 256) + 256;
    staging = std::make_unique<kvtool::staging>(archive->tokens, layers, v_trans, n_row, std::max(lctx.n_threads(), 1u));
    archive->tokens.defer_seal(true, 1);

    lctx.cparams.cb_eval           = kvtool::staging::reach;
    lctx.cparams.cb_eval_user_data = staging.get();
    forget_graphs(lctx, true);

    return staging->bytes();
}

std::string llama_kvtool::no_staging() const {
    const auto & tokens = archive->tokens;
    if (tokens.size() + GGML_PAD(layers[0].n_cell, 256) + 256 > staging->n_token()) {
        return format("%lld archived tokens do not fit where %lld rows are staged", (long long) tokens.size(), (long long) staging->n_token());
    }
    return {};
}

//
// llama.cpp's tables and graphs
//

int llama_kvtool::n_used(const llama_context & lctx) const {
    return memory::n_used(*memory::cache(lctx), params.n_recall);
}

void llama_kvtool::fill_recalled(const llama_context & lctx, int n_tokens) const {
    const int64_t n_filled = params.n_synthetic == 0 ? n_archived() : (int64_t) n_tokens*params.n_synthetic;
    const int64_t n        = n_tokens == 0 || n_archived() == 0 ? 0 : n_filled;
    memory::fill_recalled(*memory::cache(lctx), params.n_recall, 0, std::min<int64_t>(params.n_recall, n));
}

void llama_kvtool::forget_graphs(llama_context & lctx, bool reserve) {
    for (auto & res : lctx.gf_res_prev) {
        res.reset();
    }
    lctx.gf_res_prev_active = nullptr;
    lctx.sched_need_reserve = reserve;
    if (lctx.kvtool) {
        lctx.kvtool->version = next_version();
    }
}

//
// before a step
//

static bool prepare(llama_context & lctx, uint32_t n_tokens) {
    auto * kvtool = lctx.kvtool.get();

    if (!kvtool->broken.empty()) {
        LLAMA_LOG_ERROR("%s\n", kvtool->broken.c_str());
        return false;
    }
    const auto & deferred = kvtool->deferred;
    if ((!kvtool->defers(n_tokens) || deferred.n + (int) n_tokens > deferred.n_slot) && !kvtool->sum_deferred(lctx)) {
        LLAMA_LOG_ERROR("the device failed to compute the signals\n");
        return false;
    }
    if (kvtool->most_cells() > kvtool->n_indexed) {
        LLAMA_LOG_ERROR("the index of this model chooses %d cells, not %d\n", kvtool->n_indexed, kvtool->most_cells());
        return false;
    }
    // while texts are staged, threads may be clustering, and no step uses residents
    if (kvtool->resident && !kvtool->is_staging()) {
        kvtool->resident->is_fit = kvtool->resident->selection.unfit().empty();
    }
    if (kvtool->params.n_recall > 0) {
        const int n_live = kvtool->n_used(lctx);
        const int n      = kvtool->layers[0].n_cell - kvtool->params.n_recall;
        if (n_tokens > (uint32_t) (n - n_live)) {
            LLAMA_LOG_ERROR("%d cells cannot hold %d + %u tokens\n", n, n_live, n_tokens);
            return false;
        }
        if (kvtool->is_staging()) {
            if (const std::string why = kvtool->no_staging(); !why.empty()) {
                LLAMA_LOG_ERROR("%s\n", why.c_str());
                return false;
            }
            kvtool->fill_recalled(lctx, 0);
        } else if (kvtool->uses_residents(n_tokens)) {
            if (!kvtool->update_residents(lctx, n_tokens)) {
                LLAMA_LOG_ERROR("the device failed to write archived tokens\n");
                return false;
            }
        } else if (kvtool->params.n_synthetic > 0 && kvtool->n_archived() > 0) {
            if (n_tokens > (uint32_t) (kvtool->n_filled()/kvtool->params.n_synthetic)) {
                LLAMA_LOG_ERROR("%d cells are too few for the synthetic cells of %u tokens\n", kvtool->n_filled(), n_tokens);
                return false;
            }
            kvtool->fill_recalled(lctx, n_tokens);
        }
    }
    if (!kvtool->params.ragged) {
        return true;
    }

    for (const auto & l : kvtool->layers) {
        const int n_live = kvtool->most_live(l);
        if (n_tokens > (uint32_t) (l.n_cell - n_live)) {
            LLAMA_LOG_ERROR("layer %d: %d cells cannot hold %d + %u tokens\n", l.il, l.n_cell, n_live, n_tokens);
            return false;
        }
    }

    return true;
}

bool llama_kvtool_prepare(llama_context & lctx, uint32_t n_tokens) {
    if (!lctx.kvtool) {
        return true;
    }
    try {
        return prepare(lctx, n_tokens);
    } catch (const std::exception & e) {
        // llama.cpp does not expect an exception here
        LLAMA_LOG_ERROR("%s\n", e.what());
        return false;
    }
}
