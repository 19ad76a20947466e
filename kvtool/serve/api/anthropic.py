"""Anthropic's /v1/messages: convert requests to chats, and answers and errors to Anthropic's format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtool.serve.api.completions import AnswerBodies, Body, server_event
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, kind_of, need, need_text, optional, shown, wrong
from kvtool.serve.api.messages import left_out, listed
from kvtool.serve.api.output_format import OutputFormat
from kvtool.serve.api.request_tools import GivenTool
from kvtool.serve.api.requests import MAX_STOPS, GivenChat
from kvtool.serve.events import End, PromptCounts

_REFUSED = ("mcp_servers", "container")
"""Fields that only Anthropic's servers can support. They are refused."""

_HOSTED_BLOCKS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
    *("code_execution_tool_result", "bash_code_execution_tool_result"),
    *("text_editor_code_execution_tool_result", "advisor_tool_result", "mcp_tool_use", "mcp_tool_result"),
)
"""Types of the assistant's blocks that belong to tools which kvtool ignores. They are left out."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Values of Anthropic's tool_choice.type, mapped to values of OpenAI's tool_choice."""

_FINISH = {"length": "max_tokens", "tool_calls": "tool_use"}
"""OpenAI's finish reasons, mapped to Anthropic's stop reasons. All other finish reasons become "end_turn"."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""HTTP statuses, mapped to Anthropic's types of errors."""


def as_chat(body: object, *, is_counted: bool = False) -> GivenChat:
    """Convert a body to a chat. Copy fields that have the same meaning in both APIs.

    is_counted: True if the client wants only the number of tokens of the prompt.
    """
    fields = Fields(body)
    fields.refuse(_REFUSED)
    messages: list[tuple[str, Body]] = []
    for where, block in _blocks(fields.pop("system") or "", "system", ("text",)):
        messages.append((where, {"role": "system", "content": need_text(block, "text", where)}))
    asked = listed(fields.pop("messages"))
    given = optional(fields.pop("tools"), list, "tools") or []
    tools = _tools(given)
    functions = {str(tool.function["name"]): tool.function for tool in tools}
    # pass tools without a function, and blocks that are left out, on as unknown fields, so that the answer
    # lists them as ignored
    chat: Body = {f"tools[{i}]": tool for i, tool in enumerate(given) if not _is_function(tool)}
    for where, each in asked:
        messages += _messages(each, where, functions, chat)
    n_max = fields.whole("max_tokens", 0, 2**31 - 1)
    if not is_counted:
        _check_answered(messages, n_max)
        chat["max_tokens"] = n_max
    if stops := fields.texts("stop_sequences", MAX_STOPS):
        chat["stop"] = list(stops)
    if (choice := fields.pop("tool_choice")) is not None:
        chat["tool_choice"] = _choice(choice, tools)
        where = "tool_choice.disable_parallel_tool_use"
        if optional(choice.get("disable_parallel_tool_use"), bool, where):
            chat["parallel_tool_calls"] = False
    config = fields.mapping("output_config") or {}
    output_format = _output_format(config, fields.pop("output_format"))
    if config.get("effort") is not None:
        chat["output_config"] = {"effort": config["effort"]}
    copied = {name: fields.pop(name) for name in fields.left}
    return GivenChat(messages, tools, copied | chat, output_format)


def _check_answered(messages: Sequence[tuple[str, Body]], n_max: int | None) -> None:
    """Raise ApiError if the messages cannot be answered, or if max_tokens is missing (None)."""
    if n_max is None:
        raise ApiError.at("max_tokens", "is missing: it is the most tokens of the answer")
    where, message = messages[-1]
    if message["role"] == "assistant" and "tool_calls" in message:
        raise ApiError.at(where, "must be followed by the results of its tool_use blocks")
    if message["role"] == "assistant" and message["content"] != message["content"].rstrip():
        # models continue badly after white space; Anthropic's server refuses it too
        raise ApiError.at(where, "must not end with white space, as it is continued")


def _messages(
    value: object, where: str, functions: Mapping[str, Mapping[str, Any]], ignored: Body
) -> Iterator[tuple[str, Body]]:
    """Convert one of Anthropic's messages to messages of a chat, and yield (place, message) for each.

    The place is the part of the request from which the message is made, such as "messages[2].content[0]".
    Each result of a tool becomes a message of the chat. functions: the functions of all tools by their names.
    ignored: gets the blocks that are left out, by their places.
    """
    message = need(value, dict, where)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError.at(f"{where}.role", f"must be user or assistant, got {shown(role)}")
    kinds = {
        "user": ("tool_result", "document", "search_result"),
        "assistant": ("tool_use", "thinking", "redacted_thinking"),
    }
    hosted = _HOSTED_BLOCKS if role == "assistant" else ()
    texts, calls, thoughts, n_result = [], [], [], 0
    for at, block in _blocks(content, f"{where}.content", ("text", *kinds.get(role, ())), hosted):
        if block["type"] == "text":
            texts.append(need_text(block, "text", at))
        elif block["type"] == "thinking":
            # leave the signature out, because only Anthropic can check it; leave redacted thoughts out,
            # because they have no text
            thoughts.append(need_text(block, "thinking", at))
        elif block["type"] in ("document", "search_result"):
            texts.append(_document(block, at))
        elif block["type"] in hosted:
            ignored[at] = block
        elif block["type"] == "tool_use":
            calls.append(_call(block, at))
        elif block["type"] == "tool_result":
            n_result += 1
            yield at, _result(block, at, functions, ignored)
    if texts or calls or not n_result:
        more: Body = {"tool_calls": calls} if calls else {}
        more |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        yield where, {"role": role, "content": "".join(texts), **more}


def _blocks(
    value: object, where: str, kinds: tuple[str, ...], hosted: tuple[str, ...] = ()
) -> Iterator[tuple[str, Body]]:
    """Yield (place, block) for each block of a value. A string is a single block of text.

    Raises ApiError, which names `kinds`, if the type of a block is neither in `kinds` nor in `hosted`.
    """
    if isinstance(value, str):
        value = [{"type": "text", "text": value}] if value else []
    if not isinstance(value, list):
        raise wrong(where, "a string or a list of blocks", value)
    for i, block in enumerate(value):
        at = f"{where}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else kind_of(block)
        if kind not in (*kinds, *hosted):
            *first, last = kinds
            allowed = f"{', '.join(first)} and {last} are" if first else f"{last} is"
            fault = f"is of type {shown(kind)}; only {allowed} allowed here"
            raise ApiError.at(at, fault, "unsupported_content")
        yield at, block


def _call(block: Body, where: str) -> Body:
    arguments = json.dumps(need(block.get("input"), dict, f"{where}.input"), ensure_ascii=False)
    function = {"name": need_text(block, "name", where), "arguments": arguments}
    return {"id": need_text(block, "id", where), "type": "function", "function": function}


def _result(block: Body, where: str, functions: Mapping[str, Mapping[str, Any]], ignored: Body) -> Body:
    content = block.get("content")
    texts, definitions = [], []
    kinds = ("text", "tool_reference", "image", "document", "search_result")
    for at, part in _blocks("" if content is None else content, f"{where}.content", kinds):
        if part["type"] == "text":
            texts.append(need_text(part, "text", at))
        elif part["type"] == "image" or (part["type"] == "document" and not _is_text(part)):
            ignored[at] = part
            texts.append(left_out(part["type"]))
        elif part["type"] != "tool_reference":
            texts.append(_document(part, at))
        else:
            definitions.append(_definition(part, at, functions))
    if definitions:
        texts.append("\n".join(["<functions>", *definitions, "</functions>"]))
    return {"role": "tool", "tool_call_id": need_text(block, "tool_use_id", where), "content": "".join(texts)}


def _is_text(document: Body) -> bool:
    source = document.get("source")
    return isinstance(source, dict) and source.get("type") == "text"


def _document(block: Body, where: str) -> str:
    """Return the lines of a document or search result: its source if this is an address, its title, its text.

    Raises ApiError if the block has no text.
    """
    if block["type"] == "document":
        if not _is_text(block):
            fault = "is a document without text; only documents with a source of type text are read"
            raise ApiError.at(where, fault, "unsupported_content")
        texts = [need_text(block["source"], "data", f"{where}.source")]
    else:
        parts = _blocks(block.get("content"), f"{where}.content", ("text",))
        texts = [need_text(part, "text", at) for at, part in parts]
    about = [block.get("source"), block.get("title")]
    return "\n".join([*(each for each in about if isinstance(each, str)), *texts, ""])


def _definition(block: Body, where: str, functions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the definition of a tool that a tool search found, in the form that Claude Code uses."""
    name = need_text(block, "tool_name", where)
    if name not in functions:
        raise ApiError.at(f"{where}.tool_name", f"must be the name of a tool in tools, got {shown(name)!r}")
    definition = {key: value for key, value in functions[name].items() if value is not None}
    return f"<function>{json.dumps(definition, ensure_ascii=False)}</function>"


def _tools(given: Sequence[object]) -> list[GivenTool]:
    """Convert tools to tools of a chat. Leave out Anthropic's own tools, because they have no schema.

    A tool with "defer_loading" is not in the prompt until a result refers to the tool. If a request has
    Anthropic's own tool search, all tools are in the prompt: this search never runs here, and so no result of
    it can refer to tools.
    """
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in given]
    is_hosted_search = any(isinstance(kind, str) and kind.startswith("tool_search_tool") for kind in kinds)
    tools = []
    for i, each in enumerate(given):
        if not _is_function(each):
            continue
        where = f"tools[{i}]"
        tool = need(each, dict, where)
        function = {name: tool.get(name) for name in ("name", "description", "strict")}
        function["parameters"] = tool.get("input_schema")
        is_deferred = optional(tool.get("defer_loading"), bool, f"{where}.defer_loading")
        deferred = bool(is_deferred) and not is_hosted_search
        tools.append(GivenTool(where, f"{where}.input_schema", function, deferred))
    return tools


def _is_function(tool: object) -> bool:
    """Return False for Anthropic's own tools."""
    return not isinstance(tool, dict) or tool.get("type") in (None, "custom")


def _choice(value: object, tools: Sequence[GivenTool]) -> object:
    choice = need(value, dict, "tool_choice")
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "name": choice.get("name")}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise ApiError.at("tool_choice.type", f"must be auto, any, tool or none, got {shown(kind)}")
    if kind == "any" and not tools:
        raise ApiError.at("tool_choice.type", "must not be any without a tool that has an input_schema")
    return _CHOICES[kind]


def _output_format(config: Body, output_format: object) -> OutputFormat | None:
    """Return the format in output_config.format or output_format, or None."""
    where = "output_config.format" if output_format is None else "output_format"
    given = config.get("format") if output_format is None else output_format
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise ApiError.at(f"{where}.type", "must be json_schema")
    return OutputFormat("schema", need(given.get("schema"), dict, f"{where}.schema"), f"{where}.schema")


def has_cache_control(body: Body) -> bool:
    """True if a checked request has a "cache_control" anywhere."""
    blocks = [body, *(body.get("tools") or [])]
    for content in (body.get("system"), *(message["content"] for message in body["messages"])):
        blocks += content if isinstance(content, list) else []
    return any(isinstance(each, dict) and each.get("cache_control") for each in blocks)


def status_of(error: ApiError) -> int:
    """Return the HTTP status of an error. Anthropic's API has 529 where OpenAI's API has 503."""
    return 529 if error.status == 503 else error.status


def error_body(error: ApiError, request_id: str) -> Body:
    status, message = status_of(error), error.message
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if error.code == "context_length_exceeded":
        # use these words, because clients recognize a full context by them
        message = "prompt is too long: {n_prompt_tokens} tokens > {n_ctx} maximum".format(**error.more)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class AnthropicBodies(AnswerBodies):
    """Makes the body of one message, or the events of its stream. asked: the request's body, checked."""

    def __init__(self, model: str, policy: str, asked: Body, id: str) -> None:
        self._id = id
        self._hides_thoughts = (asked.get("thinking") or {}).get("type") == "disabled"
        self._reports_writes = has_cache_control(asked)
        self._has_begun = False
        # kind of the block that is open, or None
        self._open_kind: str | None = None
        # index of the last block
        self._n_block = -1
        id = f"msg_{secrets.token_hex(12)}"
        super().__init__(policy, {"id": id, "type": "message", "role": "assistant", "model": model})

    def whole(self, logprobs: list[Body] | None, end: End) -> Body:
        message, content = end["message"], []
        thought = message.get("reasoning_content")
        if thought and not self._hides_thoughts:
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", []):
            content.append(_call_block(call) | {"input": json.loads(call["function"]["arguments"])})
        usage = self._usage(end, end["n_written"])
        return self._common | {"content": content, **_stop(end), "usage": usage, **self._kvtool(end)}

    def prompt_known(self, prompt: PromptCounts | None) -> list[str]:
        if self._has_begun or not prompt:
            return []
        self._has_begun = True
        empty: Body = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._common | empty | {"usage": self._usage(prompt)}
        return [server_event("message_start", message=message)]

    def ping(self) -> str:
        # before message_start, do not send an event, because clients expect message_start as the first event
        return server_event("ping") if self._has_begun else super().ping()

    def piece(self, delta: Body, logprobs: list[Body] | None) -> list[str]:
        if thought := delta.get("reasoning_content"):
            return [] if self._hides_thoughts else self._text_events("thinking", thought)
        if text := delta.get("content"):
            return self._text_events("text", text)
        lines: list[str] = []
        for call in delta.get("tool_calls", []):
            if "id" in call:
                block = _call_block(call) | {"input": {}}
                lines += [*self._close_block(), self._open_block("tool_use", block)]
            if arguments := call["function"]["arguments"]:
                lines.append(self._delta(type="input_json_delta", partial_json=arguments))
        return lines

    def last(self, logprobs: list[Body] | None, end: End) -> list[str]:
        usage = self._usage(end, end["n_written"])
        return [
            *self._close_block(),
            server_event("message_delta", delta=_stop(end), usage=usage, **self._kvtool(end)),
            server_event("message_stop"),
        ]

    def failed(self, error: ApiError) -> list[str]:
        body = error_body(error, self._id)
        return [server_event(body.pop("type"), **body)]

    # parts of a stream

    def _text_events(self, kind: str, text: str) -> list[str]:
        lines: list[str] = []
        if self._open_kind != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            lines = [*self._close_block(), self._open_block(kind, {"type": kind, kind: "", **signature})]
        return [*lines, self._delta(type=f"{kind}_delta", **{kind: text})]

    def _open_block(self, kind: str, block: Body) -> str:
        self._open_kind = kind
        self._n_block += 1
        return server_event("content_block_start", index=self._n_block, content_block=block)

    def _close_block(self) -> list[str]:
        kind, self._open_kind = self._open_kind, None
        # send an empty signature, because clients expect one; kvtool does not check signatures
        signed = [self._delta(type="signature_delta", signature="")] if kind == "thinking" else []
        return [*signed, server_event("content_block_stop", index=self._n_block)] if kind else []

    def _delta(self, **delta: str) -> str:
        return server_event("content_block_delta", index=self._n_block, delta=delta)

    def _usage(self, prompt: PromptCounts, n_written: int = 0) -> Body:
        """Return the usage. Each token of the prompt is counted in exactly one of the first three numbers."""
        n_cached = prompt["n_cached"]
        n_read = prompt["n_prompt"] - n_cached
        # every token that is read is also written to the cache; count it as written only for clients that
        # use "cache_control"
        n_created = n_read if self._reports_writes else 0
        return {
            "input_tokens": n_read - n_created,
            "cache_creation_input_tokens": n_created,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_written,
        }


def _call_block(call: Body) -> Body:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _stop(end: End) -> Body:
    """Return the fields that say why an answer ended."""
    sequence = (end["finish"] == "stop" and end["stopped_by"]) or None
    reason = "stop_sequence" if sequence else _FINISH.get(end["finish"], "end_turn")
    if end["finish"] == "length" and end["is_full"]:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": sequence}
