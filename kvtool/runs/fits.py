"""Which of the models that kvtool knows by name have room in this machine's memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from kvtool.errors import KvtoolError
from kvtool.models.catalogue import Entry
from kvtool.system.memory import total_bytes

_BESIDE_BYTES = 2**29

_QUICK_BYTES = 3_100_000_000
"""The weights that a CPU reads for each token, at most: ten times a second at 30 GB/s."""


class Room(NamedTuple):
    """What runs on this machine, with a cache of the default budget.

    Attributes
    ----------
    n_bytes
        Of the largest model.
    quick_bytes
        Of the largest one that is quick enough for a chat.
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
    return Room(max(host, gpu), max(min(host, _QUICK_BYTES), gpu))


def fits(entry: Entry, room: Room) -> bool | None:
    """Whether there is room for a model; None where its size is not known."""
    return None if entry.about_bytes is None else entry.about_bytes <= room.n_bytes


def best(entries: Iterable[Entry], room: Room) -> Entry | None:
    """The largest recommended one of those that are quick; None if none is."""
    found = (each for each in entries if each.is_recommended and (each.about_bytes or 0) <= room.quick_bytes)
    return max(found, key=lambda entry: entry.about_bytes or 0, default=None)
