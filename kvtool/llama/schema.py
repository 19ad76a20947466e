"""JSON schemas as llguidance takes them, and what of them it cannot enforce."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from kvtool.errors import UsageError
from kvtool.llama.constraint import Rules, with_room

OPTIONS = {"whitespace_pattern": r"\x20|\x0A[\x20\x09]{0,20}"}
"""llguidance's options: between two parts of JSON stands at most a space, or a line break and an indentation.

Small models write blanks without an end where they may.
"""

SAYS_WHAT = {
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "$ref", "format"),
    *("properties", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that say which values fit."""


class Enforced(NamedTuple):
    """A schema that can be enforced.

    Attributes
    ----------
    schema
        What llguidance enforces of the schema.
    not_held
        Keywords that it does not enforce, sorted.
    """

    schema: Mapping[str, Any]
    not_held: list[str]

    @property
    def rules(self) -> Rules:
        """Rules of the JSON texts that fit."""
        whole = {**self.schema, "x-guidance": OPTIONS | {"lenient": bool(self.not_held)}}
        return Rules(json.dumps({"grammars": [{"json_schema": whole}]}), "the JSON schema")


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
    """What llguidance can enforce of a schema. strict: all of it, or nothing. Raises UsageError.

    An object that may have other properties than those that the schema names gets none: models make up names
    where they may.
    """
    import llguidance

    try:
        json.dumps(schema).encode()
        schema = _prepared(schema)
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None
    check = llguidance.LLMatcher.validate_grammar_with_warnings
    why = ""
    for found in (Enforced(schema, []), Enforced(schema, ["?"])):
        fails, remarks = with_room(partial(check, found.rules.text))
        if not fails:
            return Enforced(schema, sorted({name for remark in remarks for name in _named(remark)}))
        why = why or remarks[0].partition("\n")[0]
        if strict:
            break
    raise UsageError(f"the JSON schema cannot be enforced: {why}")


_OF_OBJECTS = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
    *("anyOf", "oneOf", "allOf", "not", "if", "$ref", "enum", "const", "dependencies", "dependentSchemas"),
}
"""Keywords that say something about properties that `properties` does not name."""

_LENGTHS = ("maxLength", "maxItems", "maxProperties")
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"}
_GREATEST = 10**18
"""The greatest whole number where a schema names none: models write digits without an end."""
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[4-7]|draft/20(19-09|20-12))/schema#?")


def _prepared(schema: Any) -> Any:
    """The schema with fewer texts where models would write too much.

    An object gets no other properties than the schema names, and an integer has at most 64 bits, where
    nothing else is said. Lengths that no text has, and which llguidance cannot count, are left out.
    """
    if not isinstance(schema, Mapping):
        return schema
    found = {key: value for key, value in schema.items() if not _is_idle(key, value)}
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = _prepared(found[key])
    for key in ("prefixItems", *(["anyOf"] if found.keys() & SAYS_WHAT == {"anyOf"} else [])):
        if isinstance(found.get(key), list):
            found[key] = [_prepared(part) for part in found[key]]
    if isinstance(found.get("properties"), Mapping):
        found["properties"] = {name: _prepared(part) for name, part in found["properties"].items()}
    names, required = found.get("properties"), found.get("required", [])
    is_named = (
        isinstance(names, Mapping) and isinstance(required, list) and all(name in names for name in required)
    )
    if is_named and not found.keys() & _OF_OBJECTS:
        found["additionalProperties"] = False
    if (
        found.get("type") in ("integer", ["integer", "null"], ["null", "integer"])
        and not found.keys() & _BOUNDS
    ):
        found |= {"minimum": -_GREATEST, "maximum": _GREATEST}
    return found


def _is_idle(key: str, value: object) -> bool:
    """True for a keyword that says nothing: a length that no text has, or a dialect that is not known."""
    if key == "$schema":
        return not (isinstance(value, str) and _DRAFTS.fullmatch(value))
    return key in _LENGTHS and isinstance(value, int) and value >= 2**31


def _named(remark: str) -> list[str]:
    """The keywords that llguidance names in a remark."""
    if remark.startswith("Unimplemented keys: "):
        names: list[str] = json.loads(remark.partition(": ")[2])
        return names
    if remark.startswith("Unknown format: "):
        return [f"format {remark.partition(': ')[2]}"]
    return ["minProperties", "maxProperties"] if remark.startswith("min/max") else [remark.partition(" ")[0]]
