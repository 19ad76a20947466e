"""What is wrong with a request, as OpenAI's API says it."""

from __future__ import annotations


class ApiError(Exception):
    """A request that cannot be answered.

    Attributes
    ----------
    message
        What is wrong, in one line.
    param
        The request's field that is wrong, such as tools[1].function.name; None if no field is.
    code
        A word for programs; None for most errors.
    status
        The HTTP status.
    kind
        The error's type in OpenAI's words.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.kind = kind
