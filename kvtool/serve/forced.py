"""Grammars that make a model call a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.errors import UsageError
from kvtool.llama.grammar import SAYS_WHAT, schema_grammar
from kvtool.serve.errors import ApiError
from kvtool.serve.formats import HERMES, Format, Parameters
from kvtool.serve.tools import Choice
from kvtool.serve.values import resolved, types_of

_ANY_OBJECT = {"type": "object"}
_HELD_OF_TEXT = {"pattern", "format", "minLength", "maxLength", "enum", "const", "allOf"}
_PLAIN_OBJECT = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("title", "description", "$schema", "$id"),
}


def forced_grammar(
    format: Format, tools: Sequence[Mapping[str, Any]], choice: Choice, *, thought_end: str = ""
) -> str | None:
    """A GBNF grammar of one call of a chosen tool, as `Parser` reads it; None if no call is required.

    Arguments are held to the tool's schema. Hermes's syntax stands in where a format has no place for what a
    schema asks for, such as a pattern of a text that is not quoted. A schema that no grammar can hold is an
    ApiError for a strict tool; the arguments of another tool are then any object.

    tools: as `check_tools` returns them. thought_end: what closes the thought that the reply header has
    opened; the model first writes that thought.
    """
    if choice.kind != "required":
        return None
    calls, rules = [], []
    for n, tool in enumerate(tools):
        function = tool["function"]
        if choice.name in (None, function["name"]):
            calls.append(f"t{n}-call")
            rules += _rules_of(f"t{n}", format, function, f"tools[{n}].function.parameters")
    root = " | ".join(calls)
    if thought_end:
        rules += _until("thought", thought_end)
        root = f"thought-0 [ \\n]{{0,3}} ({root})"
    return "\n".join([f"root ::= {root}", *rules]) + "\n"


class _NoPlace(Exception):
    """A format cannot say what a schema asks for."""


def _rules_of(name: str, format: Format, function: Mapping[str, Any], where: str) -> list[str]:
    """The rules of a call of one tool, in its format or in Hermes's. where: the schema's field."""
    try:
        try:
            return _call_rules(name, format, function)
        except _NoPlace:
            return _call_rules(name, HERMES, function)
    except UsageError as error:
        if function.get("strict"):
            raise ApiError(f"{where}: {error}", param=where) from None
    return _call_rules(name, HERMES if format.parameters else format, {**function, "parameters": _ANY_OBJECT})


def _call_rules(name: str, format: Format, function: Mapping[str, Any]) -> list[str]:
    """The rules of a call in a format: {name}-call and those that it needs."""
    start = _literal(format.open + format.start + function["name"] + format.middle)
    end = _literal(format.end + format.close)
    own = format.parameters
    arguments = f"{name}-s-root" if own is None else f"{name}-first0"
    call = f"{name}-call ::= {start} {arguments} {end}"
    if own is None:
        return [call, *_schema_rules(name, function["parameters"])]
    return [call, *_parameter_rules(name, own, function["parameters"])]


def _schema_rules(name: str, schema: Mapping[str, Any]) -> list[str]:
    """The rules of a schema's JSON texts, in one text: {name}-s-root and others that begin so."""
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise UsageError("the JSON schema is nested too deeply") from None
    # texts, sets of characters and counts have no names in them
    return [_TOKEN.sub(lambda found: f"{name}-s-{found[0]}" if found[1] else found[0], schema_grammar(text))]


_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{[0-9, ]*\}|([a-zA-Z0-9-]+)', re.S)


def _parameter_rules(name: str, own: Parameters, schema: Mapping[str, Any]) -> list[str]:
    """The rules of arguments one after another, in the schema's order; {name}-first0 is the first."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not schema.keys() <= _PLAIN_OBJECT:
        raise _NoPlace
    rules, required = [], schema.get("required", ())
    between = _literal(own.between)
    for n, (key, part) in enumerate(properties.items()):
        if not re.fullmatch(r"[\w.$-]+", key):
            raise _NoPlace
        rules += _value_rules(f"{name}-p{n}", own, part, schema)
        item = f"{_literal(own.start + key + own.middle)} {name}-p{n}-value"
        # first: nothing stands before it
        for rule, before in (("first", '""'), ("next", between)):
            skip = "" if key in required else f" | {name}-{rule}{n + 1}"
            rules.append(f"{name}-{rule}{n} ::= {before} {item} {name}-next{n + 1}{skip}")
    last = len(properties)
    return [*rules, f'{name}-first{last} ::= ""', f'{name}-next{last} ::= ""']


def _value_rules(name: str, own: Parameters, schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The rules of one value and what ends it; {name}-value is the first."""
    if own.mark:
        return _marked_rules(name, own, schema, root)
    if not own.quotes:
        known = {} if schema is True else resolved(schema, root)
        types = types_of(known, root)
        if not isinstance(known, Mapping):
            raise _NoPlace
        if types <= {"string", "null"} and "enum" in known:
            return [f"{name}-value ::= ({_choices(known['enum'], own)}) {_literal(own.end)}"]
        if _is_free_text(known, root):
            after = own.end[own.end.index(own.tag) + len(own.tag) :]
            return [f"{name}-value ::= {name}-0 {_literal(after)}", *_until(name, own.tag)]
        if "string" in types or not (types or known.keys() & {"properties", "items", "prefixItems"}):
            raise _NoPlace
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    whole = {**schema, **definitions} if isinstance(schema, Mapping) else schema
    rules = _schema_rules(name, {} if whole is True else whole)
    return [f"{name}-value ::= {name}-s-root {_literal(own.end)}", *rules]


def _marked_rules(name: str, own: Parameters, schema: Any, root: Mapping[str, Any]) -> list[str]:
    """As `_value_rules`, where marks stand around strings."""
    known = resolved(schema, root)
    types = types_of(known, root)
    if not isinstance(known, Mapping) or not types:
        raise _NoPlace
    if not _has_strings(known, root):
        return [f"{name}-value ::= {name}-s-root {_literal(own.end)}", *_schema_rules(name, known)]
    null = " | " + _literal("null") if "null" in types else ""
    if types <= {"string", "null"} and "enum" in known:
        texts = [own.written(value) for value in known["enum"]]
        return [f"{name}-value ::= ({' | '.join(map(_literal, texts))}) {_literal(own.end)}"]
    if types <= {"string", "null"} and _is_free_text(known, root):
        text = f"({_literal(own.mark)} {name}-0{null}) {_literal(own.end)}"
        return [f"{name}-value ::= {text}", *_until(name, own.mark)]
    raise _NoPlace


def _has_strings(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value of a schema may be or have a string, or names."""
    types = types_of(schema, root)
    if "array" in types and isinstance(schema, Mapping):
        types = types - {"array"} | (types_of(schema.get("items"), root) or {"string"})
    return not types or bool(types & {"string", "object", "array"})


def _choices(values: Sequence[object], own: Parameters) -> str:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if any(own.tag in text for text in texts):
        raise _NoPlace
    return " | ".join(map(_literal, texts))


def _is_free_text(schema: object, root: Mapping[str, Any]) -> bool:
    """Whether any text that is not quoted fits a schema."""
    types = types_of(schema, root)
    if not isinstance(schema, Mapping) or types & {"object", "array"}:
        return False
    parts = [resolved(part, root) for key in ("anyOf", "oneOf") for part in schema.get(key) or ()]
    if any(isinstance(part, Mapping) and part.keys() & _HELD_OF_TEXT for part in [schema, *parts]):
        return False
    return "string" in types or not schema.keys() & SAYS_WHAT


def _until(name: str, tag: str) -> list[str]:
    """The rules of any text up to a tag, and the tag; {name}-0 is the first.

    Rule i is where i characters of the tag have been written.
    """
    rules = []
    for i in range(len(tag)):
        goes = {char: _n_common(tag, tag[:i] + char) for char in dict.fromkeys(tag)}
        goes = {char: n for char, n in goes.items() if n}
        options = [_literal(char) + (f" {name}-{n}" if n < len(tag) else "") for char, n in goes.items()]
        others = "".join(f"\\{char}" if char in "\\[]" else char for char in goes)
        rules.append(f"{name}-{i} ::= {' | '.join(options)} | [^{others}] {name}-0")
    return rules


def _n_common(tag: str, text: str) -> int:
    """The most characters at the end of the text that the tag begins with."""
    return next((n for n in range(len(text), 0, -1) if text.endswith(tag[:n])), 0)


def _literal(text: str) -> str:
    """A text in a grammar."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char >= " " else f"\\x{ord(char):02x}" for char in escaped) + '"'
