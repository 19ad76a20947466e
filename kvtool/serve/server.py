"""The server as a whole: HTTP in the main thread, the engine in one of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import uvicorn

from kvtool.errors import KvtoolError, LibraryError
from kvtool.serve import jobs
from kvtool.serve.app import Site, make
from kvtool.serve.talk import Talk

_HEADERS = 64 * 2**10
"""The most bytes of a request's head."""

_GRACE_S = 2
"""Seconds that answers may take to end when the server is stopped."""


def serve(
    site: Site,
    opened: Callable[[], AbstractContextManager[Talk]],
    listening: socket.socket,
    ready: Callable[[Talk], None],
) -> None:
    """Serves until it is stopped. Raises the KvtoolError with which the engine could not be opened.

    opened: loads the model, in the engine's thread. listening: a socket that is bound. ready: called in the
    engine's thread once the model is loaded.
    """
    config = uvicorn.Config(
        make(site),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        h11_max_incomplete_event_size=_HEADERS,
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = uvicorn.Server(config)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with opened() as talk:
                ready(talk)
                jobs.run(site.waiting, talk.answer)
        except BaseException as error:  # noqa: BLE001
            # the main thread says it
            failed.append(error)
            site.props = None
            server.should_exit = True

    engine = threading.Thread(target=work, name="engine")
    engine.start()
    try:
        server.run(sockets=[listening])
    finally:
        site.waiting.close()
        engine.join()
    if failed and isinstance(failed[0], KvtoolError):
        raise failed[0]
    if failed:
        raise LibraryError(f"the engine has failed: {failed[0]!r}") from failed[0]
