"""Errors that a client gets instead of an answer."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

_PLACE = re.compile(r"(?<![\w.])\w+(?:\[\d+\])?(?:\.\w+(?:\[\d+\])?){0,2}")
"""Pattern of places in a body, such as "messages[1].content". Keys of `ClientPlaces.places` fit it."""


@dataclass(eq=False)
class ApiError(Exception):
    """The error of a request. It has the fields of OpenAI's error bodies.

    Attributes
    ----------
    message
        One line that names the fault and a remedy.
    param
        The field of the request that is wrong, such as "messages[2].role".
    code
        Code for programs, such as "context_length_exceeded".
    status
        HTTP status.
    kind
        OpenAI's `type`, such as "invalid_request_error".
    more
        Other fields of the error body.
    """

    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    status: int = 400
    kind: str = "invalid_request_error"
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # replace line breaks and control characters, because the message may quote a request's text
        self.message = "".join(each if each.isprintable() else " " for each in self.message)
        super().__init__(self.message)

    @classmethod
    def at(cls, where: str, fault: str, code: str | None = None) -> ApiError:
        """Return the error of a field. where: path of the field. fault: the message after the path."""
        return cls(f"{where} {fault}", param=where, code=code)

    @property
    def body(self) -> dict[str, Any]:
        """JSON that the client gets."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | self.more}


@dataclass(frozen=True, slots=True)
class ClientPlaces:
    """Translates places in a checked chat, such as "messages[1].content", to places in the client's request.

    Attributes
    ----------
    places
        Maps places in the converted body (a body of /v1/chat/completions) to places in the client's request.
    shift
        Index of a message in the request, minus the index of this message in the chat. It is above 0 if
        messages at the start were joined or dropped, and -1 if a system prompt was added.
    """

    places: Mapping[str, str]
    shift: int = 0

    def in_error(self, error: ApiError) -> ApiError:
        """Return a copy of the error. Its message and `param` name places in the client's request."""
        param = None if error.param is None else self.in_text(error.param)
        return replace(error, message=self.in_text(error.message), param=param)

    def in_text(self, text: str) -> str:
        """Replace places in the chat by places in the client's request. Return the new text."""
        if self.shift:
            text = re.sub(r"\bmessages\[(\d{1,9})\]", lambda match: self._message(int(match[1])), text)
        return _PLACE.sub(lambda match: self._translated(match[0]), text) if self.places else text

    def _translated(self, place: str) -> str:
        """Replace the longest known beginning of a place."""
        known = place
        while known and known not in self.places:
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
        return self.places.get(known, "") + place[len(known) :]

    def _message(self, i: int) -> str:
        return f"messages[{i + self.shift}]" if i + self.shift >= 0 else "the server's system prompt"


def internal_error(error: Exception) -> ApiError:
    """Print the traceback of a bug in kvtool to the log, and return the error for the client."""
    traceback.print_exception(error)
    name = type(error).__name__
    return ApiError(f"kvtool has failed ({name}); its log says more", status=500, kind="server_error")
