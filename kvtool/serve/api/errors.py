"""Errors that a client gets instead of an answer."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any


@dataclass(eq=False)
class ApiError(Exception):
    """Error of a request, with the fields of OpenAI's error bodies.

    Attributes
    ----------
    message
        One line: the fault, and a remedy.
    param
        Field of the request that is wrong, such as "messages[2].role".
    code
        Code for programs, such as "context_length_exceeded".
    status
        HTTP status.
    kind
        OpenAI's `type`, such as "invalid_request_error".
    more
        Further fields of the error body.
    """

    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    status: int = 400
    kind: str = "invalid_request_error"
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # the message may quote a request's text: replace line breaks and control characters
        self.message = "".join(each if each.isprintable() else " " for each in self.message)
        super().__init__(self.message)

    @property
    def body(self) -> dict[str, Any]:
        """JSON that the client gets."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | self.more}


@dataclass(frozen=True, slots=True)
class ClientPlaces:
    """Translates places in a checked chat ("messages[1].content") to places in the client's request.

    Attributes
    ----------
    places
        Maps each place in the converted body (of /v1/chat/completions) to its place in the client's request.
    shift
        Index of a message in the request minus its index in the chat. Above 0 if messages at the start were
        joined or dropped; -1 if a system prompt was added.
    """

    places: Mapping[str, str]
    shift: int = 0

    def in_error(self, error: ApiError) -> ApiError:
        """Return the error with the client's places in its message and `param`."""
        param = None if error.param is None else self.in_text(error.param)
        return replace(error, message=self.in_text(error.message), param=param)

    def in_text(self, text: str) -> str:
        """Return a text with the client's places."""
        if self.shift:
            text = re.sub(r"\bmessages\[(\d+)\]", lambda match: self._message(int(match[1])), text)
        if not self.places:
            return text
        known = "|".join(map(re.escape, sorted(self.places, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.])({known})(?!\w)", lambda match: self.places[match[1]], text)

    def _message(self, i: int) -> str:
        return f"messages[{i + self.shift}]" if i + self.shift >= 0 else "the server's system prompt"


def internal_error(error: Exception) -> ApiError:
    """Return the error for a bug in kvtool, and print its traceback to the log."""
    traceback.print_exception(error)
    name = type(error).__name__
    return ApiError(f"kvtool has failed ({name}); its log says more", status=500, kind="server_error")
