"""What a client gets instead of an answer."""

from __future__ import annotations

import traceback
from dataclasses import KW_ONLY, dataclass, field
from typing import Any


@dataclass(eq=False)
class ApiError(Exception):
    """A request that cannot be answered, in the words of OpenAI's error bodies.

    Attributes
    ----------
    message
        One line: what is wrong, and what to do about it.
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
        # it may repeat what a stranger has sent
        self.message = "".join(each if each.isprintable() else " " for each in self.message)
        super().__init__(self.message)

    @property
    def body(self) -> dict[str, Any]:
        """What the client gets."""
        own = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": own | self.more}


def bug(error: Exception) -> ApiError:
    """What a client gets for a mistake of ours; the log gets where it was made."""
    traceback.print_exception(error)
    what = type(error).__name__
    return ApiError(f"kvtool has failed ({what}); its log says more", status=500, kind="server_error")
