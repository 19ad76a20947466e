"""Which of the models that kvtool knows by name have room in this machine's memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from kvtool.errors import KvtoolError
from kvtool.models.catalogue import Entry
from kvtool.system.cpu import default_threads
from kvtool.system.memory import total_bytes

_BESIDE_BYTES = 2**29

_CORE_BYTES_S, _CPU_BYTES_S = 10_000_000_000, 31_000_000_000
"""Bytes of weights that one core goes through in a second, and that the memory gives all cores together.

Measured with Q4_K_M, 512 cells: Qwen2.5 1.5B on one core of an AMD EPYC (Zen 5), 12 to 16 GB/s.
"""

_TOKENS_S = 10
"""Tokens per second that a chat should write: about as fast as people read."""


class Room(NamedTuple):
    """What runs on this machine, with a cache of the default budget.

    Attributes
    ----------
    n_bytes
        Of the largest model.
    quick_bytes
        Of the largest one that is quick enough for a chat: each token takes all of its weights.
    """

    n_bytes: int
    quick_bytes: int


def room() -> Room:
    """That is in a GPU's memory, or in two thirds of the machine's: programs and an archive take the rest.

    What is free now is not asked: it changes from one minute to the next, and with it the advice would.
    """
    gpus = [0]
    # where there is no llama.cpp, this fails
    with suppress(KvtoolError):
        from kvtool.llama.devices import devices

        gpus += [device["memory_total"] * 9 // 10 for device in devices() if device["type"] == "gpu"]
    # cache, compute buffers and repacked weights grow with the model: Qwen2.5 1.5B, 1.12 GB, takes 1.84 GB
    host, gpu = (max(n - _BESIDE_BYTES, 0) * 4 // 5 for n in (total_bytes() * 2 // 3, max(gpus)))
    quick = min(default_threads() * _CORE_BYTES_S, _CPU_BYTES_S) // _TOKENS_S
    return Room(max(host, gpu), max(min(host, quick), gpu))


def fits(entry: Entry, room: Room) -> bool | None:
    """Whether there is room for a model; None where its size is not known."""
    return None if entry.about_bytes is None else entry.about_bytes <= room.n_bytes


def best(entries: Iterable[Entry], room: Room, n_token: int = 0) -> Entry | None:
    """The largest recommended one of those that are quick and trained for so many tokens; None if none is."""
    found = (
        each
        for each in entries
        if each.is_recommended
        and (each.about_bytes or 0) <= room.quick_bytes
        and (each.n_ctx_train or 0) >= n_token
    )
    return max(found, key=lambda entry: entry.about_bytes or 0, default=None)
