"""Holdings: which tokens of a stream each row of the cache still holds, at several points of the stream.

A row holds a token if it has the token's key. If only the token's value was merged into another token, the
row does not hold it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtool.engine.loop import Engine
from kvtool.llama.loaded.model import Model

Progress = Callable[[int], None]
"""Function to call after each batch, with the number of tokens read so far."""


N_TRACED = 256
"""Number of archived tokens whose attention is recorded, for each row and step.

They are the archived tokens that the row attends to most. In a text of 1,500 tokens, 256 tokens get 93 % of
the attention to the archive, and 64 tokens get 79 %.
"""


@dataclass(slots=True)
class Attended:
    """Attention that the n tokens of a text got after they were archived.

    Attributes
    ----------
    attn
        f32[row, n], attention of the row's query heads to each token, summed over heads and queries. For
        each query, the attention of a head to all tokens sums to 1.
    n_head
        i32[row], number of query heads of each row.
    n_query
        Number of queries since the first token was archived.
    query
        i32[n], the step in which the token got its largest share of all attention. It is given by the
        position of the step's first query. If several steps are equal, the first is used. -1 if the token
        got no attention.
    query_share
        f64[n], the token's share of all attention in the step of `query`.
    """

    attn: np.ndarray
    n_head: np.ndarray
    n_query: int
    query: np.ndarray
    query_share: np.ndarray

    @classmethod
    def none(cls, n_head: np.ndarray, n: int) -> Attended:
        """Create an object for n tokens that have got no attention yet. n_head: i32[row]."""
        attn = np.zeros((len(n_head), n), np.float32)
        return cls(attn, n_head, 0, np.full(n, -1, np.int32), np.zeros(n))

    def add(self, pos: np.ndarray, attn: np.ndarray, queries: slice) -> None:
        """Add the attention of a step.

        pos: i64[row, k], positions of archived tokens, -1 for no token. attn: f32[row, k], their attention.
        queries: positions of the step's tokens.
        """
        row, at = np.nonzero(pos >= 0)
        if not len(row):
            return
        pos, attn = pos[row, at], attn[row, at]
        n = queries.stop - queries.start
        self.attn[row, pos] += attn
        self.n_query += n
        share = np.bincount(pos, attn, len(self.query)) / (n * self.n_head.sum())
        more = share > self.query_share
        self.query[more], self.query_share[more] = queries.start, share[more]

    def share(self) -> np.ndarray:
        """f64[n], each token's share of all attention since the first token was archived."""
        share: np.ndarray = self.attn.sum(axis=0, dtype=np.float64) / (self.n_query * self.n_head.sum())
        return share

    def row_share(self) -> np.ndarray:
        """f64[row, n], each token's share of the row's attention."""
        share: np.ndarray = self.attn / (self.n_query * self.n_head[:, None])
        return share


@dataclass(frozen=True, slots=True)
class Holdings:
    """Tokens that each row held, at several points (snapshots) of a text of n tokens.

    Attributes
    ----------
    layer
        i32[row], layer of each row.
    head
        i32[row], KV head of each row.
    ends
        i64[snapshot], number of tokens read at each snapshot, ascending.
    until
        u8[row, n], index of the first snapshot at which the row no longer held the token; 0 if it held the
        token at no snapshot. One index is enough, because an evicted token never returns to a live cell.
    archived
        i64[snapshot, 2], position of the first archived token, and position after the last archived token.
    attended
        Attention that archived tokens got; None without an archive.
    """

    layer: np.ndarray
    head: np.ndarray
    ends: np.ndarray
    until: np.ndarray
    archived: np.ndarray
    attended: Attended | None = None

    def held(self, snapshot: int = -1) -> np.ndarray:
        """b1[row, n], True if the row holds the token at this snapshot. The default is the last snapshot."""
        snapshot %= len(self.ends)
        seen = np.arange(self.until.shape[1]) < self.ends[snapshot]
        held: np.ndarray = (self.until > snapshot) & seen
        return held

    def share(self, snapshot: int = -1) -> np.ndarray:
        """f64[n], share of the rows that hold the token at this snapshot."""
        share: np.ndarray = self.held(snapshot).mean(axis=0)
        return share

    def is_archived(self, snapshot: int = -1) -> np.ndarray:
        """b1[n], True if the archive has the token at this snapshot."""
        begin, end = self.archived[snapshot]
        at = np.arange(self.until.shape[1])
        archived: np.ndarray = (begin <= at) & (at < end)
        return archived


def is_archived(engine: Engine) -> np.ndarray:
    """b1[n_past], True if a token is in the archive: no row holds it, and it may be recalled."""
    return np.isin(np.arange(engine.n_past), _archived(engine))


def n_forgotten(engine: Engine) -> int:
    """Number of the stream's tokens that are lost: they are in no row and not in the archive.

    The time of the computation depends on the number of cells, not on the length of the stream.
    """
    held = np.sort(_held(engine)[1])
    # np.unique would import numpy.ma, which takes 20 ms
    n_held = np.count_nonzero(held[1:] != held[:-1]) + bool(len(held))
    return engine.n_past - int(n_held) - engine.n_archived


def watch(
    engine: Engine, tokens: np.ndarray, n_snapshot: int = 1, progress: Progress = lambda n: None
) -> Holdings:
    """Read a text i32[n] into the engine's empty cache, and take up to n_snapshot snapshots, at most 255.

    The text is streamed as in `perplexity`, so that evictions follow the policy's schedule exactly. Snapshots
    are taken at ends of batches, about equally spaced. If the engine reads the text as a whole instead, there
    is only one snapshot, after the eviction. Attention to an archive is counted from the first eviction on.
    """
    n = len(tokens)
    rows = engine.cells()
    until = np.zeros((len(rows.live), n), np.uint8)
    ends: list[int] = []
    archived: list[tuple[int, int]] = []
    archive, recall = engine.context.archive, engine.policy.recall
    attended = None
    if archive and recall:
        attended = Attended.none(engine.context.n_head, n)
        # for a model without values (MLA), only attention to the recalled tokens is known
        n_traced = N_TRACED if engine.model.layers.has_values else recall.n_cell
        archive.trace(n_traced)

    def stopped() -> bool:
        progress(engine.n_past)
        return False

    def take_snapshot() -> None:
        ends.append(engine.n_past)
        until[_held(engine)] = len(ends)
        span = _archived(engine)
        archived.append((span.start, span.stop))

    if engine.reads_whole(n):
        engine.read(tokens, stopped=stopped)
        take_snapshot()
    else:
        for part in engine.steps(tokens, every=False):
            progress(engine.n_past)
            if archive and attended:
                attended.add(*archive.attended(len(until), n_traced), part)
            # take a snapshot if this batch has completed another of n_snapshot equal parts of the text
            if part.stop * n_snapshot // n > part.start * n_snapshot // n:
                take_snapshot()
    if attended and not attended.n_query:
        attended = None
    return Holdings(rows.layer, rows.head, np.array(ends), until, np.array(archived), attended)


def texts(model: Model, tokens: np.ndarray) -> list[str]:
    """Return the text of each token i32[n], special tokens included.

    If a character spans several tokens, it belongs to the last of them. The texts of the earlier tokens are
    empty.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(model.piece(token, special=True)) for token in tokens.tolist()]
    if pieces:
        pieces[-1] += decoder.decode(b"", final=True)
    return pieces


def _archived(engine: Engine) -> range:
    archive = engine.context.archive
    return archive.span if archive else range(0)


def _held(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of every live cell."""
    row, cell = np.nonzero(np.arange(engine.n_kv) < engine.rows.live[:, None])
    return row, engine.rows.pos[row, cell]
