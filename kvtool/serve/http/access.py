"""The access log. It gets one line for each request, after the answer has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtool.serve.api.fields import shown
from kvtool.serve.events import End

_GONE = 499
"""Status of an answer that is not sent, because the client has left."""


class AccessLog:
    """Calls `say` with a line about each request.

    The line has the time, client, method, path, status and duration of the request. It ends with the tokens
    of the answer, or with the error if the request was refused or the answer was cut.
    """

    def __init__(self, app: ASGIApp, say: Callable[[str], None]) -> None:
        self._app = app
        self._say = say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, is_over, started = 0, False, time.perf_counter()
        # the routes store two values in this dict: the job of the answer, and the error that the client gets
        state: dict[str, Any] = scope.setdefault("state", {})

        async def send_noted(message: Message) -> None:
            nonlocal status, is_over
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                is_over = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            ms = 1e3 * (time.perf_counter() - started)
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            client = scope["client"][0] if scope.get("client") else "-"
            path = "".join(each if each.isprintable() else " " for each in shown(scope["path"]))
            line = f"{now} {client} {shown(scope['method'])} {path} {status} {ms:.0f} ms"
            job, error = state.get("job"), state.get("error")
            if error:
                line += f": {error}"
            elif job and job.end:
                line += f", {_tokens(job.end)}"
            elif job and job.error:
                line += f", the answer was cut: {job.error}"
            elif not is_over or status == _GONE:
                line += ", the client has gone"
            self._say(line)


def _tokens(end: End) -> str:
    read = f"{end['n_prompt']:,} tokens ({end['n_cached']:,} cached) read in {end['read_s']:.1f} s"
    return f"{read}, {end['n_written']:,} written in {end['write_s']:.1f} s ({end['finish']})"
