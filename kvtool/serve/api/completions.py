"""Bodies of answers in OpenAI's API. They also have the timings of llama-server, and fields of kvtool."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from kvtool.serve.api.errors import ApiError
from kvtool.serve.events import End, PromptCounts, Reading

DONE = "data: [DONE]\n\n"

Body = dict[str, Any]

_LINE_ENDS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}
"""Escapes for characters at which some clients, such as httpx, split a stream into lines."""


def server_event(kind: str, **values: Any) -> str:
    """Return a named event of a stream."""
    return f"event: {kind}\n{_line({'type': kind, **values})}"


class AnswerBodies:
    """Makes the body of one answer, or the lines of its stream. Each API has a subclass.

    common: the first fields of each body of the answer.
    """

    def __init__(self, policy: str, common: Body) -> None:
        self._policy = policy
        self._common = common

    def whole(self, logprobs: list[Body] | None, end: End) -> Body:
        """Return the body of an answer that is not streamed."""
        raise NotImplementedError

    def first(self) -> list[str]:
        """Return the first lines of a stream."""
        return []

    def prompt_known(self, prompt: PromptCounts | None) -> list[str]:
        """Return lines with the number of tokens of the prompt.

        Called for each event, but returns lines only once: as soon as the number is known.
        """
        return []

    def progress(self, prompt: PromptCounts | None, event: Reading) -> list[str]:
        """Return lines that report how much of the prompt has been read."""
        return []

    def piece(self, delta: Body, logprobs: list[Body] | None) -> list[str]:
        """Return the lines of a delta, such as {"content": ...}.

        logprobs: a record for each token of the delta, or None if none were requested.
        """
        raise NotImplementedError

    def last(self, logprobs: list[Body] | None, end: End) -> list[str]:
        """Return the last lines of a stream."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> list[str]:
        """Return the last lines of a stream that ends with an error."""
        raise NotImplementedError

    def ping(self) -> str:
        """Return a line without content, which shows the client that the stream is alive."""
        return ": ping\n\n"

    def _kvtool(self, end: End) -> Body:
        """Return the field "kvtool": the policy, numbers of tokens in cache and archive, and remarks."""
        return {"kvtool": {"policy": self._policy, **end["kvtool"]}}


class CompletionBodies(AnswerBodies):
    """Makes the bodies or lines of OpenAI's API. kind: "chat" or "text"."""

    def __init__(self, kind: str, model: str, policy: str, *, with_usage: bool = False) -> None:
        self._is_chat = kind == "chat"
        self._with_usage = with_usage
        id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        super().__init__(policy, {"id": id, "created": int(time.time()), "model": model})

    def whole(self, logprobs: list[Body] | None, end: End) -> Body:
        message = end["message"]
        if message.get("tool_calls") and not message["content"]:
            message = message | {"content": None}
        shown = None if logprobs is None else self._logprobs(logprobs)
        choice: Body = {"index": 0, "finish_reason": end["finish"], "logprobs": shown}
        choice |= {"message": message} if self._is_chat else {"text": message["content"]}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._common | {"object": kind, "choices": [choice]} | self._numbers(end)

    def first(self) -> list[str]:
        # no content: with "" some clients show an empty text before a call
        return [self._piece({"role": "assistant"})] if self._is_chat else []

    def progress(self, prompt: PromptCounts | None, event: Reading) -> list[str]:
        """Report the numbers of prompt tokens, cached tokens and tokens read so far, like llama-server."""
        if not prompt:
            return []
        n, n_cached = prompt["n_prompt"], prompt["n_cached"]
        now = {"processed": min(event["n_past"], n), "time_ms": round(1e3 * event["seconds"])}
        return [self._piece({}, more={"prompt_progress": {"total": n, "cache": n_cached, **now}})]

    def piece(self, delta: Body, logprobs: list[Body] | None) -> list[str]:
        return [self._piece(delta, logprobs)]

    def last(self, logprobs: list[Body] | None, end: End) -> list[str]:
        numbers = self._numbers(end)
        # clients of llama-server expect the timings in the last piece
        more = {name: numbers[name] for name in ("timings", "kvtool")}
        lines = [self._piece({}, logprobs or None, end["finish"], more)]
        if self._with_usage:
            lines.append(_line(self._head() | {"choices": []} | numbers))
        return [*lines, DONE]

    def failed(self, error: ApiError) -> list[str]:
        return [_line(error.body), DONE]

    def _piece(
        self,
        delta: Body,
        logprobs: list[Body] | None = None,
        finish: str | None = None,
        more: Body | None = None,
    ) -> str:
        shown = None if logprobs is None else self._logprobs(logprobs)
        choice: Body = {"index": 0, "finish_reason": finish, "logprobs": shown}
        choice |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return _line(self._head() | {"choices": [choice]} | (more or {}))

    def _numbers(self, end: End) -> Body:
        """Return the fields "usage", "timings" and "kvtool"."""
        n_prompt, n_cached, n = end["n_prompt"], end["n_cached"], end["n_written"]
        n_read = n_prompt - n_cached
        return {
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n,
                "total_tokens": n_prompt + n,
                "prompt_tokens_details": {"cached_tokens": n_cached},
                "completion_tokens_details": {"reasoning_tokens": end["n_thought"]},
            },
            "timings": {
                "cache_n": n_cached,
                **_timings("prompt", n_read, end["read_s"]),
                **_timings("predicted", n, end["write_s"]),
                "draft_n": end["n_drafted"],
                "draft_n_accepted": end["n_accepted"],
            },
            **self._kvtool(end),
        }

    def _head(self) -> Body:
        return self._common | {"object": "chat.completion.chunk" if self._is_chat else "text_completion"}

    def _logprobs(self, records: list[Body]) -> Body:
        if self._is_chat:
            return {"content": records}
        return {
            "tokens": [_token(record) for record in records],
            "token_logprobs": [record["logprob"] for record in records],
            "top_logprobs": [_top(record) for record in records],
            "text_offset": [record["text_offset"] for record in records],
        }


def _top(record: Body) -> dict[str, float] | None:
    """Return the log-probabilities of the likeliest tokens and of the token itself, as OpenAI's API does."""
    if record["top_logprobs"] is None:
        return None
    logprobs: dict[str, float] = {}
    for top in [*record["top_logprobs"], record]:
        # several tokens may have the same text; keep the likeliest token
        logprobs.setdefault(_token(top), top["logprob"])
    return logprobs


def _token(record: Body) -> str:
    """Return the text of a token. If it is not UTF-8, return its bytes in OpenAI's form: "bytes:\\xe9"."""
    data = bytes(record["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"bytes:{data.decode('ascii', 'backslashreplace')}"


def _timings(name: str, n: int, seconds: float) -> Body:
    ms = 1e3 * seconds
    return {
        f"{name}_n": n,
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / n, 3) if n else None,
        f"{name}_per_second": round(n / seconds, 3) if n and seconds else None,
    }


def _line(body: Body) -> str:
    # clients cannot parse NaN and Infinity
    text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    return f"data: {text.translate(_LINE_ENDS)}\n\n"
