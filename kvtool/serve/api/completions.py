"""Answers in OpenAI's interface, with llama-server's timings and kvtool's own fields."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from kvtool.serve.api.errors import ApiError

DONE = "data: [DONE]\n\n"

Body = dict[str, Any]


class Answer:
    """The bodies of one answer: the part that all interfaces share."""

    def first(self) -> list[str]:
        """The first lines of a stream."""
        return []

    def begun(self, counts: Body | None) -> list[str]:
        """Lines about the prompt's tokens, once they are known. May be called again."""
        return []

    def progress(self, counts: Body | None, event: Body) -> list[str]:
        """A stream's report of how much of the prompt is read. event: of kind "reading"."""
        return []

    def ping(self) -> str:
        """A line that shows that the stream is alive."""
        return ": ping\n\n"


class Bodies(Answer):
    """The bodies of one answer of OpenAI's interface.

    Parameters
    ----------
    kind
        "chat" or "text".
    model
        The model's name.
    policy
        The policy's.
    with_usage
        Whether a stream ends with its usage.
    """

    def __init__(self, kind: str, model: str, policy: str, *, with_usage: bool = False) -> None:
        self._is_chat = kind == "chat"
        self._policy = policy
        self._with_usage = with_usage
        self._common = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, logprobs: list[Body] | None, end: Body) -> Body:
        """The body of an answer that is not streamed. end: the last event."""
        message = end["message"]
        shown = logprobs if logprobs is None else self._logprobs(logprobs)
        choice: Body = {"index": 0, "finish_reason": end["finish"], "logprobs": shown}
        choice |= {"message": message} if self._is_chat else {"text": message["content"]}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._common | {"object": kind, "choices": [choice]} | self.counts(end)

    def first(self) -> list[str]:
        """The first lines of a stream."""
        return [self._piece({"role": "assistant", "content": ""})] if self._is_chat else []

    def progress(self, counts: Body | None, event: Body) -> list[str]:
        """llama-server's report: the prompt's tokens, how many were cached, and how many are read by now."""
        if not counts:
            return []
        n, n_cached = counts["n_prompt"], counts["n_cached"]
        now = {"processed": min(event["n_past"], n), "time_ms": round(1e3 * event["seconds"])}
        return [self._piece({}, more={"prompt_progress": {"total": n, "cache": n_cached, **now}})]

    def piece(self, delta: Body, listed: list[Body] | None) -> list[str]:
        """The lines of a piece. delta: {"content": ...} and the like."""
        return [self._piece(delta, listed)]

    def last(self, listed: list[Body] | None, end: Body) -> list[str]:
        """The last lines of a stream."""
        counts = self.counts(end)
        # llama-server's clients look for these in the last piece
        more = {name: counts[name] for name in ("timings", "kvtool")}
        lines = [self._piece({}, listed or None, end["finish"], more)]
        if self._with_usage:
            lines.append(_line(self._head() | {"choices": []} | counts))
        return [*lines, DONE]

    def failed(self, error: ApiError) -> list[str]:
        """The lines of an error."""
        return [_line(error.body), DONE]

    def _piece(
        self,
        delta: Body,
        listed: list[Body] | None = None,
        finish: str | None = None,
        more: Body | None = None,
    ) -> str:
        shown = listed if listed is None else self._logprobs(listed)
        choice: Body = {"index": 0, "finish_reason": finish, "logprobs": shown}
        choice |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return _line(self._head() | {"choices": [choice]} | (more or {}))

    def counts(self, end: Body) -> Body:
        """The answer's tokens and times, and how much of its chat is held."""
        n_prompt, n_cached, n = end["n_prompt"], end["n_cached"], end["n_written"]
        n_read = n_prompt - n_cached
        return {
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n,
                "total_tokens": n_prompt + n,
                "prompt_tokens_details": {"cached_tokens": n_cached},
            },
            "timings": {
                "cache_n": n_cached,
                **_timings("prompt", n_read, end["read_s"]),
                **_timings("predicted", n, end["write_s"]),
                "draft_n": end["n_drafted"],
                "draft_n_accepted": end["n_accepted"],
            },
            "kvtool": {"policy": self._policy, **end["held"]},
        }

    def _head(self) -> Body:
        return self._common | {"object": "chat.completion.chunk" if self._is_chat else "text_completion"}

    def _logprobs(self, listed: list[Body]) -> Body:
        if self._is_chat:
            return {"content": listed}
        return {
            "tokens": [each["token"] for each in listed],
            "token_logprobs": [each["logprob"] for each in listed],
            "top_logprobs": [_top(each["top_logprobs"]) for each in listed],
            "text_offset": [each["text_offset"] for each in listed],
        }


def _top(likeliest: list[Body] | None) -> dict[str, float] | None:
    if likeliest is None:
        return None
    found: dict[str, float] = {}
    for top in likeliest:
        # of tokens with equal texts, such as parts of a character, the likeliest counts
        found.setdefault(top["token"], top["logprob"])
    return found


def _timings(name: str, n: int, seconds: float) -> Body:
    ms = 1e3 * seconds
    return {
        f"{name}_n": n,
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / n, 3) if n else None,
        f"{name}_per_second": round(n / seconds, 3) if n and seconds else None,
    }


def _line(body: Body) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
