"""Which of the models that kvtool knows by name have room in this machine's memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from kvtool.errors import KvtoolError
from kvtool.models.catalogue import Entry
from kvtool.system.memory import free_bytes

_BESIDE_BYTES = 2**29


def room() -> int:
    """Bytes of the largest model that runs here, with a cache of the default budget.

    That is in a GPU's free memory, or in three quarters of the machine's: an archive may take the rest.
    """
    free = [free_bytes() * 3 // 4]
    # where there is no llama.cpp, this fails
    with suppress(KvtoolError):
        from kvtool.llama.devices import devices

        free += [device["memory_free"] for device in devices() if device["type"] == "gpu"]
    # cache, compute buffers and repacked weights grow with the model: Qwen2.5 1.5B, 1.12 GB, takes 1.84 GB
    return max(max(free) - _BESIDE_BYTES, 0) * 4 // 5


def fits(entry: Entry, n_bytes: int) -> bool | None:
    """Whether a model fits into `room`; None where its size is not known."""
    return None if entry.about_bytes is None else entry.about_bytes <= n_bytes


def best(entries: Iterable[Entry], n_bytes: int) -> Entry | None:
    """The largest recommended one of those that fit; None if none does."""
    found = (entry for entry in entries if entry.is_recommended and fits(entry, n_bytes))
    return max(found, key=lambda entry: entry.about_bytes or 0, default=None)
