"""Translate regular expressions and formats of JSON schemas for llguidance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from kvtool.llama.grammar.rules import repeats_too_often

_NATIVE = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}

_FRACTION = r"^[^.]*(?:\.[0-9]{1,6}[^0-9].*)?$"
_DIGITS = {
    **dict.fromkeys(("date-time", "time"), _FRACTION),
    "duration": "^P(?:T?[0-9]{1,6}[A-Z])*$",
}
"""Patterns that limit the digits of a number in a format. Weak models write digits without end otherwise."""

_NARROWER: dict[str, dict[str, str]] = {
    **{name: {"format": "uri"} for name in ("iri", "url")},
    **{"idn-email": {"format": "email"}, "idn-hostname": {"format": "hostname"}},
    "json-pointer": {"pattern": "^(?:/(?:[^~/]|~[01])*)*$"},
    "relative-json-pointer": {"pattern": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$"},
    "uri-reference": {"pattern": r"^[A-Za-z0-9._~/-]*(?:\?[A-Za-z0-9._~/=&-]*)?(?:#[A-Za-z0-9._~/-]*)?$"},
    "iri-reference": {"pattern": r"^[A-Za-z0-9._~/-]*(?:\?[A-Za-z0-9._~/=&-]*)?(?:#[A-Za-z0-9._~/-]*)?$"},
    "uri-template": {"pattern": r"^(?:[A-Za-z0-9._~:/?#=&-]|\{[A-Za-z0-9_]+\})*$"},
    **{
        f"uuid{n}": {
            "pattern": f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{n}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
        }
        for n in range(1, 9)
    },
    **dict.fromkeys(("byte", "base64"), {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==)?$"}),
    # every text has these formats
    **dict.fromkeys(("binary", "password"), {}),
}
"""Formats that llguidance does not know, each with a schema that accepts only texts of that format."""

_PART = re.compile(r"\\.|&&|--|~~|.", re.S)


def of_format(name: object) -> dict[str, Any] | None:
    """Return a schema of texts that fit a format. Return None for an unknown format."""
    if not isinstance(name, str):
        return None
    limit = {"pattern": _DIGITS[name]} if name in _DIGITS else {}
    return {"format": name, **limit} if name in _NATIVE else _NARROWER.get(name)


@lru_cache(10_000)
def parts_of(pattern: str) -> tuple[str, ...] | None:
    """Split a pattern into patterns that llguidance accepts. A text must match all of them.

    A lookahead at the start of the pattern becomes a separate pattern. Returns None if this is impossible,
    or if the pattern repeats a part too often.
    """
    import llguidance

    if repeats_too_often(pattern):
        return None
    rest, parts = "".join(part for part, _ in _plain(pattern)), []
    while rest.startswith("^(?="):
        end = _end_of_lookahead(rest)
        if end is None:
            return None
        parts.append(f"^(?:{rest[4:end]})")
        rest = f"^{rest[end + 1 :]}"
    parts.append(rest)
    make, check = llguidance.LLMatcher.grammar_from_json_schema, llguidance.LLMatcher.validate_grammar
    fails = any(check(make({"type": "string", "pattern": part})) for part in parts)
    return None if fails else tuple(parts)


def _plain(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield (part, is in a character set) for each part of a pattern.

    Escapes parts that llguidance would take for a nested set, a set operation or a word boundary.
    """
    in_set, first = False, 0
    for n, part in enumerate(_PART.findall(pattern)):
        if part in (r"\<", r"\>"):
            yield rf"\x{ord(part[1]):x}", in_set
        elif in_set and part in ("[", "&&", "--", "~~"):
            yield "".join(f"\\{char}" for char in part), True
        elif in_set or len(part) < 2:
            if part == "[":
                in_set, first = True, n + 1
            elif in_set and part == "^" and n == first:
                first += 1
            elif part == "]" and n != first:
                in_set = False
            yield part, in_set
        else:
            # outside a set, the part is an escape, or characters that are an operator only in a set
            yield part, False


def _end_of_lookahead(pattern: str) -> int | None:
    """Return the index of the parenthesis that closes the pattern's first lookahead.

    Return None if no parenthesis closes it, or if the pattern has alternatives, because the lookahead then
    applies only to the first alternative.
    """
    at, depth, end = 0, 0, None
    for part, in_set in _plain(pattern):
        if not in_set and part in ("(", ")"):
            depth += 1 if part == "(" else -1
            if not depth and end is None:
                end = at
        if not in_set and part == "|" and not depth:
            return None
        at += len(part)
    return end
