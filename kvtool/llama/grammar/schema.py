"""Prepare JSON schemas for llguidance, and list keywords that cannot be enforced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from kvtool.errors import UsageError
from kvtool.llama.grammar.constraint import limits, with_large_stack
from kvtool.llama.grammar.rewriting import LeftOut, rewritten
from kvtool.llama.grammar.rules import Rules

OPTIONS = {"whitespace_pattern": r"\x20|\x0A(?:\x20{0,16}|\x09{0,4})"}
"""llguidance's options. Between two parts of JSON, they allow at most one space, or one line break and an
indentation by up to 16 spaces or 4 tabs. Without these limits, small models may write endless whitespace.
"""

MAX_CHARACTERS = 2**20
"""Maximum characters of a schema."""


class Unenforced(UsageError):
    """Error for a schema or keyword that cannot be enforced.

    where: JSON pointer to the keyword, or "" for the whole schema.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class Enforced(NamedTuple):
    """The enforced part of a schema.

    Every text that fits `schema` also fits the requested schema without the keywords in `left_out`, and with
    oneOf read as anyOf.
    """

    schema: Mapping[str, Any]
    left_out: list[LeftOut]

    @property
    def not_held(self) -> list[str]:
        """Names of the keywords that are not enforced, sorted."""
        return sorted({item.keyword for item in self.left_out})

    @property
    def rules(self) -> Rules:
        """Rules for the JSON texts that fit the schema."""
        return Rules(json_texts(self.schema), name="the JSON schema")


def json_texts(schema: Mapping[str, Any]) -> str:
    """Return the Lark expression for JSON texts that fit a schema.

    schema: the schema of an `Enforced` object, or a part of that schema.
    """
    return f"%json {json.dumps({**schema, 'x-guidance': OPTIONS | {'coerce_one_of': True}})}"


def enforced_text(schema: str) -> Enforced:
    """Parse a schema and return the part of it that can be enforced, as `enforced` does."""
    try:
        parsed = json.loads(schema)
    except json.JSONDecodeError as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None
    except ValueError:
        # Python refuses to parse a number that has thousands of digits
        raise UsageError("the JSON schema has a number of too many digits") from None
    if parsed is True:
        # any JSON fits
        parsed = {}
    if not isinstance(parsed, dict):
        raise UsageError(f"the JSON schema must be an object {{...}} or true, got {schema.strip()[:40]}")
    return enforced(parsed)


def enforced(
    schema: Mapping[str, Any], *, strict: bool = False, drops_integers: bool = False, narrows: bool = True
) -> Enforced:
    """Return the part of a schema that can be enforced.

    Raises Unenforced if the schema is invalid, is too large, or fits no value. If `strict`, also raises
    Unenforced if a keyword cannot be enforced. drops_integers, narrows: see `rewritten`.
    """
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise Unenforced("the JSON schema is nested too deeply") from None
    if len(text) > MAX_CHARACTERS:
        raise Unenforced(f"the JSON schema has more than {MAX_CHARACTERS:,} characters")
    return _enforced(text, strict, drops_integers, narrows)


# cached, because clients send the same tools with every request, and tools contain schemas
@lru_cache(128)
def _enforced(text: str, strict: bool, drops_integers: bool, narrows: bool) -> Enforced:
    try:
        new, left_out = rewritten(json.loads(text), drops_integers=drops_integers, narrows=narrows)
    except UsageError as error:
        raise Unenforced(str(error)) from None
    except RecursionError:
        raise Unenforced("the JSON schema is nested too deeply") from None
    if strict and left_out:
        keyword, where = left_out[0]
        raise Unenforced(f"the JSON schema's {keyword} cannot be enforced", where)
    if refusal := _refusal(new):
        raise Unenforced(f"the JSON schema cannot be enforced: {refusal}")
    return Enforced(new, sorted(set(left_out), key=lambda item: item.where))


def _refusal(schema: Mapping[str, Any]) -> str:
    """Return llguidance's reason for rejecting a schema, or "" if it accepts the schema."""
    import llguidance

    check = llguidance.LLMatcher.validate_grammar
    message = with_large_stack(partial(check, Enforced(schema, []).rules.text, limits=limits()))
    # drop the message's beginning: it has a line number of the Lark rules, which the user does not know
    message = message.partition("\n")[0].rpartition("failed to compile JSON schema: ")[2]
    return "" if message.startswith("WARNING") else " ".join(message.split())[:200]
