"""Streams at a depth: as if many tokens had been read, for measurements of speed.

Reading 32,768 tokens may take minutes, and what a step takes depends on how many tokens there are, not on
which: a few are read, and what the cache or the archive then holds of them is repeated. What such a stream
says means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.model import Model
from kvtool.llama.segment import CLUSTERS, TABLE, layer_name
from kvtool.models.layers import Kind
from kvtool.policies import recall
from kvtool.policy import Policy

if TYPE_CHECKING:
    from kvtool.llama.archive import Archive

N_SEED = 256
"""Tokens that are read for a full cache."""

N_ARCHIVED, N_EVICTED = 512, 64
"""Tokens that leave the cache while the start of a policy is read: of one that recalls, and of others."""

Arrays = dict[str, np.ndarray]


def text(model: Model) -> np.ndarray:
    """Tokens of a text that is always at hand: the source of the policies."""
    files = sorted(Path(policies.__file__).parent.glob("*.py"))
    return model.tokenize("\n".join(file.read_text(encoding="utf-8") for file in files), start=True)


def fill(engine: Engine, tokens: np.ndarray, n: int) -> None:
    """Lets an empty engine, of a policy that evicts nothing, hold n tokens: the first ones, repeated."""
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
    engine.eviction.edit(live, n)
    context.set_places(pos)


def _key_shares(model: Model) -> list[float]:
    """Of each layer that has cells, which share of a cell's bytes are keys; both have one type."""
    own = [layer for layer in model.layers.of(Kind.ROWS) if layer.is_owner]
    return [layer.head_size_k / (layer.head_size_k + layer.head_size_v) for layer in own]


def _repeated(values: np.ndarray, n_own: int, n: int) -> np.ndarray:
    """The bytes of n tokens from those of n_own."""
    own = values.reshape(-1).view(np.uint8).reshape(n_own, values.nbytes // n_own)
    return np.take(own, np.arange(n) % n_own, axis=0).reshape(-1)


def n_start(policy: Policy) -> int:
    """Tokens after which an evicting policy is as it stays: its cells are taken, and some are archived."""
    return policy.n_live + (N_ARCHIVED if policy.recall else N_EVICTED)


def start(
    model: Model, policy: Policy, settings: Settings, tokens: np.ndarray, stopped: Callable[[], bool]
) -> Arrays:
    """What `Engine.save` gives of an evicting policy after tokens i32[n], which are read for it.

    `stopped` is asked before each step whether to end. A policy that recalls reads in steps as long as any:
    that changes what is kept by rounding alone.
    """
    if isinstance(policy, recall.Recall):
        policy = replace(policy, chunk=settings.n_batch)
    engine = Engine(model, policy, replace(settings, prefill="stream"))
    try:
        engine.read(tokens, stopped)
        return {name: np.array(values) for name, values in engine.save()}
    finally:
        engine.close()


def n_past(saved: Arrays) -> int:
    """After how many tokens a stream was `saved`."""
    return int(saved["engine"][0])


def lengthened(saved: Arrays, n: int, n_ctx: int) -> Arrays:
    """What an evicting policy has `saved`, as if it were after n tokens more.

    The newest tokens stay the newest; what is added went to the archive, if there is one, before them.
    """
    # in the order of `snapshot._COUNTERS`
    counters = saved["engine"].copy()
    n_after, next_rot = n_past(saved) + n, int(counters[5])
    for at in (0, 6, 7):
        counters[at] += n
    longer = saved | {"engine": counters}
    if TABLE not in saved:
        return longer
    begin, end = saved[TABLE][:2].tolist()
    assert begin < end
    # those of the repeated tokens are made when they are restored
    longer = {name: values for name, values in longer.items() if not name.startswith(CLUSTERS)}
    layer = 0
    while (name := layer_name(layer)) in longer:
        longer[name] = _repeated(longer[name], end - begin, end - begin + n)
        layer += 1
    longer["pos"] = np.where(saved["pos"] < begin, saved["pos"], saved["pos"] + n).astype(np.int32)
    base = n_after - next_rot
    # positions start over, as they do in a stream
    bases = range(base, 0, -max(n_ctx * 3 // 4, 1))[::-1]
    frames = [number for own in bases for number in (max(begin, own), own)] or [begin, 0]
    frames[0] = begin
    far = max(begin, n_after - n_ctx // 2)
    longer[TABLE] = np.array([begin, end + n, min(far, end + n), *frames], np.int64)
    return longer


def clusters(archive: Archive) -> Arrays:
    """The clusters of an archive, which `lengthened` leaves out: to make them takes longer than the rest."""
    return dict(archive.save_clusters())
