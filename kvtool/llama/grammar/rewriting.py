"""Rewrite a JSON schema in keywords that llguidance enforces.

Keywords that cannot be enforced are returned in a list. Every value that fits the rewritten schema also fits
the original without these keywords, and with oneOf read as anyOf. Some values that fit the original do not
fit a schema that is narrowed for writing: very large integers, objects with properties that the schema does
not name, and unusual texts of a format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from kvtool.errors import UsageError
from kvtool.llama.grammar.json_pointer import at_pointer
from kvtool.llama.grammar.patterns import of_format, parts_of

Schema = dict[str, Any]

_MAX_PROPERTIES = 5000
_MAX_PATTERNS = 100
"""Maximum number of an object's properties, and of its patternProperties. llguidance compares all pairs."""

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
    **dict.fromkeys(("if", "then", "else", "contentEncoding", "contentMediaType"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 8),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef", "contentSchema"), 8),
    "$dynamicRef": 9,
}
"""For each keyword, the first draft of JSON Schema that has it. 8 is draft 2019-09, and 9 is 2020-12."""

_DEPENDENT = ("dependencies", "dependentSchemas", "dependentRequired")
_NOT_ENFORCED = {
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef", "not", "if", *_DEPENDENT),
    *("contentEncoding", "contentMediaType", "contentSchema"),
}
_IN_PLACE = {"anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref", *_DEPENDENT}
"""Keywords with subschemas that apply to the same value as the schema itself."""

CONSTRAINING = (_IN_PLACE | _NOT_ENFORCED) | {
    *("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties"),
    *("minProperties", "maxProperties", "propertyNames", "format", "pattern", "minLength", "maxLength"),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that restrict the values of a schema."""

_ON_UNNAMED = {"additionalProperties", "patternProperties", "propertyNames", "enum", "const"}
"""Keywords about properties that the schema does not name."""


class LeftOut(NamedTuple):
    """A keyword that is not enforced. where: JSON pointer to the keyword."""

    keyword: str
    where: str


def rewritten(
    schema: Mapping[str, Any], *, drops_integers: bool = False, narrows: bool = True
) -> tuple[Schema, list[LeftOut]]:
    """Rewrite a schema for llguidance. Return the new schema, and the keywords that are not enforced.

    narrows: False to check a written value: every value of the original fits, and no format is checked.

    Raises UsageError if the schema is too large, if an object has too many properties, or if const or enum
    has an integer beyond _MAX_EXACT, unless `drops_integers`, which leaves out the keyword.
    """
    shared: set[str] = set()
    while True:
        writer = _Writer(schema, shared, drops_integers, narrows)
        new = writer.schema(schema, "#", is_alone=narrows)
        if writer.shared <= shared:
            return new, writer.left_out
        shared = shared | writer.shared


class _Writer:
    """One pass of `rewritten` over a schema.

    shared: targets of references ("$ref") to values that other keywords also restrict. The other keywords may
    name properties that the target does not name, so the target must allow unnamed properties. The set has
    the targets that this pass finds. The constructor's argument has the targets of earlier passes.
    `rewritten` makes passes until a pass finds no new target.
    """

    def __init__(
        self, root: Mapping[str, Any], shared: set[str], drops_integers: bool, narrows: bool
    ) -> None:
        self._root, self._drops_integers, self._narrows = root, drops_integers, narrows
        self._known, self.shared = shared, set[str]()
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
            self.shared.add(unquote(new["$ref"]))
        if new.get("unevaluatedProperties") is False and not new.keys() & _IN_PLACE:
            new.setdefault("additionalProperties", new.pop("unevaluatedProperties"))
        # subschemas in place may need properties that this schema does not name, also if they are left out
        may_close = is_alone and not new.keys() & (_IN_PLACE | _ON_UNNAMED)
        if new.pop("then", True) is new.pop("else", True) is True:
            new.pop("if", None)
        for key in _NOT_ENFORCED & new.keys():
            self._leave_out(new, key, where)
        self._property_names(new, where)
        self._pattern_names(new, where)
        more = [*self._pattern(new, where), *self._format(new, where)]
        if more:
            new["allOf"] = [*_listed(new, "allOf"), *more]
        self._parts(new, where, is_alone=is_alone)
        self._close(new, may_close and not more)
        self._counts(new, where, is_alone=is_alone)
        self._constants(new, where)
        self._numbers(new, where)
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
        """Translate "format" for llguidance. If it needs other keywords, return a schema with them."""
        if "format" not in new:
            return []
        name = new.pop("format")
        if not self._narrows:
            return []
        known = of_format(name)
        if known is None:
            self._leave_out(new, "format", where, f"format {name}")
        more = dict(known or {})
        if "format" in more:
            new["format"] = more.pop("format")
        return [more] if more else []

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
        names, known = new["propertyNames"], new.get("properties", {})
        if isinstance(names, Mapping) and names.keys() & CONSTRAINING == {"$ref"}:
            names = at_pointer(self._root, str(names["$ref"]))
        keywords = names.keys() & CONSTRAINING if isinstance(names, Mapping) else set()
        others = new.get("additionalProperties", True)
        may_list = "patternProperties" not in new and isinstance(known, Mapping)
        if may_list and keywords - {"type"} in ({"enum"}, {"const"}):
            texts = [names["const"]] if "const" in names else _listed(names, "enum")
            texts = [name for name in texts if isinstance(name, str)]
            allowed = [name for name in [*known, *texts] if name in texts]
            new["properties"] = {name: known.get(name, others) for name in allowed}
            new["additionalProperties"] = False
            del new["propertyNames"]
        elif (
            may_list
            and not known
            and keywords - {"type"} == {"pattern"}
            and isinstance(names["pattern"], str)
        ):
            new |= {"patternProperties": {names["pattern"]: others}, "additionalProperties": False}
            del new["propertyNames"]
        elif keywords or not (names is True or isinstance(names, Mapping)):
            self._leave_out(new, "propertyNames", where)
        else:
            del new["propertyNames"]

    def _close(self, new: Schema, may_close: bool) -> None:
        """Forbid properties that the schema does not name, unless it needs them.

        may_close: False if another keyword or schema may need them.
        """
        names, required = new.get("properties", {}), new.get("required", [])
        if not isinstance(names, Mapping) or not isinstance(required, list):
            return
        if max(len(names), len(required)) > _MAX_PROPERTIES:
            raise UsageError(f"an object of the JSON schema has more than {_MAX_PROPERTIES:,} properties")
        least = new.get("minProperties", 0)
        fits = all(name in names for name in required) and isinstance(least, int) and least <= len(names)
        if may_close and fits and "properties" in new:
            new["additionalProperties"] = False

    def _counts(self, new: Schema, where: str, *, is_alone: bool) -> None:
        """Leave out minProperties and maxProperties that llguidance does not enforce.

        If properties may be optional, it would count only those that the schema does not name, or refuse the
        schema. It also counts a name that it writes twice.
        """
        names, required = new.get("properties", {}), new.get("required", [])
        if not isinstance(names, Mapping) or not isinstance(required, list):
            return
        others = [*_listed(new, "allOf"), *_listed(new, "anyOf"), *_listed(new, "oneOf")]
        has_optional = any(part is not False and name not in required for name, part in names.items())
        others_may_have = "$ref" in new or any(
            isinstance(part, Mapping) and part.keys() & (_IN_PLACE | {"properties"}) for part in others
        )
        if has_optional or others_may_have or (self._narrows and not is_alone):
            for key in {"minProperties", "maxProperties"} & new.keys():
                self._leave_out(new, key, where)
        least = new.get("minProperties", 0)
        if self._narrows and isinstance(least, int) and least > max(len(required), 1):
            self._leave_out(new, "minProperties", where)

    def _parts(self, new: Schema, where: str, *, is_alone: bool) -> None:
        """Rewrite the subschemas."""
        keywords = new.keys() & CONSTRAINING

        def subschema(key: str, value: Any, is_alone: bool) -> Any:
            return self.schema(value, _inside(where, key), is_alone=is_alone)

        for key, value in [*new.items()]:
            is_pure = is_alone and keywords == {key} and key in ("anyOf", "oneOf")
            if key in _MAPS and isinstance(value, Mapping):
                of_names = is_alone or key in ("$defs", "definitions")
                new[key] = {
                    name: subschema(f"{key}/{_escaped(name)}", part, of_names) for name, part in value.items()
                }
            elif key in _LISTS and isinstance(value, list):
                of_list = is_pure or (is_alone and key not in _IN_PLACE)
                new[key] = [subschema(f"{key}/{n}", part, of_list) for n, part in enumerate(value)]
            elif key in _SINGLE:
                new[key] = subschema(key, value, is_alone)

    def _numbers(self, new: Schema, where: str) -> None:
        """Give integers both bounds, and leave out bounds that llguidance would round."""
        are_integers = _types(new) & {"integer", "number"} == {"integer"}
        for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            bound = new.get(key)
            if isinstance(bound, bool) or not isinstance(bound, (int, float)) or abs(bound) < _MAX_EXACT:
                continue
            is_outer = (bound < 0) == key.endswith("inimum")
            if are_integers and is_outer and abs(bound) > _GREATEST - (not key.startswith("exclusive")):
                del new[key]  # _LEAST or _GREATEST is as narrow
            else:
                self._leave_out(new, key, where)
        if self._narrows and are_integers and not new.keys() & {"enum", "const"}:
            new |= {"minimum": new.get("minimum", _LEAST), "maximum": new.get("maximum", _GREATEST)}


_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalItems", "additionalProperties")


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


def _types(schema: Schema) -> set[str]:
    types = schema.get("type")
    names = [types] if isinstance(types, str) else _listed(schema, "type")
    return {name for name in names if isinstance(name, str)}


def _listed(schema: Schema, key: str) -> list[Any]:
    """Return the list under a keyword, or [] if the keyword has no list."""
    options = schema.get(key)
    return options if isinstance(options, list) else []


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _inside(where: str, key: str) -> str:
    return f"{where}/{key}"
