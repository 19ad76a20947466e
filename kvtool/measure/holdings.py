"""Which tokens of the stream the cache still holds, over time: row by row, and as a share of the rows.

A row holds a token whose key it has. A value that was merged into another token's counts for nothing here.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtool.engine.loop import Engine
from kvtool.llama.model import Model

MOST_SNAPSHOTS = 255
"""A snapshot's number fits into a byte."""

Progress = Callable[[int], None]
"""Called after each step with the number of tokens read so far."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What each row held of a text of n tokens after some of its tokens: the snapshots.

    layer, head i32[row]: the layer and the KV head in it of each row. ends i64[snapshot]: how many tokens
    each snapshot had seen, rising. until u8[row, n]: the first snapshot at which the row no longer held the
    token, 0 if it held it at none; what goes never comes back, so that this says all of it.
    """

    layer: np.ndarray
    head: np.ndarray
    ends: np.ndarray
    until: np.ndarray

    def held(self, snapshot: int = -1) -> np.ndarray:
        """b1[row, n]: whether the row holds the token at that snapshot, the last unless given."""
        snapshot %= len(self.ends)
        seen = np.arange(self.until.shape[1]) < self.ends[snapshot]
        held: np.ndarray = (self.until > snapshot) & seen
        return held

    def share(self, snapshot: int = -1) -> np.ndarray:
        """f64[n]: the share of the rows that hold the token at that snapshot."""
        share: np.ndarray = self.held(snapshot).mean(axis=0)
        return share


def n_forgotten(engine: Engine) -> int:
    """How many tokens of the stream no row holds any more; costs by the cells, not by the stream."""
    held = np.sort(_held(engine)[1])
    return engine.n_past - int(np.count_nonzero(np.diff(held, prepend=-1)))


def watch(
    engine: Engine, tokens: np.ndarray, n_snapshot: int = 1, progress: Progress = lambda n: None
) -> Holdings:
    """Reads a text i32[n] into the engine's empty cache, with snapshots after equal parts of it.

    Streamed as perplexity streams it: no eviction is late. Where the engine reads it whole there is one
    snapshot, after its compression. Raises as Engine.step and Engine.read do.
    """
    n = len(tokens)
    whole = engine.reads_whole(n)
    ends = np.array([n]) if whole else np.unique(-(-np.arange(1, n_snapshot + 1) * n // n_snapshot))
    rows = engine.cells()
    until = np.zeros((len(rows.live), n), np.uint8)

    def stopped() -> bool:
        progress(engine.n_past)
        return False

    for snapshot, end in enumerate(ends.tolist()):
        if whole:
            engine.read(tokens, stopped=stopped)
        while engine.n_past < end:
            n_step = min(engine.room(), engine.n_until_plan, end - engine.n_past)
            engine.step(tokens[engine.n_past : engine.n_past + n_step], n_output=0)
            progress(engine.n_past)
        until[_held(engine)] = snapshot + 1
    return Holdings(rows.layer, rows.head, ends, until)


def texts(model: Model, tokens: np.ndarray) -> list[str]:
    """The text of each token i32[n]; markers are written out.

    A character of several tokens is its last one's text, and the others have none.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = [decoder.decode(model.piece(token, special=True)) for token in tokens.tolist()]
    if found:
        found[-1] += decoder.decode(b"", final=True)
    return found


def _held(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of every live cell."""
    row, cell = np.nonzero(np.arange(engine.n_kv) < engine.rows.live[:, None])
    return row, engine.rows.pos[row, cell]
