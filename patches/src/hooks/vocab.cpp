// Attributes and bytes of all tokens of a vocabulary. llama.cpp returns them for one token at a time.

#include "error.h"
#include "llama-kvtool.h"

#include <algorithm>
#include <cstdlib>

using namespace kvtool;

int32_t llama_kvtool_token_attrs(const llama_vocab * vocab, int32_t * attrs) {
    if (!vocab || !attrs) {
        return fail("vocab and attrs must not be null");
    }
    const int32_t n_token = llama_vocab_n_tokens(vocab);
    for (llama_token token = 0; token < n_token; ++token) {
        attrs[token] = llama_vocab_get_attr(vocab, token) | (llama_vocab_is_eog(vocab, token) ? LLAMA_KVTOOL_TOKEN_ENDS : 0);
    }
    return 0;
}

int64_t llama_kvtool_pieces(const llama_vocab * vocab, char * out, int64_t n_out, int64_t * ends) {
    if (!vocab || !ends || (n_out > 0 && !out)) {
        return fail("vocab and ends must not be null, nor out where n_out is more than 0");
    }
    const int32_t n_token = llama_vocab_n_tokens(vocab);

    int64_t n_bytes = 0;
    for (llama_token token = 0; token < n_token; ++token) {
        const int32_t n_left = (int32_t) std::clamp<int64_t>(n_out - n_bytes, 0, INT32_MAX);
        // if a token does not fit, llama.cpp writes nothing and returns its negative size
        const int32_t n_piece = llama_token_to_piece(vocab, token, n_left > 0 ? out + n_bytes : out, n_left, 0, true);
        n_bytes += std::abs(n_piece);
        ends[token] = n_bytes;
    }
    return n_bytes;
}
