"""One stream of tokens in one cache: the model, the rows, and the policy at work on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvtool.engine.checks import check, how_read
from kvtool.engine.chunk_size import ChunkSize
from kvtool.engine.eviction import Eviction, ask
from kvtool.engine.rows import Rows
from kvtool.engine.settings import Settings
from kvtool.engine.signals import Signals
from kvtool.errors import LibraryError, StreamEnd, UsageError
from kvtool.llama.context import Context
from kvtool.llama.library import HOW_TO_BUILD, UNPATCHED, is_patched
from kvtool.llama.model import Model
from kvtool.models.layers import PAD
from kvtool.policy import Policy, State

if TYPE_CHECKING:
    from kvtool.llama.sequence import Cache

_N_CHUNK = 1024
"""Tokens of a chunk on a GPU: the archive is copied there once for each chunk."""


def pad(n: int) -> int:
    """The cells that llama.cpp makes for n tokens: a multiple of 256."""
    return -(-n // PAD) * PAD


def chunk(model: Model, policy: Policy, settings: Settings) -> int:
    """Most tokens of a chunk that attends exactly to an archive, see `staged`; 0 if texts are not read so."""
    if not (policy.recall and model.layers.has_values):
        return 0
    if settings.prefill == "exact":
        return settings.n_batch
    on_gpu = settings.prefill is None and settings.kv_offload and model.is_on_gpu
    return max(settings.n_batch, _N_CHUNK) if on_gpu else 0


def on_model(policy: Policy, model: Model) -> Policy:
    """The policy for the model. Raises UsageError where they do not go together."""
    try:
        return policy.on(model.layers.n_group, model.layers.has_values)
    except ValueError as error:
        raise UsageError(str(error)) from error


class JointDecoder(Protocol):
    """Streams that are decoded together."""

    @property
    def is_several(self) -> bool:
        """Whether steps are those of several streams now, so that none has guesses."""

    def decode(self, context: Context, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Decodes as `Context.decode` does."""


class Stream:
    """One stream of tokens through one cache under one policy. `Engine` says when it evicts.

    Attributes
    ----------
    model, policy, settings
        What it was made of.
    prefill
        How a prompt is read: "stream", "whole" or "exact".
    n_ctx
        Context length: the most positions that keys are rotated to.
    n_cell
        The most tokens that the cache takes before an eviction.
    n_chunk
        The most tokens of a chunk that attends exactly to all archived tokens; 0 if no text is read so.
    n_batch
        The most tokens of a step; of a policy that recalls, once there is something to recall.
    context
        The cache in llama.cpp, whose `logits()` are those of the last step.
    rows
        What every row holds.
    signals
        What the policy reads of the attention.
    eviction
        The policy at work: its state, and what it has evicted.
    joint_decoder
        Decodes steps of several streams at once; None where this one is alone.
    pace
        In which parts the steps of a prompt are decoded, where something else waits for them.
    """

    def __init__(self, model: Model, policy: Policy, settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        self.model = model
        if policy.recall:
            policy = on_model(policy, model)
        self.policy = policy
        self.n_ctx = min(settings.n_ctx or model.n_ctx_train, model.n_ctx_train)
        check(policy, settings, model.layers, self.n_ctx, model.n_ctx_train)
        self.prefill = how_read(policy, settings)
        self.n_cell = n_start = self._n_live = policy.n_live
        if policy.ragged:
            # llama.cpp's own table holds no more than the tokens between two plans
            n_start = policy.slack + settings.n_batch + 1
        elif policy.slack and settings.over_budget and not policy.recall:
            over = policy.budget - policy.slack + settings.n_batch
            self.n_cell = n_start = max(policy.budget, min(over, self.n_ctx))
        self.n_batch = min(settings.n_batch, policy.recall.chunk) if policy.recall else settings.n_batch
        # the tokens of a prompt that a GPU had no room to read whole
        self.n_refused: int | None = None
        self.n_chunk = chunk(model, policy, settings)
        self.chunk_size: ChunkSize | None = None
        self.joint_decoder: JointDecoder | None = None
        self._request = ask(policy, "request")
        self._needs_t = self._request.needs_t
        n_start += policy.recall.n_filled(model.layers.has_values) if policy.recall else 0
        self.context = self._cache(pad(n_start))
        if policy.reconstruction and isinstance(self.context, Context):
            self.context.watch(on=False)
        self.rows = Rows(self.context.row_layers, self.context.n_cell, ragged=policy.ragged)
        self.signals = Signals(policy.reads, self.context, self.rows)
        in_cache = settings.positions == "in-cache"
        parts = self.context, self.rows, self.signals
        self.eviction = Eviction(policy, *parts, self.n_ctx, in_cache=in_cache)

    def _cache(self, n_cell: int) -> Cache:
        """The cache. Raises UsageError where it is too long, and LibraryError for what needs the patch."""
        model, policy, settings = self.model, self.policy, self.settings
        # ragged rows grow
        _check_index(model, max(n_cell, pad(policy.n_live)))
        names = "type_k", "type_v", "flash", "n_threads", "kv_offload"
        how: dict[str, Any] = {name: getattr(settings, name) for name in names}
        how["n_output"] = max(settings.n_output, settings.n_ahead + 1)
        if is_patched():
            own: dict[str, Any] = {
                name: getattr(settings, name) for name in ("archive_type", "archive_bytes", "archive_file")
            }
            if policy.recall and model.layers.has_values:
                # right behind the live cells: a step attends no farther than to its last one
                own["n_filled"] = n_cell - policy.n_live
            own |= {
                "n_ahead": settings.n_ahead,
                "ragged": policy.ragged,
                "n_archive": settings.archive,
                "n_near": self.n_ctx // 2,
            }
            n_batch = max(settings.n_batch, self.n_chunk)
            return Context(model, n_cell, n_batch, self._request, **own, **how)
        lacking = (
            (policy.needs_patch(), f"the policy {type(policy).__name__}"),
            (self.prefill == "whole", "reading a prompt whole, without --prefill stream,"),
        )
        for is_asked, what in lacking:
            if is_asked:
                raise LibraryError(f"{UNPATCHED}, which {what} needs; {HOW_TO_BUILD}")
        # what most chats do not need is not imported at their start
        from kvtool.llama.sequence import SequenceContext

        return SequenceContext(model, n_cell, settings.n_batch, **how)

    def reset(self) -> None:
        """Forget all tokens, and how many of them are pinned and held."""
        self.eviction.reset()

    def empty(self) -> None:
        """Forget all tokens, but not how many are pinned and held."""
        self.eviction.empty()

    def close(self) -> None:
        """Frees the cache."""
        self.context.close()

    @property
    def n_past(self) -> int:
        """Tokens decoded so far."""
        return self.rows.n_past

    @property
    def n_kv(self) -> int:
        """Live cells of each row; of the longest row if they are ragged."""
        return self.rows.n_kv

    @property
    def n_pinned(self) -> int:
        """First tokens that are never evicted."""
        return self.eviction.n_pinned

    @property
    def n_held(self) -> int:
        """Newest tokens that are never evicted."""
        return self.eviction.n_held

    @property
    def n_restart(self) -> int:
        """How often positions have started over behind the live cells."""
        return self.eviction.n_restart

    @property
    def n_evicted(self) -> int:
        """Cells evicted so far per row; the mean if rows are ragged."""
        return self.eviction.n_evicted // len(self.rows.live)

    @property
    def n_archived(self) -> int:
        """Evicted tokens that a step may recall."""
        return self.context.archive.n if self.context.archive else 0

    @property
    def mean_live(self) -> float:
        """Tokens that a row holds: the mean of all rows."""
        return float(self.rows.live.mean())

    @property
    def mean_kv(self) -> float:
        """Cells per row that a query sees, live or recalled: the mean of all rows."""
        n_recalled = min(self.policy.recall.n_cell, self.n_archived) if self.policy.recall else 0
        return self.mean_live + n_recalled

    @property
    def state(self) -> State:
        """What the policy remembers of each cell: arrays [row, cell, ...]."""
        return self.eviction.state

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V, whether their cells are live or not."""
        return self.context.cache_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that the policy's state and the rows' table take on the host."""
        return self.rows.pos.nbytes + self.rows.rot.nbytes + sum(array.nbytes for array in self.state)

    @property
    def signal_bytes(self) -> int:
        """Bytes of one copy of the signals, and of queries, beside the cache."""
        return self.context.signal_bytes(self.context.layer_cells)

    @property
    def state_bytes(self) -> int:
        """Bytes of all that a policy takes beside the cache."""
        return self.host_bytes + self.signal_bytes

    @property
    def archive_bytes(self) -> int:
        """Bytes that the archive takes, in host memory or on disk."""
        return self.context.archive.n_bytes if self.context.archive else 0

    def part(self, at: int, end: int) -> slice:
        """Which of a step's tokens from here to its end are decoded at once."""
        # those of a step share what they find in an archive
        return self.chunk_size.part(at, end) if self.chunk_size and not self.n_archived else slice(at, end)

    def decode(self, tokens: np.ndarray, n_output: int) -> None:
        """Decodes i32[n] tokens behind the live cells, whatever the budget says: what a step is made of."""
        rows = self.rows
        if self.signals.is_observed:
            # a step must not add to them
            self.signals.clear()
        if self._needs_t:
            self.context.see(rows.n_past if self._request.t == "stream" else rows.n_kv)
        began = time.perf_counter()
        if self.joint_decoder:
            assert isinstance(self.context, Context)
            self.joint_decoder.decode(self.context, tokens, rows.next_rot, n_output)
        else:
            self.context.decode(tokens, rows.next_rot, n_output)
        if self.chunk_size:
            self.chunk_size.note(len(tokens), time.perf_counter() - began)
        rows.append(len(tokens))

    def batches(self, tokens: np.ndarray) -> list[np.ndarray]:
        """A text i32[n] in the steps that it takes, of about the same size; one for an empty text."""
        n_batch = min(self.settings.n_batch, self.context.n_batch)
        return np.array_split(tokens, max(-(-len(tokens) // n_batch), 1))

    def decode_all(self, tokens: np.ndarray, n_output: int, stopped: Callable[[], bool]) -> bool:
        """Decodes a text i32[n] behind the live cells, in as many steps as it takes; the last n_output tokens
        of it give logits. Returns False if `stopped`, which is asked before each step, ended it.
        """
        n_left = len(tokens)
        for step in self.batches(tokens):
            at = 0
            while at < len(step):
                if stopped():
                    return False
                part = step[self.part(at, len(step))]
                at += len(part)
                n_left -= len(part)
                self.decode(part, 0 if n_left else n_output)
        return True

    def advance(self, tokens: np.ndarray, n_output: int) -> None:
        """Decodes as `decode` does, once there are cells and positions for the tokens. Raises StreamEnd."""
        self.make_way(len(tokens))
        self.decode(tokens, n_output)

    def make_way(self, n: int) -> None:
        """Sees to cells and positions for a step of n tokens.

        Raises StreamEnd if original positions end before them.
        """
        if self.rows.next_rot + n > self.n_ctx:
            self._start_over(n)
        if self.rows.ragged:
            self.eviction.take_room(n)

    def _start_over(self, n: int) -> None:
        """Closes all gaps between live cells; positions start over behind them, n tokens to come."""
        if self.settings.positions == "original":
            raise StreamEnd(
                f"the stream has reached the context of {self.n_ctx} tokens; "
                "continue with --positions auto or in-cache"
            )
        self.eviction.close_gaps(n)


def _check_index(model: Model, n_cell: int) -> None:
    """Raises UsageError for more cells than the model's index chooses."""
    if n_cell > (n_most := model.layers.most_cells):
        raise UsageError(
            f"{model.path.name} chooses {n_most:,} cells by an index, and kvtool keeps no more for it; "
            f"choose a smaller --budget, --batch-size or --ctx-size: {n_cell:,} cells are needed"
        )
