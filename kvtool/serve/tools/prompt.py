"""Tools, calls and results as a chat template takes them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from kvtool.chats.template import Template
from kvtool.serve.api.messages import loaded
from kvtool.serve.tools.formats import HERMES, LLAMA, Format


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
