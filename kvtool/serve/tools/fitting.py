"""Check whether the arguments of a call fit the schema of the tool. llguidance checks them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from kvtool.errors import UsageError
from kvtool.llama.grammar.constraint import accepts
from kvtool.llama.grammar.rules import Rules
from kvtool.llama.grammar.schema import enforced, json_texts
from kvtool.serve.tools.values import alternatives, resolved


def fits(arguments: str, parameters: Mapping[str, Any]) -> bool:
    """True if the JSON text of a call's arguments fits the schema of the tool's parameters.

    Keywords that cannot be enforced are ignored. So is a schema that cannot be enforced.
    """
    try:
        schema = enforced(parameters, drops_integers=True, narrows=False).schema
    except UsageError:
        return True
    rules, value = Rules(json_texts(schema)), json.loads(arguments)
    try:
        # alternatives of a schema may have different orders. A constrained call has the right order
        texts = _written(value, [], schema), _written(value, [schema], schema)
        return any(accepts(rules, text) for text in dict.fromkeys(texts))
    except RecursionError:
        return False


def _written(value: object, schemas: Sequence[object], root: Mapping[str, Any]) -> str:
    """Return a value as JSON, written as llguidance expects it.

    Properties of objects are in the order of the schemas. Numbers have no exponent, and whole numbers have no
    decimal point.

    schemas: schemas for the value. root: schema with the definitions.
    """
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
    if not isinstance(value, (dict, list)):
        # llguidance accepts this control character only as an escape
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    known = _same_place(schemas, root)
    if isinstance(value, list):
        items = [part for schema in known for part in (schema.get("items"), *schema.get("prefixItems", ()))]
        return f"[{', '.join(_written(item, items, root) for item in value)}]"
    named = [(name, part) for schema in known for name, part in schema.get("properties", {}).items()]
    others = [
        part
        for schema in known
        for part in (schema.get("additionalProperties"), *schema.get("patternProperties", {}).values())
    ]
    order = [name for name, _ in named] + [name for schema in known for name in schema.get("required", ())]
    parts = []
    for name in dict.fromkeys([*(name for name in order if name in value), *value]):
        of_name = [part for each, part in named if each == name]
        parts.append(f"{_written(name, [], root)}: {_written(value[name], of_name or others, root)}")
    return f"{{{', '.join(parts)}}}"


def _same_place(schemas: Sequence[object], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return those of the schemas that are objects, and the schemas in them that apply to the same value."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting = [*schemas]
    while waiting:
        schema = waiting.pop(0)
        if isinstance(schema, Mapping) and id(schema) not in found:
            found[id(schema)] = schema
            target = resolved(schema, root)
            waiting = [*alternatives(schema), *schema.get("allOf", ()), target, *waiting]
    return [*found.values()]
