"""Events of the answer to a request. A slot emits them, and HTTP sends the client what they say.

The first events are any number of Reading, then one Read, then any number of Piece. The last event is End, or
Failed if the request has failed. Times are in seconds. `read_s` and `write_s` leave out waiting for turns.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from kvtool.serve.api.errors import ApiError


class PromptCounts(TypedDict):
    """Tokens of a prompt, and how many of them are cached, so that they need not be read."""

    n_prompt: int
    n_cached: int


class PromptRead(PromptCounts):
    """Numbers about a prompt that has been read."""

    read_s: float


class Written(TypedDict):
    """Numbers about an answer that has been written, and the reason why it ended.

    Attributes
    ----------
    finish
        OpenAI's finish reason: "stop", "length" or "tool_calls".
    is_full
        True if the answer was cut because the context is full.
    stopped_by
        The stop string that ended the answer, or "".
    n_thought
        See `Reply.n_thought`.
    n_accepted
        How many of the `n_drafted` draft tokens became tokens of the answer.
    """

    finish: str
    is_full: bool
    stopped_by: str
    n_written: int
    n_thought: int
    write_s: float
    n_drafted: int
    n_accepted: int


class Reading(TypedDict):
    """The engine is about to read the next step of a text. A prompt may be read as several texts.

    Attributes
    ----------
    n_past
        Number of tokens in the engine's stream.
    seconds
        Time since the slot began to work on the request.
    """

    kind: Literal["reading"]
    n_read: int
    n_all: int
    n_past: int
    seconds: float


class Read(TypedDict):
    """The prompt has been read."""

    kind: Literal["read"]


class Piece(TypedDict):
    """The next piece of the answer.

    Attributes
    ----------
    deltas
        Parts of the message, in OpenAI's format, each with one field of the message. Empty if the text of the
        piece is held back.
    logprobs
        A record for each token since the last piece: see `chats.logprobs`. Empty if none were requested.
    """

    kind: Literal["piece"]
    deltas: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class End(PromptRead, Written):
    """The answer is complete.

    Attributes
    ----------
    message
        The whole message, in OpenAI's format.
    kvtool
        The answer's field "kvtool", without the policy: the numbers of `slot._cache_numbers`, and "unsaved",
        "ignored" and "remarks" if there are any.
    """

    kind: Literal["end"]
    message: dict[str, Any]
    kvtool: dict[str, Any]


class Failed(TypedDict):
    """The request has failed. error: the error that the client gets."""

    kind: Literal["error"]
    error: ApiError


Event = Reading | Read | Piece | End | Failed
