"""Run the server. HTTP is handled in the main thread, engines run in other threads."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import Any

import h11
import uvicorn

from kvtool.errors import KvtoolError, LibraryError
from kvtool.serve.http.app import Site, make
from kvtool.serve.pool import SlotPool
from kvtool.system import interrupt

_HEADERS = 64 * 2**10
"""Maximum number of bytes of a request's headers."""

_BACKLOG = 2048
"""Maximum number of connections that wait until they are accepted."""

_REPEAT_S = 60
"""The line about too many open files is printed at most once in this number of seconds."""

_GRACE_S = 1
"""Maximum seconds to wait for HTTP when the server stops. The maximum for the engine is the same."""


def serve(
    site: Site,
    opened: Callable[[], AbstractContextManager[SlotPool]],
    listening: socket.socket,
    ready: Callable[[SlotPool], None],
) -> int:
    """Serve until a signal stops the server, and return the signal.

    The engine's thread may not have ended yet: it may still be decoding. Raises KvtoolError if the engine
    cannot be opened.

    opened: loads the model and yields the slots. Called in the engine's thread.
    ready: called in the engine's thread after the model was loaded.
    """
    config = uvicorn.Config(
        make(site),
        # do not let uvicorn choose httptools, which has other limits
        http="h11",
        ws="none",
        log_config=None,
        # do not let uvicorn log mistakes of clients; `internal_error` prints bugs of kvtool
        log_level="critical",
        access_log=False,
        lifespan="off",
        server_header=False,
        h11_max_incomplete_event_size=_HEADERS,
        # when no file descriptor is free, asyncio calls accept this many times, and each call fails
        backlog=1,
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = _Server(config, site)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with opened() as pool:
                try:
                    site.start(pool)
                    ready(pool)
                    pool.run(site.jobs)
                finally:
                    # the model is freed next, so no thread may use it
                    site.pool = None
                    site.threads.shutdown(cancel_futures=True)
        except BaseException as error:  # noqa: BLE001
            # the main thread raises this error again
            failed.append(error)
            server.should_exit = True

    # a daemon thread ends with the process; this is safe at any time, because files are never half written
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
    """uvicorn's server with time limits. Without the limits, slow clients could keep connections forever."""

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site
        # for each connection that waits for its client: the time since which the client has done nothing
        self._stalled: dict[tuple[Any, ...], float] = {}
        self._full_at = -inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note_full)
        await super().startup(sockets)
        for each in sockets or ():
            # `backlog` has also set the length of the queue in the operating system
            each.listen(_BACKLOG)

    def _note_full(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say that no file descriptor is free for a connection. asyncio tries again after a second."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._full_at > _REPEAT_S:
            self._full_at = time.monotonic()
            self._site.say("too many open files: new connections wait; raise the limit (ulimit -n)")

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._close_stalled(time.monotonic())
        return await super().on_tick(counter)

    def _close_stalled(self, now: float) -> None:
        """Close connections whose clients send no request, or read nothing of an answer, for too long."""
        connections: list[Any] = list(self.server_state.connections)
        # `cycle` changes with each request, and the size of the buffer when the client reads
        stalled = [
            (each, each.cycle, each.transport.get_write_buffer_size())
            for each in connections
            if each.conn.their_state is h11.IDLE or each.flow.write_paused
        ]
        self._stalled = {key: self._stalled.get(key, now) for key in stalled}
        for (connection, *_), since in self._stalled.items():
            if now - since > self._site.limits.read_timeout:
                connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._site.jobs.close()
        self._site.stopping.set()
        connections: list[Any] = list(self.server_state.connections)
        for each in connections:
            # do not wait for clients that are still sending a request or that do not read the answer
            if each.conn.their_state is h11.SEND_BODY or each.flow.write_paused:
                each.transport.abort()
        await super().shutdown(sockets)


@contextmanager
def _noted_signals(server: uvicorn.Server) -> Iterator[list[int]]:
    """Yield a list. Each SIGINT, SIGTERM and SIGHUP that comes while the block runs is added to this list.

    uvicorn handles SIGINT and SIGTERM while it runs, and raises them again when it ends. If a signal comes
    before uvicorn runs, the server stops as soon as it has started. An ignored SIGHUP stays ignored.
    """
    signals: list[int] = []

    def note(number: int, _: object) -> None:
        signals.append(number)
        server.should_exit = True

    numbers = {signal.SIGINT, signal.SIGTERM, *interrupt.not_ignored()}
    before = {each: signal.signal(each, note) for each in numbers}
    try:
        yield signals
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
