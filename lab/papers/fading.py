"""Measure rows that keep means of evicted tokens next to the cells that a policy chooses.

    python -m lab.papers.fading wiki.test.raw --budget 128 --rules full,h2o,h2o+16:cells,h2o+16,h2o+16:spare

With `h2o+16`, a row has `--budget` cells in all: 16 cells hold means of evicted tokens, and the remaining
cells hold the tokens that the policy keeps. A query attends to all cells. An evicted token becomes a mean of
one token. If a row then has more than 16 means, two of them merge. The merged mean has the mean key, the mean
value, and a bias that is added to its logit. The word after a colon selects the rule:

output  the default: merge the two means whose merge changes the outputs of the last queries least. Means are
        weighted by the attention of these queries, and the bias keeps the sum of that attention.
spare   merge nothing: drop the evicted token whose loss changes the outputs of the last queries least.
cells   keep no means. The policy keeps as many tokens as fit into the bytes of a row with `output`.

`h2o+16:output:4` keeps the queries of 4 tokens; the default is 16.

A policy decides for each row by this row's attention alone, so one layer is computed for all tokens before
the next layer. Numbers are in F32, and there is an eviction at each token, as in `kvtool perplexity
--evict-every 1`. Runs a llama or qwen2 model in NumPy. lab/papers/fading.md has the results.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from kvtool.measure import records, statistics
from kvtool.models.resolve import resolve
from kvtool.policies.h2o import H2O
from kvtool.policies.roco import RoCo
from lab.benchmarks.common import add_common, load_model, load_tokens, make_parser, note, write_json
from tests import tiny
from tests.reference.models import Llama

MERGES = ("output", "spare", "cells")
WINDOW, HEAVY, STEADY = range(3)
_CHUNK = 256
_SINKS = 4
_FAR = np.float32(1e30)


class Rule(NamedTuple):
    """Rule by which a row evicts and merges.

    policy
        "h2o", "roco" or "streamingllm".
    n_mean
        Number of cells that hold means of evicted tokens.
    merge
        How an evicted token joins a mean: one of MERGES.
    n_query
        Number of tokens whose queries are kept.
    """

    policy: str
    n_mean: int
    merge: str
    n_query: int

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse POLICY, POLICY+N, POLICY+N:MERGE or POLICY+N:MERGE:QUERIES. Raises ValueError."""
        row, _, options = text.partition(":")
        policy, _, n_mean = row.partition("+")
        merge, _, n_query = options.partition(":")
        if policy not in ("h2o", "roco", "streamingllm") or (merge or "output") not in MERGES:
            raise ValueError(f"not a rule: {text}")
        return cls(policy, int(n_mean or 0), merge or "output", int(n_query or 16))

    def n_byte(self, budget: int, group: int, dim: int) -> int:
        """The bytes of a row: keys, values and queries take two bytes a number, other numbers four.

        A cell has a key and a value; a mean also has a size and a bias. A kept query also has the logarithm
        of its sum of exponentials, and for `spare` its output.
        """
        cell = 4 * dim
        if not self.n_mean:
            return budget * cell
        if self.merge == "cells":
            return self._n_cell(budget, group, dim) * cell
        of_query = (4 if self.merge == "spare" else 2) * dim + 4
        return budget * cell + self.n_mean * 8 + self.n_query * group * of_query

    def _n_cell(self, budget: int, group: int, dim: int) -> int:
        if self.merge != "cells":
            return budget - self.n_mean
        return self._replace(merge="output").n_byte(budget, group, dim) // (4 * dim)

    def numbers(self, budget: int, group: int, dim: int) -> tuple[int, int, int, int, int, int]:
        """Return six arguments of `_evict`: n_cell, kind, n_sink, n_window, n_steady and n_mean.

        n_steady is the number of cells that stay because their attention has a high standard deviation.
        """
        n_cell = self._n_cell(budget, group, dim)
        n_mean = 0 if self.merge == "cells" else self.n_mean
        if self.policy == "h2o":
            h2o = H2O.fit(n_cell, 1)
            return n_cell, HEAVY, h2o.sinks, h2o.window, 0, n_mean
        if self.policy == "roco":
            roco = RoCo.fit(n_cell, 1)
            return n_cell, STEADY, roco.sinks, roco.window, roco.keep_std, n_mean
        return n_cell, WINDOW, _SINKS, 0, 0, n_mean


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--rules", default="full,h2o,h2o+16:cells,h2o+16,h2o+16:spare")
    parser.add_argument("--budget", type=int, default=128, help="cells and means of a row")
    parser.add_argument("--max-tokens", type=int, default=2048)
    args = parser.parse_args()

    rules = {name: None if name == "full" else Rule.parse(name) for name in args.rules.split(",")}
    vocabulary = load_model(args.model)
    tokens = load_tokens(vocabulary, args.file, args.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        tiny.dequantize(resolve(args.model), Path(folder) / "f32.gguf")
        model = Llama(Path(folder) / "f32.gguf")
    n_row, group = len(model.layers) * model.n_head_kv, model.n_head // model.n_head_kv
    blocks, seconds, n_byte = {}, {}, {}
    print("| rule | perplexity | a row's bytes |")
    print("| --- | ---: | ---: |")
    for name, rule in rules.items():
        note(name)
        started = time.process_time()
        of_tokens = nll(model, tokens, rule, args.budget)
        seconds[name] = time.process_time() - started
        blocks[name] = statistics.block_sums(of_tokens.astype(np.float64)).tolist()
        of_row = rule.n_byte(args.budget, group, model.head_dim) if rule else len(tokens) * 4 * model.head_dim
        n_byte[name] = of_row * n_row
        print(f"| `{name}` | {np.exp(of_tokens.mean()):.3f} | {of_row:,} |", flush=True)
    about = {"file": args.file.name, "model": resolve(args.model).name, "tokens": len(tokens)}
    about["text_sha256"] = records.text_sha256(vocabulary, tokens)
    about |= {"budget": args.budget, **records.versions()}
    write_json(args.json, about | {"nll_blocks": blocks, "cpu_s": seconds, "bytes": n_byte})


def nll(model: Llama, tokens: np.ndarray, rule: Rule | None, budget: int) -> np.ndarray:
    """Return the negative log-likelihood f32[n - 1] of each token after the first.

    rule: None for the full cache.
    """
    n, group = len(tokens), model.n_head // model.n_head_kv
    x = model.embd[tokens]
    for i, layer in enumerate(model.layers):
        h = _norm(model, x, layer["attn_norm"])
        query, key, value = (
            (h @ layer[name].T + layer.get(f"{name}.bias", np.float32(0))).reshape(n, -1, model.head_dim)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        query, key = (_rotated(model, each, i) for each in (query, key))
        output = np.empty_like(query)
        for head in range(model.n_head_kv):
            mine = slice(head * group, (head + 1) * group)
            of_row = (np.ascontiguousarray(each) for each in (query[:, mine], key[:, head], value[:, head]))
            output[:, mine] = attend(*of_row, rule, budget)
        x = x + output.reshape(n, -1) @ layer["attn_output"].T
        h = _norm(model, x, layer["ffn_norm"])
        gate = h @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    x = _norm(model, x[:-1], model.output_norm)
    result = np.empty(n - 1, np.float32)
    for at in range(0, n - 1, _CHUNK):
        logits = x[at : at + _CHUNK] @ model.output.T
        most = logits.max(axis=1)
        right = logits[np.arange(len(logits)), tokens[at + 1 : at + 1 + len(logits)]]
        result[at : at + _CHUNK] = most + np.log(np.exp(logits - most[:, None]).sum(axis=1)) - right
    return result


def _norm(model: Llama, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(model.eps)) * weight


def _rotated(model: Llama, x: np.ndarray, i: int) -> np.ndarray:
    """Rotate f32[n, head, head_dim] by RoPE, which rotates pairs of dimensions.

    In the result, the first dimensions of all pairs come before the second dimensions.
    """
    half = model.head_dim // 2
    a, b = (x[..., :half], x[..., half:]) if model.pairs_are_halves else (x[..., ::2], x[..., 1::2])
    angle = np.arange(len(x))[:, None, None] * model.freq[i]
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)


def attend(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, rule: Rule | None, budget: int
) -> np.ndarray:
    """A row's outputs f32[n, group, dim], for query f32[n, group, dim], key and value f32[n, dim]."""
    query = query / np.float32(np.sqrt(query.shape[-1]))
    if rule is None:
        return _attend_all(query, key, value)
    output = np.empty_like(query)
    numbers = rule.numbers(budget, *query.shape[1:])
    _evict(query, key, value, *numbers, rule.merge == "spare", rule.n_query, output)
    return output


def _attend_all(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The outputs with the full cache."""
    n, group, dim = query.shape
    output = np.empty_like(query)
    for at in range(0, n, _CHUNK):
        end = min(at + _CHUNK, n)
        logits = (query[at:end].reshape(-1, dim) @ key[:end].T).reshape(end - at, group, end)
        logits[:, :, at:] += np.triu(np.full((end - at, end - at), -np.inf, np.float32), 1)[:, None]
        weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
        sums = weight.sum(axis=-1, keepdims=True)
        output[at:end] = ((weight / sums).reshape(-1, end) @ value[:end]).reshape(end - at, group, dim)
    return output


@numba.njit(fastmath=True, cache=True)
def _dot(a, b):
    total = np.float32(0)
    for e in range(len(a)):
        total += a[e] * b[e]
    return total


@numba.njit(fastmath=True, cache=True)
def _apart(a, b):
    """Return the squared distance of two vectors."""
    total = np.float32(0)
    for e in range(len(a)):
        total += (a[e] - b[e]) * (a[e] - b[e])
    return total


@numba.njit(fastmath=True, cache=True)
def _victim(kind, t, n, n_sink, n_window, n_steady, pos, mass, squares):
    """Return the index of the cell to evict after token t, among the first n cells.

    If cells have equal scores, the oldest is evicted.
    """
    if n_steady > 0:
        variance = np.full(n, np.inf)
        for c in range(n):
            if n_sink <= pos[c] <= t - n_window:
                mean = mass[c] / (t + 1 - pos[c])
                variance[c] = squares[c] / (t + 1 - pos[c]) - mean * mean
        n_exempt = np.count_nonzero(np.isinf(variance)) + n_steady
        least = np.partition(variance, n - n_exempt)[n - n_exempt] if n_exempt < n else -np.inf
    best, lowest = -1, np.inf
    for c in range(n):
        if not n_sink <= pos[c] <= t - n_window or (n_steady > 0 and variance[c] >= least):
            continue
        score = 0.0
        if kind == HEAVY:
            score = np.float64(mass[c])
        elif kind == STEADY:
            score = mass[c] / (t + 1 - pos[c])
        if best < 0 or score < lowest or (score == lowest and pos[c] < pos[best]):
            best, lowest = c, score
    return best


@numba.njit(fastmath=True, cache=True)
def _seen(key, bias, queries, totals, into):
    """Return a mean's attention, summed over the queries. Write the attention of each query to `into`."""
    total = np.float32(1e-20)
    for r in range(len(queries)):
        into[r] = np.exp(min(_dot(key, queries[r]) + bias - totals[r], np.float32(0)))
        total += into[r]
    return total


@numba.njit(fastmath=True, cache=True)
def _least_seen(m, seen, values, outputs):
    """Return the index of the mean whose removal changes the outputs least.

    The cost ignores that the attention to all other tokens grows after a removal.
    """
    best, least = -1, _FAR
    for x in range(m):
        cost = np.float32(0)
        for r in range(len(outputs)):
            cost += seen[x, r] * seen[x, r] * _apart(values[x], outputs[r])
        if cost < least:
            best, least = x, cost
    return best


@numba.njit(fastmath=True, cache=True)
def _least_changed(m, seen, total, values):
    """Return the indices of the two means whose merge changes the outputs least.

    The merged mean is assumed to get the sum of the two means' attention.
    """
    one, other, least = -1, -1, _FAR
    for x in range(m):
        for y in range(x):
            share = total[x] / (total[x] + total[y])
            cost = np.float32(0)
            for r in range(seen.shape[1]):
                u = seen[x, r] * (1 - share) - seen[y, r] * share
                cost += u * u
            cost *= _apart(values[x], values[y])
            if cost < least:
                one, other, least = x, y, cost
    return one, other


@numba.njit(fastmath=True, cache=True)
def _evict(
    query,
    key,
    value,
    n_cell,
    kind,
    n_sink,
    n_window,
    n_steady,
    n_mean,
    spare,
    n_query,
    output,
):
    """Compute a row's outputs, with an eviction after each token. query: already scaled."""
    n_token, group, dim = query.shape
    f32 = np.float32
    keys, values = np.zeros((n_cell, dim), f32), np.zeros((n_cell, dim), f32)
    mass, squares, pos = np.zeros(n_cell, f32), np.zeros(n_cell), np.zeros(n_cell, np.int64)
    mean_keys, mean_values = np.zeros((n_mean + 1, dim), f32), np.zeros((n_mean + 1, dim), f32)
    size, bias = np.zeros(n_mean + 1, f32), np.zeros(n_mean + 1, f32)
    # queries of the last n_query tokens. An unused entry has a total of _FAR, so that its attention to every
    # mean is 0
    queries, outputs = np.zeros((n_query * group, dim), f32), np.zeros((n_query * group, dim), f32)
    totals = np.full(n_query * group, _FAR)
    seen, paid = np.zeros((n_mean + 1, n_query * group), f32), np.zeros(n_mean + 1, f32)
    weight, attn, out = np.zeros(n_cell + n_mean + 1, f32), np.zeros(n_cell, f32), np.zeros(dim, f32)
    n = m = 0
    for t in range(n_token):
        keys[n], values[n], pos[n], mass[n], squares[n] = key[t], value[t], t, 0, 0
        n += 1
        attn[:n] = 0
        for g in range(group):
            most = -_FAR
            for c in range(n):
                weight[c] = _dot(keys[c], query[t, g])
                most = max(most, weight[c])
            for c in range(m):
                weight[n + c] = _dot(mean_keys[c], query[t, g]) + bias[c]
                most = max(most, weight[n + c])
            z = f32(0)
            for c in range(n + m):
                weight[c] = np.exp(weight[c] - most)
                z += weight[c]
            out[:] = 0
            for c in range(n + m):
                w = weight[c] / z
                from_ = values[c] if c < n else mean_values[c - n]
                for e in range(dim):
                    out[e] += w * from_[e]
                if c < n:
                    attn[c] += w
            output[t, g] = out
            r = t % n_query * group + g
            queries[r], outputs[r], totals[r] = query[t, g], out, most + np.log(z)
        for c in range(n):
            mass[c] += attn[c]
            squares[c] += attn[c] * attn[c]
        if n < n_cell:
            continue
        gone = _victim(kind, t, n, n_sink, n_window, n_steady, pos, mass, squares)
        if n_mean:
            mean_keys[m], mean_values[m], size[m], bias[m] = keys[gone], values[gone], 1, 0
            m += 1
        n -= 1
        keys[gone], values[gone], pos[gone] = keys[n], values[n], pos[n]
        mass[gone], squares[gone] = mass[n], squares[n]
        if m <= n_mean:
            continue
        for x in range(m):
            paid[x] = _seen(mean_keys[x], bias[x], queries, totals, seen[x])
        if spare:
            b = _least_seen(m, seen, mean_values, outputs)
        else:
            a, b = _least_changed(m, seen, paid, mean_values)
            share = max(min(paid[a] / (paid[a] + paid[b]), f32(0.99)), f32(0.01))
            for e in range(dim):
                mean_keys[a, e] = share * mean_keys[a, e] + (1 - share) * mean_keys[b, e]
                mean_values[a, e] = share * mean_values[a, e] + (1 - share) * mean_values[b, e]
            size[a] += size[b]
            now = f32(1e-20)
            for r in range(n_query * group):
                now += np.exp(min(_dot(mean_keys[a], queries[r]) - totals[r], f32(60)))
            # limit the bias to log(size) +- 3, because it is a bad estimate if the queries hardly attend to
            # the mean
            log_size = np.log(size[a])
            bias[a] = min(max(np.log((paid[a] + paid[b]) / now), log_size - 3), log_size + 3)
        m -= 1
        mean_keys[b], mean_values[b], size[b], bias[b] = mean_keys[m], mean_values[m], size[m], bias[m]


if __name__ == "__main__":
    main()
