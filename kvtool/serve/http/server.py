"""The whole server: HTTP in the main thread, engines in other threads."""

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
"""Maximum bytes of the headers of a request."""

_GRACE_S = 1
"""Seconds for HTTP, and then for the engine, to end after the server is stopped."""


def serve(
    site: Site,
    opened: Callable[[], AbstractContextManager[SlotPool]],
    listening: socket.socket,
    ready: Callable[[SlotPool], None],
) -> int:
    """Serve until a signal stops the server, and return the signal. An engine may then still be in a step.

    Raises the KvtoolError of an engine that cannot be opened.

    Parameters
    ----------
    opened
        Loads the model and yields its slots, in the engine's thread.
    listening
        A bound socket.
    ready
        Called in the engine's thread after the model is loaded.
    """
    config = uvicorn.Config(
        make(site),
        # uvicorn would use httptools if it is installed, which has other limits
        http="h11",
        ws="none",
        log_config=None,
        # uvicorn would log clients' mistakes; bugs of kvtool are printed by `internal_error`
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
            # the main thread raises it
            failed.append(error)
            site.props = None
            server.should_exit = True

    # a daemon thread ends with the process. This is safe in any step, because no file is ever half written
    engine = threading.Thread(target=work, name="engine", daemon=True)
    with _noted_signals(server) as signals:
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
    """uvicorn's server, with time limits. Without them a slow client could keep its connection forever."""

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site
        # time when each connection began to wait for its client
        self._stalled: dict[Any, float] = {}

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._close_stalled(time.monotonic())
        return await super().on_tick(counter)

    def _close_stalled(self, now: float) -> None:
        """Close connections whose client sends no request, or reads no answer, for too long."""
        connections: list[Any] = list(self.server_state.connections)
        stalled = [
            each for each in connections if each.conn.their_state is h11.IDLE or each.flow.write_paused
        ]
        self._stalled = {each: self._stalled.get(each, now) for each in stalled}
        for each, since in self._stalled.items():
            if now - since > self._site.limits.read_timeout:
                each.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._site.jobs.close()
        connections: list[Any] = list(self.server_state.connections)
        for each in connections:
            # the client is still sending its request, or does not read the answer
            if each.conn.their_state is h11.SEND_BODY or each.flow.write_paused:
                each.transport.abort()
        await super().shutdown(sockets)


@contextmanager
def _noted_signals(server: uvicorn.Server) -> Iterator[list[int]]:
    """Yield a list that gets each SIGINT and SIGTERM within the block.

    uvicorn handles these signals while it runs, and raises them again at its end. A signal that comes earlier
    stops the server as soon as it has started.
    """
    signals: list[int] = []

    def note(number: int, _: object) -> None:
        signals.append(number)
        server.should_exit = True

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
