"""Fake long streams, to measure speed at a depth (a number of tokens).

Reading 32,768 tokens may take minutes. But the time of a step depends only on how many tokens are in the
cache and the archive. Therefore only a few tokens are read, and their data is repeated. The model's output is
then meaningless.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.engine.snapshot import COUNTERS, Counters
from kvtool.llama.cache.segment import CENTERS, CLUSTERS, TABLE, layer_name, n_blocks
from kvtool.llama.loaded.model import Model
from kvtool.models.layers import Kind
from kvtool.policies import recall
from kvtool.policy import Policy

N_SEED = 256
"""Number of tokens that `fill` reads. It repeats the data of these tokens."""

N_ARCHIVED, N_EVICTED = 512, 64
"""Number of tokens that `start` reads after the cells are full.

The first number is for policies with recall. The second number is for other policies.
"""

Arrays = dict[str, np.ndarray]


def text(model: Model) -> np.ndarray:
    """Return the tokens of a text that is always available: the source code of the policies."""
    files = sorted(Path(policies.__file__).parent.glob("*.py"))
    return model.tokenize("\n".join(file.read_text(encoding="utf-8") for file in files), start=True)


def fill(engine: Engine, tokens: np.ndarray, n: int) -> None:
    """Fill an empty engine with n tokens: read the first N_SEED, and repeat their data.

    The policy must not evict.
    """
    n_seed = min(n, N_SEED)
    engine.read(tokens[:n_seed])
    if n == n_seed:
        return
    rows, context = engine.rows, engine.context
    shares = _key_shares(engine.model)
    for layer, share in enumerate(shares):
        data = context.cells(layer, n_seed)
        ends = 0, round(len(data) * share), len(data)
        parts = [_repeated(data[a:b], n_seed, n) for a, b in pairwise(ends)]
        context.set_cells(layer, n, np.concatenate(parts))
    rows.n_past = rows.n_kv = n
    pos = np.tile(np.arange(n, dtype=np.int32), (len(rows.layer), 1))
    live = np.full(len(rows.layer), n, np.int32)
    rows.next_rot = n
    rows.put(live, pos, pos)
    engine.cache.edit(live, n)
    context.set_positions(pos)


def _key_shares(model: Model) -> list[float]:
    """Share of keys in the bytes of a cell, for each layer with cells.

    Keys and values must have the same type.
    """
    owners = [layer for layer in model.layers.of(Kind.ROWS) if layer.is_owner]
    return [layer.head_size_k / (layer.head_size_k + layer.head_size_v) for layer in owners]


def _repeated(values: np.ndarray, n_own: int, n: int) -> np.ndarray:
    """Repeat the bytes of n_own tokens, in order, until there are n tokens. Return the bytes as u8."""
    tokens = values.reshape(-1).view(np.uint8).reshape(n_own, values.nbytes // n_own)
    return np.take(tokens, np.arange(n) % n_own, axis=0).reshape(-1)


def n_start(policy: Policy) -> int:
    """Number of tokens after which an evicting policy has filled its cells and evicted some tokens."""
    return policy.n_live + (N_ARCHIVED if policy.recall else N_EVICTED)


def start(
    model: Model, policy: Policy, settings: Settings, tokens: np.ndarray, stopped: Callable[[], bool]
) -> Arrays:
    """Read tokens i32[n] with an evicting policy, and return the result of `Engine.save`.

    `stopped` is called before each step. Reading ends when it returns True. A policy with recall reads full
    batches here instead of its usual chunks. This changes the saved data only by rounding errors.
    """
    if isinstance(policy, recall.Recall):
        policy = replace(policy, chunk=settings.n_batch)
    with closing(Engine(model, policy, replace(settings, prefill="stream"))) as engine:
        engine.read(tokens, stopped)
        return dict(engine.save())


def n_past(saved: Arrays) -> int:
    """Number of tokens of the saved stream."""
    return _counters(saved)["rows.n_past"]


def _counters(saved: Arrays) -> Counters:
    return dict(zip(COUNTERS, saved["engine"].tolist(), strict=True))


def lengthened(saved: Arrays, n: int, n_ctx: int) -> Arrays:
    """Return the state `saved` as if n more tokens had been read. The policy must evict.

    The keys and values in the cells stay the same. If there is an archive, n tokens are added at its end.
    """
    counters = _counters(saved)
    for name in ("rows.n_past", "n_planned", "signals.since"):
        counters[name] += n
    n_after, next_rot = counters["rows.n_past"], counters["rows.next_rot"]
    longer = saved | {"engine": np.array(list(counters.values()), np.int64)}
    if TABLE not in saved:
        return longer
    begin, end = saved[TABLE][:2].tolist()
    assert begin < end
    # leave out the saved clusters: `Engine.restore` then computes clusters for the repeated tokens
    longer = {name: values for name, values in longer.items() if not name.startswith(CLUSTERS)}
    layer = 0
    while (name := layer_name(layer)) in longer:
        longer[name] = _repeated(longer[name], end - begin, end - begin + n)
        layer += 1
    if CENTERS in longer:
        shape = n_blocks(begin, end + n), longer[CENTERS].shape[1]
        longer[CENTERS] = np.resize(longer[CENTERS], shape)
    longer["pos"] = np.where(saved["pos"] < begin, saved["pos"], saved["pos"] + n).astype(np.int32)
    base = n_after - next_rot
    # A new frame begins whenever a stream closes the gaps in its positions. Assume that it closed them every
    # n_ctx * 3 / 4 tokens
    bases = range(base, 0, -max(n_ctx * 3 // 4, 1))[::-1]
    frames = [number for step in bases for number in (max(begin, step), step)] or [begin, 0]
    frames[0] = begin
    far = max(begin, n_after - n_ctx // 2)
    longer[TABLE] = np.array([begin, end + n, min(far, end + n), *frames], np.int64)
    return longer
