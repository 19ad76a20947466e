// The archive of the layers that lie on one machine: what each kind of it can do.

#pragma once

#include "archive.h"
#include "attention.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct llm_graph_context;

namespace kvtool {

// It lies in this process, or in a worker's. Layers are counted from 0.
class archive_part {
public:
    virtual ~archive_part() = default;

    // takes the memory for these; throws no_room, and nothing has changed then
    virtual void reserve(const leaving & some) = 0;

    // copies them from these caches
    virtual void push(const std::vector<const layer *> & from, const leaving & some) = 0;

    virtual void set_base(int64_t base) = 0;
    virtual void keep(int64_t n) = 0;
    virtual void clear() = 0;

    // a layer's first token, and the one behind its last
    virtual std::pair<int64_t, int64_t> span(size_t i) const = 0;

    // bytes of a token of a layer
    virtual size_t token_bytes(size_t i) const = 0;

    virtual void get (size_t i, uint8_t * out, int64_t begin, int64_t end) = 0;
    virtual void expect(int64_t begin, int64_t end) = 0; // see archive
    virtual void fill(size_t i, const uint8_t * in, int64_t begin, int64_t end) = 0;

    virtual std::vector<int64_t> table() const = 0;
    virtual std::string set_table(const std::vector<int64_t> & table) = 0;

    virtual int64_t bytes()      const = 0;
    virtual int64_t slab_bytes() const = 0;
    virtual int64_t free_bytes() const = 0; // of the machine's memory, when the archive was made; -1: not known here

    // [n_head][n_recall]: the tokens that a layer's rows recalled last, the oldest first, then -1
    virtual std::vector<int64_t> chosen(size_t i) = 0;

    // What recalls tokens of layer i, whose keys are k, in a graph: see recall_into. n: the numbers that it gives
    virtual ggml_tensor * build(
            const llm_graph_context & graph, size_t i, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n,
            const logit_params & logits) = 0;

    // the caches have other tensors now
    virtual void forget_caches() {}
};

} // namespace kvtool
