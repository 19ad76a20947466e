"""Which tokens of the stream the cache still holds, over time: for each row, and as a share of the rows.

A row holds a token if it has its key. A value that was merged into another token's does not count.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtool.engine.loop import Engine
from kvtool.llama.model import Model

MOST_SNAPSHOTS = 255
"""The most snapshots: their numbers must fit into a byte."""

Progress = Callable[[int], None]
"""Called after each batch with the number of tokens read so far."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Which tokens of a text of n tokens each row held at some times, the snapshots.

    Attributes
    ----------
    layer
        i32[row], the layer of each row.
    head
        i32[row], the KV head of each row.
    ends
        i64[snapshot], tokens read at each snapshot, rising.
    until
        u8[row, n], the first snapshot at which the row no longer held the token; 0 if it held it at none.
        This says everything, because an evicted token never comes back to a cell of its own.
    archived
        i64[snapshot, 2], the first archived token and the one behind the last.
    """

    layer: np.ndarray
    head: np.ndarray
    ends: np.ndarray
    until: np.ndarray
    archived: np.ndarray

    def held(self, snapshot: int = -1) -> np.ndarray:
        """b1[row, n], whether the row holds the token at that snapshot; by default at the last."""
        snapshot %= len(self.ends)
        seen = np.arange(self.until.shape[1]) < self.ends[snapshot]
        held: np.ndarray = (self.until > snapshot) & seen
        return held

    def share(self, snapshot: int = -1) -> np.ndarray:
        """f64[n], the share of the rows that hold the token at that snapshot."""
        share: np.ndarray = self.held(snapshot).mean(axis=0)
        return share


def is_archived(engine: Engine) -> np.ndarray:
    """b1[n_past], whether a token is in the archive: no row holds it, and it may be recalled."""
    span = _archived(engine)
    token = np.arange(engine.n_past)
    return (token >= span.start) & (token < span.stop)


def n_forgotten(engine: Engine) -> int:
    """How many tokens of the stream no row holds any more, nor the archive.

    The cost grows with the cells, not the stream.
    """
    held = np.sort(_held(engine)[1])
    return engine.n_past - int(np.count_nonzero(np.diff(held, prepend=-1))) - engine.n_archived


def watch(
    engine: Engine, tokens: np.ndarray, n_snapshot: int = 1, progress: Progress = lambda n: None
) -> Holdings:
    """Read a text i32[n] into the engine's empty cache, with snapshots after equal parts of it.

    The text is streamed as in `perplexity`: no eviction is late. If the engine reads it whole, there is one
    snapshot, after the eviction. Raises what Engine.step and Engine.read raise.
    """
    n = len(tokens)
    whole = engine.reads_whole(n)
    ends = np.array([n]) if whole else np.unique(-(-np.arange(1, n_snapshot + 1) * n // n_snapshot))
    rows = engine.cells()
    until = np.zeros((len(rows.live), n), np.uint8)
    archived = np.zeros((len(ends), 2), np.int64)

    def stopped() -> bool:
        progress(engine.n_past)
        return False

    for snapshot, end in enumerate(ends.tolist()):
        if whole:
            engine.read(tokens, stopped=stopped)
        for _ in engine.steps(tokens[engine.n_past : end], every=False):
            progress(engine.n_past)
        until[_held(engine)] = snapshot + 1
        span = _archived(engine)
        archived[snapshot] = span.start, span.stop
    return Holdings(rows.layer, rows.head, ends, until, archived)


def texts(model: Model, tokens: np.ndarray) -> list[str]:
    """The text of each token i32[n], special tokens included.

    A character that spans several tokens is the text of the last of them; the others have "".
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = [decoder.decode(model.piece(token, special=True)) for token in tokens.tolist()]
    if found:
        found[-1] += decoder.decode(b"", final=True)
    return found


def _archived(engine: Engine) -> range:
    """The positions of the archived tokens."""
    archive = engine.context.archive
    return archive.span if archive else range(0)


def _held(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """The row and the position of every live cell."""
    row, cell = np.nonzero(np.arange(engine.n_kv) < engine.rows.live[:, None])
    return row, engine.rows.pos[row, cell]
