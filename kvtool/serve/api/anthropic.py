"""Anthropic's /v1/messages: its requests as a chat's, its answers and its errors."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from kvtool.serve.api.completions import Answer
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, kind_of, shown, wrong
from kvtool.serve.api.requests import MOST_STOPS

Body = dict[str, Any]

_REFUSED = ("mcp_servers", "container")
"""Fields that need what only Anthropic's servers have."""

Places = dict[str, str]
"""Places in a request of /v1/messages, by the places in the chat that it becomes."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def as_chat(body: object, *, is_counted: bool = False) -> tuple[Body, Places]:
    """The body of /v1/chat/completions that asks for the same, and the origin of its parts.

    Fields that mean the same in a chat are passed on. Raise ApiError.

    is_counted: True if only the prompt's tokens are asked for.
    """
    fields = Fields(body)
    fields.refuse(_REFUSED)
    messages: list[Body] = []
    places: Places = {}

    def add(where: str, message: Body) -> None:
        places[f"messages[{len(messages)}]"] = where
        messages.append(message)

    for where, block in _blocks(fields.any("system") or "", "system", ("text",)):
        add(where, {"role": "system", "content": _text(block, "text", where)})
    asked = fields.any("messages")
    if not isinstance(asked, list):
        raise wrong("messages", "a list", asked)
    if not asked:
        raise ApiError("messages must have at least one message", param="messages")
    given = fields.any("tools")
    tools = [] if given is None else _tools(given, places)
    for i, each in enumerate(asked):
        for where, message in _messages(each, f"messages[{i}]", tools):
            add(where, message)
    chat: Body = {"messages": messages}
    # this interface has no answer without a limit
    n_max = fields.whole("max_tokens", 0, 2**31 - 1)
    if not is_counted:
        _check_answered(messages, n_max, f"messages[{len(asked) - 1}]")
        chat["max_tokens"] = n_max
    if stops := fields.texts("stop_sequences", MOST_STOPS):
        chat["stop"], places["stop"] = list(stops), "stop_sequences"
    if given is not None:
        chat["tools"] = tools
    if (choice := fields.any("tool_choice")) is not None:
        chat["tool_choice"], places["tool_choice.function"] = _choice(choice), "tool_choice"
    config = fields.any("output_config")
    where, schema = _schema(config, fields.any("output_format"))
    if config and config.get("effort") is not None:
        chat["reasoning_effort"], places["reasoning_effort"] = config["effort"], "output_config.effort"
    if schema is not None:
        chat["json_schema"] = schema
        places["json_schema"] = places["response_format"] = where
    return {name: fields.any(name) for name in fields.left} | chat, places


def _check_answered(messages: list[Body], n_max: int | None, last: str) -> None:
    """Raise ApiError for a request that cannot be answered. last: the place of the last message."""
    if n_max is None:
        raise ApiError("max_tokens is missing: it is the most tokens of the answer", param="max_tokens")
    if messages[-1]["role"] == "assistant" and "tool_calls" in messages[-1]:
        raise ApiError(f"{last} must be followed by the results of its tool_use blocks", param=last)
    content = messages[-1]["content"]
    if messages[-1]["role"] == "assistant" and content != content.rstrip():
        # as Anthropic's server: models continue it badly
        raise ApiError(f"{last} must not end with white space, as it is continued", param=last)


def _messages(value: object, where: str, tools: list[Any]) -> Iterator[tuple[str, Body]]:
    """Convert a message to places and messages of a chat, where each result of a tool is a message."""
    if not isinstance(value, dict):
        raise wrong(where, "an object", value)
    role, content = value.get("role"), value.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{where}.role must be user or assistant, got {shown(role)}", param=f"{where}.role")
    own = {"user": ("tool_result",), "assistant": ("tool_use", "thinking", "redacted_thinking")}
    texts, calls, thoughts, n_result = [], [], [], 0
    for at, block in _blocks(content, f"{where}.content", ("text", *own.get(role, ()))):
        if block["type"] == "text":
            texts.append(_text(block, "text", at))
        elif block["type"] == "thinking":
            # its signature proves to Anthropic whose it is; a redacted one has no text
            thoughts.append(_text(block, "thinking", at))
        elif block["type"] == "tool_use":
            calls.append(_call(block, at))
        elif block["type"] == "tool_result":
            n_result += 1
            yield at, _result(block, at, tools)
    if texts or calls or not n_result:
        more: Body = {"tool_calls": calls} if calls else {}
        more |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        yield where, {"role": role, "content": "".join(texts), **more}


def _blocks(value: object, where: str, kinds: tuple[str, ...]) -> Iterator[tuple[str, Body]]:
    """The blocks of a content, which must be of these kinds, each with its place."""
    if isinstance(value, str):
        value = [{"type": "text", "text": value}] if value else []
    if not isinstance(value, list):
        raise wrong(where, "a string or a list of blocks", value)
    for i, block in enumerate(value):
        at = f"{where}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else kind_of(block)
        if kind not in kinds:
            raise ApiError(
                f"{at} is of type {shown(kind)}; kvtool reads {', '.join(kinds)} there",
                param=at,
                code="unsupported_content",
            )
        yield at, block


def _text(block: Body, name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise wrong(f"{where}.{name}", "a string", text)
    return text


def _call(block: Body, where: str) -> Body:
    given = block.get("input")
    if not isinstance(given, dict):
        raise wrong(f"{where}.input", "an object", given)
    function = {"name": _text(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _text(block, "id", where), "type": "function", "function": function}


def _result(block: Body, where: str, tools: list[Any]) -> Body:
    content = block.get("content")
    texts, definitions = [], []
    kinds = ("text", "tool_reference")
    for at, part in _blocks("" if content is None else content, f"{where}.content", kinds):
        if part["type"] == "text":
            texts.append(_text(part, "text", at))
        else:
            definitions.append(_definition(part, at, tools))
    if definitions:
        texts.append("\n".join(["<functions>", *definitions, "</functions>"]))
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": "".join(texts)}


def _definition(block: Body, where: str, tools: list[Any]) -> str:
    """The definition of a tool that a search returned, in the form that Claude Code announces."""
    name = _text(block, "tool_name", where)
    for tool in tools:
        if isinstance(tool, dict) and tool["function"]["name"] == name:
            definition = {key: value for key, value in tool["function"].items() if value is not None}
            return f"<function>{json.dumps(definition, ensure_ascii=False)}</function>"
    where += ".tool_name"
    raise ApiError(f"{where} must be the name of a tool in tools, got {shown(name)!r}", param=where)


def _tools(value: object, places: Places) -> list[Any]:
    """The client's own tools as a chat's. Anthropic's, which have another type and no schema, are left out.

    A tool with "defer_loading" stays out of the prompt until a result refers to it. If the request relies on
    Anthropic's tool search, no result ever will, and all tools are in the prompt.
    """
    if not isinstance(value, list):
        raise wrong("tools", "a list", value)
    kinds = [each.get("type") if isinstance(each, dict) else None for each in value]
    is_hosted_search = any(isinstance(kind, str) and kind.startswith("tool_search_tool") for kind in kinds)
    found: list[Any] = []
    for i, (each, kind) in enumerate(zip(value, kinds, strict=True)):
        if kind not in (None, "custom"):
            continue
        where, at = f"tools[{i}]", f"tools[{len(found)}]"
        places |= {f"{at}.function.parameters": f"{where}.input_schema", f"{at}.function": where, at: where}
        if isinstance(each, dict):
            own = {name: each.get(name) for name in ("name", "description", "strict")}
            function = own | {"parameters": each.get("input_schema")}
            deferred = None if is_hosted_search else each.get("defer_loading")
            each = {"type": "function", "function": function, "defer_loading": deferred}
        found.append(each)
    return found


def _choice(value: object) -> object:
    if not isinstance(value, dict):
        raise wrong("tool_choice", "an object", value)
    kind = value.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": value.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise ApiError(
            f"tool_choice.type must be auto, any, tool or none, got {shown(kind)}", param="tool_choice.type"
        )
    return _CHOICES[kind]


def _schema(config: object, form: object) -> tuple[str, object]:
    """The place of the JSON schema that the answer must fit, and the schema, or None."""
    if config is not None and not isinstance(config, dict):
        raise wrong("output_config", "an object", config)
    where = "output_config.format" if form is None else "output_format"
    form = (config or {}).get("format") if form is None else form
    if form is None:
        return where, None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise ApiError(f"{where}.type must be json_schema", param=f"{where}.type")
    if not isinstance(schema := form.get("schema"), dict):
        raise wrong(f"{where}.schema", "an object", schema)
    return f"{where}.schema", schema


def has_cache_control(body: Body) -> bool:
    """Whether a request that was checked marks what is to be cached."""
    blocks = [body, *(body.get("tools") or [])]
    for content in (body.get("system"), *(message["content"] for message in body["messages"])):
        blocks += content if isinstance(content, list) else []
    return any(isinstance(each, dict) and each.get("cache_control") for each in blocks)


def status_of(error: ApiError) -> int:
    """The HTTP status of an error."""
    return 529 if error.status == 503 else error.status


def error_body(error: ApiError, request_id: str) -> Body:
    """What the client gets."""
    status, message = status_of(error), error.message
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if error.code == "context_length_exceeded":
        # clients look for these words
        message = "prompt is too long: {n_prompt_tokens} tokens > {n_ctx} maximum".format(**error.more)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


_FINISH = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageBodies(Answer):
    """The bodies of one message.

    Parameters
    ----------
    model, policy
        Their names.
    asked
        The request's body, checked.
    id
        The request's.
    """

    def __init__(self, model: str, policy: str, asked: Body, id: str) -> None:
        self._policy = policy
        self._id = id
        self._hides_thoughts = (asked.get("thinking") or {}).get("type") == "disabled"
        self._creates = has_cache_control(asked)
        self._has_begun = False
        # the kind of the block that is open, and its number
        self._open: str | None = None
        self._n = -1
        self._common: Body = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, logprobs: list[Body] | None, end: Body) -> Body:
        """A message that is not streamed."""
        message, content = end["message"], []
        thought = message.get("reasoning_content")
        if thought and not self._hides_thoughts:
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", []):
            content.append(_call_block(call) | {"input": json.loads(call["function"]["arguments"])})
        return self._common | {"content": content, **_stop(end), "usage": self._usage(end), **self._own(end)}

    def begun(self, counts: Body | None) -> list[str]:
        """The first event, once the prompt's tokens are counted."""
        if self._has_begun or not counts:
            return []
        self._has_begun = True
        own: Body = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(counts)}
        return [_event("message_start", message=self._common | own)]

    def ping(self) -> str:
        """A line that shows that the stream is alive."""
        # clients want another event first
        return _event("ping") if self._has_begun else super().ping()

    def piece(self, delta: Body, listed: list[Body] | None) -> list[str]:
        """The events of a piece."""
        if thought := delta.get("reasoning_content"):
            return [] if self._hides_thoughts else self._said("thinking", "thinking", thought)
        if text := delta.get("content"):
            return self._said("text", "text", text)
        lines: list[str] = []
        for call in delta.get("tool_calls", []):
            if "id" in call:
                lines += [*self._close(), *self._begin("tool_use", _call_block(call) | {"input": {}})]
            if arguments := call["function"]["arguments"]:
                lines.append(self._delta(type="input_json_delta", partial_json=arguments))
        return lines

    def last(self, listed: list[Body] | None, end: Body) -> list[str]:
        """The last events of a stream."""
        usage = self._usage(end)
        return [
            *self._close(),
            _event("message_delta", delta=_stop(end), usage=usage, **self._own(end)),
            _event("message_stop"),
        ]

    def failed(self, error: ApiError) -> list[str]:
        """The event of an error."""
        return [_event(**error_body(error, self._id))]

    # parts

    def _said(self, kind: str, name: str, text: str) -> list[str]:
        lines: list[str] = []
        if self._open != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            lines = [*self._close(), *self._begin(kind, {"type": kind, name: "", **more})]
        return [*lines, self._delta(type=f"{kind}_delta", **{name: text})]

    def _begin(self, kind: str, block: Body) -> list[str]:
        self._open = kind
        self._n += 1
        return [_event("content_block_start", index=self._n, content_block=block)]

    def _close(self) -> list[str]:
        kind, self._open = self._open, None
        # a thought is read by its client alone, and nobody needs to prove whose it is
        signed = [self._delta(type="signature_delta", signature="")] if kind == "thinking" else []
        return [*signed, _event("content_block_stop", index=self._n)] if kind else []

    def _delta(self, **what: str) -> str:
        return _event("content_block_delta", index=self._n, delta=what)

    def _usage(self, counts: Body) -> Body:
        """The tokens of the prompt, each counted once, and those of the answer."""
        n_cached = counts["n_cached"]
        n_read = counts["n_prompt"] - n_cached
        # all that is read is stored; who marks nothing does not look for it
        n_created = n_read if self._creates else 0
        return {
            "input_tokens": n_read - n_created,
            "cache_creation_input_tokens": n_created,
            "cache_read_input_tokens": n_cached,
            "output_tokens": counts.get("n_written", 0),
        }

    def _own(self, end: Body) -> Body:
        return {"kvtool": {"policy": self._policy, **end["held"]}}


def _call_block(call: Body) -> Body:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _stop(end: Body) -> Body:
    """Why an answer ended."""
    stop = (end["finish"] == "stop" and end["stopped_by"]) or None
    reason = "stop_sequence" if stop else _FINISH.get(end["finish"], "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop}


def _event(type: str, **what: Any) -> str:
    return f"event: {type}\ndata: {json.dumps({'type': type, **what}, ensure_ascii=False)}\n\n"
