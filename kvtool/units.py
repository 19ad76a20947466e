"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from kvtool.errors import UsageError

_UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """The bytes in "64MiB", rounded down. A KiB is 1024 bytes, a KB 1000.

    Case does not matter; a number without a unit is bytes. Raises UsageError.
    """
    # imported here: most commands never need it, and it takes memory
    from decimal import Decimal

    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"a size is a number with a unit (B, KiB, MiB, GiB, KB, MB or GB), like 64MiB; got {text!r}"
        )
    return int(Decimal(match[1]) * unit)


def format_bytes(n_bytes: int) -> str:
    """Bytes in the largest unit of which there is at least one: B, KiB, MiB or GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} B"
