"""A prompt that is read whole: decoded into a cache that holds all of it, then compressed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from kvtool.engine.cached_prompt import CachedPrompt
from kvtool.engine.reconstruction import Reconstruction
from kvtool.engine.stream import Stream, pad
from kvtool.engine.watched import decode_watched
from kvtool.errors import KvtoolError, StreamEnd, UsageError
from kvtool.llama.devices import gpu_free_bytes
from kvtool.policy import SIGNALS


def read_whole(
    stream: Stream, tokens: np.ndarray, stopped: Callable[[], bool], whole: CachedPrompt | None = None
) -> int:
    """Decodes a prompt into a cache that holds all of it, and lets the policy compress it once.

    A prompt beyond the context is decoded in segments that do not see each other (BumbleBee 6.4). If the
    policy has a reconstruction pass, each is then read again. `stopped` is asked before each batch whether to
    end. whole: what another stream has read; of the same prompt, only what that lacks is read here. Returns
    how many tokens were read: all or none. After none, or an error, the cache is empty and what was pinned
    and held is so again. Raises StreamEnd if original positions do not reach so far, and what `Engine.step`
    raises.
    """
    n = len(tokens)
    segments = np.array_split(tokens, n_segments(stream, n))
    twice = ", read twice," if stream.policy.reconstruction else ""
    if len(segments) > 1 and not in_segments(stream):
        apart = "without -o heads=adaptive and layers=adaptive"
        instead = "with -o heads=equal" if twice else f"with --prefill stream, or {apart}"
        who = "rows that share a budget cannot read more in one piece"
        if stream.policy.recall:
            who, instead = "recall cannot read more in one piece", "with --prefill stream"
        raise StreamEnd(
            f"the prompt of {n} tokens{twice} is longer than the context of {stream.n_ctx}, and {who}; "
            f"continue {instead}"
        )
    if n_cells(stream, n) > (n_most := stream.model.layers.most_cells):
        instead = "choose a shorter prompt" if twice else "choose --prefill stream, or a shorter prompt"
        raise UsageError(
            f"{stream.model.path.name} chooses {n_most:,} cells by an index: a prompt of {n} tokens{twice} "
            f"cannot be read whole; {instead}"
        )
    if len(segments) > 1 and stream.settings.positions == "original":
        instead = "" if twice else ", or with --prefill stream"
        raise StreamEnd(
            f"the prompt of {n} tokens{twice} is longer than the context of {stream.n_ctx}; "
            f"continue with --positions auto or in-cache{instead}"
        )
    try:
        fits = whole and len(segments) == 1 and whole.fits(stream.eviction, tokens)
        signals = _decode(stream, segments, stopped, whole if fits else None)
        if signals is None:
            stream.empty()
            return 0
        _compress(stream, signals, close=len(segments) > 1)
    except BaseException:
        with suppress(KvtoolError):
            stream.empty()
        raise
    return n


def fits_at_once(stream: Stream, n: int) -> bool:
    """Whether a prompt of n tokens can be read whole, but for positions that end."""
    in_one = in_segments(stream) or n_segments(stream, n) == 1
    return in_one and n_cells(stream, n) <= stream.model.layers.most_cells


def has_room(stream: Stream, n: int) -> bool:
    """Whether a prompt of n tokens that would be streamed and recalled is read whole instead, unasked.

    A CPU searches the archive for each token of it: a GPU reads the whole ten times as fast. It is done where
    the cells for that take at most half of what is free there.
    """
    settings = stream.settings
    if settings.prefill or not (stream.policy.recall and settings.kv_offload and stream.model.is_on_gpu):
        return False
    if stream.n_refused is not None and n >= stream.n_refused:
        return False
    return fits_at_once(stream, n) and 2 * whole_bytes(stream, n) <= gpu_free_bytes()


def whole_bytes(stream: Stream, n: int) -> int:
    """Bytes of K and V while a prompt of n tokens is read whole."""
    context = stream.context
    cell_bytes = sum(map(context.cell_bytes, range(len(stream.eviction.layer_cells))))
    return stream.cache_bytes + (n_cells(stream, n) - context.n_cell) * cell_bytes


def in_segments(stream: Stream) -> bool:
    """Whether a prompt longer than the context can be read whole: in segments that do not see each other."""
    # one attends over all cells of rows that differ, and to all of an archive
    return not (stream.rows.ragged or stream.policy.recall)


def n_segments(stream: Stream, n: int) -> int:
    """In how many segments a prompt of n tokens is read whole. Raises UsageError for too short a context."""
    words = stream.policy.reconstruction
    longest = Reconstruction(stream, words).longest if words else stream.n_ctx
    if longest < 1:
        raise UsageError(f"a context of {stream.n_ctx} tokens is too short to read a prompt twice")
    return -(-n // longest)


def n_cells(stream: Stream, n: int) -> int:
    """The most cells of a row while a prompt of n tokens is read whole."""
    if words := stream.policy.reconstruction:
        reconstruction = Reconstruction(stream, words)
        n += reconstruction.n_beside + reconstruction.n_chunk(-(-n // n_segments(stream, n)))
    if stream.policy.recall:
        # behind the live cells are those for what is recalled
        n += int(stream.eviction.layer_cells.max()) - stream.policy.n_live
    return pad(n)


def _decode(
    stream: Stream, segments: list[np.ndarray], stopped: Callable[[], bool], whole: CachedPrompt | None
) -> dict[str, np.ndarray] | None:
    """Decodes the segments into a cache made for them. Returns the signals of all; None if stopped."""
    rows, eviction = stream.rows, stream.eviction
    n = sum(map(len, segments))
    # it is the small cache's
    eviction.state = ()
    # attention goes over all cells of rows that differ: there they come as the text does
    if not rows.ragged:
        stream.eviction.resize(np.full_like(stream.eviction.layer_cells, n_cells(stream, n)))
    elif whole:
        stream.eviction.make_room(n)
    words = stream.policy.reconstruction
    reconstruction = Reconstruction(stream, words) if words else None
    signals: dict[str, np.ndarray] = {}
    for segment in segments:
        first = rows.n_past
        rows.rotate_from(0)
        n_known = whole.put(stream.eviction) if whole else 0
        if rows.ragged and n_known:
            # what was put there took cells
            stream.eviction.make_room(len(segment) - n_known)
        found: Mapping[str, np.ndarray] | None
        found = decode_watched(stream, segment[n_known:], int(first + len(segment) == n), stopped)
        if reconstruction and found is not None:
            found = _reconstructed(stream, reconstruction, np.concatenate(segments), first, stopped, whole)
        elif whole and n_known == n:
            found = {name: whole.signals[name] for name in stream.signals.of}
        if found is None:
            return None
        for name, values in found.items():
            total = signals.setdefault(name, np.zeros((len(rows.live), n), values.dtype))
            # no segment sees another: where one has something, the others have 0
            total[:, : rows.n_kv] += values
        if rows.n_past < n:
            eviction.hide()
    return signals


def _reconstructed(
    stream: Stream,
    reconstruction: Reconstruction,
    tokens: np.ndarray,
    first: int,
    stopped: Callable[[], bool],
    whole: CachedPrompt | None,
) -> dict[str, np.ndarray] | None:
    """Signals of a reconstruction pass, as `Reconstruction.read`; the logits stay those of the prompt."""
    n_chunk = reconstruction.n_chunk(stream.n_past - first)
    how = stream.policy.request(), reconstruction.words, stream.n_pinned, stream.n_held, n_chunk
    if whole and (known := whole.reconstructed.get(how)):
        return known
    logits = stream.context.logits().copy() if stream.n_past == len(tokens) else None
    found = reconstruction.read(tokens, first, stopped)
    if found is not None and logits is not None:
        stream.context.take_logits(logits)
    if found is not None and whole:
        whole.reconstructed[how] = found
    return found


def _compress(stream: Stream, signals: dict[str, np.ndarray], *, close: bool) -> None:
    """Evicts once, by the signals f32[row, n] of the whole prompt; the large cache is given back."""
    rows, eviction = stream.rows, stream.eviction
    view = eviction.view(signals, rows.n_past)
    plan = eviction.ask("compress", view)
    n_keep = eviction.check(view, plan)
    next_rot = rows.next_rot
    if close:
        eviction.n_restart += 1
        next_rot = eviction.low_rot(int(n_keep[0]), 0)
    source = eviction.apply(plan, n_keep, next_rot, close=close)
    eviction.n_planned = rows.n_past
    if rows.ragged:
        stream.eviction.make_room(stream.policy.slack)
    else:
        stream.eviction.resize(stream.eviction.layer_cells)
    eviction.start()
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
    eviction.ask("adopt", replace(view, **kept), eviction.state)
    eviction.clear_dead(rows.n_kv)


def _aligned(source: np.ndarray, n_axis: int, cell_axis: int) -> np.ndarray:
    """View of source i32[row, cell] with n_axis axes, for arrays that have their cells along cell_axis."""
    other = [axis for axis in range(n_axis) if axis not in (0, cell_axis)]
    return np.expand_dims(source, other)


def _clear_dead(kept: Mapping[str, np.ndarray], dead: np.ndarray) -> None:
    """Set the signals of empty cells, dead b1[row, n_kv], to zero."""
    for spec in SIGNALS.values():
        for field in spec.fields:
            if field in kept:
                np.moveaxis(kept[field], spec.cell_axis, 1)[dead] = 0
