// What is asked of a worker: an operation in a graph, with a letter to it and one back. ggml's RPC carries no others of ours.

#pragma once

#include "archive.h"
#include "llama-kvtool.h"

#include "ggml.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace kvtool {

enum call_kind {
    CALL_RECALL, // recall_into, without letters
    CALL_MAKE,
    CALL_RESERVE,
    CALL_PUT,    // of one layer: also K and V; the last one answers
    CALL_BASE,
    CALL_KEEP,
    CALL_CLEAR,
    CALL_GET,
    CALL_EXPECT,
    CALL_FILL,
    CALL_TABLE,
    CALL_CHOSEN,
};

// in an operation's parameters, behind ggml's own
struct call {
    uint32_t magic   = 0x6b76746c;
    uint32_t version = LLAMA_KVTOOL_ABI;
    uint64_t archive; // its number
    int32_t  what;
    int32_t  layer; // of the archive
    float    scale; // of recall

    static constexpr size_t offset = 24;

    void write(ggml_tensor * t) const { memcpy((char *) t->op_params + offset, this, sizeof(*this)); }

    static call read(const ggml_tensor * t) {
        call res;
        memcpy(&res, (const char *) t->op_params + offset, sizeof(res));
        return res;
    }
};

static_assert(call::offset + sizeof(call) <= GGML_MAX_OP_PARAMS, "a call has no room");

// how an answer begins
struct answer_head {
    int32_t  status; // 0, or as the C API's calls have it: then a text follows
    uint32_t n_bytes;
};

// room for a letter
constexpr size_t n_letter = 1 << 20;

// values one after the other
class letter {
public:
    letter() = default;
    letter(const uint8_t * begin, size_t n) : data(begin, begin + n) {}

    template <typename T> letter & put(const T & value) { return put_bytes(&value, sizeof(T)); }

    template <typename T> letter & put_list(const T * values, size_t n) {
        put((uint32_t) n);
        return put_bytes(values, n*sizeof(T));
    }

    letter & put_bytes(const void * from, size_t n) {
        data.resize(data.size() + n);
        if (n > 0) {
            memcpy(data.data() + data.size() - n, from, n);
        }
        return *this;
    }

    template <typename T> void take(T & value) { memcpy(&value, next(sizeof(T)), sizeof(T)); }

    template <typename T> T take() {
        T res;
        take(res);
        return res;
    }

    template <typename T> std::vector<T> take_list() {
        const size_t n = take<uint32_t>();
        const auto * bytes = next(n*sizeof(T));
        std::vector<T> res(n);
        if (n > 0) {
            memcpy(res.data(), bytes, n*sizeof(T));
        }
        return res;
    }

    std::vector<uint8_t> data;

private:
    size_t at = 0;

    const uint8_t * next(size_t n) {
        if (n > data.size() - at) {
            throw std::runtime_error("a letter is too short");
        }
        at += n;
        return data.data() + at - n;
    }
};

// f(number) for each number that a layer's shape has beside its lists
template <typename F> void each_number(archive_shape & s, F && f) {
    auto & r = s.turns.rope;

    f(s.n_head);
    f(s.n_embd_k);
    f(s.n_embd_v);
    f(s.turns.n_map);
    f(r.n_dims);
    f(r.first);
    f(r.mode);
    f(r.n_ctx_orig);
    f(r.freq_base);
    f(r.freq_scale);
    f(r.ext_factor);
    f(r.beta_fast);
    f(r.beta_slow);
    f(r.sections);
}

} // namespace kvtool
