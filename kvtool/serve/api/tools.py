"""The tools that a request offers, and its choice among them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from kvtool.serve.api.errors import ApiError

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request says of calling tools.

    Attributes
    ----------
    kind
        Whether the model must not, may, or must call a tool.
    name
        The one tool that it must call; None: any.
    """

    kind: Literal["none", "auto", "required"]
    name: str | None = None


def check_tools(value: object) -> list[dict[str, Any]]:
    """A request's tools, checked and without fields that are not known; empty for null. Raises ApiError.

    Every function has "name" and "parameters", as templates expect. "defer_loading" is kept if true.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        _wrong("tools", "must be a list")
    tools = [_tool(each, f"tools[{n}]") for n, each in enumerate(value)]
    names = [tool["function"]["name"] for tool in tools]
    for n, name in enumerate(names):
        if name in names[:n]:
            _wrong(f"tools[{n}].function.name", f"must be unique; there are two tools {name!r}")
    return tools


def _tool(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _wrong(where, "must be an object")
    kind = value.get("type")
    if kind != "function":
        _wrong(f"{where}.type", f"must be 'function'{_got(kind)}; other kinds of tools are not supported")
    given = value.get("function")
    where += ".function"
    if not isinstance(given, dict):
        _wrong(where, "must be an object")
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _wrong(f"{where}.name", f"must be 1 to 128 letters, digits, '_' or '-'{_got(name)}")
    description, strict = given.get("description"), given.get("strict")
    if not isinstance(description, str | None):
        _wrong(f"{where}.description", "must be a text")
    parameters = _parameters(given.get("parameters"), f"{where}.parameters")
    if not isinstance(strict, bool | None):
        _wrong(f"{where}.strict", "must be true or false")
    own = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    tool = {"type": "function", "function": {key: part for key, part in own.items() if part is not None}}
    deferred = value.get("defer_loading")
    if not isinstance(deferred, bool | None):
        _wrong(f"{where.removesuffix('.function')}.defer_loading", "must be true or false")
    return tool | {"defer_loading": True} if deferred else tool


def _parameters(value: object, where: str) -> dict[str, Any]:
    if value is None:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        _wrong(where, "must be a JSON schema, which is an object")
    if value.get("type", "object") != "object":
        _wrong(f"{where}.type", f"must be 'object'{_got(value['type'])}")
    properties = value.get("properties", {})
    if not isinstance(properties, dict):
        _wrong(f"{where}.properties", "must be an object")
    for name, schema in properties.items():
        if not isinstance(schema, (dict, bool)):
            _wrong(f"{where}.properties.{name}", "must be a JSON schema")
    required = value.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        _wrong(f"{where}.required", "must be a list of names")
    return {"type": "object", **value}


def check_choice(value: object, tools: Sequence[Mapping[str, Any]]) -> Choice:
    """A request's tool_choice, checked. Raises ApiError.

    Null is auto; without tools, auto is none. tools: as `check_tools` returns them.
    """
    if value is None or value == "auto":
        return Choice("auto" if tools else "none")
    if isinstance(value, dict):
        return Choice("required", _named(value, [tool["function"]["name"] for tool in tools]))
    if value == "none":
        return Choice("none")
    if value != "required":
        _wrong("tool_choice", f"must be 'none', 'auto', 'required' or an object{_got(value)}")
    if not tools:
        _wrong("tool_choice", "must not be 'required' without tools")
    return Choice("required")


def _named(value: dict[str, Any], names: list[str]) -> str:
    kind = value.get("type")
    if kind != "function":
        _wrong("tool_choice.type", f"must be 'function'{_got(kind)}; other kinds are not supported")
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        _wrong("tool_choice.function.name", "must be the name of a tool")
    if name not in names:
        _wrong("tool_choice.function.name", f"must be the name of a tool in tools, got {name!r}")
    return name


def _got(value: object) -> str:
    """The value, for the end of a message, if it is a text."""
    return f", got {value[:80]!r}" if isinstance(value, str) else ""


def _wrong(where: str, what: str) -> NoReturn:
    raise ApiError(f"{where} {what}", param=where)
