"""A JSON schema in keywords that llguidance enforces.

Every value that fits the result fits the schema, except for keywords that are left out and listed. The result
may have fewer values: objects get no properties that the schema does not name, integers have at most 64 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

from kvtool.errors import UsageError
from kvtool.llama.complement import DEPENDENT, IN_PLACE, SAYS, Complement, types_of, values_of
from kvtool.llama.patterns import of_format, parts_of

Schema = dict[str, Any]

_MOST_PROPERTIES = 5000
_MOST_PATTERNS = 100
"""Most properties of an object, and patterns of their names: llguidance compares each with each."""

_MOST_CHOICES = 50
"""Most choices of properties that stand for a number of them."""

_MOST_SCHEMAS = 50_000
"""Most schemas within a schema: llguidance takes as many."""

_GREATEST = 10**18
"""Greatest integer where a schema names none: small models write digits without an end."""

_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft-0([467])|draft/20(19-09|20-12))/schema#?")
_SINCE = {
    **dict.fromkeys(("contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 8),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef"), 8),
    "$dynamicRef": 9,
}
"""Keywords by the first draft that has them: 8 is 2019-09, and 9 is 2020-12."""

_NOTHING_FOR = {
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
}

_OF_OTHERS = {"additionalProperties", "patternProperties", "propertyNames", "enum", "const"}
"""Keywords that say something about properties that are not named."""

_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"}


class LeftOut(NamedTuple):
    """A keyword that is not enforced. where: its place, as a JSON pointer."""

    keyword: str
    where: str


def rewritten(schema: Mapping[str, Any], *, is_exact: bool = True) -> tuple[Schema, list[LeftOut]]:
    """Return the schema for llguidance, and the keywords left out of it.

    is_exact: express oneOf, not and conditions in other keywords. Raises UsageError for a schema that becomes
    too large, and for an object with too many properties.
    """
    shared: set[str] = set()
    while True:
        writer = _Writer(schema, shared, is_exact)
        found = writer.schema(schema, "#", is_alone=True)
        if writer.shared <= shared:
            return found, writer.left_out
        shared = shared | writer.shared


class _Writer:
    """Rewrites a schema.

    Attributes
    ----------
    shared
        Places that references lead to from schemas with more keywords about the same value. No object there
        may be closed. The constructor takes the places that are known; here are the places met on the way.
    left_out
        Keywords that are not enforced.
    """

    def __init__(self, root: Mapping[str, Any], shared: set[str], is_exact: bool) -> None:
        self._known, self.shared = shared, set[str]()
        self._is_exact = is_exact
        self._complement = Complement(root)
        draft = root.get("$schema")
        said = _DRAFT.fullmatch(draft) if isinstance(draft, str) else None
        self._draft = int(said[1]) if said and said[1] else 8 if said and said[2] == "19-09" else 9
        self.left_out: list[LeftOut] = []
        self._n_left = _MOST_SCHEMAS

    def schema(self, schema: Any, where: str, *, is_alone: bool) -> Any:
        """Rewrite a schema. where: its place. is_alone: only this schema holds the value."""
        if not isinstance(schema, Mapping):
            return schema
        self._n_left -= 1
        if self._n_left < 0:
            raise UsageError("the JSON schema is too large")
        is_alone = is_alone and where not in self._known
        found = {key: value for key, value in schema.items() if self._is_needed(key, value)}
        if isinstance(found.get("$ref"), str) and not (is_alone and found.keys() & SAYS == {"$ref"}):
            self.shared.add(found["$ref"])
        if found.get("unevaluatedProperties") is False and not found.keys() & IN_PLACE:
            found.setdefault("additionalProperties", found.pop("unevaluatedProperties"))
        for key in _NOTHING_FOR & found.keys():
            self._leave_out(found, key, where)
        self._property_names(found, where)
        self._pattern_names(found, where)
        are_apart = self._one_of(found, where)
        more = [*self._pattern(found, where), *self._format(found, where), *self._negation(found, where)]
        more += [*self._condition(found, where), *self._dependent(found, where)]
        if more:
            found["allOf"] = [*_listed(found, "allOf"), *more]
        self._parts(found, where, is_alone=is_alone, are_apart=are_apart)
        self._close(found, is_alone=is_alone)
        self._counts(found, where)
        if found.get("type") in _INTEGERS and not found.keys() & _BOUNDS:
            found |= {"minimum": -_GREATEST, "maximum": _GREATEST}
        return found

    def _is_needed(self, key: str, value: object) -> bool:
        """False for a keyword that says nothing."""
        if self._draft < _SINCE.get(key, 0):
            return False
        if key in ("maxLength", "maxItems", "maxProperties"):
            # no text is so long, and llguidance counts in 32 bits
            return not (isinstance(value, int) and value >= 2**31)
        if key == "$schema":
            return isinstance(value, str) and _DRAFT.fullmatch(value) is not None
        return not (key == "uniqueItems" and value is False)

    def _leave_out(self, found: Schema, key: str, where: str, name: str = "") -> None:
        found.pop(key, None)
        self.left_out.append(LeftOut(name or key, _inside(where, key)))

    # texts

    def _pattern(self, found: Schema, where: str) -> list[Schema]:
        """Put the pattern in llguidance's terms; return schemas of further patterns."""
        pattern = found.get("pattern")
        if not isinstance(pattern, str):
            return []
        parts = parts_of(pattern)
        if parts is None:
            self._leave_out(found, "pattern", where)
            return []
        found["pattern"] = parts[-1]
        return [{"pattern": part} for part in parts[:-1]]

    def _format(self, found: Schema, where: str) -> list[Schema]:
        """Put the format in llguidance's terms; return schemas of formats that are patterns there."""
        if "format" not in found:
            return []
        name = found.pop("format")
        known = of_format(name)
        if known is None and "string" in types_of(found.get("type")):
            self._leave_out(found, "format", where, f"format {name}")
        if known and "format" in known:
            found |= known
            return []
        return [known] if known else []

    # more about the same value

    def _one_of(self, found: Schema, where: str) -> bool:
        """Give each option of oneOf only values of that option; True if nothing had to change."""
        options = _listed(found, "oneOf")
        within, new = types_of(found.get("type")), []
        near = self._complement.near(options, within)
        if near is None:
            self._leave_out(dict(found), "oneOf", where)
            return False
        for option, others in zip(options, near, strict=True):
            names = _named(self._complement.resolved(option))
            parts = [self._without(options[j], names) for j in others]
            if not all(parts):
                self._leave_out(dict(found), "oneOf", where)
                return False
            new.append({"allOf": [option, *parts]} if parts else option)
        if new != options:
            found["oneOf"] = new
        return new == options

    def _without(self, schema: Any, names: Iterable[str] = ()) -> Schema | None:
        """A schema of values that do not fit a schema, or None. names: as for `Complement.of`."""
        others = self._complement.of(schema, names=names) if self._is_exact else []
        return {"anyOf": others} if others else None

    def _negation(self, found: Schema, where: str) -> list[Schema]:
        """Take the keyword not out; return schemas in its place."""
        if "not" not in found:
            return []
        others = self._without(found["not"])
        if not others:
            self._leave_out(found, "not", where)
            return []
        del found["not"]
        return [others]

    def _condition(self, found: Schema, where: str) -> list[Schema]:
        """Take the keyword if out; return schemas in its place."""
        then, other = found.pop("then", True), found.pop("else", True)
        if "if" not in found or then is other is True:
            found.pop("if", None)
            return []
        others = self._without(found["if"])
        if not others:
            self._leave_out(found, "if", where)
            return []
        return [{"anyOf": [{"allOf": [found.pop("if"), then]}, {"allOf": [others, other]}]}]

    def _dependent(self, found: Schema, where: str) -> list[Schema]:
        """Take out what depends on a property; return schemas in its place."""
        more = []
        for key in DEPENDENT:
            of = found.get(key)
            if isinstance(of, Mapping) and not self._is_exact:
                self._leave_out(found, key, where)
            elif isinstance(of, Mapping):
                for name, part in found.pop(key).items():
                    names = part if isinstance(part, list) else []
                    has = {"required": [name, *(each for each in names if each != name)]}
                    there = has if isinstance(part, list) else {"allOf": [has, part]}
                    more.append({"anyOf": [{"properties": {name: False}}, there]})
        return more

    # properties

    def _pattern_names(self, found: Schema, where: str) -> None:
        """Put patterns of names in llguidance's terms."""
        patterns = found.get("patternProperties")
        if not isinstance(patterns, Mapping):
            return
        if len(patterns) > _MOST_PATTERNS:
            raise UsageError(f"an object of the JSON schema has more than {_MOST_PATTERNS} patterns of names")
        parts = [parts_of(pattern) or () for pattern in patterns]
        if all(len(part) == 1 for part in parts):
            found["patternProperties"] = {
                part[0]: value for part, value in zip(parts, patterns.values(), strict=True)
            }
        else:
            self._leave_out(found, "patternProperties", where)

    def _property_names(self, found: Schema, where: str) -> None:
        """Put what propertyNames says into the other keywords of an object."""
        if "propertyNames" not in found:
            return
        names, known = self._complement.resolved(found["propertyNames"]), found.get("properties", {})
        says = names.keys() & SAYS if isinstance(names, Mapping) else set()
        others = found.get("additionalProperties", True)
        may_list = "patternProperties" not in found and isinstance(known, Mapping)
        if may_list and says - {"type"} in ({"enum"}, {"const"}):
            texts = [name for name in values_of(names) or () if isinstance(name, str)]
            allowed = [name for name in [*known, *texts] if name in texts]
            found["properties"] = {name: known.get(name, others) for name in allowed}
            found["additionalProperties"] = False
            del found["propertyNames"]
        elif may_list and not known and says - {"type"} == {"pattern"}:
            found |= {"patternProperties": {names["pattern"]: others}, "additionalProperties": False}
            del found["propertyNames"]
        elif says or names is False:
            self._leave_out(found, "propertyNames", where)
        else:
            del found["propertyNames"]

    def _close(self, found: Schema, *, is_alone: bool) -> None:
        """Close an object, unless it has keywords about properties that it does not name."""
        names, required = found.get("properties", {}), found.get("required", [])
        if not isinstance(names, Mapping) or not isinstance(required, list):
            return
        if max(len(names), len(required)) > _MOST_PROPERTIES:
            raise UsageError(f"an object of the JSON schema has more than {_MOST_PROPERTIES:,} properties")
        least = found.get("minProperties", 0)
        fits = all(name in names for name in required) and isinstance(least, int) and least <= len(names)
        if is_alone and fits and "properties" in found and not found.keys() & (IN_PLACE | _OF_OTHERS):
            found["additionalProperties"] = False

    def _counts(self, found: Schema, where: str) -> None:
        """Put numbers of properties in llguidance's terms: it counts only properties without a name."""
        least, most = found.get("minProperties", 0), found.get("maxProperties")
        names, required = found.get("properties"), found.get("required", [])
        if not isinstance(names, Mapping) or not isinstance(least, int) or not (least or most is not None):
            return
        names = [name for name, part in names.items() if part is not False]
        optional = [name for name in names if name not in required]
        if not optional:
            return
        is_closed = found.get("additionalProperties") is False and "patternProperties" not in found
        n_needed = least - len(required)
        n_barred = len(names) - most if isinstance(most, int) else 0
        for key, n in (("minProperties", n_needed), ("maxProperties", n_barred)):
            if key in found and is_closed and (n <= 0 or comb(len(optional), n) <= _MOST_CHOICES):
                del found[key]
                of = {"minProperties": _required, "maxProperties": _barred}[key]
                if n > 0:
                    choices = [of(choice) for choice in combinations(optional, n)]
                    found["allOf"] = [*_listed(found, "allOf"), {"anyOf": choices}]
            elif key in found:
                self._leave_out(found, key, where)

    def _parts(self, found: Schema, where: str, *, is_alone: bool, are_apart: bool) -> None:
        """Rewrite the schemas inside."""
        says = found.keys() & SAYS

        def anew(key: str, value: Any, is_alone: bool) -> Any:
            return self.schema(value, _inside(where, key), is_alone=is_alone)

        for key, value in [*found.items()]:
            is_pure = is_alone and says == {key} and (key == "anyOf" or (key == "oneOf" and are_apart))
            if key in _MAPS and isinstance(value, Mapping):
                of_names = is_alone or key in ("$defs", "definitions")
                found[key] = {
                    name: anew(f"{key}/{_escaped(name)}", part, of_names) for name, part in value.items()
                }
            elif key in _LISTS and isinstance(value, list):
                of_list = is_pure or (is_alone and key not in IN_PLACE)
                found[key] = [anew(f"{key}/{n}", part, of_list) for n, part in enumerate(value)]
            elif key in _SINGLE:
                found[key] = anew(key, value, is_alone)


_INTEGERS = ("integer", ["integer", "null"], ["null", "integer"])
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalItems", "additionalProperties")


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _named(schema: Any) -> list[str]:
    """The properties that a schema names."""
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
