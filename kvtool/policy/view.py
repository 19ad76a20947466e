"""What a policy sees of the cache: the view, the signals in it, and the request for them."""

from dataclasses import dataclass
from enum import IntFlag
from typing import cast

import numpy as np

from kvtool.policy.checks import check_choice, check_whole


class Signal(IntFlag):
    """A statistic of the step's attention A[head, query, cell], which the engine copies out for each row.

    The group of a row are the query heads that share its KV head. A key is important to a query that has seen
    t tokens, itself included, where A >= 1 / t. The values are those of the patched library's C API.
    """

    NONE = 0
    ATTENTION = 1
    """Attention sum: over the group and the queries since the last plan."""
    LAST = 2
    """Last attention: of the newest query, summed over the group."""
    RECENT = 4
    """Recent attention: summed over the group and the last `n_query` queries of the stream."""
    SQUARES = 8
    """Squares: each query's attention summed over the group, then squared, summed since the last plan."""
    HITS = 16
    """Hits: pairs of a query since the last plan and a head of the group that found the key important."""
    IMPORTANT = 32
    """Last important step: tokens seen by the latest query that found the key important; 0: none did."""
    HIGHEST = 64
    """Highest attention: of any query since the last plan and any head of the group."""
    KEYS = 128
    """Keys: of the cells that are new since the last plan, as they were before RoPE."""
    FUTURE = 256
    """Future logits: their mean and variance over the last `n_query` queries, if these came next: each of
    them at all of the next `n_future` positions, its logits averaged. Soft caps are left out, and what falls
    with distance (ALiBi)."""
    LENGTHS = 512
    """Lengths of values: the Euclidean norm of each cell's; 1 where values are a part of the keys (MLA)."""


SIGNALS = {
    Signal.ATTENTION: "attn",
    Signal.LAST: "last",
    Signal.RECENT: "recent",
    Signal.SQUARES: "squares",
    Signal.HITS: "hits",
    Signal.IMPORTANT: "important",
    Signal.HIGHEST: "highest",
}
"""The fields of a view that hold one value per cell."""


@dataclass(frozen=True, slots=True)
class Recalls:
    """What a step brings back from the archive, where evicted tokens go.

    Attributes
    ----------
    n_cell
        Cells of each row that a query sees besides the live ones. They are made, one for each query head of a
        row: attention to them is attention to the archive. Where values are a part of the keys (MLA) they are
        the archived tokens that get most attention.
    chunk
        The most tokens of a step. Each has its own made cells; archived tokens come back for all of them.
    n_exact
        Archived tokens of a row that a step looks into, cluster by cluster; the others are known by their
        cluster's mean. 0: it looks into all.
    """

    n_cell: int
    chunk: int
    n_exact: int = 0

    def n_filled(self, made: bool) -> int:
        """Cells of each row that a step fills, at most. made: whether they are made."""
        return self.n_cell * self.chunk if made else self.n_cell


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How a prompt that is read whole is read once more, in chunks, before it is compressed.

    A request to repeat the text comes before each chunk, then what comes before a reply, then the chunk as if
    it were the reply. All of that is forgotten again. Signals are computed then, and at no other time: each
    token has those of the queries that come with its own chunk. Pinned and held tokens are not repeated, and
    have zeros.

    Attributes
    ----------
    first
        The request before the first chunk.
    later
        That before each other chunk; the last tokens of the chunk before follow it.
    close
        What comes before a chunk where there is no reply header.
    n_chunk
        The most tokens of a chunk. It is less where the context has no room for so many more.
    n_lead
        Tokens of the chunk before that follow `later`.
    """

    first: str
    later: str
    close: str = "\n"
    n_chunk: int = 2048
    n_lead: int = 8


@dataclass(frozen=True, slots=True)
class Request:
    """What llama.cpp computes for a policy: how it reduces each step's attention, and scales it.

    Attributes
    ----------
    signals
        What the engine reads after a step.
    n_query
        Number of queries of `Signal.RECENT`, for which the library keeps that many floats per row and cell,
        and of `Signal.FUTURE`, for which it keeps the queries themselves.
    group
        How the attention of a group of query heads becomes one: "sum", "max" or "first".
    t
        What t counts in `Signal.HITS`, `Signal.IMPORTANT` and log_n: tokens of the "stream" or live "cells".
    log_n
        Whether attention logits are multiplied by log_512(t).
    recall
        How steps recall evicted tokens; None: they do not.
    n_future
        Positions that `Signal.FUTURE` looks ahead.
    n_skip
        First tokens of the stream whose queries do not count in `Signal.FUTURE`, unless there are no others.

    Raises ValueError or TypeError for a field out of its range.
    """

    signals: Signal = Signal.NONE
    n_query: int = 0
    group: str = "sum"
    t: str = "stream"
    log_n: bool = False
    recall: Recalls | None = None
    n_future: int = 0
    n_skip: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.signals, Signal):
            raise TypeError(f"reads must be a Signal, such as Signal.ATTENTION, got {self.signals!r}")
        check_choice("group", self.group, ("sum", "max", "first"))
        check_choice("t", self.t, ("stream", "cells"))
        for name in ("n_query", "n_future", "n_skip"):
            check_whole(name, n := getattr(self, name))
            if n < 0:
                raise ValueError(f"{name} must not be negative, got {n}")
        if Signal.FUTURE in self.signals and not (self.n_query and self.n_future):
            raise ValueError("Signal.FUTURE needs n_query and n_future of 1 or more")

    @property
    def needs_t(self) -> bool:
        """Whether llama.cpp has to be told t before each step."""
        return self.log_n or bool(self.signals & (Signal.HITS | Signal.IMPORTANT))


_ABSENT = cast("np.ndarray", None)
"""None, in a view, for what its policy does not read; typed for the policies that do."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees of the cache. All arrays are C-contiguous. The policy must not write to them.

    A signal that the policy does not read is None.

    Attributes
    ----------
    pos
        i32[row, n_kv]: the position in the stream of each cell's token. No two are equal in a row.
    layer
        i32[row]: the layer of each row. Rows of one layer are neighbours.
    next
        Position of the next token. The token at position p has lived next - p steps.
    pinned
        Tokens with pos < pinned must stay (a chat's system prompt).
    n_new
        Tokens since the last plan; they occupy the last live cells.
    live
        i32[row]: live cells of each row of a ragged policy, the first ones. None: all n_kv cells live.
    held
        The newest tokens that must stay (the chat template's reply header).
    n_ctx
        Context length, which original positions cannot exceed; 0: unknown.
    n_head
        i32[row]: query heads of each row's group, for a policy that reads HITS or FUTURE.
    attn, last, recent, squares, hits, highest
        f32[row, n_kv]: the signals ATTENTION, LAST, RECENT, SQUARES, HITS and HIGHEST.
    important
        i32[row, n_kv]: the signal IMPORTANT.
    keys
        f32[row, n_new, n_dim]: the signal KEYS. Zero beyond a layer's own head dimension.
    future_mean, future_variance
        f32[row, head, n_kv]: the signal FUTURE, by the heads of a row's group. Zero for heads that a smaller
        group lacks.
    lengths
        f32[row, n_kv]: the signal LENGTHS.
    """

    pos: np.ndarray
    layer: np.ndarray
    next: int
    pinned: int = 0
    n_new: int = 0
    live: np.ndarray = _ABSENT
    held: int = 0
    n_ctx: int = 0
    n_head: np.ndarray = _ABSENT
    attn: np.ndarray = _ABSENT
    last: np.ndarray = _ABSENT
    recent: np.ndarray = _ABSENT
    squares: np.ndarray = _ABSENT
    hits: np.ndarray = _ABSENT
    important: np.ndarray = _ABSENT
    highest: np.ndarray = _ABSENT
    keys: np.ndarray = _ABSENT
    future_mean: np.ndarray = _ABSENT
    future_variance: np.ndarray = _ABSENT
    lengths: np.ndarray = _ABSENT

    @property
    def n_kv(self) -> int:
        """Live cells of every row; of the longest row if rows are ragged."""
        return int(self.pos.shape[1])

    @property
    def new_cells(self) -> np.ndarray:
        """i64[row]: the first of the cells that `keys` are of."""
        live = np.full(len(self.pos), self.n_kv) if self.live is None else self.live
        first: np.ndarray = np.maximum(live.astype(np.int64) - self.keys.shape[1], 0)
        return first

    @property
    def lived(self) -> np.ndarray:
        """f32[row, n_kv]: steps that each cell's token has lived, 1 for the newest."""
        return (self.next - self.pos).astype(np.float32)
