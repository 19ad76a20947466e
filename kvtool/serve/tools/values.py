"""Names and arguments of calls, from JSON, from text between tags, and from Python."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any


class Broken(Exception):
    """A text is no call, or one of a tool that is not there."""


def dumped(value: object) -> str:
    """JSON text that can be encoded."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # half of a pair stays an escape
        return json.dumps(value)
    return text


def calls_in_json(text: str, names: Collection[str], *, strictly: bool = False) -> list[tuple[str, str]]:
    """The calls in the JSON text of one call, or of a list of them. Raises Broken.

    A call is an object with the name as "name", "tool_name" or "function", and the arguments as "arguments"
    or "parameters": an object, the JSON text of one as a string, or nothing. They stay as they are written.
    strictly: the name is "name", and the arguments are the object "arguments".
    """
    calls = []
    try:
        at = _past_space(text, 0)
        is_list = text[at] == "["
        at = _past_space(text, at + is_list)
        while text[at] != "]":
            members, at = _members(text, at)
            if strictly and not ("name" in members and members.get("arguments", "").startswith("{")):
                raise ValueError
            calls.append(_call(members, names))
            at = _past_space(text, at)
            if not is_list:
                return calls
            at = _past_space(text, at + 1) if text[at] == "," else at
    except (ValueError, LookupError, RecursionError) as error:
        raise Broken from error
    if not calls:
        raise Broken
    return calls


def json_of_marked(text: str, mark: str) -> str:
    """The JSON of a text whose strings stand between marks, and whose names may stand without."""
    parts = text.split(mark)
    return "".join(dumped(part) if n % 2 else _BARE.sub(_as_json, part) for n, part in enumerate(parts))


_BARE = re.compile(r""""(?:\\.|[^"\\])*"|([{,]\s*)([^\s":{}\[\],][^":{}\[\],]*?)\s*:|\b(True|False|None)\b""")


def _as_json(found: re.Match[str]) -> str:
    before, name, word = found.groups()
    return dumped(_WORDS[word]) if word else f"{before}{dumped(name)}:" if name else found[0]


def _finite(text: str) -> float:
    """The number of a text. JSON has no other, not even for NaN."""
    value = float(text)
    if not isfinite(value):
        raise ValueError
    return value


# models write line breaks into strings
_LOOSE = json.JSONDecoder(strict=False, parse_constant=_finite, parse_float=_finite)
_STRICT = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def _members(text: str, at: int) -> tuple[dict[str, str], int]:
    """The members of the object at a place, each value as its own text, and where the object ends."""
    if text[at] != "{":
        raise ValueError
    members = {}
    at = _past_space(text, at + 1)
    while text[at] != "}":
        key, at = _LOOSE.raw_decode(text, at)
        at = _past_space(text, at)
        if text[at] != ":":
            raise ValueError
        start = _past_space(text, at + 1)
        _, at = _LOOSE.raw_decode(text, start)
        members[key] = text[start:at]
        at = _past_space(text, at)
        if text[at] == ",":
            at = _past_space(text, at + 1)
        elif text[at] != "}":
            raise ValueError
    return members, at + 1


def _past_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _call(members: Mapping[str, str], names: Collection[str]) -> tuple[str, str]:
    named = [_LOOSE.decode(members[key]) for key in ("name", "tool_name", "function") if key in members]
    if not named or not isinstance(named[0], str) or named[0] not in names:
        raise ValueError
    text = members.get("arguments", members.get("parameters", "{}"))
    value = _LOOSE.decode(text)
    if isinstance(value, str):
        text = value.strip() or "{}"
        value = _LOOSE.decode(text)
    elif value is None:
        text, value = "{}", {}
    if not isinstance(value, dict):
        raise ValueError
    try:
        _STRICT.decode(text)
        text.encode()
    except ValueError:
        text = dumped(value)
    return named[0], text


_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MOST_DEEP = 8
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a JSON schema says; empty if it says none. root: has its definitions."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MOST_DEEP:
        return set()
    own = schema.get("type")
    found = {own} if isinstance(own, str) else set(own) if isinstance(own, list) else set()
    for part in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        found |= types_of(part, root, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not found and isinstance(values, list):
        found = {_TYPES.get(type(value), "null") for value in values}
    return found


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """What a schema refers to, by a path such as #/$defs/colour; itself if it refers to nothing."""
    for _ in range(_MOST_DEEP):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for name in reference[2:].split("/"):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def typed(text: str, key: str, parameters: Mapping[str, Any]) -> object:
    """The value of a text that does not say its type, by the schema of a tool's parameters.

    A text stays a string where the schema allows strings, unless it is null, an object or a list and the
    schema also allows that. Without a type in the schema it is JSON if it can be.
    """
    schema = (parameters.get("properties") or {}).get(key)
    types = types_of(schema, parameters)
    try:
        value = _WORDS[text.strip()] if text.strip() in _WORDS else _STRICT.decode(text)
    except (ValueError, RecursionError):
        return text
    own = _TYPES.get(type(value), "null")
    return text if "string" in types and not (own in types and own in ("null", "object", "array")) else value


def calls_in_python(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """The calls in a list such as [name(key='value', other=1)]. Raises Broken.

    Values are Python's or JSON's. A quote ends a string only where the value can end: models write
    'it's' without a backslash.
    """
    try:
        at = _expect(text, 0, "[")
        calls = []
        while True:
            name, at = _word(text, at)
            if name not in names:
                raise Broken
            arguments, at = _arguments(text, _expect(text, at, "("))
            calls.append((name, dumped(arguments)))
            if text[at : at + 1] == "]":
                break
            at = _expect(text, at, ",")
        if _past_space(text, at + 1) != len(text):
            raise Broken
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Broken from error
    return calls


def _expect(text: str, at: int, character: str) -> int:
    """The place after a character and the white space after that."""
    if text[at] != character:
        raise ValueError
    return _past_space(text, at + 1)


def _word(text: str, at: int) -> tuple[str, int]:
    found = _WORD.match(text, at)
    if not found:
        raise ValueError
    return found[0], _past_space(text, found.end())


_WORD = re.compile(r"[^\s()\[\]{},:='\"]+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[\s\S])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def _arguments(text: str, at: int) -> tuple[dict[str, object], int]:
    """key=value, ... up to the bracket, and the place after it."""
    found = {}
    while text[at] != ")":
        key, at = _word(text, at)
        found[key], at = _value(text, _expect(text, at, "="))
        if text[at] != ")":
            at = _expect(text, at, ",")
    return found, _expect(text, at, ")")


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value at a place, and the place after it and the white space that follows."""
    first = text[at]
    if first in "'\"":
        return _quoted(text, at)
    if first in "[(":
        return _list(text, at)
    if first == "{":
        return _mapping(text, at)
    if number := _NUMBER.match(text, at):
        is_float = bool(number[2]) or "." in number[1]
        return (_finite if is_float else int)(number[0]), _past_space(text, number.end())
    word, at = _word(text, at)
    return _WORDS[word], at


def _list(text: str, at: int) -> tuple[list[object], int]:
    found, end = [], "]" if text[at] == "[" else ")"
    at = _past_space(text, at + 1)
    while text[at] != end:
        value, at = _value(text, at)
        found.append(value)
        if text[at] != end:
            at = _expect(text, at, ",")
    return found, _past_space(text, at + 1)


def _mapping(text: str, at: int) -> tuple[dict[str, object], int]:
    found = {}
    at = _expect(text, at, "{")
    while text[at] != "}":
        key, at = _value(text, at)
        if not isinstance(key, str):
            raise ValueError
        found[key], at = _value(text, _expect(text, at, ":"))
        if text[at] != "}":
            at = _expect(text, at, ",")
    return found, _past_space(text, at + 1)


def _quoted(text: str, at: int) -> tuple[str, int]:
    quote, start = text[at], at + 1
    at = start
    while True:
        if text[at] == "\\":
            at += 2
        elif text[at] == quote and text[_past_space(text, at + 1)] in ",:)]}":
            break
        else:
            at += 1
    return _ESCAPE.sub(_unescaped, text[start:at]), _past_space(text, at + 1)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    # one that is not known stays as it is
    return _ESCAPED.get(code, code if code in "'\"\\/" else found[0])
