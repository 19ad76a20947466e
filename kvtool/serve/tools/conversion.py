"""Convert tools, calls and results to the form that a chat template expects."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

from kvtool.chats.template import Template
from kvtool.serve.api.messages import loaded
from kvtool.serve.tools.formats import HERMES, Format


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a text that describes the tools and Hermes's syntax of calls.

    It is for models whose chat template has no format for tools (see `Format.native`). It is written before
    the system prompt, with an empty line between them.
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


def for_template(messages: Sequence[Mapping[str, Any]], template: Template) -> list[dict[str, Any]]:
    """Return copies of a request's messages in the form that chat templates expect.

    Arguments of calls become objects if they are the JSON text of an object. Ids of calls become nine letters
    and digits, because Mistral's templates accept only such ids. Equal ids stay equal.

    The messages also get shields: see `chats.shields`. Calls and results that the template does not show
    become text: calls in the content of the reply, results in a message of the user. If a template accepts
    only one call in a reply, each call becomes a separate reply.
    """
    # shield the messages before tags are added to calls and results, because shielded tags are plain text
    converted = [template.shielded(_for_template(message)) for message in messages]
    native = Format.native(template)
    if native and native.shows_one_call:
        converted = _one_call_each(converted)
    if native and native.end_token:
        converted = [_with_thought_or_text(message) for message in converted]
    if native is None or not template.has_calls:
        converted = [_with_calls_in_content(message, native or HERMES) for message in converted]
    return converted if native and template.has_results else _with_results_of_user(converted)


def as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of messages for a chat without tools: calls and results become text (Hermes's syntax)."""
    return _with_results_of_user([_with_calls_in_content(_for_template(each), HERMES) for each in messages])


def _for_template(given: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(given)
    if "tool_calls" in message:
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if "tool_call_id" in message:
        message["tool_call_id"] = _short(message["tool_call_id"])
    return message


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(given["function"])
    if isinstance(arguments := loaded(function["arguments"] or "{}"), dict):
        function["arguments"] = arguments
    return {**given, "id": _short(given["id"]), "function": function}


def _short(id: str) -> str:
    is_short = re.fullmatch("[a-zA-Z0-9]{9}", id)
    return id if is_short else hashlib.sha256(id.encode(errors="replace")).hexdigest()[:9]


def _with_calls_in_content(message: dict[str, Any], format: Format) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    text = format.written([(function["name"], function["arguments"]) for function in functions])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{message['content']}\n{text}" if message["content"] else text}


def _with_thought_or_text(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out the text of a reply that has calls and a thought: gpt-oss's template refuses all three."""
    return (
        {**message, "content": ""}
        if "tool_calls" in message and message.get("reasoning_content")
        else message
    )


def _with_results_of_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the results of each reply's tool calls into one user message."""
    converted: list[dict[str, Any]] = []
    for is_result, group in groupby(messages, lambda message: bool(message["role"] == "tool")):
        if is_result:
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            converted.append({"role": "user", "content": "\n".join(texts)})
        else:
            converted += group
    return converted


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace a reply with several calls by one reply for each call, each followed by the call's result."""
    converted: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            converted.append(message)
            continue
        later = (messages[n] for n in range(at, len(messages)))
        results = [*takewhile(lambda message: message["role"] == "tool", later)]
        at += len(results)
        by_call: dict[Any, list[dict[str, Any]]] = {}
        for result in results:
            by_call.setdefault(result.get("tool_call_id"), []).append(result)
        for number, call in enumerate(calls):
            # keep the text and the thought only in the reply with the first call
            emptied = dict.fromkeys({"content", "reasoning_content"} & message.keys(), "") if number else {}
            converted.append({**message, **emptied, "tool_calls": [call]})
            converted += by_call.pop(call.get("id"), [])
        converted += [result for result in results if result.get("tool_call_id") in by_call]
    return converted
