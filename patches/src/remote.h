// An archive in a worker's memory, as the process sees it that has the context.

#pragma once

#include "archive-part.h"
#include "calls.h"

#include "ggml-cpp.h"

namespace kvtool {

class remote : public archive_part {
public:
    // spare: the worker's device for archives. Throws where the worker cannot have it.
    remote(ggml_backend_dev_t spare, const archive_params & params, const std::vector<archive_shape> & shapes);

    void reserve(const leaving & some) override;
    void push(const std::vector<const layer *> & from, const leaving & some) override;

    void set_base(int64_t base) override;
    void keep(int64_t n) override;
    void clear() override;

    std::pair<int64_t, int64_t> span(size_t i) const override { return spans[i]; }

    size_t token_bytes(size_t i) const override { return sizes[i]; }

    void get(size_t i, uint8_t * out, int64_t begin, int64_t end) override;
    void expect(int64_t begin, int64_t end) override;
    void fill(size_t i, const uint8_t * in, int64_t begin, int64_t end) override;

    std::vector<int64_t> table() const override { return own_table; }
    std::string set_table(const std::vector<int64_t> & table) override;

    int64_t bytes()      const override { return n_bytes; }
    int64_t slab_bytes() const override { return n_slab; }
    int64_t free_bytes() const override { return n_free; }

    std::vector<int64_t> chosen(size_t i) override;

    ggml_tensor * build(
            const llm_graph_context & graph, size_t i, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n,
            const logit_params & logits) override;

    void forget_caches() override { puts.reset(); }

private:
    const uint64_t number; // of the archive, among all that this process has made

    ggml_backend_ptr        backend; // of the spare
    ggml_backend_buffer_ptr buffer;  // two letters; the worker forgets the archive when it is freed
    ggml_context_ptr        ctx;

    ggml_tensor * in;

    // the graph that copies cells: the worker keeps it from one time to the next
    ggml_context_ptr puts;
    ggml_cgraph    * puts_graph = nullptr;

    // what the worker said last
    std::vector<int64_t> own_table;
    int64_t              n_bytes = 0;

    int64_t n_slab = 0;
    int64_t n_free = 0;

    std::vector<std::pair<int64_t, int64_t>> spans;
    std::vector<size_t>                      sizes; // bytes of a token

    void make(const archive_params & params, const std::vector<archive_shape> & shapes);

    // an operation that the worker answers
    ggml_tensor * add(ggml_context * ctx, call_kind what, size_t layer, std::vector<ggml_tensor *> args) const;

    // Returns what follows the answer's own head. Throws no_room, or what the worker says.
    letter ask(call_kind what, size_t layer, const letter & said = {});
    letter compute(ggml_cgraph * gf, const letter & said);

    void see_spans();
};

} // namespace kvtool
