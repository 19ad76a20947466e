"""What a client gets: the bodies of OpenAI's interface, with llama-server's timings and what kvtool adds."""

from __future__ import annotations

import secrets
import time
from typing import Any

Body = dict[str, Any]


class Bodies:
    """The bodies of one answer.

    Parameters
    ----------
    kind
        "chat" or "text".
    model
        The model's name.
    policy
        The policy's.
    """

    def __init__(self, kind: str, model: str, policy: str) -> None:
        self._is_chat = kind == "chat"
        self._policy = policy
        self._common = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, message: Body, logprobs: list[Body] | None, end: Body, finish: str) -> Body:
        """The body of an answer that is not streamed.

        message: {"role", "content", ...}. end: the last event.
        """
        shown = logprobs if logprobs is None else self._logprobs(logprobs)
        choice: Body = {"index": 0, "finish_reason": finish, "logprobs": shown}
        choice |= {"message": message} if self._is_chat else {"text": message["content"]}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._common | {"object": kind, "choices": [choice]} | self.counts(end)

    def piece(self, delta: Body, logprobs: list[Body] | None = None, finish: str | None = None) -> Body:
        """A piece of a stream. delta: {"content": ...} and the like."""
        shown = logprobs if logprobs is None else self._logprobs(logprobs)
        choice: Body = {"index": 0, "finish_reason": finish, "logprobs": shown}
        choice |= {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._head() | {"choices": [choice]}

    def usage(self, end: Body) -> Body:
        """The last piece of a stream that ends with its usage."""
        return self._head() | {"choices": []} | self.counts(end)

    def counts(self, end: Body) -> Body:
        """What the answer took, and what is left of its chat."""
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
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in listed
            ],
        }


def _timings(name: str, n: int, seconds: float) -> Body:
    ms = 1e3 * seconds
    return {
        f"{name}_n": n,
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / n, 3) if n else None,
        f"{name}_per_second": round(n / seconds, 3) if n and seconds else None,
    }
