"""JSON schemas as llguidance takes them, and what of them cannot be enforced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from kvtool.errors import UsageError
from kvtool.llama.constraint import limits, with_room
from kvtool.llama.rewriting import rewritten
from kvtool.llama.rules import Rules

OPTIONS = {"whitespace_pattern": r"\x20|\x0A[\x20\x09]{0,20}"}
"""llguidance's options: between two parts of JSON stands at most a space, or a line break and an indentation.

Small models write blanks without an end where they may.
"""

MOST = 2**20
"""Most characters of a schema."""


class Unenforced(UsageError):
    """A schema that cannot be enforced. where: the keyword's place as a JSON pointer; "" for the whole."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class Enforced(NamedTuple):
    """The enforced part of a schema.

    Attributes
    ----------
    schema
        The schema for llguidance. Except for `not_held`, every text that fits it fits the one asked for.
    not_held
        Keywords that are not enforced, sorted.
    """

    schema: Mapping[str, Any]
    not_held: list[str]

    @property
    def rules(self) -> Rules:
        """Rules of the JSON texts that fit."""
        return Rules(json_texts(self.schema), name="the JSON schema")


def json_texts(schema: Mapping[str, Any]) -> str:
    """The expression of the JSON texts that fit a schema of `Enforced`, or a part of one."""
    return f"%json {json.dumps({**schema, 'x-guidance': OPTIONS | {'coerce_one_of': True}})}"


def enforced_text(schema: str, *, strict: bool = False) -> Enforced:
    """As `enforced`, of a schema's text."""
    try:
        parsed = json.loads(schema)
    except json.JSONDecodeError as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise UsageError(f"the JSON schema must be an object {{...}}, got {schema.strip()[:40]}")
    return enforced(parsed, strict=strict)


def enforced(schema: Mapping[str, Any], *, strict: bool = False) -> Enforced:
    """Return what can be enforced of a schema. strict: all of it, or nothing.

    Raises Unenforced for a schema that is not one, that no value fits, or that is too large, and, if strict,
    for one of which something cannot be enforced.
    """
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise Unenforced("the JSON schema is nested too deeply") from None
    if len(text) > MOST:
        raise Unenforced(f"the JSON schema has more than {MOST:,} characters")
    return _enforced(text, strict)


# agents send the same tools again and again
@lru_cache(128)
def _enforced(text: str, strict: bool) -> Enforced:
    schema = json.loads(text)
    why = ""
    try:
        for is_exact in (True, False):
            try:
                found, left_out = rewritten(schema, is_exact=is_exact)
            except UsageError as error:
                why = why or str(error)
                continue
            if strict and left_out:
                keyword, where = left_out[0]
                raise Unenforced(f"the JSON schema's {keyword} cannot be enforced", where)
            refusal = _refusal(found)
            if not refusal:
                return Enforced(found, sorted({each.keyword for each in left_out}))
            why = why or f"the JSON schema cannot be enforced: {refusal}"
    except RecursionError:
        raise Unenforced("the JSON schema is nested too deeply") from None
    raise Unenforced(why)


def _refusal(schema: Mapping[str, Any]) -> str:
    """Why llguidance does not take a schema; "" if it does."""
    import llguidance

    check = llguidance.LLMatcher.validate_grammar
    said = with_room(partial(check, Enforced(schema, []).rules.text, limits=limits()))
    # it tells of the line of the rules before
    said = said.partition("\n")[0].rpartition("failed to compile JSON schema: ")[2]
    return "" if said.startswith("WARNING") else " ".join(said.split())[:200]
