"""The one loop: decode, read signals, plan, apply.

Cells 0 .. n_kv - 1 of every row are live, and in no order. The host keeps, per row and cell, which
token it holds (`pos`) and which position its key is rotated to (`rot`); llama.cpp's own cell table
only says "in use, and older than the next token".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from kvtool.engine.cells import Cells, append, fill_holes, rank_by_pos
from kvtool.engine.settings import Settings
from kvtool.errors import KvtoolError, LibraryError, PlanError, SessionError, StreamEnd, UsageError, where
from kvtool.llama.context import Context
from kvtool.llama.library import HOW_TO_BUILD, is_patched
from kvtool.llama.model import Model
from kvtool.llama.sequence import SequenceContext
from kvtool.models.header import PAD
from kvtool.policy import SIGNALS, Merge, Plan, Policy, Signal, State, View, true_cells

_WINDOW = ("window", "window_cells")
"""What is saved of sliding layers: where their tokens lie, and K and V."""

_STEP = 64
"""Ragged layers grow and shrink by this many cells."""

_COARSE = ("q4_0", "q4_1")
"""Types of keys that lose too much each time they are turned."""

_NEVER = np.iinfo(np.int32).max

_COUNTERS = (
    "n_past",
    "n_kv",
    "n_pinned",
    "n_held",
    "n_restart",
    "_next_rot",
    "_n_planned",
    "_n_observed",
    "_n_evicted_cells",
)
"""The engine's numbers, as they are saved."""


class Engine:
    """One stream of tokens through one cache under one policy.

    n_past: tokens decoded so far. n_kv: live cells of each row, of the longest if they are ragged.
    n_pinned, n_held: first and newest tokens that are never evicted.
    n_restart: how often positions have started over behind the live cells.
    state: what the policy remembers of each cell, arrays [row, cell, ...].
    plan_s, edit_s: seconds spent on plans, with the signals read for them, and on edits of the cache.
    """

    n_past: int
    n_kv: int
    n_pinned: int
    n_held: int
    n_restart: int
    _next_rot: int
    _n_planned: int
    _n_observed: int
    _n_evicted_cells: int

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
        self.n_cell = n_start = policy.budget
        if settings.positions == "in-cache" and settings.type_k in _COARSE:
            raise UsageError(
                f"{settings.type_k} keys do not outlive being turned at every eviction; "
                "choose --positions auto, or -ctk q8_0"
            )
        if policy.ragged and settings.prefill == "whole":
            raise UsageError("with this policy a prompt cannot be read whole; leave out --prefill whole")
        if policy.ragged:
            # llama.cpp's own table holds no more than the tokens between two plans
            n_start = policy.slack + settings.n_batch + 1
        elif policy.slack and settings.over_budget:
            over = policy.budget - policy.slack + settings.n_batch
            self.n_cell = n_start = max(policy.budget, min(over, self.n_ctx))
        self.context = _context(model, policy, settings, _pad(n_start))
        # who asks what 1 / t or log t is
        self._counts_seen = policy.logn or bool(policy.reads & (Signal.HITS | Signal.IMPORTANT))
        self._layer_cells = self.context.layer_cells
        # ragged rows are as many as their layer's
        self._layer_of_row = np.unique(self.context.row_layers, return_inverse=True)[1]
        self.reset()

    def reset(self) -> None:
        """Forgets everything: the next token is the first."""
        n_row = self.context.n_row
        for name in _COUNTERS:
            setattr(self, name, 0)
        self.plan_s = self.edit_s = 0.0
        self._n_unwritten = 0
        self._live = np.zeros(n_row, np.int32)
        self._edit(np.empty((0, 4), np.int32), self._live, 0)
        if (self.context.layer_cells != self._layer_cells).any():
            self.context.resize(self._layer_cells)
        shape = (n_row, self.context.n_cell)
        self._pos = np.zeros(shape, np.int32)
        self._rot = np.zeros(shape, np.int32)
        self.state = self._start()

    def close(self) -> None:
        self.context.close()

    @property
    def live(self) -> np.ndarray:
        """i32[row]: the live cells of every row."""
        self._write_down()
        return self._live

    @property
    def pos(self) -> np.ndarray:
        """i32[row, cell]: the position in the stream of each cell's token."""
        self._write_down()
        return self._pos

    @property
    def rot(self) -> np.ndarray:
        """i32[row, cell]: the position that each cell's key is rotated to."""
        self._write_down()
        return self._rot

    @property
    def n_evicted(self) -> int:
        """Cells evicted so far of each row, the mean if rows are ragged."""
        return self._n_evicted_cells // len(self._live)

    @property
    def mean_kv(self) -> float:
        """Live cells of a row, the mean of all."""
        return float(self.live.mean())

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V, whether their cells are live or not."""
        return self.context.cache_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that the policy's state and the cells' tokens and rotations take on the host."""
        return self._pos.nbytes + self._rot.nbytes + sum(array.nbytes for array in self.state)

    def pin(self, n: int) -> None:
        """The first n tokens of the stream are never evicted. Raises UsageError for too many."""
        room = self.policy.budget - self.policy.slack
        if n >= room:
            raise UsageError(
                f"the pinned text takes {n} of {room} cells; "
                f"choose a budget of {n + self.policy.slack + 64} or more, or a shorter text"
            )
        self.n_pinned = n

    def hold(self, n: int) -> None:
        """The newest n tokens stay at every eviction. Raises UsageError for too many."""
        if n >= self.policy.budget - self.policy.slack - self.n_pinned:
            raise UsageError(
                f"the words before a reply take {n} cells, and {self.n_pinned} are pinned; "
                f"choose a budget of {self.n_pinned + n + self.policy.slack + 64} or more"
            )
        self.n_held = n

    def room(self) -> int:
        """How many tokens the next step may have, after an eviction if one is due.

        Raises StreamEnd where the cache is full and the policy keeps everything.
        """
        if self.n_until_plan <= 0:
            self._evict()
        return min(self.settings.n_batch, self.n_cell - self.n_kv, self.n_ctx - self.n_kv)

    @property
    def n_until_plan(self) -> int:
        """How many tokens later the next plan is due."""
        n = self.policy.budget - self.n_kv
        if self.policy.ragged:
            n = min(n, self._n_planned + self.policy.slack - self.n_past)
        return n

    def reads_whole(self, n: int) -> bool:
        """Whether a text of n tokens would now be decoded whole, then compressed once."""
        prefill = self.settings.prefill or self.policy.prefill
        evicts = n > self.policy.budget and self.policy.slack > 0
        return prefill == "whole" and self.n_past == 0 and evicts

    def whole_bytes(self, n: int) -> int:
        """Bytes of K and V while a text of n tokens is decoded whole."""
        cell_bytes = sum(map(self.context.cell_bytes, range(len(self._layer_cells))))
        return self.cache_bytes + (_pad(n) - self.context.n_cell) * cell_bytes

    def first_plan(self, n_text: int = 0) -> int | None:
        """After how many tokens of a new stream the first plan comes; None: never.

        n_text: how many of them are read as one text, the others one by one.
        """
        if not self.policy.slack:
            return None
        if self.reads_whole(n_text):
            return n_text
        due = min(self.policy.budget, self.policy.slack if self.policy.ragged else self.policy.budget)
        if not self.settings.over_budget:
            return due
        n_batch = self.settings.n_batch
        return max(due, min(-(-due // n_batch) * n_batch, n_text, self.n_cell))

    def step(self, tokens: np.ndarray, n_output: int = 1) -> None:
        """Decodes i32[n] tokens, n <= room(), in one batch; the last n_output give logits.

        Over budget, the policy evicts at once. With original positions raises StreamEnd past the context.
        """
        n = len(tokens)
        assert 0 < n <= self.n_cell - self.n_kv
        if self._next_rot + n > self.n_ctx:
            self._roll_back(n)
        if self.policy.ragged:
            self._fit(n)
        self._decode(tokens, n_output)
        if self.n_kv > self.policy.budget:
            self._evict()

    def read(self, tokens: np.ndarray, stopped: Callable[[], bool] = lambda: False) -> int:
        """Decodes a text of any length in as many steps as it takes; its last token gives logits.

        A prompt, that is a text before which there is nothing, is read whole where that is wanted.
        stopped is asked between steps whether to end. Returns how many tokens were read: with a prompt read
        whole all or none.
        """
        if self.reads_whole(len(tokens)):
            return self._read_whole(tokens, stopped)
        done = 0
        while done < len(tokens) and not stopped():
            part = tokens[done : done + self.room()]
            done += len(part)
            self.step(part, n_output=int(done == len(tokens)))
        return done

    def cells(self) -> Cells:
        """What the rows hold now."""
        live = np.arange(self.n_kv) < self.live[:, None]
        pos = np.where(live, self.pos[:, : self.n_kv], _NEVER)
        # what is dead comes last, and no two positions of the others are equal: any sort will do
        cell = np.argsort(pos, axis=1)
        layer = self.context.row_layers
        return Cells(
            n_past=self.n_past,
            layer=layer.copy(),
            head=(np.arange(len(layer)) - np.searchsorted(layer, layer)).astype(np.int32),
            live=self.live.copy(),
            pos=np.where(live, np.take_along_axis(pos, cell, axis=1), -1),
            rot=np.where(live, np.take_along_axis(self.rot, cell, axis=1), -1),
            cell=cell.astype(np.int32),
        )

    def save(self) -> Iterator[tuple[str, np.ndarray]]:
        """What the next step depends on besides model, policy and settings: arrays by name, one at a time.

        "engine": the counters. "live", "layer_cells". "pos", "rot", "state.N" and the signals since the last
        plan: of the first n_kv cells. "cells.N": K and V of a layer's live cells as they are stored.
        """
        n = self.n_kv
        yield "engine", np.array([getattr(self, name) for name in _COUNTERS], np.int64)
        yield "live", self.live
        yield "layer_cells", self.context.layer_cells
        yield "pos", self.pos[:, :n]
        yield "rot", self.rot[:, :n]
        for i, array in enumerate(self.state):
            yield f"state.{i}", array[:, :n]
        for name, signal in self._signals().items():
            yield name, self.context.read(signal, n)
        for layer, n_live in enumerate(self._most_live(self.live)):
            yield f"cells.{layer}", self.context.cells(layer, n_live)
        if self.context.n_window:
            yield from zip(_WINDOW, self.context.window(), strict=True)

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Goes on from what `save` gave. Raises SessionError, with all as it was, if it does not fit."""
        misfit = SessionError("what was saved does not fit this model, policy or cache")
        try:
            counters = dict(zip(_COUNTERS, saved["engine"].tolist(), strict=True))
            n = counters["n_kv"]
            live, pos, rot = saved["live"], saved["pos"], saved["rot"]
            state = [saved[f"state.{i}"] for i in range(len(self.state))]
            signals = {signal: saved[name] for name, signal in self._signals().items()}
            layer_cells = saved["layer_cells"]
            cells = [saved[f"cells.{layer}"] for layer in range(len(layer_cells))]
            window = [saved[name] for name in _WINDOW] if self.context.n_window else []
        except (KeyError, ValueError):
            raise misfit from None
        rows = (len(self.live), n)
        fits = (
            live.shape == self.live.shape
            and pos.shape == rot.shape == rows
            and 0 <= n <= self.policy.budget
            and live.min(initial=n) >= 0
            and live.max(initial=0) == n
            and layer_cells.shape == self._layer_cells.shape
            and all(
                self.context.fits(layer, n_live, array)
                for layer, (array, n_live) in enumerate(zip(cells, self._most_live(live), strict=True))
            )
            and all(array.shape == rows for array in signals.values())
            and (not window or [array.shape for array in window] == self.context.window_shapes)
            and all(
                (array.dtype, array.shape) == (own.dtype, rows + own.shape[2:])
                for array, own in zip(state, self.state, strict=True)
            )
        )
        if not fits:
            raise misfit
        self.reset()
        if self.policy.ragged:
            self._resize(layer_cells)
        for name, value in counters.items():
            setattr(self, name, value)
        self._live = live.copy()
        for own, array in zip((self.pos, self.rot, *self.state), (pos, rot, *state), strict=True):
            own[:, :n] = array
        for layer, n_live in enumerate(self._most_live(live)):
            self.context.set_cells(layer, n_live, cells[layer])
        n_observed = self._n_observed
        self._edit(np.empty((0, 4), np.int32), self.live, self._next_rot)
        self._n_observed = n_observed
        if window:
            self.context.set_window(*window)
        for signal, values in signals.items():
            self.context.write(signal, values, self.n_past - n_observed)

    def _most_live(self, live: np.ndarray) -> list[int]:
        """Of each layer the live cells of its longest row, for live i32[row]."""
        most = np.zeros(len(self._layer_cells), np.int32)
        np.maximum.at(most, self._layer_of_row, live)
        return most.tolist()

    def _decode(self, tokens: np.ndarray, n_output: int) -> None:
        n = len(tokens)
        if self._counts_seen:
            self.context.see(self.n_past if self.policy.t == "stream" else self.n_kv)
        self.context.decode(tokens, self._next_rot, n_output)
        self._n_unwritten += n
        self.n_kv += n
        self.n_past += n
        self._next_rot += n

    def _write_down(self) -> None:
        """Notes where the newest tokens are: for many at once, as each row lies elsewhere in memory."""
        if n := self._n_unwritten:
            self._n_unwritten = 0
            append(self.n_past - n, self._next_rot - n, n, self._pos, self._rot, self._live)

    def _read_whole(self, tokens: np.ndarray, stopped: Callable[[], bool]) -> int:
        """Decodes a prompt into a cache that holds all of it, and lets the policy compress it once.

        A prompt beyond the context is decoded in segments that do not see each other (BumbleBee 6.4).
        """
        n = len(tokens)
        segments = np.array_split(tokens, -(-n // self.n_ctx))
        if len(segments) > 1 and self.settings.positions == "original":
            raise StreamEnd(
                f"the prompt of {n} tokens is longer than the context of {self.n_ctx}; "
                "go on with --positions auto or in-cache, or --prefill stream"
            )
        self.state = ()
        self._resize(np.full_like(self._layer_cells, _pad(n)))
        signals = {name: np.zeros((len(self.live), n), np.float32) for name in self._signals()}
        for segment in segments:
            self._write_down()
            self._next_rot = 0
            for part in np.array_split(segment, -(-len(segment) // self.settings.n_batch)):
                if stopped():
                    n_pinned, n_held = self.n_pinned, self.n_held
                    self.reset()
                    self.n_pinned, self.n_held = n_pinned, n_held
                    return 0
                self._decode(part, n_output=int(self.n_past + len(part) == n))
            for name, values in self._read_signals().items():
                signals[name][:, : self.n_kv] += values
            if self.n_past < n:
                self.context.hide(self.n_past)
        keys = self._keys()
        view = self._view(signals | keys)
        plan = self._ask("compress", view)
        n_keep = self._checked(view, plan)
        if len(segments) > 1:
            self.n_restart += 1
            self._next_rot = self._low_rot(int(n_keep[0]), 0)
        source = self._apply(plan, n_keep, self._next_rot, close=len(segments) > 1)
        self._resize(self._layer_cells)
        self.state = self._start()
        kept: dict[str, Any] = {
            field: np.take_along_axis(values, source if values.ndim == 2 else source[..., None], axis=1)
            for field in ("pos", *signals, *keys)
            for values in [getattr(view, field)]
        }
        self._ask("adopt", replace(view, **kept), self.state)
        return n

    def _resize(self, n_cell: np.ndarray) -> None:
        """Gives each layer i32[layer] so many cells, and the host's arrays as many as the longest."""
        self.context.resize(n_cell)
        if self.context.n_cell == self._pos.shape[1]:
            return
        shape = (len(self._live), self.context.n_cell)
        self._pos, self._rot = _resized(
            (self.pos, self.rot), (np.zeros(shape, np.int32), np.zeros(shape, np.int32))
        )
        if self.state:
            self.state = _resized(self.state, self._start())

    def _fit(self, n: int) -> None:
        """Lets every layer of ragged rows have room for n tokens; one that has much more gives it back."""
        most = np.array(self._most_live(self.live))
        wanted = -(-(most + n) // _STEP) * _STEP
        cells = self.context.layer_cells
        if (most + n > cells).any() or (cells - wanted > _STEP).any():
            self._resize(np.where((most + n > cells) | (cells - wanted > _STEP), wanted, cells))

    def _low_rot(self, n_kv: int, n: int) -> int:
        """Where positions start over behind n_kv cells, so that n more tokens fit into the context.

        Sliding layers need room for their window, which the cells may be fewer than.
        """
        return max(n_kv, min(self.model.window, self.n_ctx // 2, self.n_ctx - n))

    def _roll_back(self, n: int) -> None:
        """Closes all gaps between live cells; positions start over behind them, n tokens to come."""
        if self.settings.positions == "original":
            raise StreamEnd(
                f"the stream has reached the context of {self.n_ctx} tokens; "
                "go on with --positions auto or in-cache"
            )
        self.n_restart += 1
        # the edit clears the signals: what they say so far must not be lost
        self._ask("observe", self._seen(), self.state)
        keep = np.arange(self.n_kv) < self.live[:, None]
        self._apply(Plan(keep), self.live.copy(), self._low_rot(self.n_kv, n), close=True)

    def _start(self) -> State:
        shape = self.pos.shape
        state = self._ask("start", *shape, self.context.n_dim)
        if not (isinstance(state, tuple) and all(np.shape(array)[:2] == shape for array in state)):
            raise PlanError(f"{type(self.policy).__name__}: start must return a tuple of arrays {shape}")
        return state

    def _ask(self, what: str, *args: object) -> Any:
        """Calls the policy, which may be anybody's."""
        try:
            return getattr(self.policy, what)(*args)
        except KvtoolError:
            raise
        except Exception as error:
            raise PlanError(f"{type(self.policy).__name__}.{what}: {where(error)}") from error

    def _signals(self) -> dict[str, Signal]:
        """The fields of a view that the policy reads, but keys."""
        return {name: signal for signal, name in SIGNALS.items() if signal in self.policy.reads}

    def _read_signals(self) -> dict[str, np.ndarray]:
        values = {name: self.context.read(signal, self.n_kv) for name, signal in self._signals().items()}
        if any(not np.isfinite(array).all() for array in values.values()):
            raise PlanError("the model's attention is not finite; the model file may be damaged")
        return values

    def _keys(self) -> dict[str, np.ndarray]:
        """keys f32[row, n_new, n_dim] of the cells that are new since the last edit, as before RoPE.

        Nothing where the policy does not read them.
        """
        if Signal.KEYS not in self.policy.reads:
            return {}
        first = self.live - (self.n_past - self._n_observed)
        cell = first[:, None] + np.arange(self.n_past - self._n_observed)
        return {"keys": self.context.read_keys(first, -np.take_along_axis(self.rot, cell, axis=1))}

    def _seen(self) -> View:
        """The view of now."""
        return self._view(self._read_signals() | self._keys())

    def _view(self, signals: dict[str, np.ndarray]) -> View:
        """The view with these signals, by its fields' names."""
        pos = self.pos[:, : self.n_kv].copy()
        if self.policy.ragged:
            pos[np.arange(self.n_kv) >= self.live[:, None]] = -1
            signals = signals | {"live": self.live.copy()}
        if "important" in signals:
            # the library counts queries since the last edit
            steps = signals["important"].astype(np.int32)
            signals = signals | {"important": np.where(steps > 0, steps + self._n_observed, 0)}
        return View(
            pos=pos,
            layer=self.context.row_layers,
            next=self.n_past,
            pinned=self.n_pinned,
            held=self.n_held,
            n_ctx=self.n_ctx,
            n_new=self.n_past - self._n_observed,
            **signals,
        )

    def _evict(self) -> None:
        start = time.perf_counter()
        view = self._seen()
        self._ask("observe", view, self.state)
        plan = self._ask("plan", view, self.state)
        self.plan_s += time.perf_counter() - start
        self._apply(plan, self._checked(view, plan), self._next_rot)
        self._n_planned = self.n_past
        if self.policy.ragged:
            self._fit(self.policy.slack)

    def _checked(self, view: View, plan: Plan) -> np.ndarray:
        """i32[row]: how many cells the plan keeps. Raises StreamEnd or PlanError if it cannot be."""
        name = type(self.policy).__name__
        if not isinstance(plan, Plan):
            raise PlanError(f"{name}: plan must return a Plan, got {type(plan).__name__}")
        keep = plan.keep
        kind = f"{getattr(keep, 'dtype', type(keep).__name__)}{getattr(keep, 'shape', '')}"
        if kind != f"bool{view.pos.shape}" or not keep.flags.c_contiguous:
            raise PlanError(f"{name}: keep must be a C-contiguous bool{view.pos.shape}, got {kind}")
        counts: np.ndarray = keep.sum(axis=1, dtype=np.int32)
        budget = self.policy.budget
        if self.n_kv >= budget and counts.min() == self.n_kv:
            raise StreamEnd(
                f"all {self.n_kv} cells are taken and nothing may be evicted; "
                "choose a policy with a budget, or more cells with -c"
            )
        if self.policy.ragged:
            dead = np.flatnonzero((keep & (view.pos < 0)).any(axis=1))
            if len(dead):
                raise PlanError(f"{name}: row {int(dead[0])} keeps a cell that holds no token")
        elif len(uneven := np.flatnonzero(counts != counts[0])):
            row = int(uneven[0])
            raise PlanError(f"{name}: row {row} keeps {counts[row]} cells, row 0 keeps {counts[0]}")
        wrong = np.flatnonzero((counts < 1) | (counts >= budget))
        if len(wrong):
            row = int(wrong[0])
            raise PlanError(f"{name}: row {row} keeps {counts[row]} cells of a budget of {budget}")
        if view.pinned:
            lost = np.flatnonzero(((view.pos >= 0) & (view.pos < view.pinned) & ~keep).any(axis=1))
            if len(lost):
                raise PlanError(f"{name}: row {int(lost[0])} evicts a pinned token")
        if plan.merge is not None:
            _check_merge(name, plan.merge, keep)
        return counts

    def _apply(self, plan: Plan, n_keep: np.ndarray, next_rot: int, *, close: bool = False) -> np.ndarray:
        """Fills the holes, closes gaps by rotating keys, and moves the state along.

        close: if positions are original, gaps are closed too. Returns where each of the first cells has come
        from, i32[row, most].
        """
        n, most = self.n_kv, int(n_keep.max())
        source = np.empty((len(n_keep), most), np.int32)
        fill_holes(plan.keep, n_keep, source)
        dead = np.arange(n) >= n_keep[:, None] if self.policy.ragged else None
        moved, turn = source != np.arange(most, dtype=np.int32), None
        if close or self.settings.positions == "in-cache":
            pos = np.take_along_axis(self.pos, source, axis=1)
            rank = np.empty_like(pos)
            # what is dead ranks behind what lives
            rank_by_pos(pos if dead is None else np.where(dead[:, :most], _NEVER, pos), rank)
            turn = next_rot - n_keep[:, None] + rank - np.take_along_axis(self.rot, source, axis=1)
            if dead is not None:
                turn[dead[:, :most]] = 0
            moved |= turn != 0
        row, cell = true_cells(moved)
        old = source[row, cell]
        delta = np.zeros_like(old) if turn is None else turn[row, cell]
        self._edit(np.stack([row, cell, old, delta], axis=1), n_keep, next_rot, plan.merge)
        # no cell that something comes from is one that something goes to
        self.pos[row, cell] = self.pos[row, old]
        self.rot[row, cell] = self.rot[row, old] + delta
        if self.state:
            self._ask("move", self.state, source)
        for array in self.state:
            if dead is None:
                array[:, most:n] = 0
            else:
                array[:, :n][dead] = 0
        self._n_evicted_cells += int((self.live - n_keep).sum())
        self._live = n_keep
        self.n_kv = most
        self._next_rot = next_rot
        return source

    def _edit(
        self,
        moves: np.ndarray,
        n_keep: np.ndarray,
        next_rot: int,
        merge: Merge | None = None,
    ) -> None:
        """Edits the cache, which clears the signals."""
        most = int(n_keep.max())
        start = time.perf_counter()
        self.context.apply(
            moves, most, next_rot - most, merge, n_keep_row=n_keep if self.policy.ragged else None
        )
        self.edit_s += time.perf_counter() - start
        self._n_observed = self.n_past


def _context(model: Model, policy: Policy, settings: Settings, n_cell: int) -> Context:
    """The cache. Raises LibraryError for what needs the patch where the library has none."""
    how = {
        "n_output": settings.n_output,
        "type_k": settings.type_k,
        "type_v": settings.type_v,
        "flash": settings.flash,
        "n_threads": settings.n_threads,
    }
    if is_patched():
        return Context(
            model,
            n_cell,
            settings.n_batch,
            policy.reads,
            n_query=policy.n_query,
            group=policy.group,
            log_n=policy.logn,
            ragged=policy.ragged,
            **how,
        )
    lacking = (
        (policy.needs_patch(), f"the policy {type(policy).__name__}"),
        (settings.prefill == "whole", "a prompt read whole"),
        (bool(model.window) and policy.slack > 0, "evicting beside sliding layers"),
    )
    for is_asked, what in lacking:
        if is_asked:
            raise LibraryError(f"{what} needs kvtool's patch, which this llama.cpp has not; {HOW_TO_BUILD}")
    # of a Context it has what is called for such a policy
    return cast(Context, SequenceContext(model, n_cell, settings.n_batch, **how))


def _pad(n: int) -> int:
    return -(-n // PAD) * PAD


def _resized(old: State, new: State) -> State:
    """The new arrays with what the old ones hold as far as it fits."""
    for source, target in zip(old, new, strict=False):
        common = tuple(map(slice, map(min, source.shape, target.shape)))
        target[common] = source[common]
    return tuple(new)


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
