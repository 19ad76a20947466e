"""Messages of a request, checked."""

from __future__ import annotations

import json
from typing import Any

from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import kind_of, shown, wrong

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")

MOST = 100_000
"""The most messages of a request."""


def check(value: object) -> list[Message]:
    """The messages of a request as templates take them. Raises ApiError.

    Texts in parts become one; "developer" is "system". System messages at the beginning become one, as many
    templates take no second. Calls and results without an id get one, in their order. Pictures and sound are
    refused by name.
    """
    if not isinstance(value, list):
        raise wrong("messages", "a list", value)
    if not value:
        raise ApiError("messages must have at least one message", param="messages")
    if len(value) > MOST:
        raise ApiError(f"messages has {len(value):,} messages; the most are {MOST:,}", param="messages")
    found = [_message(each, f"messages[{i}]") for i, each in enumerate(value)]
    _name_calls(found)
    n = next((i for i, each in enumerate(found) if each["role"] != "system"), len(found))
    if n > 1:
        found[:n] = [found[0] | {"content": "\n\n".join(each["content"] for each in found[:n])}]
    return found


def drop_header(found: list[Message]) -> None:
    """Takes the line that Claude Code puts before its system prompt, and changes, from checked messages."""
    if found[0]["role"] == "system" and found[0]["content"].startswith("x-anthropic-billing-header:"):
        content = found[0]["content"].partition("\n")[2].lstrip("\n")
        found[:1] = [found[0] | {"content": content}] if content or len(found) == 1 else []


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise wrong(where, "an object", value)
    role = value.get("role")
    if role not in _ROLES:
        right = ", ".join(_ROLES)
        raise ApiError(f"{where}.role must be one of {right}, got {shown(role)}", param=f"{where}.role")
    found: Message = {"role": "system" if role == "developer" else role}
    found["content"] = _content(value.get("content"), f"{where}.content")
    if role == "assistant" and value.get("tool_calls"):
        found["tool_calls"] = _calls(value["tool_calls"], f"{where}.tool_calls")
    if role == "assistant" and (thought := _thought(value)):
        found["reasoning_content"] = thought
    if value.get("content") is None and role != "assistant":
        raise ApiError(f"{where}.content is missing", param=f"{where}.content")
    if role == "tool":
        found["tool_call_id"] = _id(value, "tool_call_id", where)
    # the other name is Ollama's
    if isinstance(name := value.get("name", value.get("tool_name")), str):
        found["name"] = name
    return found


def _thought(value: Message) -> str:
    """The thought of a reply, under the first of the names that clients give it. Some send it under both."""
    texts = (value.get(name) for name in ("reasoning_content", "reasoning"))
    return next((_clean(text) for text in texts if isinstance(text, str) and text.strip()), "")


def _name_calls(found: list[Message]) -> None:
    """Give ids to calls and results that have none. Raise ApiError for a result that no call waits for."""
    waiting: list[Message] = []
    n = 0
    for i, message in enumerate(found):
        if "tool_calls" in message:
            waiting = list(message["tool_calls"])
        for call in message.get("tool_calls", ()):
            n += 1
            call["id"] = call["id"] or f"call_{n}"
        if message["role"] != "tool":
            continue
        id, name = message["tool_call_id"], message.get("name")
        fitting = [call for call in waiting if call["id"] == id] if id else waiting
        # of several calls without an id, the first of the result's name
        of_name = [call for call in fitting if call["function"]["name"] == name]
        call = next(iter(of_name or fitting), None)
        if call:
            waiting.remove(call)
            message["tool_call_id"] = call["id"]
        elif not id:
            where = f"messages[{i}].tool_call_id"
            raise ApiError(f"{where} is missing, and no call waits for a result", param=where)


def _content(value: object, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _clean(value)
    if not isinstance(value, list):
        raise wrong(where, "a string or a list of parts", value)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ApiError(
                f"{where}[{i}] is of type {shown(kind)}; kvtool reads texts only",
                param=f"{where}[{i}]",
                code="unsupported_content",
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise wrong(f"{where}[{i}].text", "a string", text)
        texts.append(_clean(text))
    return "".join(texts)


def _calls(value: object, where: str) -> list[Message]:
    if not isinstance(value, list):
        raise wrong(where, "a list", value)
    found = []
    for i, each in enumerate(value):
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict):
            raise wrong(f"{where}[{i}].function", "an object", function)
        own = {
            "name": _text(function, "name", f"{where}[{i}].function"),
            "arguments": _arguments(function.get("arguments"), f"{where}[{i}].function.arguments"),
        }
        found.append({"id": _id(each, "id", f"{where}[{i}]"), "type": "function", "function": own})
    return found


def _arguments(value: object, where: str) -> str:
    """The JSON text of a call's arguments, which clients may send as an object."""
    if not isinstance(value, str | dict | None):
        raise wrong(where, "an object, or its JSON as a string", value)
    return _clean(value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False))


def _id(value: Message, name: str, where: str) -> str | None:
    """The id of a call or a result; None if it is missing or empty."""
    return _text(value, name, where) or None if value.get(name) is not None else None


def _text(value: Message, name: str, where: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise wrong(f"{where}.{name}", "a string", text)
    return _clean(text)


def _clean(text: str) -> str:
    """JSON can name halves of characters, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def loaded(text: str) -> Any:
    """The value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
