// The archives of all layers: each lies on the machine where its layer does, in host memory.

#pragma once

#include "archive-part.h"
#include "layer.h"
#include "llama-kvtool.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

struct llama_context;
struct llm_graph_context;

namespace kvtool {

class archives {
public:
    // both outlive this
    archives(const std::vector<layer> & layers, const llama_kvtool_params & params) : layers(layers), params(params) {}

    // of all layers of the cache, all empty; here: none of it lies on a worker
    void make(const llama_context & lctx, bool here);

    // from now on all of it lies here, in a new file at that path; nothing may be archived yet. Throws where that cannot be.
    void open(const llama_context & lctx, const std::string & path);

    bool has_file() const { return is_in_file; }

    // Copies these cells of all rows, and keeps the newest n_max tokens; the cache stays as it is. Throws no_room, and nothing
    // has changed then.
    void push(llama_context & lctx, const int32_t * cells, int32_t n_cell, int64_t pos_0, int64_t n_max);

    // See llama_kvtool_go_back. Throws where a layer's archive lies on a worker, and nothing has changed then.
    void go_back(llama_context & lctx, int32_t cell, int32_t n_cell, int64_t end, int64_t base, int64_t next);

    // see archive
    void set_base(int64_t base);
    void keep(int64_t n);
    void clear();

    // see llama_kvtool_get_archive and llama_kvtool_set_archive
    void get(size_t layer, uint8_t * out, int64_t begin, int64_t end);
    void set(size_t layer, const uint8_t * in, int64_t begin, int64_t end);

    std::vector<int64_t> table() const;
    std::string          set_table(const std::vector<int64_t> & table);

    std::pair<int64_t, int64_t> span(size_t layer) const;

    size_t token_bytes(size_t layer) const;

    int64_t begin() const { return parts.empty() ? 0 : parts[0]->span(0).first; }
    int64_t end()   const { return parts.empty() ? 0 : parts[0]->span(0).second; }
    int64_t size()  const { return end() - begin(); }

    int64_t bytes()      const;
    int64_t slab_bytes() const;

    // the same of each machine, and the memory that is free there
    std::vector<int64_t> slab_bytes_by_part() const;
    std::vector<int64_t> free_bytes_by_part() const;

    std::vector<int64_t> chosen(size_t layer);

    ggml_tensor * build(
            const llm_graph_context & graph, size_t layer, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n,
            const logit_params & logits);

    void forget_caches();

private:
    const std::vector<layer>  & layers;
    const llama_kvtool_params & params;

    std::vector<std::unique_ptr<archive_part>> parts;

    // of each layer, in the cache's order
    struct place {
        size_t part;
        size_t i;
    };

    std::vector<place> places;

    bool is_in_file = false;
};

} // namespace kvtool
