"""Parse the names and arguments of calls from JSON, from text between tags, and from Python syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from kvtool.llama.grammar.json_pointer import at_pointer
from kvtool.serve.api.fields import finite


class NoCall(Exception):
    """Raised if a text is not a call, or calls an unknown tool."""


def dumped(value: object) -> str:
    """Return the JSON text of a value. Lone surrogates are escaped, so that the text can be encoded."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def calls_in_json(text: str, names: Collection[str], *, strictly: bool = False) -> list[tuple[str, str]]:
    """Return the calls in the JSON text of one call, or of a list of calls. Raises NoCall.

    A call is an object. Its name is in "name", "tool_name" or "function". Its arguments are in "arguments" or
    "parameters". They may be an object, the JSON text of an object, or missing. A single call may have double
    braces, because the template of some files of Qwen 2.5 shows them.

    strictly: True if the name must be in "name", and the arguments must be an object in "arguments".
    """
    if text.startswith("{{") and text.endswith("}}"):
        text = text[1:-1]
    try:
        value = _JSON.decode(text)
        calls = [_call(each, names, strictly) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError) as error:
        raise NoCall from error
    if not calls:
        raise NoCall
    return calls


def _call(value: object, names: Collection[str], strictly: bool) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise ValueError
    name = next((value[key] for key in ("name", "tool_name", "function") if key in value), None)
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or name not in names:
        raise ValueError
    if strictly and not ("name" in value and isinstance(value.get("arguments"), dict)):
        raise ValueError
    if isinstance(arguments, str):
        arguments = _JSON.decode(arguments.strip() or "{}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError
    return name, dumped(arguments)


def arguments_in_json(text: str) -> str:
    """Return the arguments of a call: the JSON text of an object. Raises NoCall."""
    try:
        arguments = _JSON.decode(text)
        if isinstance(arguments, dict):
            return dumped(arguments)
    except (ValueError, RecursionError) as error:
        raise NoCall from error
    raise NoCall


def json_of_quoted(text: str, quote: str) -> str:
    """Return the JSON of a text that has `quote` before and after each string.

    Names in objects may be without quotes.
    """
    parts = text.split(quote)
    return "".join(dumped(part) if n % 2 else _BARE.sub(_as_json, part) for n, part in enumerate(parts))


_BARE = re.compile(r""""(?:\\.|[^"\\])*"|([{,]\s*)([^\s":{}\[\],][^":{}\[\],]*?)\s*:|\b(True|False|None)\b""")


def _as_json(match: re.Match[str]) -> str:
    before, name, word = match.groups()
    return dumped(_WORDS[word]) if word else f"{before}{dumped(name)}:" if name else match[0]


# strict is False, because models write line breaks in strings
_JSON = json.JSONDecoder(strict=False, parse_constant=finite, parse_float=finite)

_WORD = re.compile(r"[^\s()\[\]{},:='\"]+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class _Source:
    """Reads a text from its start. Each method also skips the white space after the part that it reads.

    Raises ValueError or LookupError if the text is malformed.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.skip_to(0)

    def skip_to(self, at: int) -> None:
        """Continue at the index `at`, after the white space there."""
        self.at = _past_space(self.text, at)

    @property
    def next(self) -> str:
        return self.text[self.at]

    def accept(self, character: str) -> bool:
        """If a character comes next, skip it and return True. Otherwise return False."""
        is_next = self.text.startswith(character, self.at)
        if is_next:
            self.skip_to(self.at + 1)
        return is_next

    def expect(self, character: str) -> None:
        """Skip a character, which must come next."""
        if not self.accept(character):
            raise ValueError

    def items(self, end: str) -> Iterator[None]:
        """Yield before each item of a list, and let the caller read the item. Skip commas and `end`.

        end: the character after the list.
        """
        while not self.accept(end):
            yield
            if self.next != end:
                self.expect(",")

    def word(self) -> str:
        """Read a name or keyword."""
        match = _WORD.match(self.text, self.at)
        if not match:
            raise ValueError
        self.skip_to(match.end())
        return match[0]


def _past_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MAX_DEPTH = 8
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a JSON schema allows: no types if it lists neither types nor values.

    root: schema with the definitions.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    given = schema.get("type")
    types = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    for part in alternatives(schema):
        types |= types_of(part, root, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not types and isinstance(values, list):
        types = {_TYPES.get(type(value), "null") for value in values}
    return types


def alternatives(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas in "anyOf" and "oneOf". A value that is not a list, which is invalid, is ignored."""
    return [part for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for part in schema[key]]


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Return the schema to which a reference such as #/$defs/colour refers.

    A schema without a reference is returned unchanged.
    """
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = at_pointer(root, reference[1:])
    return schema


def typed(text: str, key: str, parameters: Mapping[str, Any]) -> object:
    """Convert the text of an argument, in which a string has no quotes, to a value.

    The text is parsed as JSON, or as an object or list of Python. Otherwise it stays a string. If the schema
    allows strings, the text becomes null, an object or a list only if the schema also allows that type.

    key: name of the argument. parameters: schema of the tool's parameters.
    """
    schema = (parameters.get("properties") or {}).get(key)
    types = types_of(schema, parameters)
    try:
        value = _WORDS[text.strip()] if text.strip() in _WORDS else _JSON.decode(text)
    except (ValueError, RecursionError):
        # Seed-OSS's template shows earlier objects and lists in Python's syntax
        value = _python_value(text)
    kind = _TYPES.get(type(value), "null")
    stays = "string" in types and not (kind in types and kind in ("null", "object", "array"))
    return text if stays else value


def calls_in_python(text: str, names: Collection[str]) -> list[tuple[str, str]]:
    """Return the calls in a list such as [name(key='value', other=1)]. Raises NoCall.

    Values may have the syntax of Python or of JSON. Models write 'it's' without a backslash. Therefore a
    quote ends a string only if the next character may follow a value.
    """
    try:
        source = _Source(text)
        source.expect("[")
        calls = []
        while True:
            name = source.word()
            if name not in names:
                raise NoCall
            source.expect("(")
            calls.append((name, dumped(_arguments(source))))
            if source.accept("]"):
                break
            source.expect(",")
        if source.at != len(text):
            raise NoCall
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise NoCall from error
    return calls


def _python_value(text: str) -> object:
    """Return the object or list that a text in Python's syntax means. Return other text unchanged."""
    if text.strip()[:1] in ("[", "{"):
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            source = _Source(text)
            value = _value(source)
            return value if source.at == len(text) else text
    return text


def _arguments(source: _Source) -> dict[str, object]:
    """Read arguments (key=value, ...) up to the closing bracket."""
    arguments = {}
    for _ in source.items(")"):
        key = source.word()
        source.expect("=")
        arguments[key] = _value(source)
    return arguments


def _value(source: _Source) -> Any:
    if source.next in "'\"":
        return _quoted(source)
    if source.accept("["):
        return [_value(source) for _ in source.items("]")]
    if source.accept("("):
        return [_value(source) for _ in source.items(")")]
    if source.accept("{"):
        return _mapping(source)
    if number := _NUMBER.match(source.text, source.at):
        source.skip_to(number.end())
        is_float = bool(number[2]) or "." in number[1]
        return (finite if is_float else int)(number[0])
    return _WORDS[source.word()]


def _mapping(source: _Source) -> dict[str, object]:
    mapping = {}
    for _ in source.items("}"):
        key = _value(source)
        if not isinstance(key, str):
            raise ValueError
        source.expect(":")
        mapping[key] = _value(source)
    return mapping


_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[\s\S])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def _quoted(source: _Source) -> str:
    text, quote, start = source.text, source.next, source.at + 1
    at = start
    while not (text[at] == quote and text[_past_space(text, at + 1)] in ",:)]}"):
        at += 2 if text[at] == "\\" else 1
    source.skip_to(at + 1)
    return _ESCAPE.sub(_unescaped, text[start:at])


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    # do not change an unknown escape
    return _ESCAPED.get(code, code if code in "'\"\\/" else match[0])
