"""OpenAI's /v1/responses: convert requests to chats, and answers of chats to responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from kvtool.serve.api.completions import AnswerBodies, Body, server_event
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, need, need_text, optional, shown, wrong
from kvtool.serve.api.messages import arguments_of, content_of, left_out
from kvtool.serve.api.output_format import of_response_format
from kvtool.serve.api.request_tools import GivenTool
from kvtool.serve.api.requests import GivenChat
from kvtool.serve.events import End

_STORED = ("previous_response_id", "conversation")
"""Fields that refer to messages that OpenAI's servers store. They are refused."""

_REFUSED = ("background", "prompt")
"""Other fields that only OpenAI's servers can support. They are refused."""

_HOSTED_ITEMS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("computer_call", "computer_call_output", "tool_search_call", "tool_search_output"),
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
)
"""Types of items that belong to tools which kvtool ignores. They are left out."""

_NO_TEXTS = {"input_image": "image", "input_file": "file"}
"""Types of parts of a tool's result that are replaced by a text, which names them by these words."""

_LOGPROBS = "message.output_text.logprobs"
"""With this item in "include", a request asks for log-probabilities."""


def as_chat(body: object) -> GivenChat:
    """Convert a body to a chat. Copy fields that have the same meaning in both APIs."""
    fields = Fields(body)
    fields.refuse(_STORED, "send the whole chat instead")
    fields.refuse(_REFUSED)
    messages, chat = _messages(fields)
    if (n := fields.whole("max_output_tokens", -1, 2**31 - 1)) is not None:
        chat["max_completion_tokens"] = n
    tools = [*_listed(fields.pop("tools") or [])]
    # pass tools without a function on as unknown fields, so that the answer lists them as ignored
    chat |= {where: tool for where, _, tool in tools if not _is_function(tool)}
    if (choice := fields.pop("tool_choice")) is not None:
        chat["tool_choice"] = _tool_choice(choice)
    text = fields.mapping("text") or {}
    given_format = optional(text.get("format"), dict, "text.format")
    if text.get("verbosity") not in (None, "medium"):
        # kvtool does not support this; pass it on as an unknown field, so that the answer lists it as ignored
        chat["text.verbosity"] = text["verbosity"]
    top, included = fields.pop("top_logprobs"), fields.pop("include")
    if top or (isinstance(included, list) and _LOGPROBS in included):
        chat |= {"logprobs": True, "top_logprobs": top}
    # do not continue the last item: in this API, a last item of the assistant is complete
    copied = {"continue_final_message": False} | {name: fields.pop(name) for name in fields.left}
    output_format = of_response_format(given_format, "text.format", is_flat=True)
    functions = [_function(*each) for each in tools if _is_function(each[2])]
    return GivenChat(messages, functions, copied | chat, output_format)


def _messages(fields: Fields) -> tuple[list[tuple[str, Body]], Body]:
    """Convert the instructions and the input to messages of a chat: pairs (path in the request, message).

    Also return the items that are left out, by their paths.
    """
    asked, instructions = fields.pop("input"), fields.text("instructions")
    messages: list[tuple[str, Body]] = []
    ignored: Body = {}
    if instructions:
        messages.append(("instructions", {"role": "system", "content": instructions}))
    if isinstance(asked, str):
        messages.append(("input", {"role": "user", "content": asked}))
    elif isinstance(asked, list):
        for i, item in enumerate(asked):
            if isinstance(item, dict) and item.get("type") in _HOSTED_ITEMS:
                # pass it on as an unknown field, so that the answer lists it as ignored
                ignored[f"input[{i}]"] = item
            else:
                _add_item(messages, item, f"input[{i}]", ignored)
        # leave out a thought at the end, because it has no reply
        _pop_thought(messages)
    else:
        raise wrong("input", "a string or a list", asked)
    if not messages:
        raise ApiError.at("input", "must have at least one item")
    return messages, ignored


def _add_item(messages: list[tuple[str, Body]], item: object, where: str, ignored: Body) -> None:
    """Add an item of the input to the messages, and its parts that are left out to `ignored`."""
    item = need(item, dict, where)
    # join the thought, the text and the calls of a reply, which are separate items, into one message
    thought = _pop_thought(messages)
    kind = item.get("type", "message")
    if kind == "message":
        before = thought if item.get("role") == "assistant" else {}
        message = before | {name: item[name] for name in ("role", "content") if name in item}
        messages.append((where, message))
    elif kind == "reasoning":
        text = "".join([thought.get("reasoning_content", ""), _thought(item)])
        messages.append((where, {"role": "assistant", "reasoning_content": text}))
    elif kind in ("function_call", "custom_tool_call"):
        if kind == "custom_tool_call":
            # the input of a custom tool is a text; show it to the model as the only argument
            arguments = arguments_of({"input": need_text(item, "input", where)}, where)
        else:
            arguments = arguments_of(item.get("arguments"), f"{where}.arguments")
        name = _full_name(item.get("namespace"), need_text(item, "name", where))
        id = optional(item.get("call_id"), str, f"{where}.call_id")
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        if not (messages and messages[-1][1].get("role") == "assistant"):
            messages.append((where, {"role": "assistant", "content": None} | thought))
        messages[-1][1].setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        if item.get("output") is None:
            raise ApiError.at(f"{where}.output", "is missing")
        content = content_of(_texts(item["output"], f"{where}.output", ignored), f"{where}.output")
        id = optional(item.get("call_id"), str, f"{where}.call_id")
        messages.append((where, {"role": "tool", "tool_call_id": id, "content": content}))
    elif kind == "item_reference":
        advice = "send the whole chat (Vercel's AI SDK: providerOptions openai: {store: false}, or .chat())"
        fault = f"is of type item_reference, but kvtool stores no answers; {advice}"
        raise ApiError.at(where, fault, "unsupported_content")
    else:
        calls = "function_call, function_call_output, custom_tool_call or custom_tool_call_output"
        kinds = f"message, reasoning, {calls}"
        raise ApiError.at(f"{where}.type", f"must be {kinds}, got {shown(kind)}", "unsupported_content")


def _texts(output: object, where: str, ignored: Body) -> object:
    """Return the output of a tool, with a text for each image and file. Add these parts to `ignored`."""
    if not isinstance(output, list):
        return output
    parts = [*output]
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _NO_TEXTS:
            ignored[f"{where}[{i}]"] = part
            parts[i] = {"type": "input_text", "text": left_out(_NO_TEXTS[kind])}
    return parts


def _pop_thought(messages: list[tuple[str, Body]]) -> Body:
    """If the last message is a thought without a reply, remove it and return it. Otherwise return {}."""
    is_thought = messages and messages[-1][1].keys() == {"role", "reasoning_content"}
    return messages.pop()[1] if is_thought else {}


def _thought(item: Body) -> str:
    """Return the text of a reasoning item, or "" if the item is encrypted."""
    parts = item.get("content") or item.get("summary")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _function(where: str, group: str | None, tool: object) -> GivenTool:
    """Convert a tool of which `_is_function` is true. See `_listed` for the arguments."""
    function = {**need(tool, dict, where)}
    function["name"] = _full_name(group, function.get("name"))
    return GivenTool(where, f"{where}.parameters", function)


def _listed(tools: object, where: str = "tools") -> Iterator[tuple[str, str | None, object]]:
    """Yield (path in the request, name of the namespace or None, tool) for each tool."""
    for i, tool in enumerate(need(tools, list, where)):
        at = f"{where}[{i}]"
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            for place, _, inner in _listed(tool.get("tools"), f"{at}.tools"):
                yield place, tool.get("name"), inner
        else:
            yield at, None, tool


def _is_function(tool: object) -> bool:
    """Return False for tools that OpenAI's servers run, such as web_search, and for tools without JSON.

    Such tools are left out. They do not cause an error, because clients send them to every model.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind == "function" or not isinstance(kind, str)


def _full_name(group: object, name: object) -> object:
    """Return the name of a function in the prompt. It begins with the function's namespace, if it has one."""
    return f"{group.rstrip('_')}__{name}" if isinstance(group, str) and group else name


def _tool_choice(choice: Any) -> object:
    """Return a tool_choice with the full name of the function."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "name": _full_name(choice.get("namespace"), choice.get("name"))}
    return choice


def _status(end: End) -> str:
    return "incomplete" if end["finish"] == "length" else "completed"


class ResponseBodies(AnswerBodies):
    """Makes the body of one response, or the events of its stream.

    asked: body of the request. A response repeats some of its fields.
    """

    def __init__(self, model: str, policy: str, asked: Body) -> None:
        self._n_event = 0
        self._output: list[Body] = []
        # the thought or message that is being streamed
        self._item: Body | None = None
        # functions that have a namespace, by their names in the prompt
        self._namespaced = {
            _full_name(group, tool.get("name")): {"name": tool.get("name"), "namespace": group}
            for _, group, tool in _listed(asked.get("tools") or [])
            if isinstance(tool, dict) and group and _is_function(tool)
        }
        names = ("instructions", "temperature", "top_p", "max_output_tokens", "metadata", "text")
        common: Body = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "tools": asked.get("tools") or [],
            "tool_choice": asked.get("tool_choice") or "auto",
            **{name: asked.get(name) for name in names},
        }
        super().__init__(policy, common)

    def first(self) -> list[str]:
        return [self._unfinished("created"), self._unfinished("in_progress")]

    def ping(self) -> str:
        # repeat an event, because Codex drops a stream that has only comments for 300 s
        return self._unfinished("in_progress")

    def piece(self, delta: Body, logprobs: list[Body] | None) -> list[str]:
        if thought := delta.get("reasoning_content"):
            return [*self._open_item("reasoning"), self._add_text(thought)]
        if text := delta.get("content"):
            return [*self._open_item("message"), self._add_text(text, logprobs or [])]
        # do not send calls here, because `last` sends them
        return []

    def last(self, logprobs: list[Body] | None, end: End) -> list[str]:
        message = end["message"]
        is_empty = not (message["content"] or message.get("tool_calls"))
        lines = self._open_item("message") if is_empty else []
        if self._item and self._item["type"] == "message":
            self._item["content"][0]["logprobs"] += logprobs or []
        lines += self._close_item(_status(end))
        for call in message.get("tool_calls", []):
            lines += self._call_events(call)
        return [*lines, self._event(f"response.{_status(end)}", response=self._response(end))]

    def failed(self, error: ApiError) -> list[str]:
        return [self._event("error", code=error.code, message=error.message, param=error.param)]

    def whole(self, logprobs: list[Body] | None, end: End) -> Body:
        message = end["message"]
        if thought := message.get("reasoning_content"):
            self._output.append(_text_item("reasoning", "completed", thought))
        if message["content"] or not message.get("tool_calls"):
            self._output.append(_text_item("message", _status(end), message["content"], logprobs))
        self._output += map(self._call_item, message.get("tool_calls", []))
        return self._response(end)

    # parts of a stream

    def _unfinished(self, kind: str) -> str:
        """Return an event with the response so far."""
        response = self._common | {"status": "in_progress", "output": self._output, "usage": None}
        return self._event(f"response.{kind}", response=response)

    def _open_item(self, kind: str) -> list[str]:
        """Open an item of this kind. If an item of another kind is open, close it first."""
        if self._item and self._item["type"] == kind:
            return []
        lines = self._close_item("completed")
        self._item = _text_item(kind, "in_progress", "")
        return [
            *lines,
            self._item_event("added", self._item | {"content": []}),
            self._part_event("response.content_part.added", part=self._item["content"][0]),
        ]

    def _add_text(self, text: str, logprobs: list[Body] | None = None) -> str:
        """Add a text to the open item. logprobs: records of the text's tokens, or None for a thought."""
        assert self._item
        (part,) = self._item["content"]
        part["text"] += text
        if logprobs is None:
            return self._part_event(f"response.{part['type']}.delta", delta=text)
        part["logprobs"] += logprobs
        return self._part_event(f"response.{part['type']}.delta", delta=text, logprobs=logprobs)

    def _close_item(self, status: str) -> list[str]:
        """Close the open item, if there is one.

        status: status of the item if it is a message. A thought always gets the status "completed".
        """
        if not (item := self._item):
            return []
        (part,) = item["content"]
        item["status"] = status if item["type"] == "message" else "completed"
        values = {name: part[name] for name in ("text", "logprobs") if name in part}
        lines = [
            self._part_event(f"response.{part['type']}.done", **values),
            self._part_event("response.content_part.done", part=part),
            self._item_event("done", item),
        ]
        self._item = None
        self._output.append(item)
        return lines

    def _call_events(self, call: Body) -> list[str]:
        item = self._call_item(call)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        arguments = item["arguments"]
        lines = [
            self._item_event("added", item | {"arguments": "", "status": "in_progress"}),
            self._event("response.function_call_arguments.delta", delta=arguments, **place),
            self._event("response.function_call_arguments.done", arguments=arguments, **place),
            self._item_event("done", item),
        ]
        self._output.append(item)
        return lines

    def _call_item(self, call: Body) -> Body:
        function = call["function"]
        name = self._namespaced.get(function["name"], {"name": function["name"]})
        item = {"id": _id("fc"), "type": "function_call", "status": "completed", "call_id": call["id"]}
        return {**item, **name, "arguments": function["arguments"]}

    def _response(self, end: End) -> Body:
        is_cut = end["finish"] == "length"
        n_prompt, n = end["n_prompt"], end["n_written"]
        return self._common | {
            "status": _status(end),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": {
                "input_tokens": n_prompt,
                "input_tokens_details": {
                    "cached_tokens": end["n_cached"],
                    # every token that is read is also written to the cache
                    "cache_write_tokens": n_prompt - end["n_cached"],
                },
                "output_tokens": n,
                "output_tokens_details": {"reasoning_tokens": end["n_thought"]},
                "total_tokens": n_prompt + n,
            },
            **self._kvtool(end),
        }

    def _item_event(self, change: str, item: Body) -> str:
        return self._event(f"response.output_item.{change}", item=item, output_index=len(self._output))

    def _part_event(self, kind: str, **values: Any) -> str:
        """Return an event about the open item's part. Each item has only one part."""
        assert self._item
        place = {"item_id": self._item["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **place, **values)

    def _event(self, kind: str, **values: Any) -> str:
        self._n_event += 1
        return server_event(kind, sequence_number=self._n_event - 1, **values)


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _text_item(kind: str, status: str, text: str, logprobs: list[Body] | None = None) -> Body:
    """Return an item with one part. kind: "message", or "reasoning" for a thought."""
    if kind == "reasoning":
        part: Body = {"type": "reasoning_text", "text": text}
        return {"id": _id("rs"), "type": kind, "status": status, "summary": [], "content": [part]}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}
    return {"id": _id("msg"), "type": kind, "status": status, "role": "assistant", "content": [part]}
