"""Read the fields of a request's JSON. Type and range of a field are checked when the field is read."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeVar

from kvtool.serve.api.errors import ApiError

_T = TypeVar("_T")

MAX_DEPTH = 200
"""Maximum nesting depth of a request's JSON. It is limited, because recursive functions process it."""

NOTHING: tuple[Any, ...] = (False, 0, "", [], {})
"""Values that turn a field of a request off."""

_TEXT_ONLY = "kvtool only reads and writes text; remove it"

_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # OpenAI
    ("modalities", ([], ["text"]), _TEXT_ONLY),
    ("audio", (), _TEXT_ONLY),
    ("web_search_options", (), "kvtool cannot search the web; remove it"),
    ("functions", ([],), "use tools"),
    ("function_call", ("none", "auto"), "use tool_choice"),
    ("suffix", ("",), "kvtool only continues a text at its end; remove it"),
    # llama-server
    ("image_data", ([],), _TEXT_ONLY),
    ("n_probs", (0,), "use logprobs"),
    # vLLM
    ("bad_words", ([],), "ban single tokens by logit_bias"),
    ("min_tokens", (0,), "remove it"),
    ("allowed_token_ids", ([],), "use a grammar"),
    # these fields of vLLM, SGLang, text-generation-webui and Ollama say what the answer must fit
    ("guided_json guided_json_object", ("", False), "use response_format"),
    ("structured_outputs", ({},), "use response_format"),
    ("guided_regex regex", ("",), "use response_format with a pattern"),
    ("guided_choice", ([],), "use response_format with an enum"),
    ("guided_grammar ebnf grammar_string", ("",), "use grammar"),
    ("format", ("",), "use response_format"),
)
"""Fields that change answers of other servers and that kvtool does not support.

Each row has the names of fields, the values that do not change an answer, and a hint for the error. These
values and null are accepted.
"""

NEUTRAL = {name: (values, hint) for names, values, hint in _UNSUPPORTED for name in names.split()}

HARMLESS = frozenset(
    (
        # OpenAI
        *("user", "metadata", "safety_identifier", "prompt_cache_retention"),
        # llama-server, vLLM, LM Studio, Ollama, OpenRouter
        *("timings_per_token", "request_id", "ttl", "keep_alive", "usage"),
        # Anthropic, Codex
        *("cache_control", "client_metadata"),
    )
)
"""Fields of other servers that do not change the answer. They are ignored."""

INERT: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    # the policy decides which tokens of a long chat stay
    "truncation": ("disabled",),
    # Claude Code asks to keep all thoughts
    "context_management": (
        *([], {}, {"edits": []}),
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
}
"""Fields of other servers that have no effect here, each with the values that can be ignored silently.

If a request has another value, the answer lists the field as ignored.
"""


def loads(text: str, **how: Any) -> Any:
    """Parse JSON with `json.loads(text, **how)`. Halves of characters (lone surrogates) become U+FFFD.

    Strings with lone surrogates cannot be encoded. Raises ValueError, and RecursionError for deep nesting.
    """
    value = json.loads(text, **how)
    # a text that can be encoded has lone surrogates only as escapes
    if "\\u" in text:
        written = json.dumps(value, ensure_ascii=False)
        try:
            written.encode()
        except UnicodeEncodeError:
            return json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value


def finite(text: str) -> float:
    """Return the number of a text. Raises ValueError for NaN and infinity, which JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def parsed(data: bytes) -> Any:
    """Parse the JSON of a body with `loads`. Raises ApiError."""
    if not data.strip():
        raise ApiError("the body is empty; send a JSON object")
    # no other thread runs during `loads`, and with garbage collection it may take five times as long
    gc.disable()
    try:
        body = loads(data.decode("utf-8-sig"), parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    except ValueError:
        # `finite` refuses NaN and infinity, and Python a number that has thousands of digits
        raise ApiError("the body has a number that is not finite or has too many digits") from None
    finally:
        gc.enable()
    _check_depth(body)
    return body


def _check_depth(body: object) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        parents = (each for each in level if isinstance(each, (dict, list)))
        level = [*chain.from_iterable(each.values() if isinstance(each, dict) else each for each in parents)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(f"the body is nested too deeply; the most are {MAX_DEPTH} levels")


class Fields:
    """The JSON object of a request. Each method removes a field and returns its value.

    A field that is null is treated as missing. Raises ApiError, which names the field, if a value has another
    type or is out of range.
    """

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise ApiError(f"the body must be a JSON object, got {kind_of(body)}")
        self._left = {name: value for name, value in body.items() if value is not None}

    @property
    def left(self) -> list[str]:
        """Names of the fields that have not been removed yet."""
        return list(self._left)

    def pop(self, name: str) -> Any:
        """Return the value without checking it, or None if the field is missing."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        return optional(self.pop(name), str, name)

    def mapping(self, name: str) -> dict[str, Any] | None:
        return optional(self.pop(name), dict, name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = optional(self.pop(name), bool, name)
        return default if value is None else value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.pop(name)
        return None if value is None else need_whole(value, name, low, high)

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        value = self.pop(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(name, "a number", value)
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise ApiError.at(name, "must be a finite number")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return a list of tokens, which are whole numbers from 0. It is empty if the field is missing."""
        given = optional(self.pop(name), list, name) or ()
        return tuple(need_whole(each, f"{name}[{i}]", 0, 2**31 - 1) for i, each in enumerate(given))

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return a list of at most `most` strings. A single string becomes a list with one string."""
        value = self.pop(name)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list):
            raise wrong(name, "a string or a list of strings", value)
        need_texts(texts, name)
        if len(texts) > most:
            raise ApiError.at(name, f"takes at most {most} strings, got {len(texts)}")
        return tuple(texts)

    def refuse(self, names: Iterable[str], hint: str = "remove it") -> None:
        """Remove the fields with these names. Raises ApiError if a field is not turned off.

        hint: the end of the error, which says what to do instead.
        """
        for name in names:
            self._refuse(name, NOTHING, hint)

    def check_rest(self) -> None:
        """Remove the fields in NEUTRAL and HARMLESS, and the fields that have a value listed in INERT.

        Raises ApiError if a field in NEUTRAL is turned on.
        """
        for name, (neutral, hint) in NEUTRAL.items():
            self._refuse(name, neutral, hint)
        for name in HARMLESS | {name for name, nothing in INERT.items() if self._left.get(name) in nothing}:
            self.pop(name)

    def _refuse(self, name: str, neutral: tuple[Any, ...], hint: str) -> None:
        value = self.pop(name)
        if value is not None and value not in neutral:
            raise ApiError.at(name, f"is not supported; {hint}", "unsupported_parameter")


_NEEDED: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
_KINDS: dict[type, str] = {**_NEEDED, bool: "a boolean", int: "a number", float: "a number"}


def need(value: object, kind: type[_T], where: str) -> _T:
    """Return the value. Raises ApiError if it does not have this type. where: path of the value."""
    if not isinstance(value, kind):
        raise wrong(where, _NEEDED[kind], value)
    return value


def need_texts(values: list[Any], where: str) -> None:
    """Raise ApiError if a value of the list is not a string."""
    for i, each in enumerate(values):
        need(each, str, f"{where}[{i}]")


def need_text(values: dict[str, Any], name: str, where: str) -> str:
    """Return the string `name` of an object. Raises ApiError. where: path of the object."""
    return need(values.get(name), str, f"{where}.{name}")


def need_whole(value: object, where: str, low: int, high: int) -> int:
    """Return a whole number in low..high. Raises ApiError for other values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float):
        raise ApiError.at(where, f"must be a whole number, got {shown(value)}", "invalid_type")
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(where, "a whole number", value)
    if not low <= value <= high:
        raise ApiError.at(where, f"must be in {low}..{high}, got {shown(value)}")
    return value


def optional(value: object, kind: type[_T], where: str) -> _T | None:
    """Return the value, which may be None. Raises ApiError if it does not have this type."""
    return None if value is None else need(value, kind, where)


def wrong(name: str, needed: str, value: object) -> ApiError:
    """Return the error for a value of the wrong type.

    A null field counts as missing. A null item of a list counts as a value of the wrong type.
    """
    if value is None and not name.endswith("]"):
        return ApiError.at(name, "is missing")
    return ApiError.at(name, f"must be {needed}, got {kind_of(value)}", "invalid_type")


def kind_of(value: object) -> str:
    """Return the name of a value's JSON type."""
    return _KINDS.get(type(value), "null")


def shown(value: object) -> str:
    """Return a value for a message: a text as it is, any other value as JSON. Long texts are cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}\u2026"
