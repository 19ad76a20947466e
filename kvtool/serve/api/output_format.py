"""Structured output: answers that must fit a JSON schema or a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvtool.errors import UsageError
from kvtool.llama.grammar import gbnf
from kvtool.llama.grammar.json_pointer import names_in
from kvtool.llama.grammar.rules import Rules
from kvtool.llama.grammar.schema import Enforced, Unenforced, enforced
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, need, optional, shown

Kind = Literal["schema", "grammar"]

_ANY_OBJECT = {"type": "object"}

_MAX_REMARKS = 20
"""Maximum number of keywords of a schema that an answer lists."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A schema or a grammar that an answer must fit.

    Attributes
    ----------
    value
        A schema, or the text of a grammar.
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
        """Return a grammar for the answer, and remarks on schema keywords that it does not enforce."""
        if self.kind == "schema":
            schema = enforced_at(self.value, self.where, strict=self.strict)
            return schema.rules, remarks_of(schema, self.where)
        try:
            return gbnf.rules_of(self.value), []
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
    """Return the path of a schema's part in the request, such as "json_schema.properties.age".

    pointer: JSON pointer to the part.
    """
    return ".".join([where, *names_in(pointer)])


def remarks_of(schema: Enforced, where: str) -> list[str]:
    """Return remarks on keywords of a schema that are not enforced."""
    listed = schema.left_out[:_MAX_REMARKS]
    return [f"{_place(where, each.where)}: {each.keyword} cannot be enforced" for each in listed]


def check(fields: Fields, given: OutputFormat | None = None) -> OutputFormat | None:
    """Return the output format that a request asks for, or None. A request must not have two formats.

    given: the format in a field that only one API has.
    """
    formats = [given] if given else []
    if response_format := of_response_format(fields.mapping("response_format"), "response_format"):
        formats.append(response_format)
    if (schema := fields.mapping("json_schema")) is not None:
        formats.append(OutputFormat("schema", schema, "json_schema"))
    if grammar := fields.text("grammar"):
        formats.append(OutputFormat("grammar", grammar, "grammar"))
    if len(formats) > 1:
        one, other = formats[0].where, formats[1].where
        raise ApiError.at(other, f"and {one} each say what the answer must fit; leave out one")
    return formats[0] if formats else None


def of_response_format(
    given: dict[str, Any] | None, where: str, *, is_flat: bool = False
) -> OutputFormat | None:
    """Return the output format in OpenAI's response_format.

    is_flat: True if the schema is in the field itself.
    """
    if given is None:
        return None
    kind = given.get("type")
    if kind == "json_object":
        at = f"{where}.schema" if given.get("schema") else where
        return OutputFormat("schema", need(given.get("schema") or _ANY_OBJECT, dict, at), at)
    if kind == "json_schema":
        at, inner = (where, given) if is_flat else (f"{where}.json_schema", given.get("json_schema"))
        inner = inner if isinstance(inner, dict) else {}
        schema = need(inner.get("schema"), dict, f"{at}.schema")
        strict = optional(inner.get("strict"), bool, f"{at}.strict")
        return OutputFormat("schema", schema, f"{at}.schema", strict=bool(strict))
    if kind == "text":
        return None
    raise ApiError.at(f"{where}.type", f"must be text, json_object or json_schema, got {shown(kind)}")
