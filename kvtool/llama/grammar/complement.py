"""Complements of JSON schemas. A complement accepts only values that the original schema rejects.

llguidance does not support the keywords oneOf, not and if. They are expressed through complements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice, pairwise
from typing import Any

DEPENDENT = ("dependencies", "dependentSchemas", "dependentRequired")
IN_PLACE = {"anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref", *DEPENDENT}
"""Keywords with subschemas that apply to the same value as the schema itself."""

CONSTRAINING = IN_PLACE | {
    *("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties"),
    *("minProperties", "maxProperties", "propertyNames", "format", "pattern", "minLength", "maxLength"),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
}
"""Keywords that restrict the values of a schema."""

ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})

MAX_SCHEMAS = 24
"""Maximum number of schemas in a complement.

Further schemas are left out, so the complement accepts fewer values. It still accepts only values that the
original schema rejects.
"""

_MAX_LENGTH = 100
"""Maximum length of a text for `other_than`. Each character of the text adds a level of nesting."""

_MAX_DEPTH = 6
_MAX_VISITS = 100_000
_MAX_OPTIONS = 100
"""Limits: depth of nested schemas and of references, number of visited schemas, and number of options that
are compared pair by pair.
"""


class Complement:
    """Compute complements. root: the whole schema. References such as #/$defs/colour point into it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # number of schemas that may still be visited: visiting all nested schemas can take exponential time
        self._n_left = _MAX_VISITS

    def of(self, schema: Any, depth: int = 0, *, names: Iterable[str] = ()) -> list[Any]:
        """Return schemas that accept only values that the given schema rejects; [] if none is known.

        names: names of properties. If the schema forbids one of these properties, the result includes a
        schema of the objects that have it.
        """
        schema = self.resolved(schema)
        self._n_left -= 1
        if schema is True or (isinstance(schema, Mapping) and not schema.keys() & CONSTRAINING):
            return [False]
        if schema is False:
            return [True]
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._n_left < 0:
            return []
        others = [
            {"type": "object", "required": [name]} for name in names if _property(schema, name) is False
        ]
        return [*islice(chain(others, self._of_keywords(schema, depth)), MAX_SCHEMAS)]

    def _of_keywords(self, schema: Mapping[str, Any], depth: int) -> Iterator[Any]:
        """For each keyword of the schema, yield schemas that accept only values that the keyword rejects."""
        if types := ALL_TYPES - types_of(schema.get("type")):
            yield {"type": sorted(types)}
        values = values_of(schema)
        if values is not None:
            yield from _other_values(values)
        for name in _texts(schema.get("required")):
            yield {"type": "object", "properties": {name: False}}
        parts = schema.get("properties")
        for name, part in parts.items() if isinstance(parts, Mapping) else ():
            for other in self.of(part, depth + 1):
                yield {"type": "object", "properties": {name: other}, "required": [name]}
        for key, number in schema.items():
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                yield from _beyond(key, number)
        items = schema.get("items")
        for other in self.of(items, depth + 1) if isinstance(items, Mapping) else ():
            # a rejected first item is enough to reject an array
            yield {"type": "array", "items": [other], "minItems": 1}
        for part in listed(schema, "allOf"):
            yield from self.of(part, depth + 1)
        for key in ("anyOf", "oneOf"):
            options = [self.of(part, depth + 1) for part in listed(schema, key)]
            if options and all(options):
                yield {"allOf": [{"anyOf": option} for option in options]}
        if "not" in schema:
            yield schema["not"]

    def resolved(self, schema: Any) -> Any:
        """If the schema is only a reference, return its target. Otherwise return the schema."""
        for _ in range(_MAX_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if (
                not isinstance(reference, str)
                or not reference.startswith("#")
                or schema.keys() & CONSTRAINING - {"$ref"}
            ):
                break
            schema = at_pointer(self._root, reference[1:])
        return schema

    def near(self, options: Sequence[Any], within: frozenset[str]) -> list[list[int]] | None:
        """Return a list for each option: the indices of the other options that may accept the same value.

        within: types that values may have. Returns None if there are too many options.
        """
        overlaps: list[list[int]] = [[] for _ in options]
        if self._have_distinct_values(options, within):
            return overlaps
        if len(options) > _MAX_OPTIONS:
            return None
        for i, j in combinations(range(len(options)), 2):
            if not self.are_apart(options[i], options[j], within=within):
                overlaps[i].append(j)
                overlaps[j].append(i)
        return overlaps

    def _have_distinct_values(self, options: Sequence[Any], within: frozenset[str]) -> bool:
        """Return True if each option lists its values (const or enum), and no value is in two of the lists.

        Also return True if the options accept only objects, all require the same property, and list different
        values for it.
        """
        known = [option for option in map(self.resolved, options) if isinstance(option, Mapping)]
        if len(known) < len(options) or not known:
            return False
        lists = [[values_of(option) for option in known]]
        if all(self._types(option) & within == {"object"} for option in known):
            names = set.intersection(*(set(_texts(option.get("required"))) for option in known))
            lists += [
                [values_of(self.resolved(_property(option, name))) for option in known] for name in names
            ]
        return any(_are_distinct(values) for values in lists)

    def are_apart(self, one: Any, other: Any, depth: int = 0, *, within: frozenset[str] = ALL_TYPES) -> bool:
        """Return True only if no value fits both schemas. within: types that values may have."""
        one, other = self.resolved(one), self.resolved(other)
        self._n_left -= 1
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        if depth > _MAX_DEPTH or self._n_left < 0:
            return False
        for a, b in ((one, other), (other, one)):
            for key in ("anyOf", "oneOf"):
                options = listed(a, key)
                if options and all(self.are_apart(option, b, depth + 1, within=within) for option in options):
                    return True
            if any(self.are_apart(part, b, depth + 1, within=within) for part in listed(a, "allOf")):
                return True
        common = self._types(one) & self._types(other) & within
        values, others = values_of(one), values_of(other)
        if values is not None and others is not None:
            return not any(_same(value, other_value) for value in values for other_value in others)
        if not common:
            return True
        return common == {"object"} and self._objects_are_apart(one, other, depth)

    def _objects_are_apart(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        for a, b in ((one, other), (other, one)):
            for name in _texts(a.get("required")):
                if self.are_apart(_property(a, name), _property(b, name), depth + 1):
                    return True
        return False

    def _types(self, schema: Mapping[str, Any]) -> frozenset[str]:
        values = values_of(schema)
        types = types_of(schema.get("type"))
        return types if values is None else types & {_type(value) for value in values}


def types_of(keyword: object) -> frozenset[str]:
    """Return the types that a value of the keyword "type" allows. "integer" is treated as "number"."""
    names = [keyword] if isinstance(keyword, str) else keyword if isinstance(keyword, list) else ALL_TYPES
    return frozenset("number" if name == "integer" else str(name) for name in names)


def at_pointer(root: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer, or None."""
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        # Python does not parse a number that has thousands of digits
        if isinstance(root, list) and name.isdecimal() and len(name) < 10 and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under a keyword, or [] if the keyword has no list."""
    options = schema.get(key)
    return options if isinstance(options, list) else []


def values_of(schema: Any) -> list[Any] | None:
    """Return the values that const or enum lists. Return None if the schema has neither keyword."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _are_distinct(lists: Sequence[list[Any] | None]) -> bool:
    """Return True if no list is None and no value is in two lists."""
    if any(values is None for values in lists):
        return False
    sets = [{json.dumps(_whole(value), sort_keys=True) for value in values or ()} for values in lists]
    return len(set().union(*sets)) == sum(map(len, sets))


def _whole(value: object) -> object:
    """Convert a float without a fraction to an int. Return any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of a property."""
    names = schema.get("properties")
    if isinstance(names, Mapping) and name in names:
        return names[name]
    return "patternProperties" in schema or schema.get("additionalProperties", True)


def _type(value: object) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _same(one: object, other: object) -> bool:
    """Return True if two JSON values are equal. In JSON, unlike in Python, true does not equal 1."""
    return _type(one) == _type(other) and one == other


def _other_values(values: Sequence[Any]) -> Iterator[Any]:
    """Yield schemas that accept only values that are not in the list."""
    if types := ALL_TYPES - {_type(value) for value in values}:
        yield {"type": sorted(types)}
    for truth in (True, False):
        if any(value is (not truth) for value in values) and not any(value is truth for value in values):
            yield {"const": truth}
    texts = sorted({value for value in values if isinstance(value, str)})
    if texts and max(map(len, texts)) <= _MAX_LENGTH:
        yield {"type": "string", "pattern": f"^(?:{other_than(texts)})$"}
    numbers = sorted({value for value in values if _type(value) == "number"})
    if numbers:
        yield {"type": "number", "exclusiveMaximum": numbers[0]}
        yield {"type": "number", "exclusiveMinimum": numbers[-1]}
    for low, high in pairwise(numbers):
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}


def other_than(texts: Sequence[str]) -> str:
    """Return a regular expression that matches all texts except the given texts."""
    firsts: dict[str, list[str]] = {}
    for text in texts:
        if text:
            firsts.setdefault(text[0], []).append(text[1:])
    any_text = "(?s:.*)"
    known = "".join(map(_escaped, firsts))
    options = [f"[^{known}]{any_text}" if known else "(?s:.+)"]
    options += [f"{_escaped(char)}(?:{other_than(rest)})" for char, rest in firsts.items()]
    return "|".join(options if "" in texts else ["", *options])


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _beyond(key: str, number: float) -> Iterator[Any]:
    """Yield the schema of the values that a keyword such as minimum or maxLength rejects."""
    if key in _BOUNDS:
        kind, bound = _BOUNDS[key]
        yield {"type": kind, bound: number}
    elif key in _COUNTS and 0 <= (number := number + _COUNTS[key][2]) < 2**53:
        kind, bound, _ = _COUNTS[key]
        yield {"type": kind, bound: number}


_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum"),
    "maximum": ("number", "exclusiveMinimum"),
    "exclusiveMinimum": ("number", "maximum"),
    "exclusiveMaximum": ("number", "minimum"),
}
_COUNTS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
