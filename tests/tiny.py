"""Small GGUF models for the tests: random ones, and F32 copies of quantized files."""

from __future__ import annotations

import itertools
import re
import string
from pathlib import Path

import gguf
import numpy as np

ROPE_ARCH = {"norm": "llama", "neox": "qwen2"}
"""Two architectures with the same tensors.

The element pairs of RoPE are (2i, 2i+1) in "norm", and (i, i + d/2) in "neox".
"""

N_SPECIAL = 3
"""Number of special tokens. The vocabulary begins with <unk>, <s> and </s>. The 256 bytes follow in order."""

Q_STD = K_STD = 1.8
O_STD = 2.0
LOGIT_STD = 2.0

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}[e]{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Reader(gguf.GGUFReader):
    """gguf's reader, made several times as fast: it calls no methods for each token of a vocabulary."""

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, n = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, data, begin = gguf.GGUFValueType(kind[0]), self.data.view(np.ndarray), orig_offs + 12
        if item == gguf.GGUFValueType.STRING:
            parts, end = [], begin
            for _ in range(n[0]):
                first = end + 8
                end = first + int.from_bytes(data[end:first].data, "little")
                parts.append(data[first:end])
        else:
            values = self._get(begin, self.gguf_scalar_to_np[item], n[0]).view(np.ndarray)
            parts, end = [values[i : i + 1] for i in range(n[0])], begin + values.nbytes
        types = [gguf.GGUFValueType.ARRAY, *[item][: len(parts)]]
        return end - orig_offs, [kind, n, *parts], list(range(2, 2 + len(parts))), types


def write_llama(
    path, *, n_layer=2, n_head=4, n_head_kv=2, head_dim=32, n_ff=64, n_vocab=320, n_ctx_train=1024,
    rope="norm", tied=False, letters=False, chat_template=None, yarn=None, space_prefix=False, add_bos=False,
    arch=None, seed=0, key_bias=0.0, control=(), suppressed=(),
):  # fmt: skip
    """Write a random F32 model whose attention is peaked, so that an eviction changes the logits.

    Without `space_prefix` and `add_bos`, tokenizing adds nothing to a text, and detokenizing its tokens gives
    the same text. The output rows of special tokens are zero, so greedy text rarely ends.
    letters: also zero the output rows of byte tokens, so that the model writes letters and blanks.
    n_head_kv: an int, or with arch="deci" a list with one number per layer. (Deci is otherwise like llama.)
    key_bias: standard deviation of the biases that are added to keys; 0 to add none.
    control: further control tokens.
    suppressed: tokens that the model must never write.
    """
    sizes = (n_layer, n_head, n_head_kv, head_dim, n_ff, n_vocab)
    writer = start(path, arch or ROPE_ARCH[rope], n_ctx_train, sizes, space_prefix, add_bos, control)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head_dim)
    if yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn)
        writer.add_rope_scaling_orig_ctx_len(int(n_ctx_train / yarn))
    if chat_template:
        writer.add_chat_template(chat_template)
    if suppressed:
        writer.add_array("tokenizer.ggml.suppress_tokens", suppressed)
    n_silent = N_SPECIAL + 256 if letters else N_SPECIAL
    _add_tensors(writer, sizes, seed, tied=tied, n_silent=n_silent, key_bias=key_bias)


def write_vocab(path, *, control=(), words=(), space_prefix=False, add_bos=False):
    """Write a GGUF with only the tokenizer of write_llama, plus control tokens and user-defined `words`."""
    n_vocab = N_SPECIAL + 257 + 52 * 52 + len(control) + len(words)
    writer = _sized(path, "llama", 1024, (1, 1, 1, 32, 64, n_vocab))
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer, n_vocab, space_prefix, add_bos, control, words)
    Tensors(writer, 32, 0).write()


def write_gemma3(
    path, *, n_layer=4, n_head=4, n_head_kv=2, head_dim=32, n_ff=64, n_vocab=320, n_ctx_train=1024, window=16,
    pattern=2, chat_template=None, seed=0,
):  # fmt: skip
    """Write a model like write_llama, but of architecture gemma3.

    Every `pattern`-th layer attends to the whole stream. The other layers have a sliding window.
    """
    sizes = (n_layer, n_head, n_head_kv, head_dim, n_ff, n_vocab)
    writer = start(path, "gemma3", n_ctx_train, sizes)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1000000.0)
    writer.add_sliding_window(window)
    writer.add_sliding_window_pattern(pattern)
    if chat_template:
        writer.add_chat_template(chat_template)
    _add_tensors(writer, sizes, seed, gemma=True)


def write_like(src, path, *, chat_template=None, n_vocab=8192):
    """Write a random F32 llama with the tokenizer, chat template and trained context of another model.

    The new model writes words of ASCII letters. It also writes quotes, braces and digits, often enough to
    complete JSON. Tests use it if they need the tokens of a model, but not its weights.

    n_vocab: number of tokens: the control tokens, the bytes and the first merges. None for all tokens.
    Loading a model, sampling and grammars take time in proportion to this number.
    """
    reader = Reader(src)
    arch = reader.fields["general.architecture"].contents()
    all_tokens, kinds, merges = (
        reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")
    )
    tokens, n_first = all_tokens[:n_vocab], len(all_tokens) - len(merges)
    # each merge makes one token, in the order of the tokens
    merges = merges[: len(tokens) - n_first]
    assert [merge.replace(" ", "") for merge in merges] == tokens[n_first:]
    n_ctx_train = reader.fields[f"{arch}.context_length"].contents()
    n_layer, n_head, n_head_kv, head_dim, n_ff = 2, 2, 1, 32, 64
    sizes = (n_layer, n_head, n_head_kv, head_dim, n_ff, len(tokens))
    writer = _sized(path, "llama", n_ctx_train, sizes)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(head_dim)
    cut = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")]
    _copy_metadata(reader, writer, "tokenizer.chat_template", *cut, only="tokenizer.")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds[:n_vocab])
    writer.add_token_merges(merges)
    writer.add_chat_template(chat_template or reader.fields["tokenizer.chat_template"].contents())
    # byte-level BPE tokens write a blank as \u0120
    words = [bool(re.fullmatch("\u0120[A-Za-z]+", token)) for token in tokens]
    scale = np.array(words, np.float32)
    for token in '"}123':
        scale[tokens.index(token)] = 4
    _add_tensors(writer, sizes, 0, scale=scale)


def start(path, arch, n_ctx_train, sizes, space_prefix=False, add_bos=False, control=()):
    """Return a GGUFWriter with the tokenizer and the header fields that all architectures here have.

    sizes: n_layer, n_head, n_head_kv, head_dim, n_ff, n_vocab. n_head and n_head_kv may be a list with
    one number per layer. The embedding size is head_dim times the smallest n_head.
    """
    _, n_head, n_head_kv, *_, n_vocab = sizes
    if any(n_kv and n % n_kv for n, n_kv in np.broadcast(n_head, n_head_kv)):
        raise ValueError(f"n_head must be a multiple of n_head_kv ({n_head_kv}), got {n_head}")
    writer = _sized(path, arch, n_ctx_train, sizes)
    _add_tokenizer(writer, n_vocab, space_prefix, add_bos, control)
    return writer


def _sized(path, arch, n_ctx_train, sizes):
    n_layer, n_head, n_head_kv, head_dim, n_ff, n_vocab = sizes
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(n_layer)
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(np.min(n_head).item() * head_dim)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_vocab_size(n_vocab)
    return writer


def _write(writer):
    """Write all that was added to a GGUFWriter to its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Tensors:
    """Random F32 tensors for a writer. All calls share one generator, so their order matters."""

    def __init__(self, writer, n_embd, seed):
        self.writer = writer
        self.n_embd = n_embd
        self.rng = np.random.default_rng(seed)

    def matrix(self, n_out, n_in, std=1.0, *, of=()):
        """Return a random matrix [*of, n_out, n_in]. If its input has RMS 1, its output has RMS std."""
        return (self.rng.standard_normal((*of, n_out, n_in)) * (std / np.sqrt(n_in))).astype(np.float32)

    def norm(self, n=None, size=1.0):
        return (self.rng.uniform(0.8, 1.2, n or self.n_embd) * size).astype(np.float32)

    def bias(self, *shape, std=0.5):
        return (self.rng.standard_normal(shape) * std).astype(np.float32)

    def add_ends(self, n_vocab, *, tied=False, n_silent=N_SPECIAL, output_norm="output_norm", scale=None):
        """Write the tensors before and after the layers.

        n_silent: the output rows of the first n_silent tokens are zero.
        scale: factor of each token's logits, or None.
        """
        embd = self.rng.standard_normal((n_vocab, self.n_embd)).astype(np.float32)
        embd[:N_SPECIAL] *= not tied
        # if tied, the output rows are the embeddings, whose numbers are large, so the last norm scales the
        # logits down to LOGIT_STD
        size = np.float32(LOGIT_STD / np.sqrt(self.n_embd) if tied else 1)
        self.writer.add_tensor(f"{output_norm}.weight", self.norm() * size)
        self.writer.add_tensor("token_embd.weight", embd)
        if not tied:
            output = self.matrix(n_vocab, self.n_embd, LOGIT_STD)
            output[:n_silent] = 0
            if scale is not None:
                output *= scale[:, None]
            self.writer.add_tensor("output.weight", output)

    def attention(self, n_head, n_head_kv, head_dim):
        """Return the attention tensors of a layer, by name."""
        return {
            "attn_norm": self.norm(),
            "attn_q": self.matrix(n_head * head_dim, self.n_embd, Q_STD),
            "attn_k": self.matrix(n_head_kv * head_dim, self.n_embd, K_STD),
            "attn_v": self.matrix(n_head_kv * head_dim, self.n_embd),
            "attn_output": self.matrix(self.n_embd, n_head * head_dim, O_STD),
        }

    def qk_norms(self, head_dim, size=1.0):
        """Return norms of queries and keys, which make both `size` times as large as without norms."""
        return {
            "attn_q_norm": self.norm(head_dim, Q_STD * size),
            "attn_k_norm": self.norm(head_dim, K_STD * size),
        }

    def feed_forward(self, n_ff):
        return {
            "ffn_norm": self.norm(),
            "ffn_gate": self.matrix(n_ff, self.n_embd),
            "ffn_up": self.matrix(n_ff, self.n_embd),
            "ffn_down": self.matrix(self.n_embd, n_ff),
        }

    def add_layer(self, i, tensors):
        """Add these tensors by name. The ending .weight is added to names that do not end in .bias."""
        for name, tensor in tensors.items():
            ending = "" if name.endswith(".bias") else ".weight"
            self.writer.add_tensor(f"blk.{i}.{name}{ending}", tensor)

    def write(self):
        _write(self.writer)


def _add_tensors(
    writer, sizes, seed, *, tied=False, gemma=False, n_silent=N_SPECIAL, scale=None, key_bias=0.0
):
    n_layer, n_head, n_head_kv, head_dim, n_ff, n_vocab = sizes
    n_embd = n_head * head_dim
    tensors = Tensors(writer, n_embd, seed)
    tensors.add_ends(n_vocab, tied=tied, n_silent=n_silent, scale=scale)
    for i, n in enumerate(np.broadcast_to(n_head_kv, n_layer).tolist()):
        tensors.add_layer(i, tensors.attention(n_head, n, head_dim) | tensors.feed_forward(n_ff))
        if key_bias:
            tensors.add_layer(i, {"attn_k.bias": tensors.bias(n * head_dim, std=key_bias)})
        if gemma:
            # post_ffw_norm is small, to limit the errors of llama.cpp's GELU, which is an f16 table
            norms = tensors.qk_norms(head_dim)
            norms["post_attention_norm"] = tensors.norm(size=n_embd**0.5)
            norms["post_ffw_norm"] = tensors.norm(size=0.1)
            tensors.add_layer(i, norms)
    tensors.write()


def _add_tokenizer(writer, n_vocab, space_prefix, add_bos, control=(), words=()):
    """Add a SentencePiece tokenizer: special tokens, bytes, a space, letter pairs, control tokens, words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    if n_vocab < len(tokens):
        raise ValueError(f"n_vocab must be at least {len(tokens)}, got {n_vocab}")
    kinds = [gguf.TokenType.UNKNOWN] + 2 * [gguf.TokenType.CONTROL] + 256 * [gguf.TokenType.BYTE]
    pairs = map("".join, itertools.product(string.ascii_lowercase + string.ascii_uppercase, repeat=2))
    more = [*control, *words]
    tokens += itertools.islice(pairs, n_vocab - len(more) - len(tokens))
    tokens += more
    if len(tokens) < n_vocab:
        raise ValueError(f"n_vocab must be at most {len(tokens)}, got {n_vocab}")
    kinds += [gguf.TokenType.NORMAL] * (n_vocab - len(more) - len(kinds))
    kinds += [gguf.TokenType.CONTROL] * len(control) + [gguf.TokenType.USER_DEFINED] * len(words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0 if kind != gguf.TokenType.NORMAL else -1.0 for kind in kinds])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(space_prefix)


def dequantize(src, dst):
    """Rewrite a GGUF with every tensor in F32. The metadata stays, except for the file type."""
    reader = Reader(src)
    writer = gguf.GGUFWriter(dst, reader.fields["general.architecture"].contents())
    _copy_metadata(reader, writer, "general.file_type")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        # the reader's shapes are in ggml's order of axes, but the writer expects NumPy's order
        shape = tensor.shape[::-1].tolist()
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * tensor.n_elements)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # one tensor at a time, so that the model need not fit into memory
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(np.ascontiguousarray(data, np.float32))
    writer.close()


def _copy_metadata(reader, writer, *but, only=""):
    for key, field in reader.fields.items():
        # the writer adds these fields itself, or the caller does
        if key.startswith("GGUF.") or not key.startswith(only) or key in ("general.architecture", *but):
            continue
        if key == "general.alignment":
            writer.add_custom_alignment(field.contents())
        elif field.types[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, field.contents(), field.types[0])
        elif len(field.data):  # the writer cannot write an empty array
            writer.add_key_value(key, field.contents(), gguf.GGUFValueType.ARRAY, field.types[-1])


def write_lora(path, model, *, arch=None, seed=0):
    """Write a random LoRA adapter for all matrices of a model's layers.

    The adapter changes the model's logits.
    arch: architecture in the adapter's header; defaults to the model's architecture.
    """
    rank, reader, rng = 4, Reader(model), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch or reader.fields["general.architecture"].contents())
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 8.0)
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            n_in, n_out = tensor.shape.tolist()
            a, b = rng.standard_normal((rank, n_in)), rng.standard_normal((n_out, rank))
            writer.add_tensor(f"{tensor.name}.lora_a", (a / n_in**0.5).astype(np.float32))
            writer.add_tensor(f"{tensor.name}.lora_b", (b * 0.1).astype(np.float32))
    _write(writer)


def merge(model, path, adapters):
    """Write an F32 model with the weights of adapters added. adapters: pairs (path, scale)."""
    reader = Reader(model)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    _copy_metadata(reader, writer)
    weights = {tensor.name: np.array(tensor.data, np.float32) for tensor in reader.tensors}
    for adapter, scale in adapters:
        lora = Reader(adapter)
        alpha = lora.fields[gguf.Keys.Adapter.LORA_ALPHA].contents()
        parts = {tensor.name: np.array(tensor.data, np.float64) for tensor in lora.tensors}
        for name in [name.removesuffix(".lora_a") for name in parts if name.endswith(".lora_a")]:
            a, b = parts[f"{name}.lora_a"], parts[f"{name}.lora_b"]
            weights[name] += (scale * alpha / len(a) * (b @ a)).astype(np.float32)
    for name, values in weights.items():
        writer.add_tensor(name, values)
    _write(writer)


def split(src, prefix, n):
    """Write a model as n files PREFIX-00001-of-0000N.gguf, as llama-gguf-split does; return their paths."""
    reader = Reader(src)
    paths = [f"{prefix}-{number:05}-of-{n:05}.gguf" for number in range(1, n + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
        if number:
            writer.kv_data[0].clear()
        else:
            _copy_metadata(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", n)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        # a part takes every n-th tensor: llama.cpp accepts any division into parts
        for tensor in reader.tensors[number::n]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        _write(writer)
    return [Path(path) for path in paths]
