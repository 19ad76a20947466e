// The C API: checks arguments and calls the implementation.

#include "digest.h"
#include "cache/edit.h"
#include "cache/edit-graph.h"
#include "error.h"
#include "cache/future.h"
#include "cache/value-norms.h"
#include "llama-kvtool.h"
#include "memory.h"
#include "state.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <numeric>

using namespace kvtool;

int32_t llama_kvtool_abi(void) {
    return LLAMA_KVTOOL_ABI;
}

const char * llama_kvtool_digest(void) {
    return LLAMA_KVTOOL_DIGEST;
}

const char * llama_kvtool_arch(int32_t i) {
    const auto archs = llm_arch_all();
    return i >= 0 && i < (int32_t) archs.size() ? llm_arch_name(archs[i]) : nullptr;
}

int32_t llama_kvtool_layers(const llama_model * model, llama_kvtool_layer * out, int32_t n) {
    if (!model || (n > 0 && !out)) {
        return fail("model must not be null, nor out where n is more than 0");
    }
    return guarded([&]() -> int32_t {
        const auto mem = memory::smallest(*model);

        const auto why = memory::unsupported(*model, mem.get());
        if (!why.empty()) {
            return fail(why);
        }
        const auto layers = memory::describe(*model, mem.get());
        std::copy_n(layers.begin(), std::min<size_t>(std::max(n, 0), layers.size()), out);
        return layers.size();
    });
}

int32_t llama_kvtool_most_cells(const llama_model * model) {
    if (!model) {
        return fail("model must not be null");
    }
    return guarded([&] { return (int32_t) memory::most_indexed(*model, memory::smallest(*model).get()); });
}

bool llama_kvtool_has_alibi(const llama_model * model) {
    return model && model->hparams.use_alibi;
}

bool llama_kvtool_can_drop(const llama_model * model) {
    return model && memory::can_drop(*model);
}

int32_t llama_kvtool_enable(llama_context * ctx, const llama_kvtool_params * params) {
    if (!ctx || !params) {
        return fail("ctx and params must not be null");
    }
    return guarded([&] { return llama_kvtool::enable(*ctx, *params); });
}

int32_t llama_kvtool_row_layers(const llama_context * ctx, int32_t * layers, int32_t n_row) {
    const auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!layers || n_row != kvtool->n_row) {
        return fail(format("layers must not be null and n_row must be %d, got %d", kvtool->n_row, n_row));
    }
    std::copy(kvtool->layer_of_row.begin(), kvtool->layer_of_row.end(), layers);
    return n_row;
}

int32_t llama_kvtool_n_dim(const llama_context * ctx) {
    const auto * kvtool = llama_kvtool::get(ctx);
    return kvtool ? kvtool->n_dim() : -1;
}

int64_t llama_kvtool_cache_bytes(const llama_context * ctx) {
    const auto * kvtool = llama_kvtool::get(ctx);
    return kvtool ? kvtool->n_bytes() : -1;
}

int64_t llama_kvtool_deferred_bytes(const llama_context * ctx) {
    const auto * kvtool = llama_kvtool::get(ctx);
    return kvtool ? kvtool->deferred.n_bytes() : -1;
}

int32_t llama_kvtool_watch(llama_context * ctx, bool watch) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    return guarded([&]() -> int32_t { return kvtool->watch(*ctx, watch) ? 0 : fail("the device failed to compute the signals"); });
}

int32_t llama_kvtool_seen(llama_context * ctx, int32_t n_seen) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (n_seen < 0) {
        return fail(format("n_seen must be 0 or more, got %d", n_seen));
    }
    kvtool->n_seen = n_seen;
    return 0;
}

int32_t llama_kvtool_resize(llama_context * ctx, const int32_t * n_cell, int32_t n_layer) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!n_cell || n_layer != (int32_t) kvtool->layers.size()) {
        return fail(format("n_cell must not be null and n_layer must be %d, got %d", (int) kvtool->layers.size(), n_layer));
    }
    return guarded([&] {
        std::vector<int32_t> n_cells(n_cell, n_cell + n_layer);
        for (int32_t & n : n_cells) {
            n = std::min<int64_t>((int64_t) n + kvtool->n_resident, INT32_MAX);
        }
        return kvtool->resize(*ctx, n_cells.data());
    });
}

//
// copies of cells and of the fixed state
//

static int64_t copy_cells(llama_context * ctx, int32_t layer, uint8_t * out, const uint8_t * in, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    const int32_t n_layer = kvtool->layers.size();
    if (layer < 0 || layer >= n_layer) {
        return fail(format("layer must be in 0..%d, got %d", n_layer - 1, layer));
    }
    if (n_cell < 0 || n_cell > kvtool->layers[layer].n_cell) {
        return fail(format("layer %d: n_cell must be in 0..%d, got %d", layer, kvtool->layers[layer].n_cell, n_cell));
    }
    return guarded([&]() -> int64_t { return kvtool->copy_cells(*ctx, kvtool->layers[layer], out, in, n_cell); });
}

int64_t llama_kvtool_get_cells(llama_context * ctx, int32_t layer, uint8_t * out, int32_t n_cell) {
    return copy_cells(ctx, layer, out, nullptr, n_cell);
}

int64_t llama_kvtool_set_cells(llama_context * ctx, int32_t layer, const uint8_t * in, int32_t n_cell) {
    return copy_cells(ctx, layer, nullptr, in, n_cell);
}

int32_t llama_kvtool_set_positions(llama_context * ctx, const int32_t * pos, int32_t n_row, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!pos || n_row != kvtool->n_row || n_cell < 0 || n_cell > kvtool->most_cells()) {
        return fail(format("pos must not be null, n_row must be %d and n_cell in 0..%d, got %d and %d",
                kvtool->n_row, kvtool->most_cells(), n_row, n_cell));
    }
    for (size_t i = 0; kvtool->positions.is_on() && i < kvtool->layers.size(); ++i) {
        const auto & l = kvtool->layers[i];
        for (int head = 0; head < l.n_head; ++head) {
            for (int c = 0; c < std::min(n_cell, l.n_cell); ++c) {
                kvtool->positions.put(i, head, c, pos[(size_t) (l.row_0 + head)*n_cell + c]);
            }
        }
    }
    return 0;
}

int32_t llama_kvtool_n_fixed_state(const llama_context * ctx) {
    const auto * kvtool = llama_kvtool::get(ctx);
    return kvtool ? kvtool->n_fixed_state() : -1;
}

int64_t llama_kvtool_get_fixed_state(llama_context * ctx, int32_t * table, uint8_t * out) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    return guarded([&]() -> int64_t { return kvtool->copy_fixed_state(*ctx, table, out, nullptr, nullptr); });
}

int64_t llama_kvtool_set_fixed_state(llama_context * ctx, const int32_t * table, const uint8_t * in) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!table || !in) {
        return fail("table and in must not be null");
    }
    const int32_t n = kvtool->sliding.empty() ? 0 : kvtool->sliding[0].n_cell;
    if (n > 0 && (table[0] < 0 || table[0] > n)) {
        return fail(format("table[0] must be in 0..%d, got %d", n, table[0]));
    }
    if (!kvtool->states.empty() && table[kvtool->n_fixed_state() - 1] < -1) {
        return fail(format("the newest token's position must be -1 or more, got %d", table[kvtool->n_fixed_state() - 1]));
    }
    return guarded([&]() -> int64_t { return kvtool->copy_fixed_state(*ctx, nullptr, nullptr, table, in); });
}

//
// reading and writing signals
//

static const char * const no_signals = "the device failed to compute the signals";

// Return the index of this signal. If it is not enabled or the buffer does not fit, set the error and return a negative
// number
static int signal_index(const llama_kvtool & kvtool, uint32_t signal, const float * data, int32_t n_row, int32_t n_cell) {
    if (!data || n_row != kvtool.n_row || n_cell < 0 || n_cell > kvtool.most_cells()) {
        return fail(format("the buffer must not be null, n_row must be %d and n_cell in 0..%d, got %d and %d",
                kvtool.n_row, kvtool.most_cells(), n_row, n_cell));
    }
    int s = 0;
    while (s < llama_kvtool_graph::n_signal && signal != 1u << s) {
        ++s;
    }
    if (s == llama_kvtool_graph::n_signal || !(kvtool.params.signals & signal)) {
        return fail(format("signal %u is not enabled", signal));
    }
    return s;
}

int32_t llama_kvtool_read(llama_context * ctx, uint32_t signal, float * out, int32_t n_row, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    const int s = signal_index(*kvtool, signal, out, n_row, n_cell);
    if (s < 0) {
        return s;
    }
    if (signal == LLAMA_KVTOOL_SIGNAL_RECENT) {
        return guarded([&]() -> int32_t {
            if (!kvtool->collect(*ctx)) {
                return fail(no_signals);
            }
            for (size_t i = 0; i < kvtool->layers.size(); ++i) {
                for (int head = 0; head < kvtool->layers[i].n_head; ++head) {
                    kvtool->recent.sum(i, head, out + (size_t) (kvtool->layers[i].row_0 + head)*n_cell, n_cell);
                }
            }
            return 0;
        });
    }
    return guarded([&]() -> int32_t {
        if (!kvtool->collect(*ctx)) {
            return fail(no_signals);
        }
        for (int32_t row = 0; row < n_row; ++row) {
            const auto & src = kvtool->signals.values(s)[row];
            float * dst = out + (size_t) row*n_cell;

            const size_t n = std::min<size_t>(n_cell, src.size());
            std::copy(src.begin(), src.begin() + n, dst);
            std::fill(dst + n, dst + n_cell, 0.0f);
        }
        return 0;
    });
}

int32_t llama_kvtool_write(llama_context * ctx, uint32_t signal, const float * in, int32_t n_row, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    const int s = signal_index(*kvtool, signal, in, n_row, n_cell);
    if (s < 0) {
        return s;
    }
    if (signal == LLAMA_KVTOOL_SIGNAL_RECENT) {
        return fail("llama_kvtool_write_recent writes the recent signal");
    }
    return guarded([&]() -> int32_t {
        if (!kvtool->collect(*ctx)) {
            return fail(no_signals);
        }
        for (int32_t row = 0; row < n_row; ++row) {
            auto & dst = kvtool->signals.values(s)[row];

            const float * src = in + (size_t) row*n_cell;
            std::copy(src, src + std::min<size_t>(n_cell, dst.size()), dst.begin());
        }
        return 0;
    });
}

static int32_t copy_recent(llama_context * ctx, float * out, const float * in, int32_t n_query, int32_t n_row, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (signal_index(*kvtool, LLAMA_KVTOOL_SIGNAL_RECENT, out ? out : in, n_row, n_cell) < 0) {
        return -1;
    }
    if (n_query != kvtool->params.n_query) {
        return fail(format("n_query must be %d, got %d", kvtool->params.n_query, n_query));
    }
    return guarded([&]() -> int32_t {
        if (!kvtool->collect(*ctx)) {
            return fail(no_signals);
        }
        kvtool->recent.copy(out, in, n_cell);
        return 0;
    });
}

int32_t llama_kvtool_read_recent(llama_context * ctx, float * out, int32_t n_query, int32_t n_row, int32_t n_cell) {
    return copy_recent(ctx, out, nullptr, n_query, n_row, n_cell);
}

int32_t llama_kvtool_write_recent(llama_context * ctx, const float * in, int32_t n_query, int32_t n_row, int32_t n_cell) {
    return copy_recent(ctx, nullptr, in, n_query, n_row, n_cell);
}

//
// stored queries and draft tokens
//

int32_t llama_kvtool_read_future(
        llama_context * ctx, int32_t n_last, int64_t pos, float * mean, float * variance, int32_t n_row, int32_t n_head, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    const auto & params = kvtool->params;
    if (!kvtool->queries.is_on() || n_last < 1 || n_last > params.n_query || pos < 0 || pos > INT32_MAX) {
        return fail(format("n_future must be enabled, n_last in 1..%d and pos in 0..%d, got %d, %d and %lld",
                params.n_query, INT32_MAX, params.n_future, n_last, (long long) pos));
    }
    if (!mean || !variance || n_row != kvtool->n_row || n_head < 1 || n_cell < 1 || n_cell > kvtool->most_cells()) {
        return fail(format("the buffers must not be null, n_row must be %d, n_head 1 or more and n_cell in 1..%d, got %d, %d and %d",
                kvtool->n_row, kvtool->most_cells(), n_row, n_head, n_cell));
    }
    return guarded([&] { return read_future(*kvtool, *ctx, n_last, pos, mean, variance, n_head, n_cell); });
}

static int64_t copy_queries(llama_context * ctx, float * out, const float * in, int32_t * pos) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!kvtool->queries.is_on()) {
        return fail("n_future must be enabled");
    }
    return guarded([&]() -> int64_t {
        if ((out || in) && pos) {
            ctx->synchronize();
            kvtool->queries.copy(out, in, pos);
        }
        return kvtool->queries.n_embd_all();
    });
}

int64_t llama_kvtool_get_queries(llama_context * ctx, float * out, int32_t * pos) {
    return copy_queries(ctx, out, nullptr, pos);
}

int64_t llama_kvtool_set_queries(llama_context * ctx, const float * in, const int32_t * pos) {
    return copy_queries(ctx, nullptr, in, const_cast<int32_t *>(pos));
}

int32_t llama_kvtool_read_value_norms(llama_context * ctx, float * out, int32_t n_row, int32_t n_cell) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!out || n_row != kvtool->n_row || n_cell < 1 || n_cell > kvtool->most_cells()) {
        return fail(format("the buffer must not be null, n_row must be %d and n_cell in 1..%d, got %d and %d",
                kvtool->n_row, kvtool->most_cells(), n_row, n_cell));
    }
    return guarded([&] { return read_value_norms(*kvtool, *ctx, out, n_cell); });
}

int32_t llama_kvtool_mark_drafts(llama_context * ctx, int32_t n) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (n < 0 || n > kvtool->params.n_draft) {
        return fail(format("n must be in 0..%d, got %d", kvtool->params.n_draft, n));
    }
    if (n > 0 && kvtool->params.signals != 0 && n >= kvtool->deferred.n_slot) {
        return fail("a context with signals and an archive takes no draft tokens");
    }
    kvtool->mark_drafts(n);
    return 0;
}

int32_t llama_kvtool_drop(llama_context * ctx, int32_t n) {
    auto * kvtool = llama_kvtool::get(ctx);
    return kvtool ? guarded([&] { return kvtool->drop(*ctx, n); }) : -1;
}

//
// reading keys and editing the cache
//

int32_t llama_kvtool_read_keys(
        llama_context * ctx, const int32_t * first, const int32_t * delta, float * out, int32_t n_row, int32_t n_cell, int32_t n_dim) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!first || !delta || !out || n_row != kvtool->n_row || n_cell < 0 || n_cell > kvtool->most_cells() || n_dim != kvtool->n_dim()) {
        return fail(format("the buffers must not be null, n_row must be %d, n_cell in 0..%d and n_dim %d, got %d, %d and %d",
                kvtool->n_row, kvtool->most_cells(), kvtool->n_dim(), n_row, n_cell, n_dim));
    }
    return guarded([&] { return read_keys(*kvtool, *ctx, first, delta, out, n_cell, n_dim); });
}

int32_t llama_kvtool_apply(llama_context * ctx, const llama_kvtool_edit * edit) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!edit) {
        return fail("edit must not be null");
    }
    return guarded([&] { return kvtool::apply(*kvtool, *ctx, *edit); });
}

//
// joint steps
//

int32_t llama_kvtool_enable_joint(llama_context * ctx, const llama_context * like, int32_t n_most) {
    if (!ctx || !llama_kvtool::get(like)) {
        return ctx ? -1 : fail("ctx must not be null");
    }
    if (n_most < 1 || n_most > (int32_t) llama_n_seq_max(ctx) || llama_get_model(ctx) != llama_get_model(like)) {
        return fail(format("n_most must be in 1..%d and both contexts of one model, got %d", (int) llama_n_seq_max(ctx), n_most));
    }
    return guarded([&] { return llama_kvtool::enable_joint(*ctx, *like, n_most); });
}

int32_t llama_kvtool_decode_joint(
        llama_context * ctx, llama_batch batch, llama_context ** members, const int32_t * n_tokens, int32_t n_member) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!kvtool->joint || !members || !n_tokens || n_member < 1 || n_member > kvtool->joint->n_member_max || !batch.token || !batch.pos) {
        return fail(format("the context must be enabled for joint steps, no pointer null, and n_member in 1..%d, got %d",
                kvtool->joint ? kvtool->joint->n_member_max : 0, n_member));
    }
    for (int i = 0; i < n_member; ++i) {
        if (!llama_kvtool::get(members[i])) {
            return -1;
        }
        if (llama_get_model(members[i]) != llama_get_model(ctx) || members[i] == ctx || n_tokens[i] < 1 ||
                std::find(members, members + i, members[i]) != members + i) {
            return fail(format("member %d must be another context of the same model, with 1 token or more", i));
        }
    }
    const int64_t n = std::accumulate(n_tokens, n_tokens + n_member, (int64_t) 0);
    if (n != batch.n_tokens || n > llama_n_ubatch(ctx)) {
        return fail(format("the batch must have the members' %d tokens, and no more than %d, got %d",
                (int) n, (int) llama_n_ubatch(ctx), batch.n_tokens));
    }
    return guarded([&] { return llama_kvtool::decode_joint(*ctx, batch, members, n_tokens, n_member); });
}
