"""A request's JSON, and its fields, each checked for its type and range as it is taken out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any, NoReturn

from kvtool.serve.errors import ApiError

MOST_DEEP = 200
"""The most levels of a request's JSON: what looks through it later may recurse."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(
    r"(\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB]XX\\u[dD][c-fC-F]XX)|\\u[dD][89a-fA-F]XX".replace(
        "XX", "[0-9a-fA-F]{2}"
    )
)
"""Escapes in JSON; the group has those that are no half of a character alone."""


def parsed(data: bytes) -> Any:
    """The JSON of a body. Halves of characters, which no tokenizer takes, become U+FFFD. Raises ApiError."""
    try:
        text = data.decode("utf-8-sig")
        if _HALF.search(text):
            text = _ESCAPE.sub(lambda found: found[1] or r"\ufffd", text)
        body = json.loads(text, parse_constant=_not_json, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    except _NoNumber as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    except ValueError:
        # Python reads no numbers of thousands of digits
        raise ApiError("the body has a number of too many digits") from None
    _check_depth(body)
    return body


def _check_depth(body: object) -> None:
    level: list[Any] = [body]
    for _ in range(MOST_DEEP):
        inner = (each.values() if isinstance(each, dict) else each for each in level if _has_more(each))
        level = list(chain.from_iterable(inner))
        if not level:
            return
    raise _too_deep()


def _has_more(value: object) -> bool:
    return isinstance(value, (dict, list))


def _too_deep() -> ApiError:
    return ApiError(f"the body is nested too deeply; the most are {MOST_DEEP} levels")


class _NoNumber(ValueError):
    """What Python takes for a number, and JSON does not, or what is too large."""


def _not_json(name: str) -> NoReturn:
    raise _NoNumber(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _NoNumber("a number is too large")
    return value


class Fields:
    """A request's JSON object. Each method takes a field out; null counts as missing.

    Raises ApiError, which names the field, for a value that does not fit.
    """

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise ApiError(f"the body must be a JSON object, got {kind_of(body)}")
        self._left = {name: value for name, value in body.items() if value is not None}

    @property
    def left(self) -> list[str]:
        """The names of those that were not taken out."""
        return list(self._left)

    def any(self, name: str) -> Any:
        """The value as it is; None if there is none."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.any(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, "a string", value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, "true or false", value)
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number in low..high."""
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(name, "a whole number", value)
        if not low <= value <= high:
            raise ApiError(f"{name} must be in {low}..{high}, got {shown(value)}", param=name)
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(name, "a number", value)
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise ApiError(f"{name} must be a finite number", param=name)
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A string, or a list of at most so many."""
        value = self.any(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise wrong(name, "a string or a list of strings", value)
        if len(found) > most:
            raise ApiError(f"{name} takes at most {most} strings, got {len(found)}", param=name)
        return tuple(found)

    def refuse(self, names: Iterable[str], why: str = "is not there in kvtool; leave it out") -> None:
        """Raises ApiError if one of these fields is given, but for what asks for nothing."""
        for name in names:
            if self.any(name) not in (None, False, 0, "", [], {}):
                raise ApiError(f"{name} {why}", param=name, code="unsupported_parameter")


def wrong(name: str, needed: str, value: object) -> ApiError:
    """The error for a value of another type."""
    return ApiError(f"{name} must be {needed}, got {kind_of(value)}", param=name, code="invalid_type")


def kind_of(value: object) -> str:
    """The JSON type of a value, in words."""
    kinds: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return kinds.get(type(value), "null")


def shown(value: object) -> str:
    """A value from a stranger, cut to what fits on a line."""
    if value is None:
        return "null"
    try:
        text = str(value)
    except ValueError:
        # Python refuses to print numbers of thousands of digits
        return "a huge number"
    return text if len(text) <= 40 else f"{text[:39]}\u2026"
