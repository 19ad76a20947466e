"""Check the messages of a request."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import kind_of, loads, need, need_text, optional, shown, wrong

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_MESSAGES = 100_000
"""Maximum number of messages of a request."""


def listed(value: object) -> list[tuple[str, object]]:
    """Return (path in the request, message) for each message of a request."""
    given = need(value, list, "messages")
    if not given:
        raise ApiError.at("messages", "must have at least one message")
    return [(f"messages[{i}]", each) for i, each in enumerate(given)]


def check(given: Sequence[tuple[str, object]]) -> list[Message]:
    """Return the messages of `listed` in the form that templates expect.

    If a content is a list of parts, it becomes one text. The role "developer" becomes "system". System
    messages at the beginning are joined, because many templates accept only one. Calls and results without an
    id get an id. Results are sorted by the order of their calls, because many templates do not show ids.
    """
    if len(given) > MAX_MESSAGES:
        raise ApiError(f"the request has {len(given):,} messages; the most are {MAX_MESSAGES:,}")
    messages = [_message(each, where) for where, each in given]
    _match_results(messages, [where for where, _ in given])
    n = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    if n > 1:
        content = "\n\n".join(each["content"] for each in messages[:n])
        messages[:n] = [messages[0] | {"content": content}]
    return messages


def drop_header(messages: list[Message]) -> None:
    """Remove Claude Code's header before the system prompt.

    The header differs from request to request, so a chat with the header would never match a stored chat.
    """
    if messages[0]["role"] == "system" and messages[0]["content"].startswith("x-anthropic-billing-header:"):
        content = messages[0]["content"].partition("\n")[2].lstrip("\n")
        messages[:1] = [messages[0] | {"content": content}] if content or len(messages) == 1 else []


def _message(value: object, where: str) -> Message:
    given = need(value, dict, where)
    role = given.get("role")
    if role not in _ROLES:
        right = ", ".join(_ROLES)
        raise ApiError.at(f"{where}.role", f"must be one of {right}, got {shown(role)}")
    message: Message = {"role": "system" if role == "developer" else role}
    message["content"] = content_of(given.get("content"), f"{where}.content")
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], f"{where}.tool_calls")
    if role == "assistant" and (thought := _thought(given)):
        message["reasoning_content"] = thought
    if given.get("content") is None and role != "assistant":
        raise ApiError.at(f"{where}.content", "is missing")
    if role == "tool":
        message["tool_call_id"] = _id(given, "tool_call_id", where)
    # Ollama calls this field tool_name
    if isinstance(name := given.get("name", given.get("tool_name")), str):
        message["name"] = name
    return message


def _thought(given: Message) -> str:
    """Return the thought of a reply, or "". Some clients send the same thought in both fields."""
    texts = (given.get(name) for name in ("reasoning_content", "reasoning"))
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def _match_results(messages: list[Message], places: Sequence[str]) -> None:
    """Give ids to calls and results without an id, and sort results by the order of their calls.

    A result without an id belongs to the next call that waits for a result. Only results without other
    messages between them are sorted. Results that belong to no call keep their places. Raises ApiError for a
    result without an id if no call waits for a result.
    """
    n_call = 0
    # for each id of the last reply's calls, the numbers of the calls that wait for a result
    waiting: dict[str, deque[int]] = {}
    ids = iter(list[str]())
    # indices of the latest results in `messages`, and for each of them the number of its call
    numbers: dict[int, int] = {}
    for i, message in enumerate(messages):
        if message["role"] != "tool":
            _sort(messages, numbers)
            numbers = {}
            if "tool_calls" in message:
                waiting = {}
                for number, call in enumerate(message["tool_calls"]):
                    n_call += 1
                    call["id"] = call["id"] or f"call_{n_call}"
                    waiting.setdefault(call["id"], deque()).append(number)
                ids = iter([call["id"] for call in message["tool_calls"]])
            continue
        id = message["tool_call_id"] or next((id for id in ids if waiting[id]), None)
        if not id:
            raise ApiError.at(places[i], "is a result without an id, and no call waits for a result")
        message["tool_call_id"] = id
        if waiting.get(id):
            numbers[i] = waiting[id].popleft()
    _sort(messages, numbers)


def _sort(messages: list[Message], numbers: Mapping[int, int]) -> None:
    """Sort some of the messages by numbers. numbers: maps the indices of these messages to their numbers."""
    ordered = [messages[i] for i in sorted(numbers, key=numbers.__getitem__)]
    for i, message in zip(numbers, ordered, strict=True):
        messages[i] = message


def content_of(value: object, where: str) -> str:
    """Return the text of a content, which is a text, a list of parts or null."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(where, "a string or a list of parts", value)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        if kind not in ("text", "input_text", "output_text", "refusal"):
            fault = f"is of type {shown(kind)}; kvtool reads texts only"
            raise ApiError.at(f"{where}[{i}]", fault, "unsupported_content")
        text = part.get("refusal" if kind == "refusal" else "text")
        texts.append(need(text, str, f"{where}[{i}].text"))
    return "".join(texts)


def left_out(kind: str) -> str:
    """Return the text that replaces an image or another part that is no text, in the result of a tool.

    Clients send a result again with every later request, so an error would end the chat.
    """
    return f"[{kind}: this model reads text only]"


def _calls(value: object, where: str) -> list[Message]:
    calls = []
    for i, each in enumerate(need(value, list, where)):
        at = f"{where}[{i}].function"
        given = need(each.get("function") if isinstance(each, dict) else None, dict, at)
        arguments = arguments_of(given.get("arguments"), f"{at}.arguments")
        function = {"name": need_text(given, "name", at), "arguments": arguments}
        calls.append({"id": _id(each, "id", f"{where}[{i}]"), "type": "function", "function": function})
    return calls


def arguments_of(value: object, where: str) -> str:
    """Return the arguments of a call, which are an object or its JSON text, as JSON text."""
    if not isinstance(value, str | dict | None):
        raise wrong(where, "an object, or its JSON as a string", value)
    return value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False)


def _id(given: Message, name: str, where: str) -> str | None:
    """Return the id of a call or a result, or None if the id is missing or empty."""
    return optional(given.get(name), str, f"{where}.{name}") or None


def loaded(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON. See `loads`."""
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return text
