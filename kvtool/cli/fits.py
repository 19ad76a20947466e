"""Models of models.txt that fit into this machine's memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from kvtool.errors import KvtoolError
from kvtool.models.catalogue import Entry
from kvtool.system.cpu import default_threads
from kvtool.system.memory import total_bytes

_OTHER_BYTES = 2**29
"""Bytes that kvtool needs in addition to the model, for a model of any size."""

_CORE_BYTES_S, _CPU_BYTES_S = 10_000_000_000, 31_000_000_000
"""Bytes of weights that one core processes per second, and the maximum for all cores together.

Memory bandwidth limits the speed of all cores together. Qwen2.5 1.5B (Q4_K_M, 512 cells) processed 12 to
16 GB/s on one core of an AMD EPYC (Zen 5). The number for one core is lower on purpose: many users have
slower cores, and other programs also use the cores.
"""

_TOKENS_S = 10
"""Minimum tokens per second of a chat. This is about as fast as people read."""


class Room(NamedTuple):
    """Sizes of models that run on this machine with a cache of the default budget.

    n_bytes: size of the largest model that fits.
    quick_bytes: size of the largest model that is fast enough for a chat. Size limits the speed, because all
    weights are read for each token.
    """

    n_bytes: int
    quick_bytes: int


def room() -> Room:
    """Return how large a model may be on this machine.

    A model may use the memory of one GPU, or two thirds of host memory if that is more. The last third of
    host memory is for other programs and an archive. The sizes are computed from total memory and not from
    free memory, which changes all the time.
    """
    gpus = [0]
    # this fails if llama.cpp is not installed; then use no GPU
    with suppress(KvtoolError):
        from kvtool.llama.libllama.devices import devices

        gpus += [device["memory_total"] * 9 // 10 for device in devices() if device["type"] == "gpu"]
    # subtract _OTHER_BYTES, and leave a fifth of the rest for the cache, compute buffers and repacked weights
    host, gpu = (max(n - _OTHER_BYTES, 0) * 4 // 5 for n in (total_bytes() * 2 // 3, max(gpus)))
    quick = min(default_threads() * _CORE_BYTES_S, _CPU_BYTES_S) // _TOKENS_S
    return Room(max(host, gpu), max(min(host, quick), gpu))


def fits(entry: Entry, room: Room) -> bool | None:
    """Return True if a model is at most as large as `room` allows, None if the model's size is unknown."""
    return None if entry.about_bytes is None else entry.about_bytes <= room.n_bytes


def best(entries: Iterable[Entry], room: Room, n_token: int = 0) -> Entry | None:
    """Return the largest recommended model that is fast enough and was trained for n_token tokens.

    None if there is no such model.
    """
    candidates = (
        entry
        for entry in entries
        if entry.is_recommended
        and (entry.about_bytes or 0) <= room.quick_bytes
        and (entry.n_ctx_train or 0) >= n_token
    )
    return max(candidates, key=lambda entry: entry.about_bytes or 0, default=None)
