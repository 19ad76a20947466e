"""OpenAI's /v1/responses, as far as it maps onto chats: its requests as a chat's, a chat's answer as its."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from kvtool.serve.api.completions import Answer, Body
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, shown, wrong

_REFUSED = ("previous_response_id", "background", "conversation", "prompt", "max_tool_calls")
"""Fields that only a server that remembers responses can support."""

_LOGPROBS = "message.output_text.logprobs"
"""The item of "include" that asks for log-probabilities."""

Places = dict[str, str]
"""Places in a request of /v1/responses, by the places in the chat that it becomes."""


def as_chat(body: object) -> tuple[Body, Places]:
    """The body of /v1/chat/completions that asks for the same, and the origin of its parts.

    Fields that mean the same in a chat are passed on. Raise ApiError.
    """
    fields = Fields(body)
    fields.refuse(_REFUSED)
    asked = fields.any("input")
    instructions = fields.text("instructions")
    messages: list[Body] = []
    places: Places = {}
    if instructions:
        places["messages[0].content"] = places["messages[0]"] = "instructions"
        messages.append({"role": "system", "content": instructions})
    if isinstance(asked, str):
        places[f"messages[{len(messages)}].content"] = places[f"messages[{len(messages)}]"] = "input"
        messages.append({"role": "user", "content": asked})
    elif isinstance(asked, list):
        for i, item in enumerate(asked):
            _add(messages, places, item, f"input[{i}]")
        _take_thought(messages)
    else:
        raise wrong("input", "a string or a list", asked)
    if not messages:
        raise ApiError("input must have at least one item", param="input")
    chat: Body = {"messages": messages}
    if (n := fields.any("max_output_tokens")) is not None:
        chat["max_completion_tokens"], places["max_completion_tokens"] = n, "max_output_tokens"
    if tools := fields.any("tools"):
        chat["tools"] = _tools(tools, places)
    if (choice := fields.any("tool_choice")) is not None:
        is_named = isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice
        function = {"name": _full(choice.get("namespace"), choice["name"])} if is_named else None
        chat["tool_choice"] = {"type": "function", "function": function} if is_named else choice
        places["tool_choice.function"] = "tool_choice"
    text = fields.any("text")
    if shape := _shape(text):
        chat["response_format"] = shape
        places["response_format.json_schema"] = places["response_format"] = "text.format"
    if text and text.get("verbosity") not in (None, "medium"):
        # reported as ignored
        chat["text.verbosity"] = text["verbosity"]
    top, included = fields.any("top_logprobs"), fields.any("include")
    if top or (isinstance(included, list) and _LOGPROBS in included):
        chat |= {"logprobs": True, "top_logprobs": top}
    # the policy decides which tokens of a long chat stay
    fields.any("truncation")
    # an item of the assistant is one of many, and never begun
    return {"continue_final_message": False} | {name: fields.any(name) for name in fields.left} | chat, places


def _add(messages: list[Body], places: Places, item: object, where: str) -> None:
    """Adds an item of the input to the messages."""
    if not isinstance(item, dict):
        raise wrong(where, "an object", item)
    # thought, text and calls of one reply are separate items here
    thought = _take_thought(messages)
    kind, at = item.get("type", "message"), f"messages[{len(messages)}]"
    if kind == "message":
        own = thought if item.get("role") == "assistant" else {}
        messages.append(own | {name: item[name] for name in ("role", "content") if name in item})
        places[at] = where
    elif kind == "reasoning":
        text = "".join([thought.get("reasoning_content", ""), _thought(item)])
        messages.append({"role": "assistant", "reasoning_content": text})
    elif kind == "function_call":
        name = _full(item.get("namespace"), item.get("name"))
        function = {"name": name, "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not (messages and messages[-1].get("role") == "assistant"):
            messages.append({"role": "assistant", "content": None} | thought)
        calls = messages[-1].setdefault("tool_calls", [])
        at = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
        calls.append(call)
        places |= {f"{at}.id": f"{where}.call_id", f"{at}.function": where, at: where}
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        places |= {f"{at}.tool_call_id": f"{where}.call_id", f"{at}.content": f"{where}.output", at: where}
    else:
        raise ApiError(
            f"{where}.type must be message, function_call, function_call_output or reasoning, "
            f"got {shown(kind)}",
            param=f"{where}.type",
            code="unsupported_content",
        )


def _take_thought(messages: list[Body]) -> Body:
    """Takes the last message out if it is a thought of which no reply has come."""
    return messages.pop() if messages and messages[-1].keys() == {"role", "reasoning_content"} else {}


def _thought(item: Body) -> str:
    """The text of a reasoning item; "" for one that is encrypted."""
    parts = item.get("content") or item.get("summary")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _tools(value: object, places: Places) -> object:
    """Chats have a function's fields one level deeper."""
    found: list[object] = []
    for where, group, each in _functions(value):
        at = f"tools[{len(found)}]"
        places |= {f"{at}.function": where, at: where}
        if isinstance(each, dict):
            own = {name: each[name] for name in ("description", "parameters", "strict") if name in each}
            each = {"type": "function", "function": {"name": _full(group, each.get("name")), **own}}
        found.append(each)
    return found


def _functions(tools: object, where: str = "tools") -> Iterator[tuple[str, str | None, object]]:
    """The tools that the model is told of: place, name of the namespace, and tool.

    Tools that OpenAI's servers run, such as web_search, are left out, as are those that take no JSON: clients
    offer them to every model. Raises ApiError.
    """
    if not isinstance(tools, list):
        raise wrong(where, "a list", tools)
    for i, each in enumerate(tools):
        kind, at = each.get("type") if isinstance(each, dict) else None, f"{where}[{i}]"
        if kind == "namespace":
            for place, _, inner in _functions(each.get("tools"), f"{at}.tools"):
                yield place, each.get("name"), inner
        elif kind == "function" or not isinstance(kind, str):
            yield at, None, each


def _full(group: object, name: object) -> object:
    """The name of a namespace's function in the prompt."""
    return f"{group.rstrip('_')}__{name}" if isinstance(group, str) and group else name


def _status(end: Body) -> str:
    return "incomplete" if end["finish"] == "length" else "completed"


def _shape(text: object) -> Body | None:
    if text is None:
        return None
    if not isinstance(text, dict):
        raise wrong("text", "an object", text)
    form = text.get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": form}


class ResponseBodies(Answer):
    """The bodies of one response.

    Parameters
    ----------
    model, policy
        Their names.
    asked
        The request's body, parts of which a response repeats.
    """

    def __init__(self, model: str, policy: str, asked: Body) -> None:
        self._policy = policy
        self._n = 0
        self._item: Body | None = None
        self._thought: Body | None = None
        self._output: list[Body] = []
        self._listed: list[Body] = []
        # what clients call the functions of namespaces
        self._known = {
            _full(group, each.get("name")): {"name": each.get("name"), "namespace": group}
            for _, group, each in _functions(asked.get("tools") or [])
            if isinstance(each, dict) and group
        }
        names = ("instructions", "temperature", "top_p", "max_output_tokens", "metadata", "text")
        self._common: Body = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": True,
            "tools": asked.get("tools") or [],
            "tool_choice": asked.get("tool_choice") or "auto",
            **{name: asked.get(name) for name in names},
        }

    def first(self) -> list[str]:
        """The first lines of a stream."""
        own = self._common | {"status": "in_progress", "output": [], "usage": None}
        return [self._event(f"response.{name}", response=own) for name in ("created", "in_progress")]

    def piece(self, delta: Body, listed: list[Body] | None) -> list[str]:
        """The lines of a piece; calls come at the end."""
        if thought := delta.get("reasoning_content"):
            return self._think(thought)
        if not (text := delta.get("content")):
            return []
        lines = self._close_thought() + ([] if self._item else self._open())
        assert self._item
        self._listed += listed or []
        place = {"item_id": self._item["id"], "output_index": len(self._output), "content_index": 0}
        more = {"logprobs": listed or []}
        return [*lines, self._event("response.output_text.delta", delta=text, **place, **more)]

    def last(self, listed: list[Body] | None, end: Body) -> list[str]:
        """The last lines of a stream."""
        self._listed += listed or []
        lines = [*self._close_thought(), *self._close(end)]
        calls = end["message"].get("tool_calls", [])
        lines += [line for call in calls for line in self._called(call)]
        return [*lines, self._event(f"response.{_status(end)}", response=self._done(end))]

    def failed(self, error: ApiError) -> list[str]:
        """The lines of an error."""
        return [self._event("error", code=error.code, message=error.message, param=error.param)]

    def whole(self, listed: list[Body] | None, end: Body) -> Body:
        """A response that is not streamed."""
        message = end["message"]
        if thought := message.get("reasoning_content"):
            self._output.append(_reasoning(_id("rs"), "completed", thought))
        if message["content"] or not message.get("tool_calls"):
            item = _message(_id("msg"), _status(end))
            item["content"] = [_part(message["content"], listed)]
            self._output.append(item)
        self._output += map(self._call_item, message.get("tool_calls", []))
        return self._done(end)

    # parts

    def _think(self, text: str) -> list[str]:
        lines: list[str] = []
        place: Body = {"output_index": len(self._output)}
        if not self._thought:
            self._thought = _reasoning(_id("rs"), "in_progress", "")
            item = self._thought | {"content": []}
            part = {"item_id": item["id"], "content_index": 0, "part": self._thought["content"][0]}
            lines = [
                self._event("response.output_item.added", item=item, **place),
                self._event("response.content_part.added", **part, **place),
            ]
        self._thought["content"][0]["text"] += text
        own = {"item_id": self._thought["id"], "content_index": 0, **place}
        return [*lines, self._event("response.reasoning_text.delta", delta=text, **own)]

    def _close_thought(self) -> list[str]:
        if not self._thought:
            return []
        item, place = self._thought | {"status": "completed"}, {"output_index": len(self._output)}
        (part,) = item["content"]
        own = {"item_id": item["id"], "content_index": 0, **place}
        self._thought = None
        self._output.append(item)
        return [
            self._event("response.reasoning_text.done", text=part["text"], **own),
            self._event("response.content_part.done", part=part, **own),
            self._event("response.output_item.done", item=item, **place),
        ]

    def _open(self) -> list[str]:
        self._item = _message(_id("msg"), "in_progress")
        place = {"output_index": len(self._output)}
        part = {"item_id": self._item["id"], "content_index": 0, "part": _part("")}
        return [
            self._event("response.output_item.added", item=self._item, **place),
            self._event("response.content_part.added", **part, **place),
        ]

    def _close(self, end: Body) -> list[str]:
        if not self._item:
            return []
        item, text, place = self._item, end["message"]["content"], {"output_index": len(self._output)}
        own = {"item_id": item["id"], "content_index": 0}
        part = _part(text, self._listed)
        item |= {"status": _status(end), "content": [part]}
        self._item = None
        self._output.append(item)
        return [
            self._event("response.output_text.done", text=text, logprobs=self._listed, **own, **place),
            self._event("response.content_part.done", part=part, **own, **place),
            self._event("response.output_item.done", item=item, **place),
        ]

    def _called(self, call: Body) -> list[str]:
        item, place = self._call_item(call), {"output_index": len(self._output)}
        self._output.append(item)
        begun = item | {"arguments": "", "status": "in_progress"}
        own = {"item_id": item["id"], **place}
        return [
            self._event("response.output_item.added", item=begun, **place),
            self._event("response.function_call_arguments.delta", delta=item["arguments"], **own),
            self._event("response.function_call_arguments.done", arguments=item["arguments"], **own),
            self._event("response.output_item.done", item=item, **place),
        ]

    def _call_item(self, call: Body) -> Body:
        function = call["function"]
        name = self._known.get(function["name"], {"name": function["name"]})
        own = {"call_id": call["id"], **name, "arguments": function["arguments"]}
        return {"id": _id("fc"), "type": "function_call", "status": "completed", **own}

    def _done(self, end: Body) -> Body:
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
                    # all that is read stays in the cache
                    "cache_write_tokens": n_prompt - end["n_cached"],
                },
                "output_tokens": n,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": n_prompt + n,
            },
            "kvtool": {"policy": self._policy, **end["held"]},
        }

    def _event(self, kind: str, **what: Any) -> str:
        own = {"type": kind, "sequence_number": self._n, **what}
        self._n += 1
        return f"event: {kind}\ndata: {json.dumps(own, ensure_ascii=False)}\n\n"


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _message(name: str, status: str) -> Body:
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": []}


def _reasoning(name: str, status: str, text: str) -> Body:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": name, "type": "reasoning", "status": status, "summary": [], "content": content}


def _part(text: str, listed: list[Body] | None = None) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": listed or []}
