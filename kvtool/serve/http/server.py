"""The server as a whole: HTTP in the main thread, engines in others."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import h11
import uvicorn

from kvtool.errors import KvtoolError, LibraryError
from kvtool.serve.http.app import Site, make
from kvtool.serve.pool import SlotPool

_HEADERS = 64 * 2**10
"""The most bytes of a request's head."""

_GRACE_S = 1
"""Seconds that HTTP, and then the engine, may take to end when the server is stopped."""


def serve(
    site: Site,
    opened: Callable[[], AbstractContextManager[SlotPool]],
    listening: socket.socket,
    ready: Callable[[SlotPool], None],
) -> int:
    """Serves until a signal stops it, and returns which. The engine may still be in a long step then.

    opened: loads the model, in the engine's thread. listening: a socket that is bound. ready: called in the
    engine's thread once the model is loaded. Raises the KvtoolError with which the engine was not opened.
    """
    config = uvicorn.Config(
        make(site),
        # other implementations of HTTP, which may be installed, have other limits
        http="h11",
        ws="none",
        log_config=None,
        # a client's mistakes; ours are printed where they are made
        log_level="critical",
        access_log=False,
        lifespan="off",
        server_header=False,
        h11_max_incomplete_event_size=_HEADERS,
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = _Server(config, site)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with opened() as pool:
                ready(pool)
                pool.run(site.jobs)
        except BaseException as error:  # noqa: BLE001
            # the main thread says it
            failed.append(error)
            site.props = None
            server.should_exit = True

    # it does not keep the process: no file is half written at any time
    engine = threading.Thread(target=work, name="engine", daemon=True)
    with _noted(server) as signals:
        engine.start()
        try:
            server.run(sockets=[listening])
        finally:
            site.jobs.close()
            engine.join(_GRACE_S)
    if failed and isinstance(failed[0], KvtoolError):
        raise failed[0]
    if failed:
        raise LibraryError(f"the engine has failed: {failed[0]!r}") from failed[0]
    return signals[0]


class _Server(uvicorn.Server):
    """uvicorn's, which waits for ever for a request's head, for a client to read, and for answers to end."""

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site
        # since when each connection has waited for its client
        self._stalled: dict[Any, float] = {}

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._close_stalled(time.monotonic())
        return await super().on_tick(counter)

    def _close_stalled(self, now: float) -> None:
        """Closes connections whose client owes the head of a request, or does not read, for too long."""
        connections: list[Any] = list(self.server_state.connections)
        stalled = [one for one in connections if one.conn.their_state is h11.IDLE or one.flow.write_paused]
        self._stalled = {each: self._stalled.get(each, now) for each in stalled}
        for each, since in self._stalled.items():
            if now - since > self._site.limits.read_timeout:
                each.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._site.jobs.close()
        connections: list[Any] = list(self.server_state.connections)
        for each in connections:
            # their clients take no answer
            if each.conn.their_state is h11.SEND_BODY or each.flow.write_paused:
                each.transport.abort()
        await super().shutdown(sockets)


@contextmanager
def _noted(server: uvicorn.Server) -> Iterator[list[int]]:
    """Yield the list of the SIGINTs and SIGTERMs that arrive within the block.

    uvicorn handles them itself while it runs, and raises them again at its end. One that arrives before stops
    the server as soon as it has started.
    """
    found: list[int] = []

    def note(number: int, _: object) -> None:
        found.append(number)
        server.should_exit = True

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield found
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
