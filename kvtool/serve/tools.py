"""The tools that a request offers, and how a model is told of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NoReturn

from kvtool.chats.template import Template
from kvtool.serve.errors import ApiError
from kvtool.serve.formats import HERMES, LLAMA, Format
from kvtool.serve.messages import loaded

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


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tells a model of tools, and of Hermes's syntax of calls.

    For a model without a native format: render its template without tools, with this text before the system
    prompt (the text, an empty line, the prompt), or as the system prompt if there is none.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = HERMES.written([("NAME", {"KEY": "VALUE"})])
    return (
        "# Tools\n\n"
        "You can call these functions. Each line describes one, with a JSON schema of its arguments:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        f"To call a function, write its name and arguments as JSON between these tags:\n{example}\n"
        "Write one pair of tags for each call. The results come in the next message, between "
        "<tool_response> and </tool_response>. If no function helps, answer without a call."
    )


def for_template(
    messages: Sequence[Mapping[str, Any]], template: Template | None = None
) -> list[dict[str, Any]]:
    """A request's messages, as chat templates take them; `messages` stay as they are.

    Contents are texts, or None for "". The arguments of calls become objects where their text is the JSON of
    one. Ids of calls become nine letters and digits, since Mistral's templates take no other; equal ids stay
    equal. With a template, messages are marked, for its `of_marked`; calls and results that it does not show
    are written out, the results as messages of the user; and Llama's template, which takes one call a reply,
    gets a reply for each.
    """
    found = [_for_template(message) for message in messages]
    if template is None:
        return found
    # what is written below has markers of its own
    found = [template.marked(message) for message in found]
    native = Format.native(template)
    if native is LLAMA:
        found = _one_call_each(found)
    if native is None or not template.has_calls:
        found = [_with_calls_written(message, native or HERMES) for message in found]
    return found if native and template.has_results else _with_results_said(found)


def _for_template(given: Mapping[str, Any]) -> dict[str, Any]:
    message = {**given, "content": "" if given.get("content") is None else given["content"]}
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [_call(call) for call in calls]
    if isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = _short(message["tool_call_id"])
    return message


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    call, function = dict(given), dict(given["function"])
    if isinstance(call.get("id"), str):
        call["id"] = _short(call["id"])
    arguments = function.get("arguments")
    if isinstance(arguments, str) and isinstance(parsed := loaded(arguments or "{}"), dict):
        function["arguments"] = parsed
    return {**call, "function": function}


def _short(id: str) -> str:
    is_short = re.fullmatch("[a-zA-Z0-9]{9}", id)
    return id if is_short else hashlib.sha256(id.encode(errors="replace")).hexdigest()[:9]


def _with_calls_written(message: dict[str, Any], format: Format) -> dict[str, Any]:
    """The message with its calls in its content."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    text = format.written([(function["name"], function.get("arguments") or {}) for function in functions])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{message['content']}\n{text}" if message["content"] else text}


def _with_results_said(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with results as the user's, those of one reply together."""
    found: list[dict[str, Any]] = []
    for is_result, group in groupby(messages, lambda message: bool(message["role"] == "tool")):
        if is_result:
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            found.append({"role": "user", "content": "\n".join(texts)})
        else:
            found += group
    return found


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a reply for each call, followed by its result."""
    found: list[dict[str, Any]] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        n = next((n for n, later in enumerate(rest) if later["role"] != "tool"), len(rest))
        results, rest = rest[:n], rest[n:]
        for number, call in enumerate(calls):
            said = dict.fromkeys({"content", "reasoning_content"} & message.keys(), "") if number else {}
            found.append({**message, **said, "tool_calls": [call]})
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            found += own
            results = [result for result in results if result not in own]
        found += results
    return found
