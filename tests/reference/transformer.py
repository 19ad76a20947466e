"""A Llama or Gemma 3 by the definition: rows are lists of the entries they still have; evicting takes out.

There are no cells, and keys are stored as they were before RoPE: they are rotated from there at every
step, so that nothing drifts. Sliding layers hold what the next token sees, whatever the others evict.
Weights are F32; all else but the matrix products with them is float64.
"""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np

POSITIONS = ("original", "in-cache", "auto")

half_precision = False
"""Whether several queries at once meet keys in half precision, as in ggml's Vulkan, whatever the cache is."""


class Llama:
    """The F32 weights and the numbers of a GGUF, architecture llama, gemma3 or (without biases) qwen2."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        arch = reader.fields["general.architecture"].contents()

        def number(key, default=None):
            field = reader.fields.get(f"{arch}.{key}")
            return default if field is None else field.contents()

        if arch not in ("llama", "qwen2", "gemma3"):
            raise ValueError(f"architecture must be llama, qwen2 or gemma3, got {arch}")
        if number("rope.scaling.type", "none") != "none":
            raise ValueError("RoPE scaling is not known here")
        self.is_gemma = arch == "gemma3"
        self.pairs_are_halves = arch != "llama"
        self.n_layer = number("block_count")
        self.n_head = number("attention.head_count")
        self.n_head_kv = number("attention.head_count_kv", self.n_head)
        self.n_ctx_train = number("context_length")
        self.eps = number("attention.layer_norm_rms_epsilon")
        self.head_dim = number("attention.key_length", number("embedding_length") // self.n_head)
        if number("rope.dimension_count", self.head_dim) != self.head_dim:
            raise ValueError("RoPE over a part of the head is not known here")
        self.window = number("attention.sliding_window", 0)
        pattern = number("attention.sliding_window_pattern", 6)
        self.slides = [bool(self.window) and i % pattern < pattern - 1 for i in range(self.n_layer)]
        exponent = -np.arange(0, self.head_dim, 2) / self.head_dim
        # that of sliding layers is its own
        self.freq = {False: number("rope.freq_base", 10000.0) ** exponent, True: 10000.0**exponent}
        self._phase = dict.fromkeys(self.freq, np.empty((0, self.head_dim // 2), np.complex128))

        weights = {}
        for tensor in reader.tensors:
            if tensor.tensor_type != gguf.GGMLQuantizationType.F32:
                raise ValueError(f"{tensor.name} must be F32, got {tensor.tensor_type.name}")
            weights[tensor.name.removesuffix(".weight")] = tensor.data.view(np.ndarray)
        self.embd = weights.pop("token_embd")
        self.output_norm = weights.pop("output_norm")
        self.output = weights.pop("output", self.embd)
        names = (
            *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
            *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
        )
        if self.is_gemma:
            names += ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
        self.layers = [{name: weights.pop(f"blk.{i}.{name}") for name in names} for i in range(self.n_layer)]
        if weights:
            raise ValueError(f"tensors not known here: {', '.join(weights)}")

    def norm(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight

    def pairs(self, x):
        """x f64[..., head_dim] -> c128[..., head_dim / 2], so that a rotation is a product."""
        half = self.head_dim // 2
        re, im = (x[..., :half], x[..., half:]) if self.pairs_are_halves else (x[..., 0::2], x[..., 1::2])
        return re + 1j * im

    def feed_forward(self, layer, x):
        h = self.norm(x, layer["ffn_norm"])
        gate, up = _linear(h, layer["ffn_gate"]), _linear(h, layer["ffn_up"])
        if not self.is_gemma:
            return _linear(gate / (1 + np.exp(-gate)) * up, layer["ffn_down"])
        # llama.cpp's table has an entry for each f16
        gate = gate.astype(np.float16).astype(np.float64)
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * gate * (1 + 0.044715 * gate * gate)))
        out = _linear(gelu.astype(np.float16) * up, layer["ffn_down"])
        return self.norm(out, layer["post_ffw_norm"])

    def rotate(self, pairs, rot, slides):
        """pairs c128[..., n, head_dim / 2], rot i64[n] -> f64[..., n, head_dim], in the order of the pairs.

        Only products of two such vectors have a meaning; the order of their axes has none.
        """
        if len(rot) and rot.max() >= len(self._phase[slides]):
            self._phase[slides] = np.exp(1j * np.outer(np.arange(2 * rot.max() + 2), self.freq[slides]))
        return (pairs * self._phase[slides][rot]).view(np.float64)


class Row:
    """The entries of one (layer, KV head), in the order of the stream.

    pos i64[n]: in the stream. rot i64[n]: what the key is rotated by. key c128[n, head_dim / 2]: before
    RoPE. value f64[n, head_dim]. mass f64[n]: attention sum over all queries so far and the group.
    last f64[n]: attention of the newest query, summed over the group. seen: for each entry, the attention
    of each query since it came, as records have it. old, notes: the policy's own, False
    and empty at first. number: of the row among those of all layers.
    """

    def __init__(self, number, head_dim):
        self.number = number
        self.pos = np.empty(0, np.int64)
        self.rot = np.empty(0, np.int64)
        self.key = np.empty((0, head_dim // 2), np.complex128)
        self.value = np.empty((0, head_dim))
        self.mass = np.empty(0)
        self.last = np.empty(0)
        self.seen = []
        self.old = []
        self.notes = []
        self.archive = Archive(head_dim)

    def __len__(self):
        return len(self.pos)

    def append(self, pos, rot, key, value):
        none_yet = np.zeros(len(pos))
        self.pos = np.concatenate((self.pos, pos))
        self.rot = np.concatenate((self.rot, rot))
        self.key = np.concatenate((self.key, key))
        self.value = np.concatenate((self.value, value))
        self.mass = np.concatenate((self.mass, none_yet))
        self.last = np.concatenate((self.last, none_yet))
        self.seen += [[] for _ in pos]
        self.old += [False] * len(pos)
        self.notes += [{} for _ in pos]

    def records(self):
        names = ("pos", "mass", "last", "seen", "key", "old", "notes")
        keys = self.key.view(np.float64).tolist()
        own = (self.old, self.notes)
        columns = (self.pos.tolist(), self.mass.tolist(), self.last.tolist(), self.seen, keys, *own)
        return [
            dict(zip(names, values, strict=True), row=self.number) for values in zip(*columns, strict=True)
        ]

    def keep(self, positions):
        index = self.index(positions)
        if not np.all(np.diff(index) > 0):
            raise ValueError(f"the positions that stay must be sorted and no two equal, got {positions}")
        for name in ("pos", "rot", "key", "value", "mass", "last"):
            setattr(self, name, getattr(self, name)[index])
        self.seen = [self.seen[i] for i in index]
        self.old = [self.old[i] for i in index]
        self.notes = [self.notes[i] for i in index]

    def merge(self, terms):
        """terms {dst pos: [(src pos, weight), ...]}; every source is read before any value is written."""
        merged = {
            dst: sum(weight * self.value[self.index([src])[0]] for src, weight in sources)
            for dst, sources in terms.items()
        }
        for dst, value in merged.items():
            self.value[self.index([dst])[0]] = value

    def index(self, positions):
        index = np.searchsorted(self.pos, positions)
        if np.any(index == len(self)) or np.any(self.pos[index] != positions):
            raise ValueError(f"not all of these positions are in the row: {positions}")
        return index


class Archive:
    """What a row has evicted, in the order of the stream: pos, key and value as a row has them."""

    def __init__(self, head_dim):
        self.pos = np.empty(0, np.int64)
        self.key = np.empty((0, head_dim // 2), np.complex128)
        self.value = np.empty((0, head_dim))

    def append(self, row, gone):
        for name in ("pos", "key", "value"):
            setattr(self, name, np.concatenate((getattr(self, name), getattr(row, name)[gone])))

    def choose(self, logits, live, k):
        """The k entries that get the most attention: logits f64[query, n], beside live f64[query, n_live]."""
        everything = np.concatenate((logits, live), axis=-1)
        attention = np.exp(everything - everything.max(axis=-1, keepdims=True))
        attention /= attention.sum(axis=-1, keepdims=True)
        score = attention[:, : len(self.pos)].sum(axis=0)
        # among equal scores the newer one
        return np.sort(np.lexsort((-self.pos, -score))[:k])


class Stream:
    """A text being decoded. rows[layer][head]: what is left of it, of layers that do not slide.

    next: position of the next token. all_rows: those of sliding layers among them.

    counter: what the next token's query and key are rotated by; it starts at `counter`. t: what the queries'
    t counts, the tokens of the "stream" or the "cells" of the longest row. logn: whether attention logits are
    multiplied by log_512(t). observe: a twin's, or None. recalled: how many evicted entries a step attends to
    beside each row's own. far: those that at the last eviction were farther than n_near from the next token
    are taken to be n_near away from the step's first.
    """

    def __init__(
        self,
        model,
        *,
        positions="original",
        n_ctx_train=None,
        counter=0,
        t="stream",
        logn=False,
        observe=None,
        recalled=0,
        n_near=None,
    ):
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {positions}")
        self.model = model
        self.positions = positions
        self.n_ctx_train = n_ctx_train or model.n_ctx_train
        self.in_cache = positions == "in-cache"
        self.counter = counter
        self.t = t
        self.logn = logn
        self.observe = observe
        self.recalled = recalled
        self.n_near = n_near or self.n_ctx_train // 2
        self.far = 0
        self.next = 0
        self.rows = [
            [Row(i * model.n_head_kv + j, model.head_dim) for j in range(model.n_head_kv)]
            for i in range(model.slides.count(False))
        ]
        rows = iter(self.rows)
        self.all_rows = [
            [Row(-1, model.head_dim) for _ in range(model.n_head_kv)] if slides else next(rows)
            for slides in model.slides
        ]

    @property
    def n(self):
        """Entries of the longest row."""
        return max(len(row) for rows in self.rows for row in rows)

    def decode(self, tokens):
        """Logits f64[n_tokens, n_vocab] of a batch; its attention goes into the rows' mass and last."""
        m = len(tokens)
        self._make_room(m)
        pos = np.arange(self.next, self.next + m)
        rot = np.arange(self.counter, self.counter + m)
        t = 1 + np.arange(m) + (self.next if self.t == "stream" else self.n)
        x = self.model.embd[np.asarray(tokens)].astype(np.float64)
        if self.model.is_gemma:
            x *= np.sqrt(x.shape[1])
        for layer, rows, slides in zip(self.model.layers, self.all_rows, self.model.slides, strict=True):
            h = self._attend(layer, rows, self.model.norm(x, layer["attn_norm"]), pos, rot, t, slides)
            x = x + (self.model.norm(h, layer["post_attention_norm"]) if self.model.is_gemma else h)
            x = x + self.model.feed_forward(layer, x)
        self.next += m
        self.counter += m
        return _linear(self.model.norm(x, self.model.output_norm), self.model.output)

    def evict(self, keep, *, pinned, budget, slack, **params):
        """Lets `keep` choose, layer by layer, and takes out what does not stay."""
        for rows in self.rows:
            records = [row.records() for row in rows]
            answer = keep(records, next=self.next, pinned=pinned, budget=budget, slack=slack, **params)
            kept, merges = answer if isinstance(answer, tuple) else (answer, [{}] * len(rows))
            for row, own, positions, terms in zip(rows, records, kept, merges, strict=True):
                row.old = [record["old"] for record in own]
                row.merge(terms)
                if self.recalled:
                    row.archive.append(row, ~np.isin(row.pos, positions))
                row.keep(positions)
        self.far = self.next - self.n_near
        if self.in_cache:
            self._close_gaps(self.counter)

    def _attend(self, layer, rows, h, pos, rot, t, slides):
        """The attention block's output f64[n_tokens, n_embd] for the normed input h."""
        model, m = self.model, len(pos)

        def heads(name, n_head):
            """f64[n_head, n_tokens, head_dim]"""
            x = _linear(h, layer[name]).reshape(m, n_head, model.head_dim).swapaxes(0, 1)
            return model.norm(x, layer[f"{name}_norm"]) if f"{name}_norm" in layer else x

        query = model.rotate(model.pairs(heads("attn_q", model.n_head)), rot, slides)
        key = model.pairs(heads("attn_k", model.n_head_kv))
        value = heads("attn_v", model.n_head_kv)
        group = model.n_head // model.n_head_kv
        out = np.empty((model.n_head, m, model.head_dim))
        for i, row in enumerate(rows):
            row.append(pos, rot, key[i], value[i])
            mine = slice(i * group, (i + 1) * group)
            asked, keys = query[mine], model.rotate(row.key, row.rot, slides)
            if half_precision and m > 1:
                # keys of one head alone lie together, and are taken as they are
                asked, keys = _half(asked), _half(keys) if len(rows) > 1 else keys
            scores = asked @ keys.T / np.sqrt(model.head_dim)
            if self.logn and not slides:
                scores *= np.log(t)[:, None] / np.log(512)
            scores[:, row.pos > pos[:, None]] = -np.inf
            if slides:
                scores[:, row.pos <= pos[:, None] - model.window] = -np.inf
            values = row.value
            if len(row.archive.pos) and not slides:
                recalled, chosen = self._recall(row.archive, asked, scores, pos[0], rot[0])
                scores = np.concatenate((scores, recalled), axis=-1)
                values = np.concatenate((values, row.archive.value[chosen]))
                row.recalled = row.archive.pos[chosen]
            attn = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attn /= attn.sum(axis=-1, keepdims=True)
            out[mine] = attn @ values
            attn = attn[..., : len(row)]
            row.mass += attn.sum(axis=(0, 1))
            row.last = attn[:, -1].sum(axis=0)
            if slides:
                row.keep(row.pos[row.pos > pos[-1] + 1 - model.window])
                continue
            for step, n, heads_attn in zip(pos.tolist(), t.tolist(), attn.swapaxes(0, 1), strict=True):
                for seen, own, at in zip(row.seen, heads_attn.T.tolist(), row.pos.tolist(), strict=True):
                    if at <= step:
                        seen.append((n, own))
        return _linear(out.swapaxes(0, 1).reshape(m, -1), layer["attn_output"])

    def _recall(self, archive, asked, live, first, rot):
        """Logits of all queries with the chosen entries, and which these are."""
        at = np.where(archive.pos < self.far, rot - self.n_near, rot - (first - archive.pos))
        keys = (archive.key * np.exp(1j * np.outer(at, self.model.freq[False]))).view(np.float64)
        logits = asked @ keys.T / np.sqrt(self.model.head_dim)
        n_query = logits.shape[0] * logits.shape[1]
        chosen = archive.choose(logits.reshape(n_query, -1), live.reshape(n_query, -1), self.recalled)
        return logits[..., chosen], chosen

    def _make_room(self, m):
        """Closes all gaps and starts over where m more tokens would go past the trained context."""
        if self.positions == "original" or self.counter + m <= self.n_ctx_train:
            return
        n = self.n
        if n + m > self.n_ctx_train:
            raise ValueError(f"{n} entries and {m} tokens do not fit into a context of {self.n_ctx_train}")
        # the window of sliding layers may be longer than what the others hold
        self.counter = max(n, min(self.model.window, self.n_ctx_train // 2, self.n_ctx_train - m))
        self._close_gaps(self.counter)
        if self.observe:
            for rows in self.rows:
                self.observe([row.records() for row in rows], next=self.next)

    def _close_gaps(self, end):
        for rows in self.all_rows:
            for row in rows:
                row.rot = np.arange(end - len(row), end)


class Result(NamedTuple):
    """nll f64[n - 1]: of every token but the first. logits f64[n, n_vocab], or None. stream: as it ended."""

    nll: np.ndarray
    logits: np.ndarray | None
    stream: Stream


def run(
    model,
    tokens,
    *,
    budget=None,
    slack=None,
    n_batch=None,
    keep=None,
    observe=None,
    pinned=0,
    positions="original",
    n_ctx_train=None,
    counter=0,
    logits=False,
    t="stream",
    logn=False,
    ragged=False,
    recalled=0,
    **params,
):
    """Scores a text in batches of n_batch tokens (slack; all at once without one), never over the budget.

    Whenever the rows hold `budget` entries (None: never), or if ragged after every batch, keep(rows, *,
    next, pinned, budget, slack, **params) says for the rows of one layer which positions stay, rows being
    records as tests/reference/__init__.py has them; or (positions, merges), with terms for Row.merge.
    """
    stream = Stream(
        model,
        positions=positions,
        n_ctx_train=n_ctx_train,
        counter=counter,
        t=t,
        logn=logn,
        observe=observe,
        recalled=recalled,
    )
    n_live = None if budget is None else budget - recalled
    nll, kept_logits, at = [], [], 0
    while at < len(tokens):
        m = min(n_batch or slack or len(tokens), len(tokens) - at)
        if budget is not None:
            m = min(m, n_live - stream.n)
        if m < 1:
            raise ValueError(f"an eviction must leave fewer than {n_live} entries, got {stream.n}")
        batch_logits = stream.decode(tokens[at : at + m])
        at += m
        targets = np.asarray(tokens[at - m + 1 : at + 1], np.int64)
        scored = batch_logits[: len(targets)]
        top = scored.max(axis=-1)
        total = np.log(np.exp(scored - top[:, None]).sum(axis=-1)) + top
        nll.append(total - scored[np.arange(len(targets)), targets])
        if logits:
            kept_logits.append(batch_logits)
        if budget is not None and (ragged or stream.n >= n_live):
            stream.evict(keep, pinned=pinned, budget=budget, slack=slack, **params)
            counts = {len(row) for rows in stream.rows for row in rows}
            if len(counts) > 1 and not ragged:
                raise ValueError(f"all rows must keep the same number of entries, got {sorted(counts)}")
    return Result(np.concatenate(nll), np.concatenate(kept_logits) if logits else None, stream)


def _half(x):
    return x.astype(np.float16).astype(np.float64)


def _linear(x, weight):
    """x f64[n, n_in], weight f32[n_out, n_in] -> f64[n, n_out]"""
    return (x.astype(np.float32) @ weight.T).astype(np.float64)
