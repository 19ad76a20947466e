"""Parse and print numbers of tokens and sizes in bytes. Also lists the types of cached numbers."""

from __future__ import annotations

import re

from kvtool.errors import UsageError

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
"""Types of cached keys and values in llama.cpp, each with its number in ggml."""

TYPE_NUMBERS = {**CACHE_TYPES, "iq4_nl": 20}
"""Types of cached or archived keys and values, each with its number in ggml."""

ARCHIVE_TYPES = (*TYPE_NUMBERS, "q8_0/q4_0", "q5_0/q4_0")
"""Types of archived keys and values.

If a name has a slash, the type before the slash is for keys, and the type after the slash is for values.
"""

FEW_BITS = tuple(name for name in ARCHIVE_TYPES if "q5" in name or "q4" in name)
"""Archive types in which keys, values or both have 4 or 5 bits.

Keys and values of 4 or 5 bits are multiplied by a Hadamard matrix before they are rounded.
"""

PLAIN = "plain "
"""Prefix of a type in `FEW_BITS` that is used without the Hadamard matrix, such as "plain q4_1".

Old sessions have such archives.
"""

MAX_THREADS = 512
"""Maximum number of CPU threads. With more threads, ggml ends the process."""

MAX_RESIDENT = 2**20
"""Largest value of --resident, the number of archived tokens of each row that are also on the device.

The function llama_kvtool_reside of the patch has the same limit.
"""

_UNITS = {
    "B": 1,
    # a unit of one letter is a power of 1024, as in ls, dd and ulimit
    **{unit: 2 ** (10 * i) for i, name in enumerate("KMGT", 1) for unit in (name, f"{name}IB")},
    **{f"{name}B": 10 ** (3 * i) for i, name in enumerate("KMGT", 1)},
}
_MAX_DIGITS = 20
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", re.IGNORECASE)


def archive_types(name: str) -> tuple[str, str]:
    """Return the types of the keys and of the values. The name may have the prefix PLAIN."""
    keys, _, values = name.removeprefix(PLAIN).partition("/")
    return keys, values or keys


def parse_count(text: str) -> tuple[int, bool]:
    """Parse a count ("512") or bytes ("64MiB"). Raises UsageError.

    Returns the number, and True if it is a number of bytes.
    """
    text = text.strip()
    if text.isdecimal() and len(text) <= _MAX_DIGITS:
        return int(text), False
    return parse_bytes(text), True


def parse_bytes(text: str) -> int:
    """Parse a size like "64MiB". Return the number of bytes, rounded down. Raises UsageError.

    1 KiB or 1 K is 1024 bytes, 1 KB is 1000 bytes. Units may be in upper or lower case. A whole number
    without a unit is a number of bytes.
    """
    # imported here, because the import takes memory and most commands do not need it
    from decimal import Decimal

    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    # "1.5" cannot be a number of bytes, so a unit is missing
    lacks_unit = match is not None and not match[2] and "." in match[1]
    if match is None or unit is None or lacks_unit or len(match[1]) > _MAX_DIGITS:
        raise UsageError(
            "a size is a number with a unit (B, KiB or K, MiB or M, GiB or G, TiB or T, KB, MB, GB or TB), "
            f"like 64MiB; got {text!r}"
        )
    return int(Decimal(match[1]) * unit)


def format_tokens(n: int) -> str:
    """Format a number of tokens: "1 token", "2,048 tokens"."""
    return f"{n:,} token{'s' * (n != 1)}"


def format_bytes(n_bytes: int, *, round_up: bool = False) -> str:
    """Format a number of bytes. The unit is the largest of B, KiB, MiB, GiB and TiB that gives at least 1.

    round_up: True for a minimum, so that a user may type the formatted size.
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            number = -(-n_bytes * 10 // size) / 10 if round_up else n_bytes / size
            return f"{number:.1f} {unit}"
    return f"{n_bytes} B"
