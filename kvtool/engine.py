"""The one loop: decode, read signals, plan, apply.

Cells 0 .. n_kv - 1 of every row are live, and in no order. The host keeps, per row and cell, which
token it holds (`pos`) and which position its key is rotated to (`rot`); llama.cpp's own cell table
only says "in use, and older than the next token".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtool.budget import PAD
from kvtool.cells import fill_holes, rank_by_pos
from kvtool.errors import PlanError, StreamEnd, UsageError
from kvtool.llama import Context, Model
from kvtool.policy import SIGNALS, Merge, Plan, Policy, View


@dataclass(frozen=True, slots=True)
class Settings:
    """How the engine runs, apart from the policy.

    positions: "original", "in-cache" or "auto". n_ctx: the positions there are, the trained context unless
    given (never more). n_batch: the most tokens of a step.
    n_output: the most tokens of a step whose logits are wanted. over_budget: whether a step may go over the
    budget until its eviction, so that a prompt is read in steps longer than the slack.
    """

    positions: str = "auto"
    n_ctx: int | None = None
    n_batch: int = 256
    n_output: int = 1
    over_budget: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    flash: str = "auto"
    n_threads: int | None = None

    def __post_init__(self) -> None:
        if self.positions not in ("original", "in-cache", "auto"):
            raise UsageError(f"positions must be original, in-cache or auto, got {self.positions!r}")


class Engine:
    """One stream of tokens through one cache under one policy.

    n_past: tokens decoded so far. n_kv: live cells of each row. n_evicted: cells evicted so far, a row.
    n_pinned: first tokens that are never evicted. is_in_cache: whether positions follow the cache by now.
    """

    def __init__(self, model: Model, policy: Policy, settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        self.model = model
        self.policy = policy
        self.n_ctx = min(settings.n_ctx or model.n_ctx_train, model.n_ctx_train)
        if policy.budget > self.n_ctx:
            raise UsageError(
                f"the context is {self.n_ctx} tokens (trained: {model.n_ctx_train}); "
                f"choose at most that many cells, not {policy.budget}"
            )
        self.n_cell = policy.budget
        if policy.slack and settings.over_budget:
            over = policy.budget - policy.slack + settings.n_batch
            self.n_cell = max(policy.budget, min(over, self.n_ctx))
        self.context = Context(
            model,
            -(-self.n_cell // PAD) * PAD,
            settings.n_batch,
            policy.reads,
            n_output=settings.n_output,
            type_k=settings.type_k,
            type_v=settings.type_v,
            flash=settings.flash,
            n_threads=settings.n_threads,
        )
        shape = (self.context.n_row, self.context.n_cell)
        self.pos = np.zeros(shape, np.int32)
        self.rot = np.zeros(shape, np.int32)
        self.reset()

    def reset(self) -> None:
        """Forgets everything: the next token is the first."""
        self.context.apply(np.empty((0, 4), np.int32), 0, 0)
        self.state = self.policy.start(*self.pos.shape, self.context.n_dim)
        self.n_past = self.n_kv = self.n_evicted = self.n_pinned = 0
        self._next_rot = 0
        self.is_in_cache = self.settings.positions == "in-cache"

    def close(self) -> None:
        self.context.close()

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V, whether their cells are live or not."""
        return self.context.cache_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that the policy's state and the cells' tokens and rotations take on the host."""
        return self.pos.nbytes + self.rot.nbytes + sum(array.nbytes for array in self.state)

    def pin(self, n: int) -> None:
        """The first n tokens of the stream are never evicted. Raises UsageError for too many."""
        room = self.policy.budget - self.policy.slack
        if n >= room:
            raise UsageError(
                f"the pinned text takes {n} of {room} cells; "
                f"choose a budget of {n + self.policy.slack + 64} or more, or a shorter text"
            )
        self.n_pinned = n

    def room(self) -> int:
        """How many tokens the next step may have, after an eviction if one is due.

        Raises StreamEnd where the cache is full and the policy keeps everything.
        """
        if self.n_kv >= self.policy.budget:
            self._evict()
        return min(self.settings.n_batch, self.n_cell - self.n_kv, self.n_ctx - self.n_kv)

    def step(self, tokens: np.ndarray, n_output: int = 1) -> None:
        """Decodes i32[n] tokens, n <= room(), in one batch; the last n_output give logits.

        Over budget, the policy evicts at once. With original positions raises StreamEnd past the context.
        """
        n = len(tokens)
        assert 0 < n <= self.n_cell - self.n_kv
        if self._next_rot + n > self.n_ctx:
            self._roll_back()
        self.context.decode(tokens, self._next_rot, n_output)
        new = slice(self.n_kv, self.n_kv + n)
        self.pos[:, new] = np.arange(self.n_past, self.n_past + n)
        self.rot[:, new] = np.arange(self._next_rot, self._next_rot + n)
        self.n_kv += n
        self.n_past += n
        self._next_rot += n
        if self.n_kv > self.policy.budget:
            self._evict()

    def read(self, tokens: np.ndarray) -> None:
        """Decodes a text of any length in as many steps as it takes; its last token gives logits."""
        done = 0
        while done < len(tokens):
            part = tokens[done : done + self.room()]
            done += len(part)
            self.step(part, n_output=int(done == len(tokens)))

    def _roll_back(self) -> None:
        """Lets positions start over behind the live cells: from now on the distance in the cache counts."""
        if self.settings.positions == "original":
            raise StreamEnd(
                f"the stream has reached the context of {self.n_ctx} tokens; "
                "go on with --positions auto or in-cache"
            )
        self.is_in_cache = True
        self._apply(Plan(np.ones((len(self.pos), self.n_kv), np.bool_)), self.n_kv, self.n_kv)

    def _view(self) -> View:
        n = self.n_kv
        signals = {
            name: self.context.read(signal, n)
            for signal, name in SIGNALS.items()
            if signal in self.policy.reads
        }
        if any(not np.isfinite(values).all() for values in signals.values()):
            raise PlanError("the model's attention is not finite; the model file may be damaged")
        return View(
            pos=self.pos[:, :n].copy(),
            layer=self.context.row_layers,
            next=self.n_past,
            pinned=self.n_pinned,
            **signals,
        )

    def _evict(self) -> None:
        view = self._view()
        self.policy.observe(view, self.state)
        plan = self.policy.plan(view, self.state)
        n_keep = self._checked(view, plan)
        self._apply(plan, n_keep, self._next_rot)
        self.n_evicted += view.n_kv - n_keep

    def _checked(self, view: View, plan: Plan) -> int:
        """How many cells the plan keeps in each row. Raises StreamEnd or PlanError if it cannot be."""
        name = type(self.policy).__name__
        keep = plan.keep
        kind = f"{getattr(keep, 'dtype', type(keep).__name__)}{getattr(keep, 'shape', '')}"
        if kind != f"bool{view.pos.shape}" or not keep.flags.c_contiguous:
            raise PlanError(f"{name}: keep must be a C-contiguous bool{view.pos.shape}, got {kind}")
        counts = keep.sum(axis=1)
        n_keep = int(counts[0])
        if n_keep == self.n_kv == counts.min():
            raise StreamEnd(
                f"all {self.n_kv} cells are taken and nothing may be evicted; "
                "choose a policy with a budget, or more cells with -c"
            )
        uneven = np.flatnonzero(counts != n_keep)
        if len(uneven):
            row = int(uneven[0])
            raise PlanError(f"{name}: row {row} keeps {counts[row]} cells, row 0 keeps {n_keep}")
        if not 0 < n_keep < self.policy.budget:
            raise PlanError(f"{name}: keeps {n_keep} cells of a budget of {self.policy.budget}")
        lost = np.flatnonzero(((view.pos < view.pinned) & ~keep).any(axis=1))
        if len(lost):
            raise PlanError(f"{name}: row {int(lost[0])} evicts a pinned token")
        if plan.merge is not None:
            _check_merge(name, plan.merge, keep)
        return n_keep

    def _apply(self, plan: Plan, n_keep: int, next_rot: int) -> None:
        """Fills the holes, rotates keys where positions follow the cache, and moves the state along."""
        n_row, n = plan.keep.shape
        source = np.empty((n_row, n_keep), np.int32)
        fill_holes(plan.keep, n_keep, source)
        pos = np.take_along_axis(self.pos, source, axis=1)
        rot = np.take_along_axis(self.rot, source, axis=1)
        delta = np.zeros_like(rot)
        if self.is_in_cache:
            rank = np.empty_like(pos)
            rank_by_pos(pos, rank)
            target = next_rot - n_keep + rank
            delta = target - rot
            rot = target
        row, cell = np.nonzero((source != np.arange(n_keep)) | (delta != 0))
        moves = np.stack([row, cell, source[row, cell], delta[row, cell]], axis=1)
        self.context.apply(moves, n_keep, next_rot - n_keep, plan.merge)
        self.pos[:, :n_keep] = pos
        self.rot[:, :n_keep] = rot
        self.policy.move(self.state, source)
        for array in self.state:
            array[:, n_keep:n] = 0
        self.n_kv = n_keep
        self._next_rot = next_rot


def _check_merge(name: str, merge: Merge, keep: np.ndarray) -> None:
    """Raises PlanError where a term is none of the cache, or gives a value to a cell that does not stay."""
    parts = [np.asarray(part) for part in (merge.row, merge.dst, merge.src, merge.weight)]
    if any(part.shape != parts[0].shape or part.ndim != 1 for part in parts):
        raise PlanError(f"{name}: a merge's row, dst, src and weight must be lists of one length")
    row, dst, src, _ = parts
    n_row, n_kv = keep.shape
    outside = (row < 0) | (row >= n_row) | (dst < 0) | (dst >= n_kv) | (src < 0) | (src >= n_kv)
    if outside.any():
        i = int(np.argmax(outside))
        raise PlanError(f"{name}: merge {i} is row {row[i]} of {n_row}, cells {dst[i]} <- {src[i]} of {n_kv}")
    if not (into := keep[row, dst]).all():
        i = int(np.argmin(into))
        raise PlanError(f"{name}: row {row[i]} merges a value into cell {dst[i]}, which it evicts")
