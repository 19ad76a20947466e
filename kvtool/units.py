"""Byte sizes as people write them."""

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
    """What "64MiB" is in bytes, a fraction of a byte cut off. KiB goes by 1024, KB by 1000.

    Upper and lower case are the same; a bare number is bytes. Raises UsageError.
    """
    # here, as a chat seldom asks and the module takes memory
    from decimal import Decimal

    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"a size is a number and one of B, KiB, MiB, GiB, KB, MB, GB, like 64MiB; got {text!r}"
        )
    return int(Decimal(match[1]) * unit)


def format_bytes(n_bytes: int) -> str:
    """Bytes with the largest unit of B, KiB, MiB, GiB that leaves a number of 1 or more."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} B"
