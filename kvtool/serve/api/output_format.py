"""Shapes: an answer must be JSON of a schema, or fit a grammar, a regular expression or a choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvtool.errors import UsageError
from kvtool.llama import gbnf
from kvtool.llama.rules import Rules, of_choice, of_regex
from kvtool.llama.schema import Enforced, Unenforced, enforced
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, shown, wrong

Kind = Literal["schema", "grammar", "regex", "choice"]

_FIELDS: dict[str, Kind] = {
    # llama-server
    **{"json_schema": "schema", "grammar": "grammar"},
    # vLLM, SGLang
    **{"guided_json": "schema", "guided_grammar": "grammar", "guided_regex": "regex"},
    **{"guided_choice": "choice", "ebnf": "grammar", "regex": "regex"},
}
_STRUCTURED: dict[str, Kind] = {"json": "schema", "grammar": "grammar", "regex": "regex", "choice": "choice"}
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Requirement on an answer.

    Attributes
    ----------
    kind
        Its form.
    value
        A schema, the text of a grammar or of a regular expression, or a list of texts.
    where
        The field that has it.
    strict
        True if a schema must be enforced as a whole.
    """

    kind: Kind
    value: Any
    where: str
    strict: bool = False

    def rules(self) -> tuple[Rules, list[str]]:
        """Return the rules of the answer, and remarks on keywords that are not enforced. Raises ApiError."""
        if self.kind == "schema":
            found = enforced_at(self.value, self.where, strict=self.strict)
            return found.rules, remarks_of(found, self.where)
        make = {"grammar": gbnf.rules_of, "regex": of_regex, "choice": of_choice}[self.kind]
        try:
            return make(self.value), []
        except UsageError as error:
            raise ApiError(f"{self.where}: {error}", param=self.where) from None


def enforced_at(schema: Mapping[str, Any], where: str, *, strict: bool) -> Enforced:
    """As `enforced`, of the schema in this field. Raises ApiError, which names the keyword."""
    try:
        return enforced(schema, strict=strict)
    except UsageError as error:
        inside = error.where if isinstance(error, Unenforced) else ""
        names = (name.replace("~1", "/").replace("~0", "~") for name in inside.split("/")[1:])
        at = ".".join([where, *names])
        raise ApiError(f"{at}: {error}", param=at) from None


def remarks_of(found: Enforced, where: str) -> list[str]:
    """Remarks on keywords that are not enforced. where: the schema's field."""
    return [f"{where}: {', '.join(found.not_held)} cannot be enforced"] if found.not_held else []


def check(fields: Fields) -> Shape | None:
    """Take the shape out of a request's fields. Raises ApiError, also if there are two."""
    found = [_of_format(fields.any("response_format")), *_of_structured(fields.any("structured_outputs"))]
    found += [_shape(kind, fields.any(name), name) for name, kind in _FIELDS.items()]
    if fields.flag("guided_json_object"):
        found.append(Shape("schema", _ANY_OBJECT, "guided_json_object"))
    shapes = [shape for shape in found if shape]
    if len(shapes) > 1:
        one, other = shapes[0].where, shapes[1].where
        raise ApiError(f"{other} and {one} each say what the answer must fit; leave out one", param=other)
    return shapes[0] if shapes else None


def _shape(kind: Kind, value: Any, where: str, *, strict: bool = False) -> Shape | None:
    """A shape, checked; None for null and an empty text."""
    if value is None or value == "":
        return None
    if kind == "schema" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ApiError(f"{where} must be a JSON schema", param=where) from None
    if kind == "schema" and not isinstance(value, dict):
        raise wrong(where, "an object", value)
    if kind in ("grammar", "regex") and not isinstance(value, str):
        raise wrong(where, "a string", value)
    if kind == "choice" and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise wrong(where, "a list of strings", value)
    return Shape(kind, value, where, strict)


def _of_format(given: Any) -> Shape | None:
    """The shape of OpenAI's response_format."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise wrong("response_format", "an object", given)
    kind = given.get("type")
    if kind == "json_object":
        return _shape("schema", given.get("schema") or _ANY_OBJECT, "response_format.schema")
    if kind == "json_schema":
        own, where = given.get("json_schema"), "response_format.json_schema"
        its = Fields(own if isinstance(own, dict) else {})
        value = its.any("schema")
        if not isinstance(value, dict):
            raise wrong(f"{where}.schema", "an object", value)
        strict = its.any("strict")
        if not isinstance(strict, bool | None):
            raise wrong(f"{where}.strict", "true or false", strict)
        return _shape("schema", value, f"{where}.schema", strict=bool(strict))
    if kind == "text":
        return None
    raise ApiError(
        f"response_format.type must be text, json_object or json_schema, got {shown(kind)}",
        param="response_format.type",
    )


def _of_structured(given: Any) -> list[Shape | None]:
    """The shapes of vLLM's structured_outputs."""
    if given is None:
        return []
    if not isinstance(given, dict):
        raise wrong("structured_outputs", "an object", given)
    its = Fields(given)
    found = [_shape(kind, its.any(name), f"structured_outputs.{name}") for name, kind in _STRUCTURED.items()]
    if its.any("json_object") is True:
        found.append(Shape("schema", _ANY_OBJECT, "structured_outputs.json_object"))
    for name in its.left:
        if its.any(name) not in (False, ""):
            where = f"structured_outputs.{name}"
            raise ApiError(f"{where} is not supported; remove it", param=where, code="unsupported_parameter")
    return found
