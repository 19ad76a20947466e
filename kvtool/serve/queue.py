"""Requests on their way through an engine, and those that wait for one."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from kvtool.serve.api.errors import ApiError, bug

Event = dict[str, Any]
"""What the engine says of a request: "kind" is "read", "piece", "end" or "error"."""

MOST_EVENTS = 2**14
"""The most events that wait for a client that does not read them."""


class Job:
    """A request on its way through the engine.

    Parameters
    ----------
    request
        What is asked for.
    client
        Who asks: clients take turns.

    Attributes
    ----------
    counts
        How many tokens the prompt has ("n_prompt") and how many of them were stored before ("n_cached");
        None until that is known.
    end
        The last event of an answer that was sent to its client; None before.
    is_cancelled
        Whether nobody waits for the answer any more; the engine looks at it before each step.
    """

    def __init__(self, request: Any, client: str) -> None:
        self.request = request
        self.client = client
        self.counts: Event | None = None
        self.end: Event | None = None
        self.is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def next_but(self, *kinds: str) -> Event:
        """The next event of another kind than these; the last is of kind "end" or "error"."""
        while (event := await self._events.get())["kind"] in kinds:
            pass
        return event

    def emit(self, kind: str, **what: Any) -> None:
        """Hands an event over; called by the engine's thread. A job that nobody listens to is cancelled."""
        if self.is_cancelled:
            return
        if self._events.qsize() >= MOST_EVENTS:
            kind, what = "error", {"error": ApiError("the answer was not read", status=408, code="timeout")}
            self.cancel()
        self._loop.call_soon_threadsafe(self._events.put_nowait, {"kind": kind, **what})

    def cancel(self) -> None:
        """Nobody waits any more."""
        self.is_cancelled = True


class Waiting:
    """Jobs that wait: clients take turns, and each client's own go in their order.

    Parameters
    ----------
    most
        How many may wait.

    Attributes
    ----------
    running
        The jobs that were taken, until they are done.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: OrderedDict[str, deque[Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False
        self.running: list[Job] = []

    def __len__(self) -> int:
        with self._changed:
            return sum(not job.is_cancelled for jobs in self._of.values() for job in jobs)

    def put(self, job: Job) -> None:
        """Lets a job wait. Raises ApiError where too many wait already."""
        with self._changed:
            if self._is_closed:
                raise _stopped()
            self._forget_gone()
            if len(self) >= self.most:
                raise ApiError(
                    f"{len(self)} requests are waiting already; try again later",
                    status=429,
                    kind="rate_limit_error",
                    code="too_many_requests",
                )
            self._of.setdefault(job.client, deque()).append(job)
            self._changed.notify()

    def _forget_gone(self) -> None:
        """Frees what nobody waits for any more: requests may be large."""
        alive = (
            (client, deque(job for job in jobs if not job.is_cancelled)) for client, jobs in self._of.items()
        )
        self._of = OrderedDict((client, jobs) for client, jobs in alive if jobs)

    def take(self) -> Job | None:
        """The next job that somebody still waits for, once there is one; None once the queue is closed."""
        with self._changed:
            while not self._is_closed:
                if self._of:
                    client, jobs = next(iter(self._of.items()))
                    job = jobs.popleft()
                    # the client's others go behind those of all clients
                    del self._of[client]
                    if jobs:
                        self._of[client] = jobs
                    if not job.is_cancelled:
                        self.running.append(job)
                        return job
                else:
                    self._changed.wait()
        return None

    def done(self, job: Job) -> None:
        """A job that was taken has ended."""
        with self._changed:
            self.running.remove(job)

    def close(self) -> None:
        """Ends `take`, and the running jobs after their steps: they and those that wait get an error."""
        with self._changed:
            self._is_closed = True
            for job in chain(self.running, *self._of.values()):
                job.emit("error", error=_stopped())
                job.cancel()
            self._of.clear()
            self._changed.notify()


def _stopped() -> ApiError:
    return ApiError("the server is stopping", status=503, kind="unavailable_error", code="stopping")


def answer(job: Job, by: Callable[[Job], None]) -> None:
    """Answers a job; a failure ends that alone."""
    try:
        by(job)
    except ApiError as error:
        job.emit("error", error=job.request.names.of(error))
    except Exception as error:  # noqa: BLE001
        # a mistake of ours: its client shall not wait for ever
        job.emit("error", error=bug(error))
