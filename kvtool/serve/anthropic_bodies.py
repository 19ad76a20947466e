"""Answers in Anthropic's interface: the bodies and events of /v1/messages."""

from __future__ import annotations

import json
import secrets
from typing import Any

from kvtool.serve.anthropic import error_body, has_cache_control
from kvtool.serve.bodies import Answer, Body
from kvtool.serve.errors import ApiError

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
            content.append(_call(call) | {"input": json.loads(call["function"]["arguments"])})
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
                lines += [*self._close(), *self._begin("tool_use", _call(call) | {"input": {}})]
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


def _call(call: Body) -> Body:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _stop(end: Body) -> Body:
    """Why an answer ended."""
    stop = (end["finish"] == "stop" and end["stopped_by"]) or None
    reason = "stop_sequence" if stop else _FINISH.get(end["finish"], "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop}


def _event(type: str, **what: Any) -> str:
    return f"event: {type}\ndata: {json.dumps({'type': type, **what}, ensure_ascii=False)}\n\n"
