"""Counts, sizes in bytes and number formats, as people write them."""

from __future__ import annotations

import re

from kvtool.errors import UsageError

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
"""llama.cpp's types of cached keys and values, with ggml's numbers for them."""

ARCHIVE_TYPES = (*CACHE_TYPES, "q8_0/q4_0", "q5_0/q4_0")
"""Types of archived keys and values, or of keys / of values, which need fewer bits."""

FEW_BITS = tuple(name for name in ARCHIVE_TYPES if "q5" in name or "q4" in name)
"""Archive types of which keys, values or both are multiplied by a Hadamard matrix."""

PLAIN = "plain "
"""Prefix of an archive type of few bits without the matrix ("plain q4_1"); only old sessions need it."""

MOST_THREADS = 512
"""Maximum CPU threads; with more, ggml ends the process."""

MOST_RESIDENT = 2**20
"""Maximum resident tokens of a row, as in llama_kvtool_reside."""

_UNITS = {
    "B": 1,
    # one letter means a power of 1024, as in ls, dd and ulimit
    **{unit: 2 ** (10 * i) for i, name in enumerate("KMGT", 1) for unit in (name, f"{name}IB")},
    **{f"{name}B": 10 ** (3 * i) for i, name in enumerate("KMGT", 1)},
}
_MOST_DIGITS = 20
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", re.IGNORECASE)


def archive_types(name: str) -> tuple[str, str]:
    """Return the types of keys and values. name: an archive type, perhaps with the prefix PLAIN."""
    keys, _, values = name.removeprefix(PLAIN).partition("/")
    return keys, values or keys


def parse_count(text: str) -> tuple[int, bool]:
    """Parse a count ("512") or bytes ("64MiB"). Returns the number, and True for bytes. Raises UsageError."""
    text = text.strip()
    if text.isdecimal() and len(text) <= _MOST_DIGITS:
        return int(text), False
    return parse_bytes(text), True


def parse_bytes(text: str) -> int:
    """Parse "64MiB" to bytes, rounded down. 1 KiB or K is 1024 bytes, 1 KB is 1000 bytes.

    Case does not matter. A whole number without a unit is in bytes. Raises UsageError.
    """
    # imported here: most commands never need it, and it takes memory
    from decimal import Decimal

    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    # "1.5" cannot be bytes: its unit is missing
    lacks_unit = match is not None and not match[2] and "." in match[1]
    if match is None or unit is None or lacks_unit or len(match[1]) > _MOST_DIGITS:
        raise UsageError(
            "a size is a number with a unit (B, KiB or K, MiB or M, GiB or G, TiB or T, KB, MB, GB or TB), "
            f"like 64MiB; got {text!r}"
        )
    return int(Decimal(match[1]) * unit)


def format_tokens(n: int) -> str:
    """Format a number of tokens: "1 token", "2,048 tokens"."""
    return f"{n:,} token{'s' * (n != 1)}"


def format_bytes(n_bytes: int) -> str:
    """Format bytes in the largest unit that gives at least 1: B, KiB, MiB, GiB or TiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} B"
