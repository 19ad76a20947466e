"""Errors that a client gets instead of an answer."""

from __future__ import annotations

import traceback
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

_MAX_MESSAGE = 500
"""Maximum number of characters of an error's message."""


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
        # cut the message, and replace line breaks and control characters, because it may quote a request
        end = "\u2026" if len(self.message) > _MAX_MESSAGE else ""
        cut = self.message[:_MAX_MESSAGE] + end
        self.message = "".join(each if each.isprintable() else " " for each in cut)
        super().__init__(self.message)

    @classmethod
    def at(cls, where: str, fault: str, code: str | None = None) -> ApiError:
        """Return the error of a field. where: path of the field."""
        return cls(f"{where} {fault}", param=where, code=code)

    @property
    def body(self) -> dict[str, Any]:
        """JSON that the client gets."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | self.more}


def internal_error(error: Exception) -> ApiError:
    """Print the traceback of a bug in kvtool to the log, and return the error for the client."""
    traceback.print_exception(error)
    name = type(error).__name__
    return ApiError(f"kvtool has failed ({name}); its log says more", status=500, kind="server_error")
