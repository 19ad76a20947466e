#include "remote.h"

#include "error.h"

#include "llama-graph.h"
#include "llama-impl.h"

#include "../ggml/src/ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <random>

namespace kvtool {

// of graphs and archives; it begins anywhere, as a worker has archives of one process after the other
static uint64_t next_number() {
    static std::atomic<uint64_t> n { ((uint64_t) std::random_device()() << 32) | 1 };
    return n++;
}

// takes the place of what the worker does
static void not_here(ggml_tensor *, int, int, void *) {
    GGML_ABORT("an operation of a worker's has been computed here");
}

static ggml_tensor * new_call(
        ggml_context * ctx, ggml_type type, int64_t n, ggml_tensor ** args, int n_args, const call & what) {
    static_assert(sizeof(ggml_custom_op_params) <= call::offset, "ggml's parameters are longer");

    ggml_tensor * t = ggml_custom_4d(ctx, type, n, 1, 1, 1, args, n_args, not_here, GGML_N_TASKS_MAX, nullptr);
    what.write(t);
    return t;
}

remote::remote(ggml_backend_dev_t spare, const archive_params & params, const std::vector<archive_shape> & shapes)
    : number(next_number())
    , backend(ggml_backend_dev_init(spare, nullptr))
    , buffer(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(spare), 2*n_letter))
    , ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true })) {
    if (!backend || !buffer) {
        throw std::runtime_error("a worker has no memory for an archive");
    }
    in = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, n_letter);
    ggml_backend_tensor_alloc(buffer.get(), in, ggml_backend_buffer_get_base(buffer.get()));

    for (const auto & s : shapes) {
        sizes.push_back(s.n_head*(ggml_row_size((ggml_type) params.type_k, s.n_embd_k) + ggml_row_size((ggml_type) params.type_v, s.n_embd_v)));
    }
    spans.resize(shapes.size());

    make(params, shapes);
}

void remote::make(const archive_params & params, const std::vector<archive_shape> & shapes) {
    letter said;
    said.put(params).put((uint32_t) shapes.size());
    for (auto s : shapes) {
        each_number(s, [&](auto & number) { said.put(number); });
        said.put_list(s.turns.factors.data(), s.turns.factors.size());
        said.put_list(s.turns.scale  .data(), s.turns.scale  .size());
    }
    auto answer = ask(CALL_MAKE, 0, said);
    n_slab = answer.take<int64_t>();
    n_free = answer.take<int64_t>();
}

ggml_tensor * remote::add(ggml_context * ctx, call_kind what, size_t layer, std::vector<ggml_tensor *> args) const {
    call one;
    one.archive = number;
    one.what    = what;
    one.layer   = layer;
    one.scale   = 0.0f;

    args.insert(args.begin(), in);

    ggml_tensor * t = new_call(ctx, GGML_TYPE_I8, n_letter, args.data(), args.size(), one);
    ggml_backend_tensor_alloc(buffer.get(), t, (char *) ggml_backend_buffer_get_base(buffer.get()) + n_letter);
    return t;
}

letter remote::ask(call_kind what, size_t layer, const letter & said) {
    ggml_context_ptr own(ggml_init({ 2*ggml_tensor_overhead() + ggml_graph_overhead_custom(2, false), nullptr, true }));

    ggml_cgraph * gf = ggml_new_graph_custom(own.get(), 2, false);
    ggml_build_forward_expand(gf, add(own.get(), what, layer, {}));

    return compute(gf, said);
}

letter remote::compute(ggml_cgraph * gf, const letter & said) {
    if (said.data.size() > n_letter) {
        throw std::runtime_error("a letter to a worker is too long");
    }
    if (!said.data.empty()) {
        ggml_backend_tensor_set(in, said.data.data(), 0, said.data.size());
    }
    ggml_backend_graph_compute(backend.get(), gf);

    const ggml_tensor * t = ggml_graph_node(gf, -1);

    // most answers are shorter than this
    std::vector<uint8_t> raw(1024);
    ggml_backend_tensor_get(t, raw.data(), 0, raw.size());

    answer_head head;
    memcpy(&head, raw.data(), sizeof(head));
    const size_t n = std::min(n_letter, sizeof(head) + head.n_bytes);
    if (n > raw.size()) {
        const size_t n_read = raw.size();
        raw.resize(n);
        ggml_backend_tensor_get(t, raw.data() + n_read, n_read, n - n_read);
    }

    letter res(raw.data() + sizeof(head), n - sizeof(head));
    if (head.status != 0) {
        const std::string why((const char *) res.data.data(), res.data.size());
        if (head.status == LLAMA_KVTOOL_NO_ROOM) {
            throw no_room(why + ", on a worker");
        }
        throw std::runtime_error("a worker says: " + why);
    }
    n_bytes   = res.take<int64_t>();
    own_table = res.take_list<int64_t>();

    return res;
}

// all layers have what the table says
void remote::see_spans() {
    std::fill(spans.begin(), spans.end(), std::make_pair(own_table.at(0), own_table.at(1)));
}

static letter letter_of(const leaving & some, int32_t first, int32_t n) {
    letter res;
    res.put(some.pos_0 + first).put(some.n_max).put(some.next).put_list(some.cells + first, n);
    return res;
}

void remote::reserve(const leaving & some) {
    if (store::n_slab(some.first(spans[0].first, spans[0].second), some.end())*n_slab <= n_bytes) {
        return;
    }
    letter said;
    said.put(some.pos_0).put(some.n_max).put(some.n_cell);
    ask(CALL_RESERVE, 0, said);
}

void remote::push(const std::vector<const layer *> & from, const leaving & some) {
    if (!puts) {
        const size_t n = 3*from.size();
        puts.reset(ggml_init({ n*ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false), nullptr, true }));
        puts_graph = ggml_new_graph_custom(puts.get(), n, false);
        for (size_t i = 0; i < from.size(); ++i) {
            std::vector<ggml_tensor *> args = { from[i]->k };
            if (from[i]->v) {
                args.push_back(from[i]->v);
            }
            ggml_build_forward_expand(puts_graph, add(puts.get(), CALL_PUT, i, args));
        }
        // ggml's RPC client recognizes the graph by this number
        puts_graph->uid = next_number();
    }
    static constexpr int32_t n_most = n_letter/sizeof(int32_t) - 64;

    for (int32_t first = 0; first < some.n_cell; first += n_most) {
        compute(puts_graph, letter_of(some, first, std::min(n_most, some.n_cell - first)));
    }
    see_spans();
}

void remote::set_base(int64_t base) {
    // the newest frame's
    if (own_table.size() > 3 && own_table.back() == base) {
        return;
    }
    ask(CALL_BASE, 0, letter().put(base));
}

void remote::keep(int64_t n) {
    ask(CALL_KEEP, 0, letter().put(n));
    see_spans();
}

void remote::clear() {
    ask(CALL_CLEAR, 0);
    see_spans();
}

void remote::get(size_t i, uint8_t * out, int64_t begin, int64_t end) {
    const int64_t n_most = (n_letter - 4096)/sizes[i];

    for (int64_t at = begin; at < end && out; at += n_most) {
        const int64_t n = std::min(n_most, end - at);

        auto answer = ask(CALL_GET, i, letter().put(at).put(at + n));
        const auto data = answer.take_list<uint8_t>();
        if (data.size() != n*sizes[i]) {
            throw std::runtime_error("a worker has other tokens than it should");
        }
        out = std::copy(data.begin(), data.end(), out);
    }
}

void remote::expect(int64_t begin, int64_t end) {
    const auto span = std::make_pair(begin, end);
    if (std::all_of(spans.begin(), spans.end(), [&](const auto & own) { return own == span; })) {
        return;
    }
    ask(CALL_EXPECT, 0, letter().put(begin).put(end));
    for (auto & own : spans) {
        own = own == span ? own : std::make_pair<int64_t, int64_t>(0, 0);
    }
}

void remote::fill(size_t i, const uint8_t * in, int64_t begin, int64_t end) {
    const int64_t n_most = (n_letter - 4096)/sizes[i];

    int64_t at = begin;
    do {
        const int64_t n = std::min(n_most, end - at);

        ask(CALL_FILL, i, letter().put(begin).put(end).put(at).put_list(in + (at - begin)*sizes[i], n*sizes[i]));
        at += n;
    } while (at < end);
    spans[i] = { begin, end };
}

std::string remote::set_table(const std::vector<int64_t> & table) {
    auto answer = ask(CALL_TABLE, 0, letter().put_list(table.data(), table.size()));
    const auto why = answer.take_list<char>();
    return { why.begin(), why.end() };
}

std::vector<int64_t> remote::chosen(size_t i) {
    return ask(CALL_CHOSEN, i).take_list<int64_t>();
}

ggml_tensor * remote::build(
        const llm_graph_context & graph, size_t i, const ggml_tensor * k, ggml_tensor ** args, ggml_type type, int64_t n,
        const logit_params & logits) {
    call one;
    one.archive = number;
    one.what    = CALL_RECALL;
    one.layer   = i;
    one.scale   = logits.scale;

    ggml_tensor * t = new_call(graph.ctx0, type, n, args, 4, one);

    const auto buft = ggml_backend_buffer_get_type(k->buffer);
    for (int j = 0; j < ggml_backend_sched_get_n_backends(graph.sched); ++j) {
        ggml_backend_t home = ggml_backend_sched_get_backend(graph.sched, j);
        if (ggml_backend_supports_buft(home, buft)) {
            ggml_backend_sched_set_tensor_backend(graph.sched, t, home);
        }
    }
    return t;
}

} // namespace kvtool
