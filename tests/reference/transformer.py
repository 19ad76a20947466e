"""A transformer by definition: a row is a list of its live entries, and an eviction removes entries.

There are no cells. Keys are stored before RoPE and rotated at every step, so that errors do not accumulate.
Sliding layers hold the tokens in their window, and evictions do not change these. models.py has the rest of
the model. All numbers are float64, except that matrix products with weights are computed in F32.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import numpy as np

from .clusters import Clusters
from .models import Llama, load

__all__ = ["Llama", "Row", "Stream", "join", "load", "run"]

POSITIONS = ("original", "in-cache", "auto")

half_precision = False
"""True to round queries and keys to half precision in steps of several tokens, like ggml's Vulkan backend."""


class Row:
    """Entries of one (layer, KV head), in the order of the stream.

    pos i64[n]: position in the stream. rot i64[n]: position by which the key is rotated.
    key c128[n, head_dim / 2]: before RoPE. value f64[n, value_dim].
    mass f64[n]: sum of the attention of all queries so far, over the group and all layers that read the row.
    last f64[n]: attention of the newest query, over the same heads.
    seen: for each entry, the attention of each query since the entry came. The format is that of `rows` in
    tests/reference/__init__.py. The lists are slow to make, so they are made when they are read.
    steps: the batches that are not in `seen` yet, each as (t, positions of the row's entries, attention
    f64[head, query, entry], is_first). See Stream._note.
    old, notes: for each entry, the values of these names in the records; at first False and empty.
    queries: for each query so far, its position, and its vectors f64[head, head_dim] for all heads that read
    the row.
    number: index of the row among the rows of all layers, or -1 in sliding layers.
    """

    def __init__(self, number, head_dim, value_dim):
        self.number = number
        self.pos = np.empty(0, np.int64)
        self.rot = np.empty(0, np.int64)
        self.key = np.empty((0, head_dim // 2), np.complex128)
        self.value = np.empty((0, value_dim))
        self.mass = np.empty(0)
        self.last = np.empty(0)
        self._seen = []
        self.steps = []
        self.old = []
        self.notes = []
        self.queries = []
        self.archive = Archive(head_dim, value_dim)
        self.clusters = None

    def __len__(self):
        return len(self.pos)

    @property
    def seen(self):
        for t, pos, attn, is_first in self.steps:
            n = np.searchsorted(self.pos, pos[-1], side="right")
            # an entry of this batch is seen from its own query on, an older entry by all queries
            begin = np.maximum(self.pos[:n] - (pos[-1] + 1 - len(t)), 0)
            entries, n_old = np.searchsorted(pos, self.pos[:n]), np.count_nonzero(begin == 0)
            heads = attn.T[entries[:n_old]].tolist()
            begin = begin.tolist()
            heads += [
                attn[..., first:, i].T.tolist()
                for i, first in zip(entries[n_old:].tolist(), begin[n_old:], strict=True)
            ]
            for attention, first, new in zip(self._seen, begin, heads, strict=False):
                if is_first:
                    attention.extend(zip(t[first:], new, strict=True))
                else:
                    for (_, heads_so_far), more in zip(attention[first - len(t) :], new, strict=True):
                        heads_so_far.extend(more)
        self.steps = []
        return self._seen

    def append(self, pos, rot, key, value):
        new = {"pos": pos, "rot": rot, "key": key, "value": value}
        for name, values in (new | dict.fromkeys(("mass", "last"), np.zeros(len(pos)))).items():
            setattr(self, name, np.concatenate((getattr(self, name), values)))
        self._seen += [[] for _ in pos]
        self.old += [False] * len(pos)
        self.notes += [{} for _ in pos]

    def records(self, scaled=lambda keys: keys):
        """Return the row's records. `scaled` transforms keys f64[n, head_dim] like the model after RoPE."""
        pairs = self.key
        keys = cache(lambda: scaled(pairs.view(np.float64)).tolist())
        columns = (self.pos.tolist(), self.mass.tolist(), self.last.tolist(), self.old, self.notes)
        return [Record(self, keys, i, *values) for i, values in enumerate(zip(*columns, strict=True))]

    def keep(self, positions):
        index = self.index(positions)
        if not np.all(np.diff(index) > 0):
            raise ValueError(f"the positions that stay must be sorted and no two equal, got {positions}")
        for name in ("pos", "rot", "key", "value", "mass", "last"):
            setattr(self, name, getattr(self, name)[index])
        for name in ("_seen", "old", "notes"):
            setattr(self, name, [getattr(self, name)[i] for i in index])

    def merge(self, terms):
        """Merge values by terms {dst pos: [(src pos, weight), ...]}. All sources are read first."""
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


class Record(dict):
    """Values of entry i of a row, by name. `seen` and `key` are added when they are read."""

    def __init__(self, row, keys, i, pos, mass, last, old, notes):
        super().__init__(pos=pos, mass=mass, last=last, old=old, notes=notes, row=row.number)
        self._of, self._keys, self._i = row, keys, i

    def __missing__(self, name):
        if name not in ("seen", "key"):
            raise KeyError(name)
        self[name] = (self._of.seen if name == "seen" else self._keys())[self._i]
        return self[name]


class Archive:
    """Evicted entries of a row, in the order of the stream. See Row for pos, rot, key and value."""

    def __init__(self, head_dim, value_dim):
        self.pos = np.empty(0, np.int64)
        self.rot = np.empty(0, np.int64)
        self.key = np.empty((0, head_dim // 2), np.complex128)
        self.value = np.empty((0, value_dim))

    def append(self, row, entries):
        for name in ("pos", "rot", "key", "value"):
            setattr(self, name, np.concatenate((getattr(self, name), getattr(row, name)[entries])))

    def choose(self, score, k):
        """Return the sorted indices of the k highest scores f64[n]. On ties, the newer token is chosen."""
        return np.sort(np.lexsort((-self.pos, -score))[:k])


class Batch(NamedTuple):
    """Tokens that are being decoded.

    See Row for pos and rot. t i64[n]: for each token, the number of tokens or entries (see Stream.t).
    """

    pos: np.ndarray
    rot: np.ndarray
    t: np.ndarray


class Stream:
    """Text being decoded.

    layers: layers that own rows and do not slide. rows[i][head]: live entries of layers[i].
    all_rows: for each layer of the model, the rows that it reads.
    next: position of the next token.
    counter: position by which the next token's query and key are rotated.
    t: "stream" if Batch.t counts tokens of the stream, "cells" if it counts entries of the longest row.
    logn: True to multiply attention logits by log_512(t).
    observe: function that gets all entries when positions restart, or None.
    recalled: number of evicted entries that a step attends to in addition to a row's entries, or math.inf.
    n_near: largest distance between a query and evicted entries: half of the trained context.
    far: evicted entries before this position have the distance n_near from the step's first token. An
    eviction sets `far` to the position that is n_near before the next token.
    n_block: if set, blocks of n_block tokens become far as a whole. In row i of n rows, a block becomes far
    i * (n_block // 4) // n tokens later.
    exact: number of tokens in clusters that a one-token step attends to exactly; None without clusters.
    future: (n_query, n_future, n_skip) of a policy that reads `future` or `value_norm` in records, or None.
    """

    def __init__(
        self,
        model,
        *,
        positions="original",
        t="stream",
        logn=False,
        observe=None,
        recalled=0,
        n_block=None,
        exact=None,
        future=None,
    ):
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {positions}")
        self.model = model
        self.positions = positions
        self.in_cache = positions == "in-cache"
        self.counter = 0
        self.t = t
        self.logn = logn
        self.observe = observe
        self.recalled = recalled
        self.n_near = model.n_ctx_train // 2
        self.n_block = n_block
        self.exact = exact
        self.future = future
        self.far = 0
        self.next = 0
        self._batch = None
        self._carried = {}
        self.rows, self.all_rows, self.layers = [], [], []
        for layer, owner in enumerate(model.owner):
            if owner != layer:
                self.all_rows.append([] if owner is None else self.all_rows[owner])
                continue
            first = -1 if model.slides[layer] else len(self.rows) * model.n_head_kv
            rows = [
                Row(first if first < 0 else first + head, model.head_dim, model.value_dim)
                for head in range(model.n_head_kv)
            ]
            self.all_rows.append(rows)
            if not model.slides[layer]:
                self.rows.append(rows)
                self.layers.append(layer)

    @property
    def n(self):
        """Number of entries in the longest row."""
        return max(len(row) for rows in self.rows for row in rows)

    def decode(self, tokens):
        """Decode a batch, update the rows' signals, and return the logits f64[n_tokens, n_vocab]."""
        m = len(tokens)
        self._make_room(m)
        self._batch = Batch(
            np.arange(self.next, self.next + m),
            np.arange(self.counter, self.counter + m),
            1 + np.arange(m) + (self.next if self.t == "stream" else self.n),
        )
        x = self.model.embed(tokens, self._batch.rot)
        for layer in range(self.model.n_layer):
            x = self.model.block(layer, x, self)
        self.next += m
        self.counter += m
        for rows, slides in zip(self.all_rows, self.model.slides, strict=True):
            # entries leave the window only after all layers, because later layers may read the same rows
            for row in rows if slides else ():
                row.keep(row.pos[row.pos > self.next - self.model.window])
        return self.model.logits(x)

    def evict(self, keep, *, pinned, budget, slack, **params):
        """Call `keep` for each layer, and remove the entries that it evicts."""
        for layer, rows in zip(self.layers, self.rows, strict=True):
            records = self.records(layer, rows)
            answer = keep(records, next=self.next, pinned=pinned, budget=budget, slack=slack, **params)
            kept_rows, merges = answer if isinstance(answer, tuple) else (answer, [{}] * len(rows))
            for row, row_records, positions, terms in zip(rows, records, kept_rows, merges, strict=True):
                row.old = [record["old"] for record in row_records]
                row.merge(terms)
                if self.recalled:
                    row.archive.append(row, ~np.isin(row.pos, positions))
                row.keep(positions)
        self.far = self.next - self.n_near
        if self.in_cache:
            self._close_gaps(self.counter)

    def records(self, layer, rows):
        """Return a list of records for each row of a layer."""
        records = [row.records(partial(self.model.scaled, i=layer)) for row in rows]
        if self.future:
            for row, row_records in zip(rows, records, strict=True):
                self._look_ahead(layer, row, row_records)
        return records

    def _look_ahead(self, layer, row, records):
        """Add `future` and `value_norm` to the records.

        The logit of a query for an entry is the mean of the logits that the query would have at the stream's
        next n_future positions. future: for each head, the mean and the variance of this logit over the last
        queries. value_norm: norm of the value, or 1 if values are a part of the keys.
        """
        model, (n_query, n_future, n_skip) = self.model, self.future
        row.queries = row.queries[-max(min(n_query, self.next - n_skip), 1) :]
        rot, queries = (np.array(column) for column in zip(*row.queries, strict=True))
        freq = model.freq[layer]
        # instead of moving a query to a later position, move the keys back by the same distance
        farther = np.exp(1j * np.outer(rot - self.counter, freq))
        farther *= np.exp(-1j * np.outer(np.arange(n_future), freq)).mean(axis=0)
        keys = model.rotate(row.key * farther[:, None], row.rot, layer)
        # [query, head, entry]
        logits = queries @ keys.mT * model.scale
        future = np.stack((logits.mean(axis=0), logits.var(axis=0)), axis=-1).swapaxes(0, 1)
        norms = np.linalg.norm(row.value, axis=1) if model.has_values else np.ones(len(row))
        for record, moments, norm in zip(records, future.tolist(), norms.tolist(), strict=True):
            record |= {"future": moments, "value_norm": norm}

    def attend(self, layer, query, key=None, value=None):
        """Attend with queries c128[n_head, n_tokens, head_dim / 2]. Return f64[n_head, n_tokens, value_dim].

        key, value [n_head_kv, n_tokens, ...]: new entries for the layer's rows, or None if the layer reads
        the rows of an earlier layer. Keys and queries are not rotated yet (no RoPE).
        """
        model, (pos, rot, t) = self.model, self._batch
        slides, sinks = model.slides[layer], model.layers[layer].get("attn_sinks")
        query = model.rotate_query(query, rot, layer)
        group = model.n_head // model.n_head_kv
        out = np.empty((model.n_head, len(pos), model.value_dim))
        for i, row in enumerate(self.all_rows[layer]):
            if key is not None:
                row.append(pos, rot, key[i], value[i])
            heads = slice(i * group, (i + 1) * group)
            if self.future and row.number >= 0:
                self._ask(row, query[heads], is_first=key is not None)
            own_sinks = None if sinks is None else sinks[heads]
            queries, keys = query[heads], model.rotate(row.key, row.rot, layer)
            if half_precision and len(pos) > 1:
                # Vulkan does not round the keys of a single KV head, because they are contiguous
                queries, keys = _half(queries), _half(keys) if model.n_head_kv > 1 else keys
            scores = queries @ keys.T * model.scale
            if self.logn and not slides:
                scores *= np.log(t)[:, None] / np.log(512)
            if model.slopes is not None:
                scores += model.slopes[heads, None, None] * (row.rot - rot[:, None])
            scores[:, row.pos > pos[:, None]] = -np.inf
            if slides:
                scores[:, row.pos <= pos[:, None] - model.window] = -np.inf
            values = row.value
            if len(row.archive.pos) and not slides:
                recalled, recalled_values = self._recall(layer, row, queries, scores, own_sinks)
                scores = np.concatenate((scores, recalled), axis=-1)
                values = np.concatenate((values, recalled_values))
            attn = _softmax(scores, own_sinks)
            out[heads] = attn @ values
            self._note(row, attn[..., : len(row)], is_first=key is not None)
        return out

    def carry(self, layer, x, n):
        """Return the layer's previous n entries, followed by x f64[n_tokens, size].

        The stream begins with n entries of zeros.
        """
        both = np.concatenate((self._carried.get(layer, np.zeros((n, x.shape[1]))), x))
        self._carried[layer] = both[len(both) - n :]
        return both

    def _ask(self, row, queries, is_first):
        """Add a batch's rotated queries f64[group, n_tokens, head_dim] to a row. See _note for is_first."""
        rot = self._batch.rot.tolist()
        for i, heads in enumerate(queries.swapaxes(0, 1), -len(rot)):
            if is_first:
                row.queries.append((rot[i], heads))
            else:
                row.queries[i] = rot[i], np.concatenate((row.queries[i][1], heads))

    def _note(self, row, attn, is_first):
        """Add a batch's attention f64[group, n_tokens, n] to a row's signals.

        is_first: True in the layer that owns the row, False in later layers that read it.
        """
        row.mass += attn.sum(axis=(0, 1))
        row.last = attn[:, -1].sum(axis=0) + (0 if is_first else row.last)
        if row.number >= 0:
            row.steps.append((self._batch.t.tolist(), row.pos, attn, is_first))

    def _late(self, row):
        return row.number * (self.n_block // 4) // sum(map(len, self.rows))

    def _first_near(self, row):
        """First position of the archived entries that keep their true distance to the query."""
        if not self.n_block:
            return self.far
        return (min(self.far, row.archive.pos[-1] + 1) - self._late(row)) // self.n_block * self.n_block

    def _recall(self, layer, row, queries, live, sinks):
        """Return the logits of all queries with the recalled entries, and the values of these entries.

        live: logits of all queries with the live entries of the row.
        """
        archive, first, rot = row.archive, self._batch.pos[0], self._batch.rot[0]
        is_far = archive.pos < self._first_near(row)
        pos = np.where(is_far, rot - self.n_near, rot - (first - archive.pos))
        keys = self._rotated(layer, archive.key, pos)
        logits = queries @ keys.T * self.model.scale
        if self.exact:
            row.clusters = row.clusters or Clusters(self.n_block, self.exact)
            end = archive.pos[-1] + 1 - self._late(row)
            of = row.clusters.members(archive.pos, keys, end, self._first_near(row))
            if (of < 0).all():
                return logits, archive.value
            # before clustering, all keys of a far block are rotated to position 0. Keys of a near block are
            # rotated to pos - base, where base is pos - rot of the block's last key
            n = self.n_block
            last = np.searchsorted(archive.pos, archive.pos // n * n + n) - 1
            bases = (archive.pos - archive.rot)[last]
            turns = np.where(is_far, self.n_near - rot, first - rot - bases)
            names, firsts = np.unique(of, return_index=True)
            turned = [self._turned(layer, queries, turns[i]) * self.model.scale for i in firsts[names >= 0]]
            gains = row.clusters.gains(of, self._rotated(layer, archive.key, pos + turns), turned)
            return row.clusters.attend(of, logits, gains, archive.value, queries.shape[1])
        attention = _softmax(np.concatenate((logits, live), axis=-1), sinks)
        k = min(self.recalled, len(archive.pos))
        indices = archive.choose(attention[..., : len(archive.pos)].sum(axis=(0, 1)), k)
        row.recalled = archive.pos[indices]
        return logits[..., indices], archive.value[indices]

    def _rotated(self, layer, keys, positions):
        """Return keys f64[n, head_dim], from keys c128[n, head_dim / 2] before RoPE."""
        rotated = keys * self.model.phases(positions, layer)
        return self.model.scaled(rotated.view(np.float64), layer)

    def _turned(self, layer, queries, n):
        """Return queries f64[..., head_dim] after a further rotation by n positions."""
        pairs = np.ascontiguousarray(queries).view(np.complex128)
        return (pairs * np.exp(1j * n * self.model.freq[layer])).view(np.float64)

    def _make_room(self, m):
        """Close all gaps and restart positions if m more tokens would exceed the trained context."""
        n, n_ctx = self.n, self.model.n_ctx_train
        if self.positions == "original" or self.counter + m <= n_ctx:
            return
        if n + m > n_ctx:
            raise ValueError(f"{n} entries and {m} tokens do not fit into a context of {n_ctx}")
        # rows of sliding layers may be longer than n, and their first entries need positions of at least 0
        self.counter = max(n, min(self.model.window, n_ctx // 2, n_ctx - m))
        self._close_gaps(self.counter)
        if self.observe:
            for rows in self.rows:
                self.observe([row.records() for row in rows], next=self.next)

    def _close_gaps(self, end):
        for rows in self.all_rows:
            for row in rows:
                row.rot = np.arange(end - len(row), end)


class Result(NamedTuple):
    """Result of `run`.

    nll f64[n - 1]: NLL of all tokens except the first. stream: the stream after the text.
    """

    nll: np.ndarray
    stream: Stream


def join(streams, counter):
    """Put the entries of earlier streams in front of the last stream's rows, and return the last stream.

    counter: position by which the next query and key of the last stream are rotated.
    """
    *_, stream = streams
    for rows in zip(*(each.rows for each in streams), strict=True):
        for head, (row, *later) in enumerate(zip(*rows, strict=True)):
            for part in later:
                n_row = len(row)
                row.append(part.pos, part.rot, part.key, part.value)
                row.mass[n_row:], row.last[n_row:] = part.mass, part.last
                row.seen[n_row:], row.notes[n_row:] = part.seen, part.notes
            rows[-1][head] = row
    stream.in_cache, stream.counter = True, counter
    return stream


def run(
    model,
    tokens,
    *,
    budget=None,
    slack=None,
    n_batch=None,
    keep=None,
    pinned=0,
    ragged=False,
    n_synthetic=0,
    **options,
):
    """Score a text in batches of n_batch tokens. Rows never exceed the budget.

    If n_batch is None, batches have `slack` tokens. If this is also None, the text is one batch.
    Rows evict when they are full. With `ragged` they evict after every batch. Without a budget they never
    evict.
    keep: the function `keep` of a twin (tests/reference/__init__.py), with its options bound.
    n_synthetic: number of cells of the budget that are reserved for recalled entries; 0 to reserve `recalled`
    cells.
    options: options of Stream.
    """
    stream = Stream(model, **options)
    n_live = None if budget is None else budget - (n_synthetic or stream.recalled)
    nll, begin = [], 0
    while begin < len(tokens):
        m = min(n_batch or slack or len(tokens), len(tokens) - begin)
        if budget is not None:
            m = min(m, n_live - stream.n)
        if m < 1:
            raise ValueError(f"an eviction must leave fewer than {n_live} entries, got {stream.n}")
        batch_logits = stream.decode(tokens[begin : begin + m])
        begin += m
        targets = np.asarray(tokens[begin - m + 1 : begin + 1], np.int64)
        scored = batch_logits[: len(targets)]
        top = scored.max(axis=-1)
        total = np.log(np.exp(scored - top[:, None]).sum(axis=-1)) + top
        nll.append(total - scored[np.arange(len(targets)), targets])
        if budget is not None and (ragged or stream.n >= n_live):
            stream.evict(keep, pinned=pinned, budget=budget, slack=slack)
            counts = {len(row) for rows in stream.rows for row in rows}
            if len(counts) > 1 and not ragged:
                raise ValueError(f"all rows must keep the same number of entries, got {sorted(counts)}")
    return Result(np.concatenate(nll), stream)


def _half(x):
    return x.astype(np.float16).astype(np.float64)


def _softmax(scores, sinks=None):
    """Return the softmax over the last axis of f64[head, n_tokens, n].

    sinks f32[head]: additional logits that have no values.
    """
    top = scores.max(axis=-1, keepdims=True)
    if sinks is None:
        weight = np.exp(scores - top)
        return weight / weight.sum(axis=-1, keepdims=True)
    top = np.maximum(top, sinks[:, None, None])
    weight = np.exp(scores - top)
    return weight / (weight.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None, None] - top))
