"""Check the tools of a request, and its tool_choice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import need, optional

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Choice:
    """A request's tool_choice.

    Attributes
    ----------
    kind
        "none" if the model must not call a tool, "auto" if it may call a tool, "required" if it must.
    name
        Name of the tool that the model must call. None if it may choose the tool.
    one_call
        True if a reply must not have several calls.
    """

    kind: Literal["none", "auto", "required"]
    name: str | None = None
    one_call: bool = False


class GivenTool(NamedTuple):
    """A tool of a request.

    Attributes
    ----------
    where
        Path of the function in the request, such as "tools[0].function".
    schema_where
        Path of the schema of the function's parameters.
    function
        The function, with OpenAI's names of fields. Its fields are not checked yet.
    is_deferred
        True if the prompt does not list the tool.
    """

    where: str
    schema_where: str
    function: Mapping[str, Any]
    is_deferred: bool = False


def listed(value: object) -> list[GivenTool]:
    """Return the tools of a request to /v1/chat/completions. null means that there are no tools."""
    given = []
    for n, each in enumerate(optional(value, list, "tools") or []):
        where, at = f"tools[{n}]", f"tools[{n}].function"
        tool = need(each, dict, where)
        kind = tool.get("type")
        if kind != "function":
            raise ApiError.at(
                f"{where}.type", f"must be 'function'{_got(kind)}; other kinds of tools are not supported"
            )
        is_deferred = optional(tool.get("defer_loading"), bool, f"{where}.defer_loading")
        function = need(tool.get("function"), dict, at)
        given.append(GivenTool(at, f"{at}.parameters", function, bool(is_deferred)))
    return given


def check_tools(given: Sequence[GivenTool]) -> list[dict[str, Any]]:
    """Return the tools of a request without unknown fields.

    Each returned function has "name" and "parameters", as templates expect. "defer_loading" is kept if it is
    true.
    """
    tools = [_tool(each) for each in given]
    names = set()
    for each, tool in zip(given, tools, strict=True):
        name = tool["function"]["name"]
        if name in names:
            raise ApiError.at(f"{each.where}.name", f"must be unique; there are two tools {name!r}")
        names.add(name)
    return tools


def _tool(given: GivenTool) -> dict[str, Any]:
    where, schema_where, values, is_deferred = given
    name = values.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError.at(f"{where}.name", f"must be 1 to 128 letters, digits, '_' or '-'{_got(name)}")
    function = {
        "name": name,
        "description": optional(values.get("description"), str, f"{where}.description"),
        "parameters": _parameters(values.get("parameters"), schema_where),
        "strict": optional(values.get("strict"), bool, f"{where}.strict"),
    }
    function = {key: part for key, part in function.items() if part is not None}
    return {"type": "function", "function": function} | ({"defer_loading": True} if is_deferred else {})


def _parameters(value: object, where: str) -> dict[str, Any]:
    if value is None:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict):
        raise ApiError.at(where, "must be a JSON schema, which is an object")
    if value.get("type", "object") != "object":
        raise ApiError.at(f"{where}.type", f"must be 'object'{_got(value['type'])}")
    for name, schema in need(value.get("properties", {}), dict, f"{where}.properties").items():
        if not isinstance(schema, (dict, bool)):
            raise ApiError.at(f"{where}.properties.{name}", "must be a JSON schema")
    required = value.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ApiError.at(f"{where}.required", "must be a list of names")
    # do not change the order of the keys, because the template shows them in this order
    return value if "type" in value else {"type": "object", **value}


def check_choice(value: object, tools: Sequence[Mapping[str, Any]]) -> Choice:
    """Return the tool_choice of a request. null means auto. If there are no tools, auto becomes none.

    tools: the result of `check_tools`.
    """
    if value is None or value == "auto":
        return Choice("auto" if tools else "none")
    if isinstance(value, dict):
        return Choice("required", _named(value, [tool["function"]["name"] for tool in tools]))
    if value == "none":
        return Choice("none")
    if value != "required":
        raise ApiError.at("tool_choice", f"must be 'none', 'auto', 'required' or an object{_got(value)}")
    if not tools:
        raise ApiError.at("tool_choice", "must not be 'required' without a tool of type 'function'")
    return Choice("required")


def _named(value: dict[str, Any], names: list[str]) -> str:
    kind = value.get("type")
    if kind != "function":
        raise ApiError.at(
            "tool_choice.type", f"must be 'function'{_got(kind)}; other kinds are not supported"
        )
    # responses and messages have the name in tool_choice itself
    where = "tool_choice.name" if "name" in value else "tool_choice.function.name"
    function = value if "name" in value else value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ApiError.at(where, "must be the name of a tool")
    if name not in names:
        raise ApiError.at(where, f"must be the name of a tool in tools, got {name!r}")
    return name


def _got(value: object) -> str:
    """Return the end of an error message that quotes the value. Return "" if the value is not a text."""
    return f", got {value[:80]!r}" if isinstance(value, str) else ""
