#include "archives.h"

#include "devices.h"
#include "memory.h"
#include "recaller.h"
#include "remote.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

#include <map>

namespace kvtool {

void archives::make(const llama_context & lctx, bool here) {
    const auto & kv = *memory::cache(lctx);
    const auto & p  = params;

    const archive_params common = { p.n_recall, p.n_near, p.n_bit, p.type_k, p.type_v, memory::is_transposed(kv), p.n_made, p.n_exact };

    const int n_map = memory::key_map(kv);

    // by the device for archives on the layer's machine, null: this one
    std::map<ggml_backend_dev_t, size_t> part_of;

    std::vector<ggml_backend_dev_t>         homes;
    std::vector<std::vector<archive_shape>> shapes;

    places.clear();
    for (const auto & l : layers) {
        const auto home = here || p.n_made > 0 ? nullptr : archive_spare(ggml_backend_buft_get_device(ggml_backend_buffer_get_type(l.k->buffer)));

        const size_t part = part_of.insert({ home, homes.size() }).first->second;
        if (part == homes.size()) {
            homes .push_back(home);
            shapes.emplace_back();
        }
        places.push_back({ part, shapes[part].size() });
        shapes[part].push_back({ l.n_head, l.n_embd_k, l.n_embd_v, rotation(l, n_map) });
    }

    parts.clear();
    for (size_t i = 0; i < homes.size(); ++i) {
        if (homes[i]) {
            parts.push_back(std::make_unique<remote>(homes[i], common, shapes[i]));
        } else {
            parts.push_back(std::make_unique<recaller>(common, shapes[i]));
        }
    }
}

void archives::open(const llama_context & lctx, const std::string & path) {
    make(lctx, true);
    static_cast<recaller &>(*parts[0]).open(path);
    is_in_file = true;
}

void archives::push(llama_context & lctx, const int32_t * cells, int32_t n_cell, int64_t pos_0, int64_t n_max) {
    if (n_cell == 0) {
        return;
    }
    lctx.synchronize();

    const leaving some = { cells, n_cell, pos_0, n_max, memory::cache(lctx)->seq_pos_max(0) + 1 };

    for (auto & p : parts) {
        p->reserve(some);
    }
    for (size_t i = 0; i < parts.size(); ++i) {
        std::vector<const layer *> from;
        for (size_t j = 0; j < places.size(); ++j) {
            if (places[j].part == i) {
                from.push_back(&layers[j]);
            }
        }
        parts[i]->push(from, some);
    }
}

void archives::set_base(int64_t base) {
    for (auto & p : parts) {
        p->set_base(base);
    }
}

void archives::keep(int64_t n) {
    for (auto & p : parts) {
        p->keep(n);
    }
}

void archives::clear() {
    for (auto & p : parts) {
        p->clear();
    }
}

void archives::get(size_t layer, uint8_t * out, int64_t begin, int64_t end) {
    parts[places[layer].part]->get(places[layer].i, out, begin, end);
}

void archives::set(size_t layer, const uint8_t * in, int64_t begin, int64_t end) {
    for (auto & p : parts) {
        p->expect(begin, end);
    }
    parts[places[layer].part]->fill(places[layer].i, in, begin, end);
}

std::vector<int64_t> archives::table() const {
    return parts[0]->table();
}

std::string archives::set_table(const std::vector<int64_t> & table) {
    for (auto & p : parts) {
        const auto why = p->set_table(table);
        if (!why.empty()) {
            return why;
        }
    }
    return {};
}

std::pair<int64_t, int64_t> archives::span(size_t layer) const {
    return parts[places[layer].part]->span(places[layer].i);
}

size_t archives::token_bytes(size_t layer) const {
    return parts[places[layer].part]->token_bytes(places[layer].i);
}

int64_t archives::bytes() const {
    int64_t res = 0;
    for (const auto & p : parts) {
        res += p->bytes();
    }
    return res;
}

int64_t archives::slab_bytes() const {
    int64_t res = 0;
    for (const auto & p : parts) {
        res += p->slab_bytes();
    }
    return res;
}

std::vector<int64_t> archives::slab_bytes_by_part() const {
    std::vector<int64_t> res;
    for (const auto & p : parts) {
        res.push_back(p->slab_bytes());
    }
    return res;
}

std::vector<int64_t> archives::free_bytes_by_part() const {
    std::vector<int64_t> res;
    for (const auto & p : parts) {
        res.push_back(p->free_bytes());
    }
    return res;
}

std::vector<int64_t> archives::chosen(size_t layer) {
    return parts[places[layer].part]->chosen(places[layer].i);
}

ggml_tensor * archives::build(
        const llm_graph_context & graph, size_t layer, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n,
        const logit_params & logits) {
    return parts[places[layer].part]->build(graph, places[layer].i, k, args, type, n, logits);
}

void archives::forget_caches() {
    for (auto & p : parts) {
        p->forget_caches();
    }
}

} // namespace kvtool
