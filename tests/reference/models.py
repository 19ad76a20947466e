"""Models by definition, one small class per architecture, without attention over the cache.

Attention is in transformer.py: a Stream holds the rows, and its method `attend` reads them.
"""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np

from tests.tiny import Reader

ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


class Llama:
    """F32 weights and settings from a GGUF of llama, qwen2 or gemma3; base class of the other architectures.

    slides: for each layer, True if it has a sliding window.
    owner: for each layer, the layer whose rows it reads; None for a layer without rows.
    freq: for each layer f64[head_dim / 2], the angle by which a key's pairs are rotated per position.
    scale: factor of attention logits.
    slopes: f64[n_head], decrease of logits per position of distance; None without ALiBi.
    head_dim, value_dim: sizes of a key and of a value in a row.
    """

    archs = ("llama", "qwen2", "gemma3")
    pairs_are_halves = True
    output_norm_name = "output_norm"
    slopes = None
    has_values = True

    def __init__(self, path):
        reader = Reader(path)
        arch = reader.fields["general.architecture"].contents()

        def number(key, default=None):
            field = reader.fields.get(f"{arch}.{key}")
            return default if field is None else field.contents()

        if arch not in self.archs:
            raise ValueError(f"architecture must be one of {', '.join(self.archs)}, got {arch}")
        if number("rope.scaling.type", "none") != "none":
            raise ValueError("RoPE scaling is not known here")
        self.is_gemma = arch.startswith("gemma")
        if arch == "llama":
            self.pairs_are_halves = False
        self.n_layer = number("block_count")
        self.n_head = number("attention.head_count")
        self.n_head_kv = np.max(number("attention.head_count_kv", self.n_head)).item()
        self.n_ctx_train = number("context_length")
        self.eps = number("attention.layer_norm_rms_epsilon")
        self.head_dim = number("attention.key_length", number("embedding_length") // self.n_head)
        self.value_dim = number("attention.value_length", self.head_dim)
        self.scale = 1 / np.sqrt(self.head_dim)
        self.window = number("attention.sliding_window", 0)
        pattern = number("attention.sliding_window_pattern", 6)
        if isinstance(pattern, int):
            pattern = [bool(self.window) and i % pattern < pattern - 1 for i in range(self.n_layer)]
        self.slides = pattern
        self.owner = list(range(self.n_layer))
        weights = _weights(reader)
        self.freq = self.frequencies(number, weights)
        self._phase = [np.empty((0, self.head_dim // 2), np.complex128)] * self.n_layer
        self.configure(number)

        self.embd = weights.pop("token_embd")
        self.output_norm = weights.pop(self.output_norm_name)
        self.output = weights.pop("output", self.embd)
        self.layers = [self._take(weights, i) for i in range(self.n_layer)]
        if weights:
            raise ValueError(f"tensors not known here: {', '.join(weights)}")

    # methods that architectures override

    def configure(self, number):
        """Set the architecture's attributes. number(key, default) reads the file's metadata."""

    def frequencies(self, number, weights):
        """Return the attribute `freq`. If it is computed from tensors, remove these from `weights`."""
        if number("rope.dimension_count", self.head_dim) != self.head_dim:
            raise ValueError("RoPE over a part of the head is not known here")
        exponent = -np.arange(0, self.head_dim, 2) / self.head_dim
        base = number("rope.freq_base", 10000.0)
        # sliding layers may have their own RoPE base
        base_swa = number("rope.freq_base_swa", 10000.0 if self.is_gemma else base)
        return [(base_swa if slides else base) ** exponent for slides in self.slides]

    def names(self, i):
        """Names of a layer's tensors."""
        norms = (
            ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm") if self.is_gemma else ()
        )
        return ATTENTION + FEED_FORWARD + norms

    def mix(self, i, h, stream):
        """Mix tokens by attention or convolution. Return f64[n_tokens, n_embd] for the normed input h."""
        layer = self.layers[i]

        def heads(name, n_head):
            """f64[n_head, n_tokens, head_dim]"""
            x = linear(layer, name, h).reshape(len(h), n_head, self.head_dim).swapaxes(0, 1)
            return self.norm(x, layer[f"{name}_norm"]) if f"{name}_norm" in layer else x

        new = ()
        if self.owner[i] == i:
            new = self.pairs(heads("attn_k", self.n_head_kv)), self.value(heads("attn_v", self.n_head_kv))
        out = stream.attend(i, self.pairs(heads("attn_q", self.n_head)), *new)
        return linear(layer, "attn_output", _side_by_side(out))

    def value(self, x):
        """Transform a value before it is stored in a row."""
        return x

    def feed_forward(self, layer, x):
        h = self.norm(x, layer["ffn_norm"])
        gate, up = linear(layer, "ffn_gate", h), linear(layer, "ffn_up", h)
        if not self.is_gemma:
            return linear(layer, "ffn_down", gate * _sigmoid(gate) * up)
        out = linear(layer, "ffn_down", _gelu(gate).astype(np.float16) * up)
        return self.norm(out, layer["post_ffw_norm"])

    # methods that most architectures share

    def embed(self, tokens, rot):
        """Return the embeddings f64[n_tokens, n_embd]. rot i64[n_tokens]: positions of the tokens."""
        x = self.embd[np.asarray(tokens)].astype(np.float64)
        return x * np.sqrt(x.shape[1]) if self.is_gemma else x

    def block(self, i, x, stream):
        """Return the output f64[n_tokens, n_embd] of a layer for an input x of the same shape."""
        layer = self.layers[i]
        h = self.mix(i, self.norm(x, layer["attn_norm"]), stream)
        x = x + (self.norm(h, layer["post_attention_norm"]) if self.is_gemma else h)
        return x + self.feed_forward(layer, x)

    def logits(self, x):
        return _product(self.norm(x, self.output_norm), self.output)

    def norm(self, x, weight=1.0):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight

    def pairs(self, x):
        """Return x f64[..., head_dim] as c128[..., head_dim / 2], so that a rotation is a product."""
        half = x.shape[-1] // 2
        re, im = (x[..., :half], x[..., half:]) if self.pairs_are_halves else (x[..., 0::2], x[..., 1::2])
        return re + 1j * im

    def rotate(self, pairs, rot, i):
        """Rotate pairs c128[..., n, head_dim / 2] by positions rot i64[n]: f64[..., n, head_dim].

        i: the layer. The dimensions of the result have the order of the pairs, which may differ from the
        model's order. Only dot products of two such vectors are used, and these do not depend on the order.
        """
        return self.scaled((pairs * self.phases(rot, i)).view(np.float64), i)

    def phases(self, rot, i):
        """Return the factors c128[n, head_dim / 2] that rotate pairs of layer i by positions rot i64[n]."""
        most = np.abs(rot).max(initial=-1)
        if most >= len(self._phase[i]):
            self._phase[i] = np.exp(1j * np.outer(np.arange(2 * most + 2), self.freq[i]))
        phases = self._phase[i][np.abs(rot)]
        return np.where(rot[:, None] < 0, phases.conj(), phases) if rot.min(initial=0) < 0 else phases

    def scaled(self, keys, i):
        """Scale rotated keys f64[..., head_dim], whose elements are in the order of RoPE's pairs."""
        return keys

    def rotate_query(self, pairs, rot, i):
        """Rotate queries like keys."""
        return self.rotate(pairs, rot, i)

    def _take(self, weights, i):
        """Remove a layer's tensors from `weights` and return them by name. A bias has the name NAME.bias."""
        layer = {name: weights.pop(f"blk.{i}.{name}") for name in self.names(i)}
        biases = [f"{name}.bias" for name in layer if f"blk.{i}.{name}.bias" in weights]
        return layer | {name: weights.pop(f"blk.{i}.{name}") for name in biases}


class SmolLM3(Llama):
    """Every fourth layer has no positions (NoPE)."""

    archs = ("smollm3",)
    pairs_are_halves = False

    def frequencies(self, number, weights):
        return [freq * ((i + 1) % 4 > 0) for i, freq in enumerate(super().frequencies(number, weights))]


class Maincoder(Llama):
    """The norm weights of queries and keys are applied after the rotation."""

    archs = ("maincoder",)
    pairs_are_halves = False

    def names(self, i):
        return (*super().names(i), "attn_q_norm", "attn_k_norm")

    def mix(self, i, h, stream):
        layer = self.layers[i]

        def heads(name, n_head):
            return linear(layer, name, h).reshape(len(h), n_head, self.head_dim).swapaxes(0, 1)

        query_and_key = [
            self.pairs(self.norm(heads(*each)))
            for each in (("attn_q", self.n_head), ("attn_k", self.n_head_kv))
        ]
        out = stream.attend(i, *query_and_key, heads("attn_v", self.n_head_kv))
        return linear(layer, "attn_output", _side_by_side(out))

    def scaled(self, keys, i):
        return keys * self.layers[i]["attn_k_norm"].astype(np.float64)

    def rotate_query(self, pairs, rot, i):
        layer = self.layers[i]
        return super().rotate(pairs, rot, i) / layer["attn_k_norm"] * layer["attn_q_norm"]


class Refact(Llama):
    """Keys are not rotated. Attention decreases with distance (ALiBi), in each head at a different rate."""

    archs = ("refact",)

    def configure(self, number):
        # this formula holds if the number of heads is a power of 2
        self.slopes = 2.0 ** (-8 / self.n_head * np.arange(1, self.n_head + 1))

    def frequencies(self, number, weights):
        return [0 * freq for freq in super().frequencies(number, weights)]


class GPT2(Llama):
    """A learned vector for each position is added to the token's embedding. Keys are not rotated."""

    archs = ("gpt2",)

    def __init__(self, path):
        self.parts = {}
        super().__init__(path)

    def configure(self, number):
        self.eps = number("attention.layer_norm_epsilon")

    def frequencies(self, number, weights):
        self.parts = {name: weights.pop(name) for name in ("position_embd", "output_norm.bias")}
        return [0 * freq for freq in super().frequencies(number, weights)]

    def names(self, i):
        return "attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"

    def embed(self, tokens, rot):
        return super().embed(tokens, rot) + self.parts["position_embd"][rot]

    def block(self, i, x, stream):
        layer = self.layers[i]
        h = linear(layer, "attn_qkv", self._norm(layer, "attn_norm", x))
        q, k, v = h.reshape(len(h), 3, self.n_head, self.head_dim).transpose(1, 2, 0, 3)
        x = x + linear(layer, "attn_output", _side_by_side(stream.attend(i, *map(self.pairs, (q, k)), v)))
        up = linear(layer, "ffn_up", self._norm(layer, "ffn_norm", x))
        return x + linear(layer, "ffn_down", _gelu(up).astype(np.float16).astype(np.float64))

    def logits(self, x):
        return _product(
            self._norm({"": self.output_norm, ".bias": self.parts["output_norm.bias"]}, "", x), self.output
        )

    def _norm(self, layer, name, x):
        x = x - x.mean(axis=-1, keepdims=True)
        return self.norm(x, layer[name]) + layer[f"{name}.bias"]


class Qwen2VL(Llama):
    """M-RoPE: a token has four positions, and each pair is rotated by one of them. Text has (p, p, p, 0)."""

    archs = ("qwen2vl",)

    def frequencies(self, number, weights):
        sections = number("rope.dimension_sections")
        pair = np.arange(self.head_dim // 2) % sum(sections)
        return [freq * (pair < sum(sections[:3])) for freq in super().frequencies(number, weights)]


class GptOss(Llama):
    """Each head has a sink: an additional logit in the softmax, without a value. Tokens use all experts."""

    archs = ("gpt-oss",)
    limit = 7.0

    def configure(self, number):
        pattern = number("attention.sliding_window_pattern", 2)
        self.slides = [i % pattern < pattern - 1 for i in range(self.n_layer)]
        self.n_expert = number("expert_count")
        if number("expert_used_count") != self.n_expert:
            raise ValueError("a choice among experts is not known here")

    def names(self, i):
        experts = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
        return (*ATTENTION, "attn_sinks", "post_attention_norm", *experts)

    def feed_forward(self, layer, x):
        h = self.norm(x, layer["post_attention_norm"])
        share = np.exp(linear(layer, "ffn_gate_inp", h))
        share /= share.sum(axis=-1, keepdims=True)

        def expert(i):
            def part(name, x):
                return _product(x, layer[name][i]) + layer[f"{name}.bias"][i]

            gate = np.minimum(part("ffn_gate_exps", h), self.limit)
            up = np.clip(part("ffn_up_exps", h), -self.limit, self.limit)
            return part("ffn_down_exps", gate * _sigmoid(1.702 * gate) * (up + 1))

        return sum(share[:, i, None] * expert(i) for i in range(self.n_expert))


class LFM2(Llama):
    """Layers without KV heads convolve each token with the few tokens before it."""

    archs = ("lfm2",)
    output_norm_name = "token_embd_norm"

    def configure(self, number):
        n_head_kv = number("attention.head_count_kv")
        self.owner = [i if n else None for i, n in enumerate(n_head_kv)]
        self.n_conv = number("shortconv.l_cache")

    def names(self, i):
        if self.owner[i] is None:
            conv = ("shortconv.in_proj", "shortconv.conv", "shortconv.out_proj")
            return ("attn_norm", *conv, *FEED_FORWARD)
        return (*ATTENTION, "attn_q_norm", "attn_k_norm", *FEED_FORWARD)

    def mix(self, i, h, stream):
        if self.owner[i] is not None:
            return super().mix(i, h, stream)
        layer = self.layers[i]
        before, behind, x = np.split(linear(layer, "shortconv.in_proj", h), 3, axis=-1)
        x = stream.carry(i, before * x, self.n_conv - 1)
        weight = layer["shortconv.conv"]
        x = sum(weight[:, j] * x[j : j + len(h)] for j in range(self.n_conv))
        return linear(layer, "shortconv.out_proj", behind * x)


class DeepSeek2(Llama):
    """Latent attention (MLA) with one row per layer. Keys are [latent | rotary part], values are the latent.

    Each head has one matrix that maps queries into the latent space, and another that maps the result out of
    it.
    """

    archs = ("deepseek2",)
    pairs_are_halves = False
    has_values = False

    def configure(self, number):
        self.n_latent = number("attention.kv_lora_rank")
        self.q_rank = number("attention.q_lora_rank", 0)
        self.head_dim_mla = number("attention.key_length_mla")
        self.scale = 1 / np.sqrt(self.head_dim_mla)
        if number("leading_dense_block_count") != self.n_layer:
            raise ValueError("experts are not known here")

    def frequencies(self, number, weights):
        n_rot = number("rope.dimension_count")
        freq = number("rope.freq_base", 10000.0) ** (-np.arange(0, n_rot, 2) / n_rot)
        latent = np.zeros((self.head_dim - n_rot) // 2)
        return [np.concatenate((latent, freq))] * self.n_layer

    def names(self, i):
        query = ("attn_q_a", "attn_q_a_norm", "attn_q_b") if self.q_rank else ("attn_q",)
        latent = ("attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b")
        return ("attn_norm", *query, *latent, "attn_output", *FEED_FORWARD)

    def mix(self, i, h, stream):
        layer = self.layers[i]
        if self.q_rank:
            query = self.norm(linear(layer, "attn_q_a", h), layer["attn_q_a_norm"])
            query = linear(layer, "attn_q_b", query)
        else:
            query = linear(layer, "attn_q", h)
        query = query.reshape(len(h), self.n_head, self.head_dim_mla).swapaxes(0, 1)
        n_rot = self.head_dim - self.n_latent
        query = np.concatenate((query[..., :-n_rot] @ layer["attn_k_b"].mT, query[..., -n_rot:]), axis=-1)
        key = linear(layer, "attn_kv_a_mqa", h)
        latent = self.norm(key[:, : self.n_latent], layer["attn_kv_a_norm"])
        key = np.concatenate((latent, key[:, self.n_latent :]), axis=-1)
        out = stream.attend(i, self.pairs(query), self.pairs(key[None]), latent[None])
        return linear(layer, "attn_output", _side_by_side(out @ layer["attn_v_b"].mT))


class DeepSeek32(DeepSeek2):
    """DeepSeek2 with an index, which chooses the cells that a query attends to.

    The index is not computed here, because it would choose all cells of a small cache.
    """

    archs = ("deepseek32",)

    def names(self, i):
        index = ("k_norm", "proj", "attn_k", "attn_q_b")
        return super().names(i) + tuple(f"indexer.{name}" for name in index)


class Gemma4(Llama):
    """The last layers have no rows. Each of them reads the rows of an earlier layer.

    A sliding layer reads those of the last sliding layer with rows, and a full layer those of the last full
    layer with rows.
    """

    archs = ("gemma4",)

    def configure(self, number):
        self.scale = 1.0
        self.cap = number("final_logit_softcapping", 30.0)
        n_own = self.n_layer - number("attention.shared_kv_layers", 0)
        for i in range(n_own, self.n_layer):
            self.owner[i] = max(j for j in range(n_own) if self.slides[j] == self.slides[i])

    def frequencies(self, number, weights):
        factors = weights.pop("rope_freqs")
        freqs = super().frequencies(number, weights)
        return [freq if slides else freq / factors for freq, slides in zip(freqs, self.slides, strict=True)]

    def names(self, i):
        return tuple(
            name
            for name in super().names(i)
            if self.owner[i] == i or name not in ("attn_k", "attn_k_norm", "attn_v")
        )

    def value(self, x):
        return self.norm(x)

    def logits(self, x):
        return np.tanh(super().logits(x) / self.cap) * self.cap


KINDS = {
    arch: kind
    for kind in (
        Llama,
        SmolLM3,
        Maincoder,
        Refact,
        GPT2,
        Qwen2VL,
        GptOss,
        LFM2,
        DeepSeek2,
        DeepSeek32,
        Gemma4,
    )
    for arch in kind.archs
}


@cache
def load(path):
    """Load the model of a GGUF with the class of its architecture. Each file is read once."""
    return KINDS[Reader(path).fields["general.architecture"].contents()](path)


def linear(layer, name, x):
    """Apply the layer's weight `name`, and its bias if there is one: f64[..., n_in] -> f64[..., n_out]"""
    return _product(x, layer[name]) + layer.get(f"{name}.bias", 0)


def _product(x, weight):
    """x f64[n, n_in], weight f32[n_out, n_in] -> f64[n, n_out]"""
    return (x.astype(np.float32) @ weight.T).astype(np.float64)


def _weights(reader):
    """F32 arrays by name, without the ending .weight."""
    weights = {}
    for tensor in reader.tensors:
        if tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            raise ValueError(f"{tensor.name} must be F32, got {tensor.tensor_type.name}")
        weights[tensor.name.removesuffix(".weight")] = tensor.data.view(np.ndarray)
    return weights


def _gelu(x):
    # llama.cpp looks GELU up in a table, which is indexed by f16 values
    x = x.astype(np.float16).astype(np.float64)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))


def _side_by_side(heads):
    """f64[n_head, n_tokens, size] -> f64[n_tokens, n_head * size]"""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))
