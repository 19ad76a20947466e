"""Whole reading: a prompt is decoded into a cache that holds all of it, then compressed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from kvtool.engine.policy_cache import PolicyCache
from kvtool.engine.settings import Settings
from kvtool.engine.sizes import pad
from kvtool.errors import KvtoolError, StreamEnd, UsageError
from kvtool.llama.cache.context import Context
from kvtool.policy import SIGNALS, ReconstructionPass

_MIN_ROOM = 256
"""Number of tokens that a prompt must leave free in the context for a reconstruction pass.

The pass uses this room to repeat a chunk of the prompt. For short chunks and short contexts, less room is
enough (see `Reconstruction.longest`). A prompt that leaves less room is read in segments.
"""

DecodeText: TypeAlias = "Callable[[np.ndarray, int], bool]"
"""Function (text i32[n], n_output) that decodes a text, of which the last n_output tokens give logits.

It returns False if it was stopped.
"""


def batches(tokens: np.ndarray, n_batch: int) -> list[np.ndarray]:
    """Split a text i32[n] into as few parts as possible, of about equal size and at most n_batch tokens."""
    return np.array_split(tokens, max(-(-len(tokens) // n_batch), 1))


class WholeReader:
    """Reads a prompt whole. Also computes in advance how many cells and segments a prompt takes."""

    def __init__(self, cache: PolicyCache, settings: Settings) -> None:
        self._cache = cache
        self._settings = settings
        self.n_batch = min(settings.n_batch, cache.context.n_batch)
        words = cache.policy.reconstruction
        self.reconstruction = Reconstruction(cache, words, self.n_batch) if words else None

    @property
    def in_segments(self) -> bool:
        """True if a prompt longer than the context can be read in segments."""
        return self.undivided is None

    @property
    def undivided(self) -> str | None:
        """Kind of policy, as messages name it, that reads no prompt in segments; None if this policy does."""
        # earlier segments must be hidden from later segments, but cells of ragged rows and archived tokens
        # cannot be hidden. Counts of queries would include the queries of later segments
        if self._cache.policy.recall:
            return "recall"
        if self._cache.rows.ragged:
            return "rows that share a budget"
        return "a policy that counts each token's queries" if self._cache.policy.counts_queries else None

    def n_segments(self, n: int) -> int:
        """Return the number of segments in which a prompt of n tokens is read.

        Raises UsageError if the context is too short for a reconstruction pass.
        """
        n_ctx = self._cache.n_ctx
        longest = self.reconstruction.longest if self.reconstruction else n_ctx
        if longest < 1:
            raise UsageError(f"a context of {n_ctx:,} tokens is too short to read a prompt twice")
        return -(-n // longest)

    def n_cells(self, n: int) -> int:
        """Return the maximum number of cells of a row while a prompt of n tokens is read."""
        cache, policy = self._cache, self._cache.policy
        if self.reconstruction:
            n_chunk = self.reconstruction.n_chunk(-(-n // self.n_segments(n)))
            n += self.reconstruction.n_before + n_chunk
        if policy.recall:
            # add the cells that steps fill from the archive
            n += int(cache.layer_cells.max()) - policy.n_live
        return pad(n)

    def n_bytes(self, n: int) -> int:
        """Return the size of K and V in bytes while a prompt of n tokens is read."""
        context = self._cache.context
        return context.cache_bytes + (self.n_cells(n) - context.n_cell) * sum(self._cache.cell_bytes)

    def signal_bytes(self, n: int) -> int:
        """Return the size of signals and queries in bytes while a prompt of n tokens is read."""
        context = self._cache.context
        return context.signal_bytes(np.full_like(context.layer_cells, self.n_cells(n)))

    def fits(self, n: int) -> bool:
        """True if whole reading is possible for n tokens.

        The model must allow enough cells for them. If they do not fit in the context, `in_segments` must be
        True. Does not check the setting `positions`, which may forbid segments.
        """
        in_one = self.in_segments or self.n_segments(n) == 1
        return in_one and self.n_cells(n) <= self._cache.context.model.layers.max_cells

    def read(self, tokens: np.ndarray, decode: DecodeText) -> int:
        """Decode a prompt i32[n] into a cache that holds all of it, and let the policy compress it once.

        A prompt longer than the context is decoded in segments that do not attend to each other (BumbleBee
        6.4). If the policy has a reconstruction pass, each segment is then read a second time.

        Returns n, or 0 if stopped. After a stop or an error, the cache is empty, but `n_pinned` and `n_held`
        are unchanged. Raises StreamEnd or UsageError if whole reading is impossible. Also raises the errors
        of `Engine.step`.
        """
        n, cache = len(tokens), self._cache
        segments = np.array_split(tokens, self.n_segments(n))
        self._check(n, len(segments))
        try:
            signals = self._decode(segments, decode)
            if signals is None:
                cache.empty()
                return 0
            self._compress(signals, close=len(segments) > 1)
        except BaseException:
            with suppress(KvtoolError):
                cache.empty()
            raise
        return n

    def _check(self, n: int, n_segment: int) -> None:
        model, n_ctx = self._cache.context.model, self._cache.n_ctx
        twice = ", read twice," if self.reconstruction else ""
        if n_segment > 1 and self.undivided:
            instead = "with a shorter prompt" if twice else "with --prefill stream"
            if self._cache.rows.ragged:
                apart = f"{instead}, or without -o heads=adaptive and layers=adaptive"
                instead = "with -o heads=equal" if twice else apart
            raise StreamEnd(
                f"the prompt of {n:,} tokens{twice} is longer than the context of {n_ctx:,}, and "
                f"{self.undivided} cannot read more in one piece; continue {instead}"
            )
        if self.n_cells(n) > (n_most := model.layers.max_cells):
            instead = "choose a shorter prompt" if twice else "choose --prefill stream, or a shorter prompt"
            raise UsageError(
                f"{model.path.name} chooses {n_most:,} cells by an index: a prompt of {n:,} tokens{twice} "
                f"cannot be read whole; {instead}"
            )
        if n_segment > 1 and self._settings.positions == "original":
            instead = "" if twice else ", or with --prefill stream"
            raise StreamEnd(
                f"the prompt of {n:,} tokens{twice} is longer than the context of {n_ctx:,}; "
                f"continue with --positions auto or in-cache{instead}"
            )

    def _decode(self, segments: list[np.ndarray], decode: DecodeText) -> dict[str, np.ndarray] | None:
        """Decode the segments into a cache with room for all of them.

        Returns the signals of all tokens; None if stopped.
        """
        cache, rows = self._cache, self._cache.rows
        n = sum(map(len, segments))
        # drop the state, because its shape fits only the small cache; `_compress` makes a new state
        cache.state = ()
        # ragged rows grow while the text is read: unused cells would cost time, because attention covers them
        if not rows.ragged:
            cache.resize(np.full_like(cache.layer_cells, self.n_cells(n)))
        total: dict[str, np.ndarray] = {}
        for segment in segments:
            first = rows.n_past
            rows.rotate_from(0)
            n_output = int(first + len(segment) == n)
            signals = decode_watched(cache, decode, segment, n_output, self.n_batch)
            if self.reconstruction and signals is not None:
                signals = self._reconstructed(np.concatenate(segments), first, decode)
            if signals is None:
                return None
            for name, values in signals.items():
                sums = total.setdefault(name, np.zeros((len(rows.live), n), values.dtype))
                # Add all signals, even maxima. Segments do not attend to each other, so a token's values are
                # 0 in all segments except its own
                sums[:, : rows.n_kv] += values
            if rows.n_past < n:
                cache.hide()
        return total

    def _reconstructed(
        self, tokens: np.ndarray, first: int, decode: DecodeText
    ) -> dict[str, np.ndarray] | None:
        """Return the signals of a reconstruction pass over the tokens from `first` on; None if stopped.

        The context keeps the prompt's logits.
        """
        assert self.reconstruction
        context = self._cache.context
        logits = context.logits().copy() if self._cache.rows.n_past == len(tokens) else None
        signals = self.reconstruction.read(tokens, first, decode)
        if signals is not None and logits is not None:
            context.set_logits(logits)
        return signals

    def _compress(self, signals: dict[str, np.ndarray], *, close: bool) -> None:
        """Evict once, then shrink the cache to its usual size.

        signals: f32[row, n] by field, of the whole prompt. close: True to close gaps between positions.
        """
        cache, rows = self._cache, self._cache.rows
        view = replace(cache.view(signals, rows.n_past), in_segments=close)
        plan = cache.ask(cache.policy.compress, view)
        n_keep = cache.check(view, plan)
        next_rot = rows.next_rot
        if close:
            cache.n_restart += 1
            next_rot = cache.rot_without_gaps(int(n_keep[0]), 0)
        source = cache.apply(plan, n_keep, next_rot, close=close)
        cache.n_planned = rows.n_past
        if rows.ragged:
            cache.make_room(cache.policy.slack)
        else:
            cache.resize(cache.layer_cells)
        cache.start()
        kept: dict[str, Any] = {
            field: np.take_along_axis(values, _aligned(source, values.ndim, spec.cell_axis), spec.cell_axis)
            for spec in SIGNALS.values()
            for field in spec.fields
            if (values := getattr(view, field)) is not None
        }
        kept["pos"] = np.take_along_axis(view.pos, source, axis=1)
        if rows.ragged:
            _clear_dead(kept, ~rows.is_live())
            kept["live"], kept["pos"] = rows.live.copy(), rows.view_pos()
        cache.ask(cache.policy.adopt, replace(view, **kept), cache.state)
        cache.clear_dead(rows.n_kv)


class Reconstruction:
    """Runs the reconstruction pass that a policy asks for. `ReconstructionPass` explains it.

    If there are held tokens, they are the reply header before each chunk.
    """

    def __init__(self, cache: PolicyCache, words: ReconstructionPass, n_batch: int) -> None:
        tokenize = cache.context.model.tokenize
        self._cache = cache
        self._n_batch = n_batch
        self.words = words
        self._first, self._later = tokenize(words.first), tokenize(words.later)
        self._close = tokenize(words.close)

    @property
    def n_before(self) -> int:
        """Maximum number of tokens that the pass decodes before each chunk."""
        n_header = self._cache.n_held or len(self._close)
        return max(len(self._first), len(self._later) + self.words.n_lead) + n_header

    @property
    def longest(self) -> int:
        """Maximum length of a segment that leaves room in the context to repeat a chunk.

        Below 1 if the context is too short.
        """
        n_ctx = self._cache.n_ctx
        return n_ctx - self.n_before - min(self.words.n_chunk, _MIN_ROOM, n_ctx // 4)

    def n_chunk(self, n: int) -> int:
        """Return the length of a chunk for a segment of n tokens."""
        return min(self.words.n_chunk, n, self._cache.n_ctx - self.n_before - n)

    def read(self, tokens: np.ndarray, first: int, decode: DecodeText) -> dict[str, np.ndarray] | None:
        """Return the signals of a pass over the tokens from `first` on: f32[row, n_past] by field.

        Afterwards the cache is unchanged except for the signals, and there are no logits. Returns None if
        stopped; the tokens of the last chunk are then still in the cache.

        tokens: i32[n], the whole prompt, of which the first n_past tokens are in the cache.
        """
        cache, rows, words = self._cache, self._cache.rows, self.words
        context = cache.context
        assert isinstance(context, Context)
        end, n_chunk = rows.n_past, self.n_chunk(rows.n_past - first)
        begin, stop = max(first, cache.n_pinned), min(end, len(tokens) - cache.n_held)
        header = tokens[len(tokens) - cache.n_held :] if cache.n_held else self._close
        fixed_state = context.fixed_state.save() if context.fixed_state else None
        # signals were off until now: use only the shapes of the arrays, not their values
        signals = {name: np.zeros_like(values) for name, values in cache.signals.read().items()}
        context.watch(on=True)
        try:
            for at in range(begin, stop, n_chunk):
                chunk = slice(at, min(at + n_chunk, stop))
                lead = tokens[max(at - words.n_lead, begin) : at]
                asked = self._first if at == begin else np.concatenate([self._later, lead])
                text = np.concatenate([asked, header, tokens[chunk]])
                watched = decode_watched(cache, decode, text, 0, self._n_batch)
                if watched is None:
                    return None
                for name, values in watched.items():
                    signals[name][:, chunk] = values[:, chunk]
                rows.drop(len(text))
                cache.edit(rows.live, rows.next_rot, n_hidden=first)
                if context.fixed_state and fixed_state:
                    context.fixed_state.restore(*fixed_state)
        finally:
            context.watch(on=False)
        return signals


def decode_watched(
    cache: PolicyCache, decode: DecodeText, tokens: np.ndarray, n_output: int, n_batch: int
) -> dict[str, np.ndarray] | None:
    """Decode a text i32[n] after the live cells. Returns signals f32[row, n_kv] by field; None if stopped.

    The signals cover all queries since the last edit before the call. Ragged rows need an edit before each
    step, because llama.cpp's own table has room for only one step. These edits clear the signals, so the
    signals of all steps are combined here.
    """
    if not cache.rows.ragged:
        return cache.signals.read() if decode(tokens, n_output) else None
    signals = cache.signals.read()
    steps = batches(tokens, n_batch)
    for i, step in enumerate(steps):
        cache.edit(cache.rows.live, cache.rows.next_rot)
        cache.take_room(len(step))
        if not decode(step, n_output if i == len(steps) - 1 else 0):
            return None
        before, signals = signals, cache.signals.read()
        for name, signal in cache.signals.by_field.items():
            if (spec := SIGNALS[signal]).scope == "plan":
                combine = np.maximum if spec.reduction == "max" else np.add
                old = signals[name][:, : before[name].shape[1]]
                combine(old, before[name], out=old)
    return signals


def _aligned(source: np.ndarray, n_axis: int, cell_axis: int) -> np.ndarray:
    """Add axes to source i32[row, cell], so that np.take_along_axis takes it as the indices of an array.

    The array has n_axis axes: rows on axis 0, and cells on axis `cell_axis`.
    """
    other = [axis for axis in range(n_axis) if axis not in (0, cell_axis)]
    return np.expand_dims(source, other)


def _clear_dead(kept: Mapping[str, np.ndarray], dead: np.ndarray) -> None:
    """Set the signals of empty cells to zero. dead: b1[row, n_kv], True for an empty cell."""
    for spec in SIGNALS.values():
        for field in spec.fields:
            if field in kept:
                np.moveaxis(kept[field], spec.cell_axis, 1)[dead] = 0
