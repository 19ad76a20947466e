"""Structured output: answers that must fit a JSON schema, a grammar, a regular expression or a choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvtool.errors import UsageError
from kvtool.llama.grammar import gbnf
from kvtool.llama.grammar.rules import Rules, of_choice, of_regex
from kvtool.llama.grammar.schema import Enforced, Unenforced, enforced
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, need, need_texts, optional, shown

Kind = Literal["schema", "grammar", "regex", "choice"]

_FIELDS: dict[str, Kind] = {
    # llama-server
    **{"json_schema": "schema", "grammar": "grammar"},
    # vLLM, SGLang
    **{"guided_json": "schema", "guided_grammar": "grammar", "guided_regex": "regex"},
    **{"guided_choice": "choice", "ebnf": "grammar", "regex": "regex"},
}
_STRUCTURED: dict[str, Kind] = {"json": "schema", "grammar": "grammar", "regex": "regex", "choice": "choice"}
_TYPES: dict[Kind, type] = {"schema": dict, "grammar": str, "regex": str, "choice": list}
_ANY_OBJECT = {"type": "object"}

_MAX_REMARKS = 20
"""Maximum number of keywords of a schema that an answer lists."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A schema, grammar, regular expression or choice that an answer must fit.

    Attributes
    ----------
    kind
        Kind of `value`.
    value
        A schema, the text of a grammar or of a regular expression, or a list of texts to choose from.
    where
        Name of the request's field that has the value.
    strict
        True to raise an error if a part of the schema cannot be enforced.
    """

    kind: Kind
    value: Any
    where: str
    strict: bool = False

    def rules(self) -> tuple[Rules, list[str]]:
        """Return a grammar for the answer, and remarks on schema keywords that the grammar does not enforce.

        Raises ApiError.
        """
        if self.kind == "schema":
            schema = enforced_at(self.value, self.where, strict=self.strict)
            return schema.rules, remarks_of(schema, self.where)
        make = {"grammar": gbnf.rules_of, "regex": of_regex, "choice": of_choice}[self.kind]
        try:
            return make(self.value), []
        except UsageError as error:
            raise ApiError(f"{self.where}: {error}", param=self.where) from None


def enforced_at(
    schema: Mapping[str, Any], where: str, *, strict: bool, drops_integers: bool = False
) -> Enforced:
    """Return the part of a schema that can be enforced: see `enforced`.

    where: the request's field that has the schema. Raises ApiError, which names the keyword that is wrong.
    """
    try:
        return enforced(schema, strict=strict, drops_integers=drops_integers)
    except UsageError as error:
        at = _place(where, error.where if isinstance(error, Unenforced) else "")
        raise ApiError(f"{at}: {error}", param=at) from None


def _place(where: str, pointer: str) -> str:
    """Return the path of a schema's part in the request, such as "guided_json.properties.age".

    where: the request's field that has the schema. pointer: JSON pointer to the part.
    """
    names = (name.replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:])
    return ".".join([where, *names])


def remarks_of(schema: Enforced, where: str) -> list[str]:
    """Return remarks on keywords of a schema that are not enforced. where: the field with the schema."""
    listed = schema.left_out[:_MAX_REMARKS]
    return [f"{_place(where, each.where)}: {each.keyword} cannot be enforced" for each in listed]


def check(fields: Fields) -> OutputFormat | None:
    """Return the output format that a request asks for, or None.

    Raises ApiError if the format is wrong, or if the request has two formats.
    """
    candidates = [_of_response_format(fields.mapping("response_format")), *_of_structured(fields)]
    candidates += [_format(kind, fields.pop(name), name) for name, kind in _FIELDS.items()]
    if fields.flag("guided_json_object"):
        candidates.append(OutputFormat("schema", _ANY_OBJECT, "guided_json_object"))
    formats = [each for each in candidates if each]
    if len(formats) > 1:
        one, other = formats[0].where, formats[1].where
        raise ApiError.at(other, f"and {one} each say what the answer must fit; leave out one")
    return formats[0] if formats else None


def _format(kind: Kind, value: Any, where: str, *, strict: bool = False) -> OutputFormat | None:
    """Check a value and return the output format, or None if the value is null or an empty text."""
    if value is None or value == "":
        return None
    if kind == "schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError.at(where, "must be a JSON schema") from None
    need(value, _TYPES[kind], where)
    if kind == "choice":
        need_texts(value, where)
    return OutputFormat(kind, value, where, strict)


def _of_response_format(given: dict[str, Any] | None) -> OutputFormat | None:
    """Return the output format in OpenAI's response_format."""
    if given is None:
        return None
    kind = given.get("type")
    if kind == "json_object":
        return _format("schema", given.get("schema") or _ANY_OBJECT, "response_format.schema")
    if kind == "json_schema":
        inner, where = given.get("json_schema"), "response_format.json_schema"
        inner = inner if isinstance(inner, dict) else {}
        schema = need(inner.get("schema"), dict, f"{where}.schema")
        strict = optional(inner.get("strict"), bool, f"{where}.strict")
        return _format("schema", schema, f"{where}.schema", strict=bool(strict))
    if kind == "text":
        return None
    raise ApiError.at("response_format.type", f"must be text, json_object or json_schema, got {shown(kind)}")


def _of_structured(fields: Fields) -> list[OutputFormat | None]:
    """Return the output formats in vLLM's structured_outputs."""
    inner = Fields(fields.mapping("structured_outputs") or {})
    formats = [
        _format(kind, inner.pop(name), f"structured_outputs.{name}") for name, kind in _STRUCTURED.items()
    ]
    if inner.pop("json_object") is True:
        formats.append(OutputFormat("schema", _ANY_OBJECT, "structured_outputs.json_object"))
    for name in inner.left:
        if inner.pop(name) not in (False, ""):
            where = f"structured_outputs.{name}"
            raise ApiError.at(where, "is not supported; remove it", "unsupported_parameter")
    return formats
