"""Inputs of a policy: the view of the cache, the signals in it, and the request for them."""

from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple, cast

import numpy as np

from kvtool.policy.checks import check_choice, check_whole


class Signal(IntFlag):
    """Statistic of a step's attention A[head, query, cell] that the engine reads for each row.

    A row's group is the set of query heads that share the row's KV head. A key is important to a query if the
    attention A to the key is at least 1 / t. t is the number of tokens that the query has seen, including its
    own token.

    llama.cpp's graph computes the signals up to HIGHEST, so these flags have the values of the C API's
    LLAMA_KVTOOL_SIGNAL_*. `PolicyCache.view` reads the other signals. To add a signal there, add its flag
    here, its entry in `SIGNALS`, its field of `View`, and the lines that read it.
    """

    NONE = 0
    ATTENTION = 1
    """Attention sum: attention summed over the group and over the queries since the last plan."""
    LAST = 2
    """Last attention: attention of the newest query, summed over the group."""
    RECENT = 4
    """Recent attention: attention summed over the group and over the last `n_query` queries of the stream."""
    SQUARES = 8
    """Squares: each query's attention is summed over the group, then squared.

    The squares are summed over the queries since the last plan.
    """
    HITS = 16
    """Hits: how often the key was important since the last plan.

    Each pair of a query and a head of the group counts once.
    """
    IMPORTANT = 32
    """Last important step: the number of tokens that the stream had when the key was last important.

    0 if the key was not important to any query since the last plan.
    """
    HIGHEST = 64
    """Highest attention: maximum over the queries since the last plan and over the heads of the group."""
    KEYS = 128
    """Keys before RoPE, for the cells that are new since the last plan."""
    FUTURE = 256
    """Future logits: mean and variance over the last `n_query` queries, as if these queries came next.

    Each query's logits are averaged over the next `n_future` positions. Soft caps and distance biases (ALiBi)
    are left out.
    """
    VALUE_NORMS = 512
    """Norms of values: the Euclidean norm of each cell's value; 1 if values are part of the keys (MLA)."""


class SignalSpec(NamedTuple):
    """Definition of a signal.

    Attributes
    ----------
    fields
        Fields of `View` that hold the signal.
    reduction
        How llama.cpp's graph combines the attention of several queries into f32[row, cell]: "sum" or "max".
        None if the graph does not compute this signal; the engine then computes it when it is read.
    scope
        Queries that the signal covers. "plan": all queries since the last plan. "newest": the newest query.
        "n_query": the last `n_query` queries. "cache": no queries, because the signal depends only on cached
        keys or values.
    uses_t
        True if the signal depends on t, the number of tokens that a query has seen.
    cell_axis
        Axis of the cells in the fields' arrays.
    """

    fields: tuple[str, ...]
    reduction: str | None
    scope: str
    uses_t: bool = False
    cell_axis: int = 1


SIGNALS = {
    Signal.ATTENTION: SignalSpec(("attn",), "sum", "plan"),
    Signal.LAST: SignalSpec(("last",), "sum", "newest"),
    Signal.RECENT: SignalSpec(("recent",), "sum", "n_query"),
    Signal.SQUARES: SignalSpec(("squares",), "sum", "plan"),
    Signal.HITS: SignalSpec(("hits",), "sum", "plan", uses_t=True),
    Signal.IMPORTANT: SignalSpec(("important",), "max", "plan", uses_t=True),
    Signal.HIGHEST: SignalSpec(("highest",), "max", "plan"),
    Signal.KEYS: SignalSpec(("keys",), None, "cache"),
    Signal.FUTURE: SignalSpec(("future_mean", "future_variance"), None, "n_query", cell_axis=2),
    Signal.VALUE_NORMS: SignalSpec(("value_norms",), None, "cache"),
}
"""The table of all signals. The patch's probes.cpp has the same reductions."""

PER_CELL = {signal: spec.fields[0] for signal, spec in SIGNALS.items() if spec.reduction}
"""Signals that llama.cpp's graph computes, as f32[row, cell], mapped to their fields of `View`."""


@dataclass(frozen=True, slots=True)
class RecallSettings:
    """Settings of recall: how steps attend to the archive of evicted tokens.

    Attributes
    ----------
    n_cell
        Number of cells of each row that a query sees in addition to the live cells. These cells are
        synthetic, one for each query head of the row: attention to them is attention to the archive. If
        values are part of the keys (MLA), the cells are instead copies of the archived tokens that get the
        most attention.
    chunk
        Maximum tokens of a step. Each token has its own synthetic cells. Copies of archived tokens are shared
        by all tokens of the step.
    n_exact
        Number of archived tokens of a row that a step attends to exactly. They are chosen in whole clusters.
        The tokens of other clusters are represented by the cluster's mean. 0 if a step attends to all tokens
        exactly.
    """

    n_cell: int
    chunk: int
    n_exact: int = 0

    def n_filled(self, made: bool) -> int:
        """Maximum number of cells of each row that a step fills from the archive.

        made: True if the cells are synthetic.
        """
        return self.n_cell * self.chunk if made else self.n_cell


@dataclass(frozen=True, slots=True)
class ReconstructionPass:
    """Reconstruction pass: after whole reading, a prompt is read again in chunks before it is compressed.

    The model reads a request to repeat the text, then the reply header, then the chunk as if it were the
    reply. These tokens are removed from the cache afterwards. Signals are computed only in this pass. A
    token's signals come from the queries of all these tokens, when its chunk is repeated. Pinned and held
    tokens are not repeated, so their signals are zero.

    Attributes
    ----------
    first
        Request before the first chunk.
    later
        Request before each later chunk, followed by the last tokens of the previous chunk.
    close
        Text between the request and the chunk if there is no reply header.
    n_chunk
        Maximum tokens of a chunk. Chunks are shorter if the context has too little room after the prompt.
    n_lead
        Number of tokens of the previous chunk that follow `later`.
    """

    first: str
    later: str
    close: str = "\n"
    n_chunk: int = 2048
    n_lead: int = 8


@dataclass(frozen=True, slots=True)
class SignalRequest:
    """Signals that llama.cpp computes for a policy, and the scaling of attention logits.

    The fields are the attributes of `Policy` with these names. Raises ValueError or TypeError for a field out
    of its range.
    """

    reads: Signal = Signal.NONE
    n_query: int = 0
    group: str = "sum"
    t: str = "stream"
    logn: bool = False
    recall: RecallSettings | None = None
    n_future: int = 0
    n_skip: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.reads, Signal):
            raise TypeError(f"reads must be a Signal, such as Signal.ATTENTION, got {self.reads!r}")
        check_choice("group", self.group, ("sum", "max", "first"))
        check_choice("t", self.t, ("stream", "cells"))
        for name in ("n_query", "n_future", "n_skip"):
            check_whole(name, n := getattr(self, name))
            if n < 0:
                raise ValueError(f"{name} must not be negative, got {n}")
        if Signal.RECENT in self.reads and not self.n_query:
            raise ValueError("Signal.RECENT needs n_query of 1 or more")
        if Signal.FUTURE in self.reads and not (self.n_query and self.n_future):
            raise ValueError("Signal.FUTURE needs n_query and n_future of 1 or more")

    @property
    def needs_t(self) -> bool:
        """True if llama.cpp uses t, so that the engine must set t before each step."""
        return self.logn or any(spec.uses_t for signal, spec in SIGNALS.items() if signal in self.reads)


_ABSENT = cast("np.ndarray", None)
"""Value of a signal that the policy does not read. It is None, but declared as an array to type checkers."""


@dataclass(frozen=True, slots=True)
class View:
    """A policy's view of the cache. All arrays are C-contiguous. The policy must not write to them.

    A signal that the policy does not read is None.

    Attributes
    ----------
    pos
        i32[row, n_kv]: position in the stream of each cell's token. Positions in a row are distinct.
    layer
        i32[row]: layer of each row. Rows of one layer are adjacent.
    next
        Position of the next token.
    pinned
        Number of first tokens that must stay (a chat's system prompt): the tokens with pos < pinned.
    n_new
        Number of tokens since the last plan. They are in the last live cells.
    live
        i32[row]: number of live cells of each row, for a ragged policy. Live cells come before the other
        cells. None if all n_kv cells are live.
    held
        Number of newest tokens that must stay (the chat template's reply header).
    n_ctx
        Context length, which original positions cannot exceed; 0 if it is unknown.
    in_segments
        True for a prompt that was read in segments. Queries have not seen tokens of earlier segments.
    n_head
        i32[row]: number of query heads in each row's group, for a policy that reads HITS or FUTURE.
    attn, last, recent, squares, hits, highest
        f32[row, n_kv]: the signals ATTENTION, LAST, RECENT, SQUARES, HITS and HIGHEST.
    important
        i32[row, n_kv]: the signal IMPORTANT.
    keys
        f32[row, n_new, n_dim]: the signal KEYS. If a layer's keys are shorter than n_dim, the rest is zero.
    future_mean, future_variance
        f32[row, head, n_kv]: the signal FUTURE, for each head of a row's group. If a row has a smaller group
        than other rows, the values of the missing heads are zero.
    value_norms
        f32[row, n_kv]: the signal VALUE_NORMS.
    """

    pos: np.ndarray
    layer: np.ndarray
    next: int
    pinned: int = 0
    n_new: int = 0
    live: np.ndarray = _ABSENT
    held: int = 0
    n_ctx: int = 0
    in_segments: bool = False
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
    value_norms: np.ndarray = _ABSENT

    @property
    def n_kv(self) -> int:
        """Number of live cells of a row; if rows are ragged, of the longest row."""
        return int(self.pos.shape[1])

    @property
    def order(self) -> np.ndarray:
        """i64[row, n_kv]: cells of each row, oldest token first, after the empty cells of a ragged row."""
        # positions in a row are distinct, so the sort need not be stable
        order: np.ndarray = np.argsort(self.pos, axis=1)
        return order

    @property
    def new_cells(self) -> np.ndarray:
        """i64[row]: cell of the first key in `keys`. The other keys belong to the cells after it."""
        live = np.full(len(self.pos), self.n_kv) if self.live is None else self.live
        first: np.ndarray = np.maximum(live.astype(np.int64) - self.keys.shape[1], 0)
        return first

    @property
    def lived(self) -> np.ndarray:
        """f32[row, n_kv]: number of queries that have seen each cell's token, 1 for the newest.

        A policy that uses it must set `counts_queries`. Raises ValueError for a prompt read in segments.
        """
        if self.in_segments:
            raise ValueError("a prompt read in segments has no view.lived; set counts_queries = True")
        return (self.next - self.pos).astype(np.float32)
