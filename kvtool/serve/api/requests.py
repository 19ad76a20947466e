"""Requests: their fields, checked, over the defaults that the server was started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, get_type_hints

from kvtool.config.generation import GenerationOptions
from kvtool.errors import UsageError
from kvtool.llama.sampling import MOST, Sampling
from kvtool.options import declared
from kvtool.serve.api import messages, output_format, thinking
from kvtool.serve.api.errors import ApiError, Names
from kvtool.serve.api.fields import Fields, shown, wrong
from kvtool.serve.api.messages import Message
from kvtool.serve.api.output_format import Shape
from kvtool.serve.api.thinking import ThinkingOptions
from kvtool.serve.api.tools import Choice, check_choice, check_tools

MOST_LOGPROBS = 20
MOST_STOPS = 16
MOST_BREAKERS = 64

MOST_IGNORED = 20
"""The most fields that an answer names as ignored."""

_KINDS = get_type_hints(Sampling)
_NUMBERS = {
    named: field
    for field, its in declared(Sampling).items()
    for named in its.request
    if _KINDS[field] in (int, float)
}
"""Fields of OpenAI and llama-server, and what `Sampling` calls them."""

_ALL_WRITTEN = ("repeat_last_n", "dry_penalty_last_n")
"""Fields of which llama-server's -1 looks back at all tokens written."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for fields that a request leaves out.

    Attributes
    ----------
    sampling
        How tokens are drawn.
    n_max
        The most tokens of an answer; None is no limit.
    seed
        What draws depend on; None draws another one for each answer.
    system
        The system prompt of chats that bring none.
    model
        The one name that a request may give the model; None: any.
    keep_headers
        Whether a system prompt keeps the header that an agent puts before it.
    thinking
        How much replies of chats think, and the most tokens of a thought.
    """

    sampling: Sampling = field(default_factory=Sampling)
    n_max: int | None = 2048
    seed: int | None = None
    system: str | None = None
    model: str | None = None
    keep_headers: bool = False
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)


@dataclass(frozen=True, slots=True)
class Request:
    """Fields that chats and plain completions share.

    Attributes
    ----------
    sampling
        How tokens are drawn.
    shape
        What the answer must fit; None for what the server was started with.
    n_max
        The most tokens of the answer; None is no limit.
    seed
        None: drawn.
    stop_tokens
        Tokens that end the answer, and are no part of it.
    allowed
        The only tokens that the answer may have; empty allows all.
    ignores_end
        True if the answer continues where the model would end it.
    logprobs
        How many of the likeliest tokens to list for each token; None lists no log-probabilities.
    stream
        Whether the answer comes piece by piece.
    with_usage
        Whether a stream ends with the usage.
    with_progress
        True if a stream says how much of the prompt is read.
    n_share
        How many of the last tokens to report the share of rows for.
    ignored
        Fields that kvtool does not know, which the answer names.
    names
        The client's names of places in the request, for errors.
    """

    sampling: Sampling
    shape: Shape | None
    n_max: int | None
    seed: int | None
    stop_tokens: tuple[int, ...]
    allowed: tuple[int, ...]
    ignores_end: bool
    logprobs: int | None
    stream: bool
    with_usage: bool
    with_progress: bool
    n_share: int
    ignored: list[str]
    names: Names


@dataclass(frozen=True, slots=True)
class ChatRequest(Request):
    """A chat's next answer.

    Attributes
    ----------
    messages
        All of the chat, as templates take them.
    name
        Of the chat, where the client names its chats.
    tools, choice
        What the model may call, and whether it must.
    thinking
        What the request asks for about thinking.
    begun
        The text of a last message of the assistant, which the answer continues; it is not in `messages`.
    """

    messages: list[Message]
    begun: str
    thinking: ThinkingOptions
    name: str | None
    tools: list[dict[str, Any]]
    choice: Choice

    @property
    def sends_thoughts(self) -> bool:
        """True if the client sends the thoughts of earlier replies back; at first a guess: agents do."""
        replies = [message for message in self.messages if message["role"] == "assistant"]
        return any("reasoning_content" in reply for reply in replies) if replies else bool(self.tools)


@dataclass(frozen=True, slots=True)
class TextRequest(Request):
    """The continuation of a text.

    Attributes
    ----------
    prompt
        The text, or tokens.
    echo
        Whether the answer begins with the text.
    """

    prompt: str | list[int]
    echo: bool


def chat(
    body: object, defaults: Defaults, name: str | None = None, places: Mapping[str, str] | None = None
) -> ChatRequest:
    """Check the body of /v1/chat/completions. Raise ApiError.

    places: where the client put the parts of a body that was translated from another interface, by their
    places in `body`.
    """
    try:
        return _chat(body, defaults, name, places or {})
    except ApiError as error:
        raise Names(places or {}).of(error) from None


def _chat(body: object, defaults: Defaults, name: str | None, places: Mapping[str, str]) -> ChatRequest:
    fields = Fields(body)
    asked = fields.any("messages")
    found = messages.check(asked)
    if not defaults.keep_headers:
        messages.drop_header(found)
    if defaults.system and all(message["role"] != "system" for message in found):
        found.insert(0, {"role": "system", "content": defaults.system})
    shift = len(asked) - len(found)
    begun = _begun(fields, found)
    tools = check_tools(fields.any("tools"))
    choice = check_choice(fields.any("tool_choice"), tools)
    if begun and choice.kind == "required":
        raise ApiError(
            "tool_choice must be auto or none if the last message is continued", param="tool_choice"
        )
    listed = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    if top and not listed:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    key = fields.text("prompt_cache_key")
    return ChatRequest(
        messages=found,
        begun=begun,
        thinking=thinking.check(fields, defaults.thinking),
        name=name or key,
        tools=tools,
        choice=choice,
        logprobs=(top or 0) if listed else None,
        names=Names(places, shift),
        **_common(fields, defaults),
    )


def _begun(fields: Fields, found: list[Message]) -> str:
    """Take the text of a last message of the assistant that the answer continues; "" if there is none.

    An empty message is dropped. Raises ApiError for fields that ask for what cannot be.
    """
    # the second name is text-generation-webui's
    names = ("continue_final_message", "continue_")
    asked = [name for name in names if name in fields.left]
    continues = all([fields.flag(name, True) for name in names])
    fits = found[-1]["role"] == "assistant" and "tool_calls" not in found[-1] and len(found) > 1
    if asked and continues and not fits:
        raise ApiError(
            f"{asked[0]} needs a last message of the assistant, without calls, that follows another message",
            param=asked[0],
        )
    if not fields.flag("add_generation_prompt", True) and not (continues and fits):
        name = "add_generation_prompt"
        raise ApiError(f"{name} must be true unless a last message of the assistant is continued", param=name)
    text: str = found.pop()["content"] if continues and fits else ""
    return text


def text(body: object, defaults: Defaults) -> TextRequest:
    """Checks the body of /v1/completions. Raises ApiError."""
    fields = Fields(body)
    return TextRequest(
        prompt=_prompt(fields.any("prompt")),
        echo=fields.flag("echo"),
        logprobs=_logprobs(fields),
        names=Names({}),
        **_common(fields, defaults),
    )


def _logprobs(fields: Fields) -> int | None:
    value = fields.any("logprobs")
    # clients of chats say false where they want none
    return Fields({"logprobs": None if value is False else value}).whole("logprobs", 0, MOST_LOGPROBS)


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list) and all(type(each) is int for each in value):
        return value
    if isinstance(value, list):
        raise ApiError("prompt must be one text: kvtool answers one prompt per request", param="prompt")
    raise wrong("prompt", "a string", value)


def _common(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    """The fields of `Request` except log-probabilities and names. Raise ApiError."""
    for one in ("n", "n_cmpl", "best_of"):
        if (fields.whole(one, 1, 2**31 - 1) or 1) > 1:
            raise ApiError(f"{one} must be 1: kvtool writes one answer a request", param=one)
    check_model(fields.text("model"), defaults)
    options = fields.any("stream_options")
    if options is not None and not isinstance(options, dict):
        raise wrong("stream_options", "an object", options)
    stream = fields.flag("stream")
    found = {
        "sampling": _sampling(fields, defaults.sampling),
        "shape": output_format.check(fields),
        "n_max": _most(fields, defaults.n_max),
        "seed": _seed(fields, defaults.seed),
        "stop_tokens": fields.tokens("stop_token_ids"),
        "allowed": fields.tokens("allowed_token_ids"),
        "ignores_end": any([fields.flag(name) for name in ("ignore_eos", "ban_eos_token")]),
        "stream": stream,
        "with_progress": fields.flag("return_progress") and stream,
        "with_usage": stream and bool((options or {}).get("include_usage")),
        "n_share": _share(fields.any("kvtool")),
    }
    fields.check_rest()
    return found | {"ignored": [shown(each) for each in fields.left[:MOST_IGNORED]]}


def _most(fields: Fields, default: int | None) -> int | None:
    """The most tokens of the answer. -1 is no limit, as in llama-server."""
    given = [fields.whole(name, -1, 2**31 - 1) for name in declared(GenerationOptions)["n"].request]
    n = next((n for n in given if n is not None), default)
    return None if n == -1 else n


def check_model(asked: str | None, defaults: Defaults) -> None:
    """Raises ApiError for a model that does not run. Agents send several names, so that any may be right."""
    if asked and defaults.model and asked not in (defaults.model, "default", "kvtool"):
        raise ApiError(
            f"this server runs {defaults.model}, and not {shown(asked)}",
            param="model",
            code="model_not_found",
            status=404,
        )


def _share(own: object) -> int:
    """How many tokens the field `kvtool` asks the shares of."""
    if own is None:
        return 0
    if not isinstance(own, dict):
        raise wrong("kvtool", "an object", own)
    asked = Fields(own)
    n = asked.whole("share", 0, 2**31 - 1) or 0
    asked.refuse(asked.left)
    return n


def _seed(fields: Fields, default: int | None) -> int | None:
    seed = fields.whole("seed", -(2**63), 2**64 - 1)
    # llama-server's -1 is a drawn one
    return default if seed is None or seed == -1 else seed % 2**31


def _sampling(fields: Fields, default: Sampling) -> Sampling:
    own: dict[str, Any] = {}
    for name, its in _NUMBERS.items():
        value = fields.whole(name, -(2**31), 2**31 - 1) if _KINDS[its] is int else fields.number(name)
        if value is not None:
            own.setdefault(its, MOST if value == -1 and its in _ALL_WRITTEN else value)
    stops = tuple(each for each in fields.texts("stop", MOST_STOPS) if each)
    if stops:
        own["stop"] = stops
    if breakers := fields.texts("dry_sequence_breakers", MOST_BREAKERS):
        own["dry_sequence_breaker"] = tuple(each for each in breakers if each != "none")
    if bias := _bias(fields.any("logit_bias")):
        own["logit_bias"] = bias
    try:
        return replace(default, **own)
    except UsageError as error:
        raise of_usage(error) from None


def of_usage(error: UsageError) -> ApiError:
    """The error of an option, worded for a field."""
    said = str(error)
    for name, its in _NUMBERS.items():
        said = said.replace(f"--{its.replace('_', '-')} ", f"{name} ")
    return ApiError(said.replace("--logit-bias", "logit_bias").replace("--", ""))


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    """OpenAI's object of tokens, or llama-server's list of pairs, in which false bans a token."""
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise wrong("logit_bias", "an object or a list of pairs", value)
    found = []
    for pair in pairs:
        try:
            token, bias = pair
            found.append((int(token), -inf if bias is False else float(bias)))
        except (TypeError, ValueError, OverflowError):
            raise ApiError(
                f"logit_bias must have pairs of a token and a number, got {shown(pair)}", param="logit_bias"
            ) from None
    return tuple(found)
