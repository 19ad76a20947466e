"""Check the fields of requests, and fill in the server's defaults for missing fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, get_type_hints

from kvtool.config.generation import GenerationOptions
from kvtool.errors import UsageError
from kvtool.llama.sampling import Sampling
from kvtool.options import declared
from kvtool.serve.api import messages, output_format, thinking
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, need_whole, shown, wrong
from kvtool.serve.api.messages import Message
from kvtool.serve.api.output_format import OutputFormat
from kvtool.serve.api.request_tools import Choice, GivenTool, check_choice, check_tools, listed
from kvtool.serve.api.thinking import ThinkingOptions

MAX_LOGPROBS = 20
MAX_STOPS = 100
MAX_BREAKERS = 64

MAX_IGNORED = 20
"""An answer lists at most this many ignored fields."""

_KINDS = get_type_hints(Sampling)
_NUMBERS = {
    name: field
    for field, option in declared(Sampling).items()
    for name in option.request
    if _KINDS[field] in (int, float)
}
"""Names of numbers in requests to OpenAI's servers or llama-server, mapped to fields of `Sampling`."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for fields that are missing in a request, and settings of the server for all requests.

    Attributes
    ----------
    n_max
        Maximum number of tokens of an answer. None for no limit.
    seed
        Seed of the sampler. None for a new random seed for each answer.
    system
        System prompt for chats that have none.
    """

    sampling: Sampling = field(default_factory=Sampling)
    n_max: int | None = 2048
    seed: int | None = None
    system: str | None = None
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)


@dataclass(frozen=True, slots=True)
class Request:
    """The fields that chats and plain completions have in common. `n_max` and `seed` are as in `Defaults`.

    Attributes
    ----------
    output_format
        None for the server's default.
    stop_tokens
        Tokens that end the answer. They are not part of the answer.
    ignores_end
        True to continue after the model's end token.
    logprobs
        Number of likeliest tokens that are listed for each token of the answer. None to list no
        log-probabilities.
    reuses
        True to read only the tokens after the longest beginning that is cached or stored.
    with_usage
        True if a stream ends with the numbers of tokens.
    with_progress
        True if a stream reports how much of the prompt has been read.
    n_share
        Number of tokens at the end of the chat. For each of them, the answer reports the share of rows that
        hold the token. 0 to report nothing.
    ignored
        Fields that have no effect, such as unknown ones. The answer lists them.
    """

    sampling: Sampling
    output_format: OutputFormat | None
    n_max: int | None
    seed: int | None
    stop_tokens: tuple[int, ...]
    ignores_end: bool
    logprobs: int | None
    stream: bool
    reuses: bool
    with_usage: bool
    with_progress: bool
    n_share: int
    ignored: list[str]


@dataclass(frozen=True, slots=True)
class ChatRequest(Request):
    """A request for the next reply of a chat.

    Attributes
    ----------
    messages
        All messages, in the form that templates expect.
    begun
        Text of the last message if the reply continues it, otherwise "". The continued message is not in
        `messages`.
    name
        Name of the chat, if the client names its chats.
    schema_places
        Path of each tool's schema in the request, for errors.
    """

    messages: list[Message]
    begun: str
    thinking: ThinkingOptions
    name: str | None
    tools: list[dict[str, Any]]
    schema_places: list[str]
    choice: Choice

    @property
    def sends_thoughts(self) -> bool:
        """True if the client sends thoughts back. Before the first reply, assume so if there are tools."""
        replies = [message for message in self.messages if message["role"] == "assistant"]
        return any("reasoning_content" in reply for reply in replies) if replies else bool(self.tools)


@dataclass(frozen=True, slots=True)
class TextRequest(Request):
    """A request to continue a text, or its tokens. echo: True if the answer begins with the prompt."""

    prompt: str | list[int]
    echo: bool

    @property
    def is_scored(self) -> bool:
        """True if the answer has the log-probabilities of the prompt's tokens."""
        return self.echo and self.logprobs is not None


class GivenChat(NamedTuple):
    """A request for the next reply of a chat, in the form that all APIs share. Most of it is not checked yet.

    Attributes
    ----------
    messages
        Pairs (path in the request, message).
    tools
        The tools that are functions.
    fields
        The other fields of the request, with the names of /v1/chat/completions.
    output_format
        The format in a field that only one API has.
    has_progress
        True if the API's streams can report how much of the prompt has been read.
    """

    messages: Sequence[tuple[str, object]]
    tools: list[GivenTool]
    fields: dict[str, Any]
    output_format: OutputFormat | None = None
    has_progress: bool = False


def as_chat(body: object) -> GivenChat:
    """Return the chat in a body of /v1/chat/completions."""
    fields = Fields(body)
    given = messages.listed(fields.pop("messages")), listed(fields.pop("tools"))
    return GivenChat(*given, {name: fields.pop(name) for name in fields.left}, has_progress=True)


def check_chat(given: GivenChat, defaults: Defaults, name: str | None = None) -> ChatRequest:
    """Check a chat, and fill in the defaults."""
    fields = Fields(given.fields)
    checked = messages.check(given.messages)
    messages.drop_header(checked)
    if defaults.system and all(message["role"] != "system" for message in checked):
        checked.insert(0, {"role": "system", "content": defaults.system})
    begun = _begun(fields, checked)
    tools = check_tools(given.tools)
    choice = check_choice(fields.pop("tool_choice"), tools)
    choice = replace(choice, one_call=not fields.flag("parallel_tool_calls", True))
    if begun and choice.kind == "required":
        raise ApiError.at("tool_choice", "must be auto or none if the last message is continued")
    has_logprobs = fields.flag("logprobs")
    n_top = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if n_top and not has_logprobs:
        raise ApiError.at("top_logprobs", "needs logprobs to be true")
    key = fields.text("prompt_cache_key")
    thinking_options = thinking.check(fields, defaults.thinking)
    common = _common(fields, defaults, given.output_format, has_progress=given.has_progress)
    if choice.kind == "required" and common["output_format"] and common["output_format"].kind == "schema":
        # as in OpenAI's API, a schema is for replies without calls
        common["output_format"] = None
    return ChatRequest(
        messages=checked,
        begun=begun,
        thinking=thinking_options,
        name=name or key,
        tools=tools,
        schema_places=[tool.schema_where for tool in given.tools],
        choice=choice,
        logprobs=(n_top or 0) if has_logprobs else None,
        **common,
    )


def _begun(fields: Fields, checked: list[Message]) -> str:
    """If the reply continues the last message, remove this message and return its text. Otherwise return "".

    Raises ApiError if the fields ask for a continuation but the last message cannot be continued, or if the
    fields contradict each other.
    """
    name = "continue_final_message"
    is_given, continues = name in fields.left, fields.flag(name, True)
    last = checked[-1]
    fits = last["role"] == "assistant" and "tool_calls" not in last and len(checked) > 1
    if is_given and continues and not fits:
        raise ApiError.at(
            name, "needs a last message of the assistant, without calls, that follows another message"
        )
    if not fields.flag("add_generation_prompt", True) and not (continues and fits):
        raise ApiError.at(
            "add_generation_prompt", "must be true unless a last message of the assistant is continued"
        )
    text: str = checked.pop()["content"] if continues and fits else ""
    return text


def check_text(body: object, defaults: Defaults) -> TextRequest:
    """Check a body of /v1/completions, and fill in the defaults."""
    fields = Fields(body)
    return TextRequest(
        prompt=_prompt(fields.pop("prompt")),
        echo=fields.flag("echo"),
        logprobs=_logprobs(fields),
        **_common(fields, defaults),
    )


def _logprobs(fields: Fields) -> int | None:
    value = fields.pop("logprobs")
    # In /v1/completions, "logprobs" is a number. But some clients send false, as in /v1/chat/completions:
    # treat false as no log-probabilities
    return None if value is None or value is False else need_whole(value, "logprobs", 0, MAX_LOGPROBS)


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(each) is int for each in value):
        return value
    if isinstance(value, list):
        raise ApiError.at("prompt", "must be one text: kvtool answers one prompt per request")
    raise wrong("prompt", "a string", value)


def _common(
    fields: Fields, defaults: Defaults, given: OutputFormat | None = None, *, has_progress: bool = True
) -> dict[str, Any]:
    """Return the fields of `Request` except `logprobs`. given, has_progress: see `GivenChat`."""
    for name in ("n", "best_of"):
        if (fields.whole(name, 1, 2**31 - 1) or 1) > 1:
            raise ApiError.at(name, "must be 1: kvtool writes one answer a request")
    # any name means the model that is served
    fields.text("model")
    stream_options = fields.mapping("stream_options") or {}
    stream = fields.flag("stream")
    common = {
        "sampling": _sampling(fields, defaults.sampling),
        "output_format": output_format.check(fields, given),
        "n_max": _n_max(fields, defaults.n_max),
        "seed": _seed(fields, defaults.seed),
        "stop_tokens": fields.tokens("stop_token_ids"),
        "ignores_end": fields.flag("ignore_eos"),
        "stream": stream,
        "reuses": fields.flag("cache_prompt", True),
        # an API without progress leaves the field to the ignored ones
        "with_progress": has_progress and fields.flag("return_progress") and stream,
        "with_usage": stream and bool(stream_options.get("include_usage")),
        "n_share": _n_share(fields.mapping("kvtool")),
    }
    fields.check_rest()
    return common | {"ignored": [shown(each) for each in fields.left[:MAX_IGNORED]]}


def _n_max(fields: Fields, default: int | None) -> int | None:
    """Return the maximum number of tokens of the answer. In a request, -1 means no limit (llama-server)."""
    given = [fields.whole(name, -1, 2**31 - 1) for name in declared(GenerationOptions)["n"].request]
    n = next((n for n in given if n is not None), default)
    return None if n == -1 else n


def _n_share(options: dict[str, Any] | None) -> int:
    """Return `Request.n_share`: the value of "share" in the object `kvtool` of a request, or 0."""
    fields = Fields({f"kvtool.{name}": value for name, value in (options or {}).items()})
    n = fields.whole("kvtool.share", 0, 2**31 - 1) or 0
    fields.refuse(fields.left)
    return n


def _seed(fields: Fields, default: int | None) -> int | None:
    seed = fields.whole("seed", -(2**63), 2**64 - 1)
    # -1 is treated as a missing seed, because it means a random seed in llama-server
    return default if seed is None or seed == -1 else seed % 2**31


def _sampling(fields: Fields, default: Sampling) -> Sampling:
    changes: dict[str, Any] = {}
    for name, parameter in _NUMBERS.items():
        is_whole = _KINDS[parameter] is int
        value = fields.whole(name, -(2**31), 2**31 - 1) if is_whole else fields.number(name)
        if value is not None:
            option = declared(Sampling)[parameter]
            try:
                value = option.parse(value, name)
                option.check(value, name)
            except UsageError as error:
                raise ApiError(str(error), param=name) from None
            changes.setdefault(parameter, value)
    if stops := tuple(each for each in fields.texts("stop", MAX_STOPS) if each):
        changes["stop"] = stops
    if breakers := fields.texts("dry_sequence_breakers", MAX_BREAKERS):
        changes["dry_sequence_breaker"] = tuple(each for each in breakers if each != "none")
    if bias := _bias(fields.pop("logit_bias")):
        changes["logit_bias"] = bias
    try:
        return replace(default, **changes)
    except UsageError as error:
        raise of_usage(error) from None


def of_usage(error: UsageError) -> ApiError:
    """Convert the error of an option to an ApiError: names of options become names of fields."""
    message = str(error).replace("--logit-bias", "logit_bias").replace("--", "")
    return ApiError(message, param="logit_bias" if message.startswith("logit_bias") else None)


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) pairs. The value is an object as in OpenAI's API, or a list as in llama-server.

    A bias of false bans the token.
    """
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise wrong("logit_bias", "an object or a list of pairs", value)
    biases = []
    for pair in pairs:
        try:
            token, bias = pair
            if int(token) != float(token):
                raise ValueError
            biases.append((int(token), -inf if bias is False else float(bias)))
        except (TypeError, ValueError, OverflowError):
            fault = f"must have pairs of a token and a number, got {shown(pair)}"
            raise ApiError.at("logit_bias", fault) from None
    return tuple(biases)
