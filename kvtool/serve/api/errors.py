"""Errors: sent to a client instead of an answer."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any


@dataclass(eq=False)
class ApiError(Exception):
    """A request that cannot be answered, in the words of OpenAI's error bodies.

    Attributes
    ----------
    message
        One line: the fault, and a remedy.
    param
        The field of the request that is wrong, such as "messages[2].role".
    code
        What programs look at, such as "exceed_context_size_error".
    status
        The HTTP status.
    kind
        OpenAI's `type`, such as "invalid_request_error".
    more
        Further fields of the body's error.
    """

    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    status: int = 400
    kind: str = "invalid_request_error"
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # it may quote a request
        self.message = "".join(each if each.isprintable() else " " for each in self.message)
        super().__init__(self.message)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that the client gets."""
        own = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": own | self.more}


@dataclass(frozen=True, slots=True)
class Names:
    """A client's names of the parts of a chat, for errors.

    Attributes
    ----------
    places
        Where the client put a part, by its place in a body of /v1/chat/completions ("messages[1].content").
    shift
        How many messages at the beginning were joined into one or dropped; negative for one that was added.
    """

    places: Mapping[str, str]
    shift: int = 0

    def of(self, error: ApiError) -> ApiError:
        """The error, naming the client's places in its message and its `param`."""
        param = None if error.param is None else self.of_text(error.param)
        return replace(error, message=self.of_text(error.message), param=param)

    def of_text(self, text: str) -> str:
        """The text, naming the client's places."""
        if self.shift:
            text = re.sub(r"\bmessages\[(\d+)\]", lambda found: self._message(int(found[1])), text)
        if not self.places:
            return text
        known = "|".join(map(re.escape, sorted(self.places, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.])({known})(?!\w)", lambda found: self.places[found[1]], text)

    def _message(self, i: int) -> str:
        return f"messages[{i + self.shift}]" if i + self.shift >= 0 else "the server's system prompt"


def bug(error: Exception) -> ApiError:
    """The error for a mistake in kvtool; the traceback goes to the log."""
    traceback.print_exception(error)
    what = type(error).__name__
    return ApiError(f"kvtool has failed ({what}); its log says more", status=500, kind="server_error")
