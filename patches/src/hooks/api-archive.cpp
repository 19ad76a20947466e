// The C API of the archive.

#include "cache/gather.h"
#include "error.h"
#include "llama-kvtool.h"
#include "memory.h"
#include "state.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"

#include <algorithm>

using namespace kvtool;

// maximum number of tokens per row that llama_kvtool_trace records; larger records might not fit in memory
static constexpr int32_t most_traced = 4096;

// maximum number of resident means in a row, and of resident tokens in a row; no device has memory for more
static constexpr int32_t most_resident = 1 << 20;

// Return the state of a context that has an archive. If it has no archive, set the error and return null
static llama_kvtool * with_archive(llama_context * ctx) {
    auto * kvtool = llama_kvtool::get(ctx);
    if (kvtool && !kvtool->archive) {
        fail("there is no archive: n_recall is 0");
        return nullptr;
    }
    return kvtool;
}

// The same as with_archive, but waits first until background work on the archive has ended. For calls that read or
// change archived tokens, clusters or cells; with_archive is for settings, which only the calling thread changes
static llama_kvtool * with_settled_archive(llama_context * ctx) {
    auto * kvtool = with_archive(ctx);
    if (!kvtool || !kvtool->staging) {
        return kvtool;
    }
    const int32_t status = guarded([&]() -> int32_t {
        kvtool->staging->settle();
        return 0;
    });
    return status < 0 ? nullptr : kvtool;
}

// True if the archives of all layers have the same tokens. Otherwise, set the error and return false
static bool same_tokens(const llama_kvtool & kvtool) {
    const auto & tokens = kvtool.archive->tokens;
    for (size_t i = 1; i < tokens.n_layer(); ++i) {
        if (tokens[i].begin() != tokens[0].begin() || tokens[i].end() != tokens[0].end()) {
            fail("the archives of the layers have different tokens");
            return false;
        }
    }
    return true;
}

int32_t llama_kvtool_archive_file(llama_context * ctx, const char * path) {
    auto * kvtool = with_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!path) {
        return fail("path must not be null");
    }
    auto & tokens = kvtool->archive->tokens;
    if (tokens.bytes() > 0 || tokens.has_file()) {
        return fail("the archive has memory already, or a file");
    }
    return guarded([&]() -> int32_t {
        tokens.open(path);
        return 0;
    });
}

static int n_thread(const llama_context * ctx) {
    return std::max(ctx->n_threads(), 1u);
}

int32_t llama_kvtool_archive(llama_context * ctx, const int32_t * cells, int32_t n_cell, int64_t pos_0, int64_t n_max) {
    auto * kvtool = with_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    const auto & tokens = kvtool->archive->tokens;

    const int32_t n_usable = kvtool->layers[0].n_cell - kvtool->params.n_recall;
    if (n_cell < 0 || (n_cell > 0 && !cells) || std::any_of(cells, cells + n_cell, [&](int32_t c) { return c < 0 || c >= n_usable; })) {
        return fail(format("cells must not be null, and all in 0..%d", n_usable - 1));
    }
    if (tokens.size() > 0 && pos_0 != tokens.end()) {
        return fail(format("pos_0 must be %lld, which comes next, got %lld", (long long) tokens.end(), (long long) pos_0));
    }
    if (pos_0 < 0 || pos_0 > archive::max_pos - n_cell) {
        return fail(format("pos_0 must be in 0..%lld, got %lld", (long long) archive::max_pos - n_cell, (long long) pos_0));
    }
    if (n_max < 1) {
        return fail(format("n_max must be 1 or more, got %lld", (long long) n_max));
    }
    return guarded([&]() -> int32_t {
        if (n_cell == 0) {
            return 0;
        }
        ctx->synchronize();

        const bool is_first = tokens.size() == 0;
        const evicted_tokens evicted = { cells, n_cell, pos_0, n_max, memory::cache(*ctx)->seq_pos_max(0) + 1 };
        const auto gathering = [&](const int32_t * cells, int32_t n, const auto & f) {
            return gather(kvtool->graphs, *ctx, kvtool->layers, cells, n, f);
        };
        kvtool->archive->push(gathering, evicted, n_thread(ctx), kvtool->staging.get());
        if (is_first) {
            llama_kvtool::forget_graphs(*ctx, true);
        }
        return 0;
    });
}

int32_t llama_kvtool_base(llama_context * ctx, int64_t base) {
    auto * kvtool = with_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    if (base < 0 || base >= archive::max_pos) {
        return fail(format("base must be in 0..%lld, got %lld", (long long) archive::max_pos - 1, (long long) base));
    }
    if (kvtool->archive->tokens.base() != base && !with_settled_archive(ctx)) {
        return -1;
    }
    return guarded([&]() -> int32_t {
        kvtool->archive->tokens.set_base(base);
        return 0;
    });
}

int64_t llama_kvtool_stage(llama_context * ctx, int64_t n_token) {
    auto * kvtool = with_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    if (n_token < 0 || n_token >= archive::max_pos) {
        return fail(format("n_token must be in 0..%lld, got %lld", (long long) archive::max_pos - 1, (long long) n_token));
    }
    return guarded([&] { return kvtool->stage(*ctx, n_token); });
}

int64_t llama_kvtool_stage_bytes(llama_context * ctx) {
    auto * kvtool = with_archive(ctx);
    return kvtool ? (int64_t) staging::most_token_bytes(kvtool->archive->tokens) : -1;
}

// True if a row can have this many residents. Otherwise, set the error and return false
static bool can_be_resident(const resident_sizes & n) {
    for (const int32_t size : { n.n_mean, n.n_mean_set, n.n_token }) {
        if (size < 0 || size > most_resident) {
            fail(format("numbers of residents must be in 0..%d, got %d", most_resident, size));
            return false;
        }
    }
    if (n.n_token > 0 && n.n_mean == 0) {
        fail("residents need cells for means of clusters, got n_mean 0");
        return false;
    }
    if (n.n_mean % n_cluster != 0 || n.n_mean_set % n_set != 0) {
        fail(format("n_mean and n_mean_set must be multiples of %d and %d, got %d and %d", n_cluster, n_set, n.n_mean, n.n_mean_set));
        return false;
    }
    return true;
}

int64_t llama_kvtool_resident_bytes(llama_context * ctx, int32_t n_mean, int32_t n_mean_set, int32_t n_token) {
    const resident_sizes n = { n_mean, n_mean_set, n_token };

    auto * kvtool = with_archive(ctx);
    return kvtool && can_be_resident(n) ? kvtool->resident_bytes(*ctx, n) : -1;
}

int64_t llama_kvtool_reside(llama_context * ctx, int32_t n_mean, int32_t n_mean_set, int32_t n_token) {
    const resident_sizes n = { n_mean, n_mean_set, n_token };

    auto * kvtool = with_settled_archive(ctx);
    return kvtool && can_be_resident(n) ? guarded([&] { return kvtool->reside(*ctx, n); }) : -1;
}

float llama_kvtool_missed(llama_context * ctx) {
    auto * kvtool = with_archive(ctx);
    if (!kvtool) {
        return -1.0f;
    }
    return guarded([&] { return kvtool->missed(*ctx); });
}

int32_t llama_kvtool_forget(llama_context * ctx) {
    auto * kvtool = with_settled_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    return guarded([&]() -> int32_t {
        kvtool->drop_residents();
        if (kvtool->n_archived() > 0) {
            llama_kvtool::forget_graphs(*ctx, true);
        }
        kvtool->archive->clear();
        kvtool->fill_recalled(*ctx);
        return 0;
    });
}

int32_t llama_kvtool_rewind(llama_context * ctx, int32_t cell, int32_t n_cell, int64_t end, int64_t base, int64_t next) {
    auto * kvtool = with_settled_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    auto & tokens = kvtool->archive->tokens;

    const int32_t n_usable = kvtool->layers[0].n_cell - kvtool->params.n_recall;
    if (cell < 0 || n_cell < 0 || cell > n_usable - n_cell) {
        return fail(format("cell and n_cell must be in 0..%d together, got %d and %d", n_usable, cell, n_cell));
    }
    if (end < tokens.begin() + n_cell || end > tokens.end()) {
        return fail(format("end must be in %lld..%lld, got %lld",
                (long long) tokens.begin() + n_cell, (long long) tokens.end(), (long long) end));
    }
    if (base < 0 || base >= archive::max_pos || next < 0 || next >= archive::max_pos) {
        return fail(format("base and next must be in 0..%lld, got %lld and %lld",
                (long long) archive::max_pos - 1, (long long) base, (long long) next));
    }
    if (!same_tokens(*kvtool)) {
        return -1;
    }
    return guarded([&]() -> int32_t {
        ctx->synchronize();
        kvtool->drop_residents();
        kvtool->archive->rewind(kvtool->layers, cell, n_cell, end, base, next);
        if (tokens.size() == 0) {
            llama_kvtool::forget_graphs(*ctx, true);
        }
        kvtool->fill_recalled(*ctx);
        return 0;
    });
}

static int64_t copy_archive(llama_context * ctx, int32_t layer, uint8_t * out, const std::vector<archive_part> & in, int64_t begin, int64_t end) {
    auto * kvtool = with_settled_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    const int32_t n_layer = kvtool->layers.size();
    if (layer < 0 || layer >= n_layer) {
        return fail(format("layer must be in 0..%d, got %d", n_layer - 1, layer));
    }
    auto & tokens = kvtool->archive->tokens;

    const int64_t pos_min = out ? tokens[layer].begin() : 0;
    const int64_t pos_max = out ? tokens[layer].end()   : archive::max_pos;
    if (begin < pos_min || begin > end || end > pos_max) {
        return fail(format("begin and end must be in %lld..%lld, got %lld and %lld",
                (long long) pos_min, (long long) pos_max, (long long) begin, (long long) end));
    }
    return guarded([&]() -> int64_t {
        if (!in.empty()) {
            kvtool->drop_residents();
            tokens.expect(begin, end);
            tokens.fill(layer, in, begin, end, n_thread(ctx));
        } else if (out) {
            tokens.get(layer, out, begin, end);
        }
        return (end - begin)*tokens.token_bytes(layer);
    });
}

int64_t llama_kvtool_get_archive(llama_context * ctx, int32_t layer, uint8_t * out, int64_t begin, int64_t end) {
    return copy_archive(ctx, layer, out, {}, begin, end);
}

int64_t llama_kvtool_set_archive(
        llama_context * ctx, int32_t layer, const uint8_t * const * in, const int64_t * first, int32_t n, int64_t begin, int64_t end) {
    if (in && (!first || n < 1)) {
        return fail("first must not be null, and n at least 1");
    }
    std::vector<archive_part> parts;
    for (int32_t i = 0; in && i < n; ++i) {
        const int64_t pos_min = i == 0 ? begin : first[i - 1];
        const int64_t pos_max = i == 0 ? begin : end;
        if (!in[i] || first[i] < pos_min || first[i] > pos_max) {
            return fail(format("in[%d] must not be null, and first[%d] in %lld..%lld, got %lld",
                    i, i, (long long) pos_min, (long long) pos_max, (long long) first[i]));
        }
        parts.push_back({ in[i], first[i] });
    }
    return copy_archive(ctx, layer, nullptr, parts, begin, end);
}

int32_t llama_kvtool_get_archive_table(llama_context * ctx, int64_t * table, int32_t n) {
    auto * kvtool = with_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    const auto values = kvtool->archive->tokens.table();
    if (table) {
        if (n != (int32_t) values.size()) {
            return fail(format("n must be %d, got %d", (int) values.size(), n));
        }
        std::copy(values.begin(), values.end(), table);
    }
    return values.size();
}

int32_t llama_kvtool_set_archive_table(llama_context * ctx, const int64_t * table, int32_t n) {
    auto * kvtool = with_settled_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!table || n < 3 || n % 2 != 1) {
        return fail("the table must not be null, and n must be 3, 5, ...");
    }
    return guarded([&]() -> int32_t {
        kvtool->drop_residents();
        const auto why = kvtool->archive->tokens.set_table({ table, table + n });
        if (!why.empty()) {
            return fail(why);
        }
        llama_kvtool::forget_graphs(*ctx, true);
        return n;
    });
}

static int64_t copy_centers(llama_context * ctx, uint8_t * out, const uint8_t * in, int64_t begin, int64_t end) {
    auto * kvtool = with_settled_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    const bool copies = in || out;
    if (copies && !same_tokens(*kvtool)) {
        return -1;
    }
    auto & tokens = kvtool->archive->tokens;

    const int64_t pos_min = copies ? tokens.begin() : 0;
    const int64_t pos_max = copies ? tokens.end()   : archive::max_pos;
    if (begin < pos_min || begin > end || end > pos_max) {
        return fail(format("begin and end must be in %lld..%lld, got %lld and %lld",
                (long long) pos_min, (long long) pos_max, (long long) begin, (long long) end));
    }
    return guarded([&]() -> int64_t {
        if (in) {
            kvtool->drop_residents();
            tokens.set_centers(in, begin, end);
        } else if (out) {
            tokens.get_centers(out, begin, end);
        }
        return begin < end ? ((end - 1)/store::n_block - begin/store::n_block + 1)*tokens.center_bytes() : 0;
    });
}

int64_t llama_kvtool_get_centers(llama_context * ctx, uint8_t * out, int64_t begin, int64_t end) {
    return copy_centers(ctx, out, nullptr, begin, end);
}

int64_t llama_kvtool_set_centers(llama_context * ctx, const uint8_t * in, int64_t begin, int64_t end) {
    return copy_centers(ctx, nullptr, in, begin, end);
}

int64_t llama_kvtool_clusters(llama_context * ctx, int64_t * span) {
    auto * kvtool = with_settled_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    const auto & tokens = kvtool->archive->tokens;
    if (span) {
        const auto blocks = tokens.clustered();
        std::copy(blocks.begin(), blocks.end(), span);
    }
    return tokens.cluster_bytes();
}

static int64_t copy_clusters(llama_context * ctx, uint8_t * out, const uint8_t * in, int64_t begin, int64_t end, bool is_far) {
    auto * kvtool = with_settled_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!same_tokens(*kvtool)) {
        return -1;
    }
    auto & tokens = kvtool->archive->tokens;

    const int64_t n       = store::n_block;
    const int64_t pos_min = tokens.begin()/n*n;
    const int64_t pos_max = tokens.end()/n*n;
    if (begin % n != 0 || end % n != 0 || begin < pos_min || begin > end || end > pos_max) {
        return fail(format("begin and end must be multiples of %lld in %lld..%lld, got %lld and %lld",
                (long long) n, (long long) pos_min, (long long) pos_max, (long long) begin, (long long) end));
    }
    return guarded([&]() -> int64_t {
        if (in) {
            kvtool->drop_residents();
            tokens.set_clusters(in, begin, end, is_far);
        } else if (out && !tokens.get_clusters(out, begin, end, is_far)) {
            return fail("not all of these blocks have such clusters");
        }
        return (end - begin)/n*tokens.cluster_bytes();
    });
}

int64_t llama_kvtool_get_clusters(llama_context * ctx, uint8_t * out, int64_t begin, int64_t end, bool is_far) {
    return copy_clusters(ctx, out, nullptr, begin, end, is_far);
}

int64_t llama_kvtool_set_clusters(llama_context * ctx, const uint8_t * in, int64_t begin, int64_t end, bool is_far) {
    return copy_clusters(ctx, nullptr, in, begin, end, is_far);
}

int32_t llama_kvtool_seal(llama_context * ctx, int64_t n_max) {
    auto * kvtool = with_settled_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    if (!same_tokens(*kvtool)) {
        return -1;
    }
    if (n_max < 1) {
        return fail(format("n_max must be 1 or more, got %lld", (long long) n_max));
    }
    return guarded([&]() -> int32_t { return kvtool->archive->tokens.seal_next_rows(n_max, n_thread(ctx)); });
}

int64_t llama_kvtool_archive_slab(const llama_context * ctx, int32_t * n_block) {
    const auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (n_block) {
        *n_block = store::n_block;
    }
    return kvtool->archive ? kvtool->archive->tokens.slab_bytes() : 0;
}

int32_t llama_kvtool_trace(llama_context * ctx, int32_t n) {
    auto * kvtool = with_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    const bool is_synthetic = kvtool->params.n_synthetic > 0;
    if (n < 0 || n > most_traced || (!is_synthetic && n != kvtool->params.n_recall)) {
        return fail(format("n must be in %d..%d, got %d", is_synthetic ? 0 : kvtool->params.n_recall, is_synthetic ? most_traced : kvtool->params.n_recall, n));
    }
    return guarded([&]() -> int32_t {
        kvtool->archive->trace(n);
        kvtool->forget_graphs(*ctx, true);
        return 0;
    });
}

int32_t llama_kvtool_attended(llama_context * ctx, int64_t * out, float * attn, int32_t n_row, int32_t n) {
    auto * kvtool = with_archive(ctx);
    if (!kvtool) {
        return -1;
    }
    const int32_t n_traced = kvtool->archive->n_traced;
    if (!out || !attn || n_row != kvtool->n_row || n != n_traced) {
        return fail(format("out and attn must not be null, n_row must be %d and n %d, got %d and %d", kvtool->n_row, n_traced, n_row, n));
    }
    for (const auto & l : kvtool->archive->recalled) {
        for (const auto & token : l.attended) {
            *out++  = token.pos;
            *attn++ = token.attn;
        }
    }
    return 0;
}

int64_t llama_kvtool_archive_bytes(const llama_context * ctx) {
    const auto * kvtool = llama_kvtool::get(ctx);
    if (!kvtool) {
        return -1;
    }
    if (kvtool->archive && !with_settled_archive(const_cast<llama_context *>(ctx))) {
        return -1;
    }
    return kvtool->archive ? kvtool->archive->tokens.bytes() : 0;
}
