"""Translate regular expressions and formats of JSON schemas for llguidance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from kvtool.llama.grammar.rules import repeats_too_often

_NATIVE = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}

_FRACTION = r"^[^.]*(?:\.[0-9]{1,9}[^0-9].*)?$"
_DIGITS = {
    **dict.fromkeys(("date-time", "time"), _FRACTION),
    "duration": "^P(?:T?[0-9]{1,9}[A-Z])*$",
}
"""Patterns that limit the digits of a number in a format. Weak models write digits without end otherwise."""

_ESCAPED = "%[0-9A-Fa-f]{2}"
_NON_ASCII = "\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U0001fffd\U00020000-\U0002fffd"
"""Characters that an IRI may have and a URI may not."""


def _references(more: str = "") -> tuple[str, str]:
    """Return the patterns of a relative and of an absolute reference (RFC 3986, RFC 3987).

    more: further characters, for the inside of a character set.
    """
    plain = f"[A-Za-z0-9{more}._~!$&'()*+,;=-]|{_ESCAPED}"
    text, segments = f"(?:{plain}|[:@])", f"(?:/(?:{plain}|[:@])*)*"
    host = f"//(?:(?:{plain}|:)*@)?(?:{plain})*(?::[0-9]*)?{segments}"
    end = rf"(?:\?(?:{plain}|[:@/?])*)?(?:#(?:{plain}|[:@/?])*)?"
    root = f"/(?:{text}+{segments})?"
    return (
        f"^(?:{host}|{root}|(?:{plain}|@)+{segments})?{end}$",
        f"^[A-Za-z][A-Za-z0-9+.-]*:(?:{host}|{root}|{text}+{segments})?{end}$",
    )


def _or_uri(*patterns: str) -> dict[str, Any]:
    """Return a schema of URIs and of texts that match one of the patterns."""
    return {"anyOf": [{"format": "uri"}, *({"pattern": pattern} for pattern in patterns)]}


_LABEL = r"[A-Za-z0-9\p{Ll}\p{Lo}][A-Za-z0-9\p{Ll}\p{Lo}\p{M}]*(?:-+[A-Za-z0-9\p{Ll}\p{Lo}\p{M}]+)*"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9\p{L}\p{M}!#$%&'*+/=?^_`{|}~-]+"
_VARIABLE = rf"(?:[A-Za-z0-9_.]|{_ESCAPED})+(?:\*|:[1-9][0-9]{{0,3}})?"

_NARROWER: dict[str, dict[str, Any]] = {
    "url": {"format": "uri"},
    "uri-reference": _or_uri(_references()[0]),
    "iri": _or_uri(_references(_NON_ASCII)[1]),
    "iri-reference": _or_uri(*_references(_NON_ASCII)),
    "uri-template": {
        "pattern": rf"^(?:[^\x00-\x20\x7f-\x9f\"'%<>\\^`{{|}}]|{_ESCAPED}"
        rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"
    },
    "idn-hostname": {"pattern": f"^{_HOSTNAME}$"},
    "idn-email": {"pattern": rf"^{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}$"},
    "json-pointer": {"pattern": "^(?:/(?:[^~/]|~[01])*)*$"},
    "relative-json-pointer": {"pattern": "^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$"},
    **{
        f"uuid{n}": {
            "pattern": f"^[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-{n}[0-9A-Fa-f]{{3}}"
            "-[89ABab][0-9A-Fa-f]{3}-[0-9A-Fa-f]{12}$"
        }
        for n in range(1, 9)
    },
    **dict.fromkeys(
        ("byte", "base64"),
        {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"},
    ),
    **{
        f"{sign}int{n}": {"multipleOf": 1, "minimum": least, "maximum": least + 2**n - 1}
        for n in (8, 16, 32)
        for sign, least in (("", -(2 ** (n - 1))), ("u", 0))
    },
    **dict.fromkeys(("uint", "uint64"), {"multipleOf": 1, "minimum": 0}),
    "int64": {"multipleOf": 1},
    # every text has these formats, and every number the last two
    **dict.fromkeys(("binary", "password", "float", "double"), {}),
}
"""Formats that llguidance does not know, each with a schema of texts or numbers in that format."""

_PART = re.compile(r"\\.|&&|--|~~|.", re.S)


def of_format(name: object) -> dict[str, Any] | None:
    """Return a schema of values that fit a format. Return None for an unknown format."""
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
