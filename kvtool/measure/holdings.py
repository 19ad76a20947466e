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

Progress = Callable[[int], None]
"""Called after each batch with the number of tokens read so far."""


@dataclass(slots=True)
class Recalled:
    """How often, where and for which queries the tokens of a text of n tokens were recalled.

    Steps in which all archived tokens came back do not count: nothing was chosen.

    Attributes
    ----------
    steps
        i32[row, n], the steps in which each row recalled the token.
    query
        i32[n], the first query of the step whose rows recalled the token most: where the share of the rows is
        farthest above that of the archive that came back. Of equal ones the first; -1 without any.
    rows
        i32[n], the rows that recalled it in that step.
    """

    steps: np.ndarray
    query: np.ndarray
    rows: np.ndarray
    _most: np.ndarray

    @classmethod
    def none(cls, n_row: int, n: int) -> Recalled:
        """Nothing is recalled yet."""
        counts = np.zeros((n_row, n), np.int32)
        return cls(counts, np.full(n, -1, np.int32), np.zeros(n, np.int32), np.zeros(n))

    def add(self, chosen: np.ndarray, query: int, n_archived: int) -> None:
        """Counts a step that begins with this query. chosen: i64[row, k], positions that rise; or -1."""
        if (chosen[:, -1] - chosen[:, 0] < chosen.shape[1]).all():
            return
        self.steps[np.arange(len(chosen))[:, None], chosen] += 1
        rows = np.bincount(chosen.ravel(), minlength=len(self.query))
        above = rows / len(chosen) - chosen.shape[1] / n_archived
        more = above > self._most
        self._most[more], self.query[more], self.rows[more] = above[more], query, rows[more]


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
    recalled
        What the rows have recalled, if the policy recalls tokens.
    """

    layer: np.ndarray
    head: np.ndarray
    ends: np.ndarray
    until: np.ndarray
    archived: np.ndarray
    recalled: Recalled | None = None

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


def recalled_last(engine: Engine) -> np.ndarray:
    """i64[row, k], the tokens that each row recalled in the last step, the oldest first; then -1."""
    n_row, archive, recall = len(engine.rows.live), engine.context.archive, engine.policy.recall
    if not archive or not recall or recall.made:
        return np.empty((n_row, 0), np.int64)
    return archive.recalled(n_row, recall.n_cell)


def is_archived(engine: Engine) -> np.ndarray:
    """b1[n_past], whether a token is in the archive: no row holds it, and it may be recalled."""
    return np.isin(np.arange(engine.n_past), _archived(engine))


def n_forgotten(engine: Engine) -> int:
    """How many tokens of the stream no row holds any more, nor the archive.

    The cost grows with the cells, not the stream.
    """
    return engine.n_past - len(np.unique(_held(engine)[1])) - engine.n_archived


def watch(
    engine: Engine, tokens: np.ndarray, n_snapshot: int = 1, progress: Progress = lambda n: None
) -> Holdings:
    """Read a text i32[n] into the engine's empty cache, with up to 255 snapshots after equal parts of it.

    The text is streamed as in `perplexity`: no eviction is late. If the engine reads it whole, there is one
    snapshot, after the eviction. Raises what Engine.step and Engine.read raise.
    """
    n = len(tokens)
    whole = engine.reads_whole(n)
    ends = np.array([n]) if whole else np.unique(-(-np.arange(1, n_snapshot + 1) * n // n_snapshot))
    rows = engine.cells()
    until = np.zeros((len(rows.live), n), np.uint8)
    archived = np.zeros((len(ends), 2), np.int64)
    recall = engine.policy.recall
    recalled = Recalled.none(*until.shape) if recall and not recall.made else None

    def stopped() -> bool:
        progress(engine.n_past)
        return False

    for snapshot, end in enumerate(ends.tolist()):
        if whole:
            engine.read(tokens, stopped=stopped)
        first = engine.n_past
        for part in engine.steps(tokens[first:end], every=False):
            progress(engine.n_past)
            if recalled:
                recalled.add(recalled_last(engine), first + part.start, engine.n_archived)
        until[_held(engine)] = snapshot + 1
        span = _archived(engine)
        archived[snapshot] = span.start, span.stop
    return Holdings(rows.layer, rows.head, ends, until, archived, recalled)


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
