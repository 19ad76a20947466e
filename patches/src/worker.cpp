// A worker's side of recall: its devices compute our own operations, too, and one more of each keeps archives in the worker's
// memory. An archive goes with the buffer that its client made it with: when the client frees that, or is gone.

#include "calls.h"
#include "devices.h"
#include "error.h"
#include "recaller.h"

#include "llama-impl.h"

#include "../ggml/src/ggml-backend-impl.h"
#include "../ggml/src/ggml-impl.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <vector>

namespace kvtool {

//
// archives
//

struct kept_archive {
    ggml_backend_buffer_t buffer;
    ggml_backend_t        host; // computes recall

    std::unique_ptr<recaller> own;

    int32_t     status = 0; // of the last call; what copies cells is several
    std::string why;
};

// a worker's server has one thread, and one client
static std::map<uint64_t, kept_archive> g_kept;

static void require(bool ok) {
    if (!ok) {
        throw std::runtime_error("malformed message from the client");
    }
}

static void (*g_free_buffer)(ggml_backend_buffer_t);

static void free_with_archive(ggml_backend_buffer_t buffer) {
    for (auto it = g_kept.begin(); it != g_kept.end();) {
        it = it->second.buffer == buffer ? g_kept.erase(it) : std::next(it);
    }
    g_free_buffer(buffer);
}

static ggml_backend_buffer_t alloc_with_archive(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t res = ggml_backend_cpu_buffer_type()->iface.alloc_buffer(buft, size);
    if (res) {
        g_free_buffer = res->iface.free_buffer;
        res->iface.free_buffer = free_with_archive;
    }
    return res;
}

// host memory
static ggml_backend_buffer_type_t letter_buffer_type(ggml_backend_dev_t) {
    static ggml_backend_buffer_type buft = [] {
        auto res = *ggml_backend_cpu_buffer_type();
        res.iface.alloc_buffer = alloc_with_archive;
        return res;
    }();
    return &buft;
}

static int n_spare; // of archives: as many as there are devices, which share the memory

static int64_t free_bytes() {
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), &free, &total);

    // ggml takes all memory for free
    std::ifstream file("/proc/meminfo");
    for (std::string name; file >> name; file.ignore(256, '\n')) {
        size_t n_kib;
        if (name == "MemAvailable:" && file >> n_kib) {
            free = std::min(free, n_kib*1024);
        }
    }
    return free/std::max(1, n_spare);
}

static std::unique_ptr<recaller> make(letter & said) {
    const auto p = said.take<archive_params>();
    require(p.n_recall > 0 && p.n_near > 0 && (p.n_bit == 0 || p.n_bit == 4 || p.n_bit == 8));
    for (const int32_t type : { p.type_k, p.type_v }) {
        require(type >= 0 && type < GGML_TYPE_COUNT && (type == GGML_TYPE_F32 || ggml_get_type_traits((ggml_type) type)->from_float_ref));
    }

    std::vector<archive_shape> shapes;
    for (uint32_t n = said.take<uint32_t>(); n > 0; --n) {
        archive_shape s = {};
        each_number(s, [&](auto & number) { said.take(number); });
        s.turns.factors = said.take_list<float>();
        s.turns.scale   = said.take_list<float>();

        static constexpr int32_t n_most = 1 << 16;
        const auto & r = s.turns.rope;
        require(s.n_head > 0 && s.n_head < n_most && s.n_embd_k > 0 && s.n_embd_k < n_most && s.n_embd_v >= 0 && s.n_embd_v < n_most);
        require(s.n_embd_k % ggml_blck_size((ggml_type) p.type_k) == 0 && s.n_embd_v % ggml_blck_size((ggml_type) p.type_v) == 0);
        require(p.n_bit == 0 || s.n_embd_k % 8 == 0);
        require(r.first >= 0 && r.n_dims >= 0 && r.first + r.n_dims <= s.n_embd_k);
        require(s.turns.factors.empty() || (int) s.turns.factors.size() == r.n_dims/2);
        require(s.turns.scale  .empty() || (int) s.turns.scale  .size() == s.n_embd_k);
        require(s.turns.n_map >= 0 && (s.turns.n_map & (s.turns.n_map - 1)) == 0 && (s.turns.n_map == 0 || s.n_embd_k % s.turns.n_map == 0));

        shapes.push_back(std::move(s));
    }
    require(!shapes.empty());

    return std::make_unique<recaller>(p, shapes);
}

// copies a layer's cells; the first layer's call begins, and the last one's ends it
static void put(kept_archive & kept, size_t i, letter & said, const ggml_tensor * node) {
    auto & tokens = kept.own->tokens;

    leaving some;
    some.pos_0 = said.take<int64_t>();
    some.n_max = said.take<int64_t>();
    some.next  = said.take<int64_t>();
    const auto cells = said.take_list<int32_t>();
    some.cells  = cells.data();
    some.n_cell = cells.size();

    const auto & l = tokens[i];
    const auto * k = node->src[1];
    const auto * v = node->src[2];
    require(some.n_max > 0 && some.pos_0 >= 0 && some.pos_0 < archive::most && (tokens.size() == 0 || tokens.end() == some.pos_0));
    require(k && k->buffer && k->ne[0] == l.n_head*l.n_embd_k && ggml_nelements(k) == k->ne[0]*k->ne[1]);
    require(l.n_embd_v == 0 || (v && v->buffer && v->ne[0] == l.n_head*l.n_embd_v && ggml_nelements(v) == v->ne[0]*v->ne[1] && v->ne[1] == k->ne[1]));
    require(std::all_of(cells.begin(), cells.end(), [&](int32_t c) { return c >= 0 && c < k->ne[1]; }));

    if (i == 0) {
        tokens.start(some);
    }
    tokens.put(i, k, l.n_embd_v > 0 ? v : nullptr, some);
    if (i == tokens.n_layer() - 1) {
        tokens.finish(some);
    }
}

// what follows the answer's head
static letter answer(const call & what, kept_archive & kept, letter & said, const ggml_tensor * node) {
    letter res;

    if (what.what == CALL_MAKE) {
        kept.own = make(said);
        return res.put(kept.own->slab_bytes()).put(free_bytes());
    }
    require(kept.own != nullptr);

    auto & own    = *kept.own;
    auto & tokens = own.tokens;

    const size_t i = what.layer;
    require(i < tokens.n_layer());

    switch (what.what) {
        case CALL_RESERVE: {
            leaving some = {};
            some.pos_0  = said.take<int64_t>();
            some.n_max  = said.take<int64_t>();
            some.n_cell = said.take<int32_t>();
            tokens.reserve(some);
            break;
        }
        case CALL_PUT:
            put(kept, i, said, node);
            break;
        case CALL_BASE:
            tokens.set_base(said.take<int64_t>());
            break;
        case CALL_KEEP: {
            const auto n = said.take<int64_t>();
            require(n >= 0);
            tokens.keep(n);
            break;
        }
        case CALL_CLEAR:
            own.clear();
            break;
        case CALL_GET: {
            const auto begin = said.take<int64_t>();
            const auto end   = said.take<int64_t>();
            require(tokens[i].begin() <= begin && begin <= end && end <= tokens[i].end() && end - begin < (int64_t) n_letter);
            std::vector<uint8_t> data((end - begin)*own.token_bytes(i));
            own.get(i, data.data(), begin, end);
            res.put_list(data.data(), data.size());
            break;
        }
        case CALL_EXPECT: {
            const auto begin = said.take<int64_t>();
            const auto end   = said.take<int64_t>();
            require(begin >= 0 && begin <= end && end <= archive::most);
            tokens.expect(begin, end);
            break;
        }
        case CALL_FILL: {
            const auto begin = said.take<int64_t>();
            const auto end   = said.take<int64_t>();
            const auto at    = said.take<int64_t>();
            const auto data  = said.take_list<uint8_t>();
            const int64_t n = data.size()/own.token_bytes(i);
            require(begin >= 0 && begin <= at && at <= end - n && end <= archive::most);
            tokens.expect(begin, end);
            tokens.fill(i, data.data(), at, n, begin, end);
            break;
        }
        case CALL_TABLE: {
            const auto table = said.take_list<int64_t>();
            require(table.size() >= 3 && table.size() % 2 == 1);
            const auto why = tokens.set_table(table);
            res.put_list(why.data(), why.size());
            break;
        }
        case CALL_CHOSEN:
            res.put_list(own.recalled[i].chosen.data(), own.recalled[i].chosen.size());
            break;
        default:
            require(false);
    }

    return res;
}

// answers a call that comes with a letter
static void answer(const call & what, ggml_backend_t backend, ggml_tensor * node) {
    const ggml_tensor * in = node->src[0];

    require(node->buffer && node->buffer->buft == letter_buffer_type(nullptr) && ggml_nbytes(node) == n_letter);
    require(in && in->buffer == node->buffer && ggml_nbytes(in) == n_letter);

    require(what.what == CALL_MAKE || g_kept.count(what.archive));

    letter said((const uint8_t *) in->data, n_letter);

    auto & kept = g_kept[what.archive];
    if (what.what != CALL_PUT || what.layer == 0) {
        kept.status = 0;
    }
    if (what.what == CALL_MAKE) {
        kept.buffer = node->buffer;
        kept.host   = backend;
    }

    letter res;
    if (kept.status == 0) {
        try {
            if (what.version != LLAMA_KVTOOL_ABI) {
                throw std::runtime_error("its kvtool is of another version");
            }
            require(kept.buffer == node->buffer);
            res = answer(what, kept, said, node);
        } catch (const no_room & e) {
            kept.status = LLAMA_KVTOOL_NO_ROOM;
            kept.why    = e.what();
        } catch (const std::exception & e) {
            kept.status = -1;
            kept.why    = e.what();
        }
    }

    letter whole;
    if (kept.status != 0) {
        whole.put(answer_head { kept.status, (uint32_t) kept.why.size() });
        whole.put_bytes(kept.why.data(), kept.why.size());
    } else {
        letter state;
        const auto table = kept.own->table();
        state.put(kept.own->bytes()).put_list(table.data(), table.size());
        whole.put(answer_head { 0, (uint32_t) (state.data.size() + res.data.size()) });
        for (const auto * part : { &state, &res }) {
            whole.put_bytes(part->data.data(), part->data.size());
        }
    }
    memcpy(node->data, whole.data.data(), std::min(whole.data.size(), n_letter));
}

//
// devices
//

using compute_t = ggml_status (*)(ggml_backend_t, ggml_cgraph *);

// how the backends compute that we have changed
static std::map<ggml_backend_t, compute_t> g_compute;

// a tensor in host memory: itself, or a copy
struct host_tensor {
    explicit host_tensor(ggml_tensor * t) : own(t) {
        if (!ggml_backend_buffer_is_host(t->buffer)) {
            memory.resize(ggml_nbytes(t));
            copy = *t;
            copy.data = memory.data();
        }
    }

    ggml_tensor * get() { return memory.empty() ? own : &copy; }

    void read()  { if (!memory.empty()) ggml_backend_tensor_get(own, memory.data(), 0, memory.size()); }
    void write() { if (!memory.empty()) ggml_backend_tensor_set(own, memory.data(), 0, memory.size()); }

private:
    ggml_tensor * own;
    ggml_tensor   copy;

    std::vector<uint8_t> memory;
};

// recalls tokens on the host, wherever the tensors lie
static void recall(const call & what, ggml_tensor * node) {
    const auto it = g_kept.find(what.archive);
    require(it != g_kept.end() && it->second.own && (size_t) what.layer < it->second.own->tokens.n_layer());

    auto & own = *it->second.own;
    auto & l   = own.recalled[what.layer];

    const auto & tokens = own.tokens[what.layer];

    ggml_tensor ** src = node->src;
    require(node->buffer && (node->type == GGML_TYPE_F16 || node->type == GGML_TYPE_F32));
    require(ggml_nelements(node) == (int64_t) own.params.n_recall*tokens.n_head*(tokens.n_embd_k + tokens.n_embd_v));
    require(std::all_of(src, src + 4, [](const ggml_tensor * t) { return t && t->buffer; }));
    require(src[0]->type == GGML_TYPE_F32 && src[0]->ne[0] == tokens.n_embd_k && src[0]->ne[1] % tokens.n_head == 0 && src[0]->ne[3] == 1);
    require(src[1]->type == GGML_TYPE_I32);
    for (int i = 2; i < 4; ++i) {
        require(src[i]->type == GGML_TYPE_F32 && ggml_is_contiguous(src[i]) && ggml_nelements(src[i]) == src[0]->ne[1]*src[0]->ne[2]);
    }
    l.logits.scale = what.scale;

    std::vector<host_tensor> args;
    for (int i = 0; i < 4; ++i) {
        args.emplace_back(src[i]);
    }
    host_tensor out(node);

    ggml_tensor here = *out.get();

    const ggml_custom_op_params params = { recall_into, GGML_N_TASKS_MAX, &l };
    memcpy(here.op_params, &params, sizeof(params));
    for (int i = 0; i < 4; ++i) {
        args[i].read();
        here.src[i] = args[i].get();
    }

    ggml_tensor * nodes[] = { &here };

    ggml_cgraph gf = {};
    gf.n_nodes = 1;
    gf.nodes   = nodes;
    require(g_compute.at(it->second.host)(it->second.host, &gf) == GGML_STATUS_SUCCESS);

    out.write();
}

// computes a graph that may have calls among its nodes
static ggml_status compute(ggml_backend_t backend, ggml_cgraph * gf) {
    const auto own = g_compute.at(backend);

    int first = 0; // of the nodes that have not been computed

    const auto compute_to = [&](int end) {
        if (first == 0 && end == gf->n_nodes) {
            return own(backend, gf);
        }
        ggml_cgraph view = *gf;
        view.nodes  += first;
        view.n_nodes = end - first;
        view.n_leafs = 0;
        view.uid     = 0;
        return view.n_nodes > 0 ? own(backend, &view) : GGML_STATUS_SUCCESS;
    };

    for (int i = 0; i < gf->n_nodes; ++i) {
        ggml_tensor * node = gf->nodes[i];
        if (!node || node->op != GGML_OP_CUSTOM) {
            continue;
        }
        const auto status = compute_to(i);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        ggml_backend_synchronize(backend);
        first = i + 1;

        const auto what = call::read(node);
        try {
            require(what.magic == call().magic);
            if (what.what == CALL_RECALL) {
                recall(what, node);
            } else {
                answer(what, backend, node);
            }
        } catch (const std::exception & e) {
            LLAMA_LOG_ERROR("%s: %s\n", __func__, e.what());
            return GGML_STATUS_FAILED;
        }
    }

    return compute_to(gf->n_nodes);
}

static void with_calls(ggml_backend_t backend) {
    g_compute[backend] = backend->iface.graph_compute;
    backend->iface.graph_compute = compute;
}

} // namespace kvtool

using namespace kvtool;

ggml_backend_dev_t llama_kvtool_recalling(ggml_backend_dev_t dev) {
    if (!dev) {
        fail("dev must not be null");
        return nullptr;
    }
    return changed_device(dev, with_calls);
}

ggml_backend_dev_t llama_kvtool_archive_spare(void) {
    ggml_backend_dev_t res = changed_device(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), with_calls);
    res->iface.get_memory      = get_spare_memory;
    res->iface.get_buffer_type = letter_buffer_type;
    ++n_spare;

    return res;
}
