"""Rewrite a JSON schema in keywords that llguidance enforces.

Keywords that cannot be enforced are returned in a list. Every value that fits the rewritten schema also fits
the original without these keywords. Some values that fit the original do not fit the rewritten schema: very
large integers, and objects with properties that the schema does not name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import comb, inf, nextafter
from typing import Any, NamedTuple

from kvtool.errors import UsageError
from kvtool.llama.grammar.complement import (
    CONSTRAINING,
    DEPENDENT,
    IN_PLACE,
    Complement,
    listed,
    types_of,
    values_of,
)
from kvtool.llama.grammar.patterns import of_format, parts_of

Schema = dict[str, Any]

_MAX_PROPERTIES = 5000
_MAX_PATTERNS = 100
"""Maximum number of an object's properties, and of its patternProperties. llguidance compares all pairs."""

_MAX_CHOICES = 50
"""Maximum number of combinations of properties that express minProperties or maxProperties."""

_MAX_SCHEMAS = 50_000
"""Maximum number of schemas inside a schema. This is llguidance's limit."""

_LEAST, _GREATEST = -(2**63 - 1024), 2**63 - 1
"""Limits of integers. Without limits, small models may write endless digits. llguidance converts bounds to
floating-point numbers, and then to integers of 64 bits, and fails for a smaller bound than _LEAST.
"""

_MAX_EXACT = 2**53
"""llguidance rounds greater integers, because it converts integers to floating-point numbers."""

_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft-0([467])|draft/20(19-09|20-12))/schema#?")
_SINCE = {
    **dict.fromkeys(("contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 8),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef"), 8),
    "$dynamicRef": 9,
}
"""For each keyword, the first draft of JSON Schema that has it. 8 is draft 2019-09, and 9 is 2020-12."""

_NOT_EXPRESSIBLE = {
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
}

_ON_UNNAMED = {"additionalProperties", "patternProperties", "propertyNames", "enum", "const"}
"""Keywords about properties that the schema does not name."""


class LeftOut(NamedTuple):
    """A keyword that is not enforced. where: JSON pointer to the keyword."""

    keyword: str
    where: str


def rewritten(
    schema: Mapping[str, Any], *, is_exact: bool = True, drops_integers: bool = False
) -> tuple[Schema, list[LeftOut]]:
    """Rewrite a schema for llguidance. Return the new schema, and the keywords that are not enforced.

    is_exact: True to express oneOf, "not", conditions and dependencies by other keywords, which makes the
    schema longer. Raises UsageError if the schema becomes too large, if an object has too many properties, or
    if const or enum has an integer beyond _MAX_EXACT, unless `drops_integers`, which leaves out the keyword.
    """
    shared: set[str] = set()
    while True:
        writer = _Writer(schema, shared, is_exact, drops_integers)
        new = writer.schema(schema, "#", is_alone=True)
        if writer.shared <= shared:
            return new, writer.left_out
        shared = shared | writer.shared


class _Writer:
    """One pass of `rewritten` over a schema.

    Attributes
    ----------
    shared
        Targets of references ("$ref") to values that other keywords also restrict. The other keywords may
        name properties that the target does not name, so the target must allow unnamed properties. The set
        has the targets that this pass finds. The constructor's argument has the targets of earlier passes.
        `rewritten` makes passes until a pass finds no new target.
    left_out
        Keywords that are not enforced.
    """

    def __init__(
        self, root: Mapping[str, Any], shared: set[str], is_exact: bool, drops_integers: bool
    ) -> None:
        self._known, self.shared = shared, set[str]()
        self._is_exact, self._drops_integers = is_exact, drops_integers
        self._complement = Complement(root)
        draft = root.get("$schema")
        match = _DRAFT.fullmatch(draft) if isinstance(draft, str) else None
        self._draft = int(match[1]) if match and match[1] else 8 if match and match[2] == "19-09" else 9
        self.left_out: list[LeftOut] = []
        self._n_left = _MAX_SCHEMAS

    def schema(self, schema: Any, where: str, *, is_alone: bool) -> Any:
        """Rewrite a schema.

        where: JSON pointer to the schema. is_alone: True if only this schema restricts the value.
        """
        if not isinstance(schema, Mapping):
            return schema
        self._n_left -= 1
        if self._n_left < 0:
            raise UsageError("the JSON schema is too large")
        is_alone = is_alone and where not in self._known
        new = {key: value for key, value in schema.items() if self._is_needed(key, value)}
        if isinstance(new.get("$ref"), str) and not (is_alone and new.keys() & CONSTRAINING == {"$ref"}):
            self.shared.add(new["$ref"])
        if new.get("unevaluatedProperties") is False and not new.keys() & IN_PLACE:
            new.setdefault("additionalProperties", new.pop("unevaluatedProperties"))
        for key in _NOT_EXPRESSIBLE & new.keys():
            self._leave_out(new, key, where)
        self._property_names(new, where)
        self._pattern_names(new, where)
        are_apart = self._one_of(new, where)
        more = [*self._pattern(new, where), *self._format(new, where), *self._negation(new, where)]
        more += [*self._condition(new, where), *self._dependent(new, where)]
        if more:
            new["allOf"] = [*listed(new, "allOf"), *more]
        self._parts(new, where, is_alone=is_alone, are_apart=are_apart)
        self._close(new, is_alone=is_alone)
        self._counts(new, where)
        self._constants(new, where)
        _limit_numbers(new)
        return new

    def _is_needed(self, key: str, value: object) -> bool:
        """Return False if the schema means the same without the keyword."""
        if self._draft < _SINCE.get(key, 0):
            return False
        if key in ("maxLength", "maxItems", "maxProperties"):
            # drop limits of 2**31 or more: llguidance counts in 32 bits, and no value is that long
            return not (isinstance(value, int) and value >= 2**31)
        if key == "$schema":
            return isinstance(value, str) and _DRAFT.fullmatch(value) is not None
        return not (key == "uniqueItems" and value is False)

    def _leave_out(self, new: Schema, key: str, where: str, name: str = "") -> None:
        new.pop(key, None)
        self.left_out.append(LeftOut(name or key, _inside(where, key)))

    def _constants(self, new: Schema, where: str) -> None:
        """Leave out const and enum if an integer of them would be rounded, or raise UsageError."""
        for key in ("const", "enum"):
            try:
                _check_integers(new.get(key))
            except UsageError:
                if not self._drops_integers:
                    raise
                self._leave_out(new, key, where, f"{key} beyond 2^53")

    # keywords of strings

    def _pattern(self, new: Schema, where: str) -> list[Schema]:
        """Translate "pattern" for llguidance. If several patterns result, return all but one as schemas."""
        pattern = new.get("pattern")
        if not isinstance(pattern, str):
            return []
        parts = parts_of(pattern)
        if parts is None:
            self._leave_out(new, "pattern", where)
            return []
        new["pattern"] = parts[-1]
        return [{"pattern": part} for part in parts[:-1]]

    def _format(self, new: Schema, where: str) -> list[Schema]:
        """Translate "format" for llguidance. If it needs a pattern, return a schema with the pattern."""
        if "format" not in new:
            return []
        name = new.pop("format")
        known = of_format(name)
        if known is None and "string" in types_of(new.get("type")):
            self._leave_out(new, "format", where, f"format {name}")
        more = dict(known or {})
        if "format" in more:
            new["format"] = more.pop("format")
        return [more] if more else []

    # keywords whose subschemas apply to the same value

    def _one_of(self, new: Schema, where: str) -> bool:
        """Make the options of oneOf exclude each other. Return True if they already did."""
        options = listed(new, "oneOf")
        within, exclusive = types_of(new.get("type")), []
        near = self._complement.near(options, within)
        if near is None:
            self._leave_out(dict(new), "oneOf", where)
            return False
        for option, others in zip(options, near, strict=True):
            names = _named(self._complement.resolved(option))
            parts = [self._without(options[j], names) for j in others]
            if not all(parts):
                self._leave_out(dict(new), "oneOf", where)
                return False
            exclusive.append({"allOf": [option, *parts]} if parts else option)
        if exclusive != options:
            new["oneOf"] = exclusive
        return exclusive == options

    def _without(self, schema: Any, names: Iterable[str] = ()) -> Schema | None:
        """Return a schema of values that the given schema rejects. Return None if no such schema is known.

        names: see `Complement.of`.
        """
        others = self._complement.of(schema, names=names) if self._is_exact else []
        return {"anyOf": others} if others else None

    def _negation(self, new: Schema, where: str) -> list[Schema]:
        """Remove "not". Return schemas that replace it."""
        if "not" not in new:
            return []
        others = self._without(new["not"])
        if not others:
            self._leave_out(new, "not", where)
            return []
        del new["not"]
        return [others]

    def _condition(self, new: Schema, where: str) -> list[Schema]:
        """Remove "if", "then" and "else". Return schemas that replace them."""
        then, other = new.pop("then", True), new.pop("else", True)
        if "if" not in new or then is other is True:
            new.pop("if", None)
            return []
        others = self._without(new["if"])
        if not others:
            self._leave_out(new, "if", where)
            return []
        return [{"anyOf": [{"allOf": [new.pop("if"), then]}, {"allOf": [others, other]}]}]

    def _dependent(self, new: Schema, where: str) -> list[Schema]:
        """Remove the keywords that depend on a property. Return schemas that replace them."""
        more = []
        for key in DEPENDENT:
            dependents = new.get(key)
            if isinstance(dependents, Mapping) and not self._is_exact:
                self._leave_out(new, key, where)
            elif isinstance(dependents, Mapping):
                for name, part in new.pop(key).items():
                    names = part if isinstance(part, list) else []
                    required = {"required": [name, *(other for other in names if other != name)]}
                    present = required if isinstance(part, list) else {"allOf": [required, part]}
                    more.append({"anyOf": [{"properties": {name: False}}, present]})
        return more

    # keywords of objects

    def _pattern_names(self, new: Schema, where: str) -> None:
        """Translate the patterns of property names for llguidance."""
        patterns = new.get("patternProperties")
        if not isinstance(patterns, Mapping):
            return
        if len(patterns) > _MAX_PATTERNS:
            raise UsageError(f"an object of the JSON schema has more than {_MAX_PATTERNS} patterns of names")
        parts = [parts_of(pattern) or () for pattern in patterns]
        if all(len(part) == 1 for part in parts):
            new["patternProperties"] = {
                part[0]: value for part, value in zip(parts, patterns.values(), strict=True)
            }
        else:
            self._leave_out(new, "patternProperties", where)

    def _property_names(self, new: Schema, where: str) -> None:
        """Express propertyNames by other keywords of the object."""
        if "propertyNames" not in new:
            return
        names, known = self._complement.resolved(new["propertyNames"]), new.get("properties", {})
        keywords = names.keys() & CONSTRAINING if isinstance(names, Mapping) else set()
        others = new.get("additionalProperties", True)
        may_list = "patternProperties" not in new and isinstance(known, Mapping)
        if may_list and keywords - {"type"} in ({"enum"}, {"const"}):
            texts = [name for name in values_of(names) or () if isinstance(name, str)]
            allowed = [name for name in [*known, *texts] if name in texts]
            new["properties"] = {name: known.get(name, others) for name in allowed}
            new["additionalProperties"] = False
            del new["propertyNames"]
        elif may_list and not known and keywords - {"type"} == {"pattern"}:
            new |= {"patternProperties": {names["pattern"]: others}, "additionalProperties": False}
            del new["propertyNames"]
        elif keywords or names is False:
            self._leave_out(new, "propertyNames", where)
        else:
            del new["propertyNames"]

    def _close(self, new: Schema, *, is_alone: bool) -> None:
        """Forbid properties that the schema does not name, unless a keyword or other schema may need them."""
        names, required = new.get("properties", {}), new.get("required", [])
        if not isinstance(names, Mapping) or not isinstance(required, list):
            return
        if max(len(names), len(required)) > _MAX_PROPERTIES:
            raise UsageError(f"an object of the JSON schema has more than {_MAX_PROPERTIES:,} properties")
        least = new.get("minProperties", 0)
        fits = all(name in names for name in required) and isinstance(least, int) and least <= len(names)
        if is_alone and fits and "properties" in new and not new.keys() & (IN_PLACE | _ON_UNNAMED):
            new["additionalProperties"] = False

    def _counts(self, new: Schema, where: str) -> None:
        """Replace minProperties and maxProperties by other keywords.

        llguidance would count only the properties that the schema does not name.
        """
        least, most = new.get("minProperties", 0), new.get("maxProperties")
        names, required = new.get("properties"), new.get("required", [])
        if not isinstance(names, Mapping) or not isinstance(least, int) or not (least or most is not None):
            return
        names = [name for name, part in names.items() if part is not False]
        optional = [name for name in names if name not in required]
        if not optional:
            return
        is_closed = new.get("additionalProperties") is False and "patternProperties" not in new
        n_needed = least - len(required)
        n_barred = len(names) - most if isinstance(most, int) else 0
        for key, n, make in (("minProperties", n_needed, _required), ("maxProperties", n_barred, _barred)):
            if key in new and is_closed and (n <= 0 or comb(len(optional), n) <= _MAX_CHOICES):
                del new[key]
                if n > 0:
                    choices = [make(choice) for choice in combinations(optional, n)]
                    new["allOf"] = [*listed(new, "allOf"), {"anyOf": choices}]
            elif key in new:
                self._leave_out(new, key, where)

    def _parts(self, new: Schema, where: str, *, is_alone: bool, are_apart: bool) -> None:
        """Rewrite the subschemas."""
        keywords = new.keys() & CONSTRAINING

        def subschema(key: str, value: Any, is_alone: bool) -> Any:
            return self.schema(value, _inside(where, key), is_alone=is_alone)

        for key, value in [*new.items()]:
            is_pure = is_alone and keywords == {key} and (key == "anyOf" or (key == "oneOf" and are_apart))
            if key in _MAPS and isinstance(value, Mapping):
                of_names = is_alone or key in ("$defs", "definitions")
                new[key] = {
                    name: subschema(f"{key}/{_escaped(name)}", part, of_names) for name, part in value.items()
                }
            elif key in _LISTS and isinstance(value, list):
                of_list = is_pure or (is_alone and key not in IN_PLACE)
                new[key] = [subschema(f"{key}/{n}", part, of_list) for n, part in enumerate(value)]
            elif key in _SINGLE:
                new[key] = subschema(key, value, is_alone)


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalItems", "additionalProperties")


def _limit_numbers(new: Schema) -> None:
    """Give integers both bounds, and replace bounds of numbers that llguidance does not support."""
    types = [new["type"]] if isinstance(new.get("type"), str) else listed(new, "type")
    are_integers = "integer" in types and "number" not in types
    if are_integers and not new.keys() & {"enum", "const"}:
        new |= {"minimum": new.get("minimum", _LEAST), "maximum": new.get("maximum", _GREATEST)}
    # llguidance rounds the bounds of integers to 64 bits, but does not round bounds of other numbers
    greatest = _GREATEST if are_integers else -_LEAST
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = new.get(key)
        if isinstance(bound, (int, float)) and not isinstance(bound, bool) and abs(bound) >= _MAX_EXACT:
            # an exclusive bound becomes an inclusive one: llguidance would round the integer beside it
            del new[key]
            beside = int(key.startswith("exclusive"))
            if key.endswith("inimum"):
                new["minimum"] = max(new.get("minimum", _LEAST), _rounded_up(bound, beside))
            else:
                most = -_rounded_up(-bound, beside)
                most = greatest if bound - beside >= greatest else most
                new["maximum"] = min(new.get("maximum", greatest), most)


def _rounded_up(bound: float, more: int) -> int:
    """Return the least integer from bound + more on that floating-point numbers hold exactly.

    It is at least _LEAST. If it would be above -_LEAST, return 2**64, which no integer of 64 bits reaches.
    """
    bound = int(max(_LEAST - 1, min(bound, 2**64))) + more
    if bound > -_LEAST:
        return 2**64
    near = max(float(bound), _LEAST)
    return int(near if near >= bound else nextafter(near, inf))


def _check_integers(value: Any) -> None:
    """Raise UsageError if a value has an integer beyond _MAX_EXACT."""
    if isinstance(value, (list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            _check_integers(part)
    elif isinstance(value, int) and abs(value) > _MAX_EXACT:
        raise UsageError(
            f"the JSON schema has the value {str(value)[:40]}, and integers beyond 2^53 would be rounded; "
            "use a string"
        )


def _named(schema: Any) -> list[str]:
    names = schema.get("properties") if isinstance(schema, Mapping) else None
    return [*names] if isinstance(names, Mapping) else []


def _required(names: Sequence[str]) -> Schema:
    return {"required": [*names]}


def _barred(names: Sequence[str]) -> Schema:
    return {"properties": dict.fromkeys(names, False)}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _inside(where: str, key: str) -> str:
    return f"{where}/{key}"
