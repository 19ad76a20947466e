#include "input.h"

#include "state.h"

#include <algorithm>
#include <cmath>
#include <numeric>

bool llama_kvtool_input::can_reuse(const llm_graph_params & params) {
    const auto fits = [&](const rows & r) { return r.limit->ne[2] == (kvtool.is_even(kvtool.layers[r.i]) ? 1 : kvtool.layers[r.i].n_head); };
    return is_resident == kvtool.uses_residents(params.ubatch.n_tokens) &&
        staged.n_archived == (kvtool.is_staging() ? kvtool.n_archived() : 0) &&
        (kvtool.params.signals == 0 || is_deferred == kvtool.defers(params.ubatch.n_tokens)) &&
        std::all_of(ragged.begin(), ragged.end(), fits);
}

void llama_kvtool_input::set_input(const llama_ubatch * ubatch) {
    const int64_t n_tokens = ubatch->n_tokens;

    std::vector<float> values(n_tokens);

    if (n_seen && n_seen->buffer) {
        for (int64_t t = 0; t < n_tokens; ++t) {
            values[t] = kvtool.n_seen + t + 1;
        }
        ggml_backend_tensor_set(n_seen, values.data(), 0, ggml_nbytes(n_seen));
    }
    if (scale && scale->buffer) {
        for (int64_t t = 0; t < n_tokens; ++t) {
            values[t] = logf(kvtool.n_seen + t + 1)/logf(512.0f);
        }
        ggml_backend_tensor_set(scale, values.data(), 0, ggml_nbytes(scale));
    }

    std::vector<int64_t> idx;

    if (recent_slots && recent_slots->buffer) {
        for (int64_t t = n_tokens - recent_slots->ne[0]; t < n_tokens; ++t) {
            idx.push_back(kvtool.recent.slot(t));
        }
        ggml_backend_tensor_set(recent_slots, idx.data(), 0, ggml_nbytes(recent_slots));
    }

    if (query_slots && query_slots->buffer) {
        idx.clear();
        for (int64_t t = n_tokens - query_slots->ne[0]; t < n_tokens; ++t) {
            idx.push_back(kvtool.queries.slot(t));
        }
        kvtool.queries.set_positions(*ubatch, query_slots->ne[0]);
        ggml_backend_tensor_set(query_slots, idx.data(), 0, ggml_nbytes(query_slots));
    }

    if (deferred_slots && deferred_slots->buffer) {
        idx.resize(n_tokens);
        std::iota(idx.begin(), idx.end(), kvtool.deferred.n);
        ggml_backend_tensor_set(deferred_slots, idx.data(), 0, ggml_nbytes(deferred_slots));
    }

    if (resident_slots && resident_slots->buffer) {
        idx.resize(n_tokens);
        std::iota(idx.begin(), idx.end(), 0);
        ggml_backend_tensor_set(resident_slots, idx.data(), 0, ggml_nbytes(resident_slots));
    }

    if (rot && rot->buffer) {
        ggml_backend_tensor_set(rot, ubatch->pos, 0, ggml_nbytes(rot));
    }

    for (const auto & d : alibi_inputs) {
        const auto & l = kvtool.layers[d.i];

        const int64_t n_kv = d.key_pos->ne[0];

        values.assign(n_kv*l.n_head, 0.0f);
        for (int head = 0; head < l.n_head; ++head) {
            const int n = kvtool.params.ragged ? kvtool.n_live_row[l.row_0 + head] : kvtool.n_live;
            for (int64_t t = 0; t < n_tokens; ++t) {
                kvtool.positions.put(d.i, head, n + t, ubatch->pos[t]);
            }
            for (int c = 0; c < n + n_tokens; ++c) {
                values[head*n_kv + c] = kvtool.positions.get(d.i, head, c);
            }
        }
        ggml_backend_tensor_set(d.key_pos, values.data(), 0, ggml_nbytes(d.key_pos));
    }
    if (query_pos && query_pos->buffer) {
        values.assign(ubatch->pos, ubatch->pos + n_tokens);
        ggml_backend_tensor_set(query_pos, values.data(), 0, ggml_nbytes(query_pos));
    }

    if (staged.tail && staged.tail->buffer) {
        staged.set_input(*kvtool.staging, ubatch->pos[0]);
    }

    for (const auto & m : synthetic_masks) {
        const int64_t n_synthetic = kvtool.params.n_synthetic;
        const int64_t first = kvtool.layers[0].n_cell - kvtool.params.n_recall;
        const int64_t n_kv  = m.visible->ne[0];

        values.assign(ggml_nelements(m.visible), 0.0f);
        for (int64_t t = 0; t < m.visible->ne[1]; ++t) {
            for (int64_t c = first; c < n_kv; ++c) {
                const bool is_visible = (c - first)/n_synthetic == t && (c - first) % n_synthetic < m.n_gqa;
                values[t*n_kv + c] = is_visible ? 0.0f : -INFINITY;
            }
        }
        ggml_backend_tensor_set(m.visible, values.data(), 0, ggml_nbytes(m.visible));
    }

    for (const auto & m : filled_cells) {
        if (m.idx->buffer) {
            idx.resize(m.idx->ne[0]);
            std::iota(idx.begin(), idx.end(), m.first);
            ggml_backend_tensor_set(m.idx, idx.data(), 0, ggml_nbytes(m.idx));
        }
    }

    for (const auto & r : ragged) {
        const auto & l = kvtool.layers[r.i];

        const auto cell = [&](int64_t t, int head) { return kvtool.n_live_row[l.row_0 + head] + t; };

        idx.clear();
        for (int64_t t = 0; t < n_tokens; ++t) {
            for (int head = 0; head < l.n_head; ++head) {
                idx.push_back(cell(t, head)*l.n_head + head);
            }
        }
        ggml_backend_tensor_set(r.k_idx, idx.data(), 0, ggml_nbytes(r.k_idx));

        if (r.v_idx) {
            const int64_t n_embd = r.v_idx->ne[0]/(n_tokens*l.n_head);

            idx.clear();
            for (int64_t t = 0; t < n_tokens; ++t) {
                for (int head = 0; head < l.n_head; ++head) {
                    for (int64_t j = 0; j < n_embd; ++j) {
                        idx.push_back((head*n_embd + j)*l.n_cell + cell(t, head));
                    }
                }
            }
            ggml_backend_tensor_set(r.v_idx, idx.data(), 0, ggml_nbytes(r.v_idx));
        }

        values.clear();
        for (int head = 0; head < r.limit->ne[2]; ++head) {
            for (int64_t t = 0; t < n_tokens; ++t) {
                values.push_back(cell(t, head));
            }
        }
        ggml_backend_tensor_set(r.limit, values.data(), 0, ggml_nbytes(r.limit));
    }
}

namespace kvtool {

llama_kvtool_input & graph_input(const llm_graph_context & graph) {
    auto & input = graph.res->kvtool.input;

    if (!input) {
        auto ptr = std::make_unique<llama_kvtool_input>(*graph.cparams.kvtool);
        input = ptr.get();
        graph.res->add_input(std::move(ptr));
    }

    return *input;
}

ggml_tensor * new_input(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
    ggml_tensor * t = ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2);
    ggml_set_input(t);
    return t;
}

} // namespace kvtool
