#include "edit.h"

#include "edit-graph.h"
#include "edit-host.h"
#include "hooks/error.h"
#include "hooks/memory.h"
#include "hooks/state.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <cmath>

namespace kvtool {

// cells that an edit writes to
struct writes {
    writes(int n_row, int n_cell) : n_cell(n_cell), is_written((size_t) n_row*n_cell) {}

    // true if this is the first write to the cell
    bool is_first(int row, int cell) {
        auto ref = is_written[(size_t) row*n_cell + cell];
        if (ref) {
            return false;
        }
        ref = true;
        return true;
    }

    int n_cell;
    std::vector<bool> is_written;
};

// reason why an edit cannot be done; empty if it can
static std::string invalid(const llama_kvtool & kvtool, const llama_kvtool_edit & edit) {
    const int  n_row  = kvtool.n_row;
    const bool ragged = kvtool.params.ragged;

    if (edit.n_move < 0 || (edit.n_move > 0 && !edit.moves) || edit.n_term < 0 || (edit.n_term > 0 && !edit.terms)) {
        return "n_move and n_term must be 0 or more, and their lists must not be null";
    }
    const int n_cell_max = kvtool.most_cells();
    const int n_usable   = n_cell_max - kvtool.params.n_recall;

    if (edit.n_keep < 0 || edit.n_keep > n_usable) {
        return format("n_keep must be in 0..%d, got %d", n_usable, edit.n_keep);
    }
    if (ragged != (edit.n_keep_row != nullptr)) {
        return ragged ? "n_keep_row must not be null where rows are ragged" : "n_keep_row must be null where rows are not ragged";
    }
    if (edit.n_hidden < 0 || edit.n_hidden > (ragged ? 0 : edit.n_keep)) {
        return format("n_hidden must be in 0..%d, got %d", ragged ? 0 : edit.n_keep, edit.n_hidden);
    }
    if (edit.pos_0 < -edit.n_hidden || edit.pos_0 > INT32_MAX - n_cell_max) {
        return format("pos_0 must be in %d..%d, got %d", -edit.n_hidden, INT32_MAX - n_cell_max, edit.pos_0);
    }

    const auto n_cell = kvtool.row_cells();

    for (int row = 0; ragged && row < n_row; ++row) {
        const int n_max = std::min(edit.n_keep, n_cell[row]);
        if (edit.n_keep_row[row] < 0 || edit.n_keep_row[row] > n_max) {
            return format("row %d: n_keep must be in 0..%d, got %d", row, n_max, edit.n_keep_row[row]);
        }
    }

    const auto inside = [&](int row, int dst, int src) {
        return row >= 0 && row < n_row && dst >= 0 && dst < n_cell[row] && src >= 0 && src < n_cell[row];
    };

    writes moved(n_row, n_cell_max);

    for (int i = 0; i < edit.n_move; ++i) {
        const auto & m = edit.moves[i];
        if (!inside(m.row, m.dst, m.src)) {
            return format("move %d lies outside the cache: row %d of %d, cells %d <- %d of %d", i, m.row, n_row, m.dst, m.src, n_cell_max);
        }
        if (!moved.is_first(m.row, m.dst)) {
            return format("move %d writes to cell %d of row %d, as another move does", i, m.dst, m.row);
        }
    }

    if (edit.n_term > 0 && std::any_of(kvtool.layers.begin(), kvtool.layers.end(), [](const layer & l) { return !l.v; })) {
        return "values of this model are a part of its keys (MLA): they cannot be merged";
    }

    writes merged(n_row, n_cell_max);

    for (int i = 0; i < edit.n_term; ++i) {
        const auto & t = edit.terms[i];
        if (!inside(t.row, t.dst, t.src) || !std::isfinite(t.weight)) {
            return format("term %d lies outside the cache or is not finite: row %d of %d, cells %d <- %d of %d, weight %f",
                    i, t.row, n_row, t.dst, t.src, n_cell_max, t.weight);
        }
        const bool is_same_cell = i > 0 && edit.terms[i - 1].row == t.row && edit.terms[i - 1].dst == t.dst;
        if (!is_same_cell && !merged.is_first(t.row, t.dst)) {
            return format("term %d: the terms of row %d, cell %d must be neighbours", i, t.row, t.dst);
        }
    }

    return {};
}

static std::vector<layer_edit> split_by_layer(const llama_kvtool & kvtool, const llama_kvtool_edit & edit) {
    const auto & layers = kvtool.layers;

    std::vector<layer_edit> res(layers.size());
    std::vector<int>        layer_of_row(kvtool.n_row);

    for (size_t i = 0; i < layers.size(); ++i) {
        std::fill_n(layer_of_row.begin() + layers[i].row_0, layers[i].n_head, (int) i);
    }

    for (int i = 0; i < edit.n_move; ++i) {
        const auto & m = edit.moves[i];

        const int i_layer = layer_of_row[m.row];

        if (m.delta != 0 && layers[i_layer].rope.is_rotary()) {
            res[i_layer].rotated.push_back(m);
        } else if (m.src != m.dst) {
            res[i_layer].moves.push_back(m);
        }
    }
    for (int i = 0; i < edit.n_term; ++i) {
        res[layer_of_row[edit.terms[i].row]].terms.push_back(edit.terms[i]);
    }

    return res;
}

// Move sliding and recurrent layers to the newest token's new position: a token must have the same position in all
// layers. Returns false if a device failed
static bool shift_fixed_state(llama_kvtool & kvtool, llama_context & lctx, const llama_kvtool_edit & edit) {
    const bool is_empty = edit.n_keep == edit.n_hidden;

    if (auto * mem = memory::recurrent(lctx)) {
        memory::set_newest(*mem, is_empty ? -1 : edit.pos_0 + edit.n_keep - 1);
    }

    auto * kv = memory::sliding_cache(lctx);

    if (!kv) {
        return true;
    }
    if (is_empty) {
        kv->clear(false);
        return true;
    }

    const auto & layers = kvtool.sliding;

    const int delta = edit.pos_0 + edit.n_keep - 1 - kv->seq_pos_max(0);

    std::vector<layer_edit> edits(layers.size());

    for (const int c : memory::shift_swa(*kv, delta)) {
        for (size_t i = 0; i < layers.size(); ++i) {
            for (int head = 0; head < layers[i].n_head && layers[i].rope.is_rotary(); ++head) {
                edits[i].rotated.push_back({ head, c, c, delta });
            }
        }
    }

    return edit_graph(kvtool, lctx, *kv, layers, single_part(layers), edits, true, false);
}

int32_t apply(llama_kvtool & kvtool, llama_context & lctx, const llama_kvtool_edit & edit) {
    const auto why = invalid(kvtool, edit);
    if (!why.empty()) {
        return fail(why);
    }

    const auto & layers = kvtool.layers;

    auto * kv = memory::cache(lctx);

    lctx.synchronize();
    if (kvtool.recent.is_on() && !kvtool.sum_deferred(lctx)) {
        return fail("the device failed to compute the signals");
    }
    kvtool.recent.collect(lctx);
    kvtool.forget_copies();

    const auto edits = split_by_layer(kvtool, edit);

    bool on_host       = !edit.force_graph;
    bool has_rotations = false;

    for (size_t i = 0; i < layers.size(); ++i) {
        on_host       = on_host && ggml_backend_buffer_is_host(layers[i].k->buffer) && (!layers[i].v || ggml_backend_buffer_is_host(layers[i].v->buffer));
        has_rotations = has_rotations || !edits[i].rotated.empty();
    }

    const bool k_on_host = on_host && !has_rotations;

    for (const auto & p : k_on_host ? std::vector<part>() : kvtool.graphs.parts(layers, GRAPH_EDITS)) {
        if (!edit_graph(kvtool, lctx, *kv, layers, p, edits, true, !on_host)) {
            return fail("the device failed to edit the cache");
        }
    }
    if (!shift_fixed_state(kvtool, lctx, edit)) {
        return fail("the device failed to turn the keys of sliding layers");
    }

    edit_host(kvtool, edits, k_on_host, on_host);

    kvtool.positions.move(layers, edit);
    kvtool.n_live       = edit.n_keep;
    kvtool.n_removable = 0;
    kvtool.n_hidden    = edit.n_hidden;

    if (kvtool.params.ragged) {
        std::copy(edit.n_keep_row, edit.n_keep_row + kvtool.n_row, kvtool.n_live_row.begin());
        // ragged rows have separate masks, so llama.cpp's table needs only the newest token
        memory::fill_tables(lctx, edit.n_keep > 0, edit.pos_0 + edit.n_keep - 1);
    } else {
        memory::fill_tables(lctx, edit.n_keep, edit.pos_0, edit.n_hidden);
        kvtool.fill_recalled(lctx);
    }

    kvtool.signals.clear(lctx);
    kvtool.deferred.remove(kvtool.deferred.n);
    if (edit.n_keep == 0) {
        kvtool.queries.clear();
    }
    if (edit.n_hidden > 0) {
        kvtool.recent.clear();
    } else {
        kvtool.recent.move(edit, edits);
    }

    return 0;
}

} // namespace kvtool
