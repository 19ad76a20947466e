"""Jobs. A job is a request that waits for a slot, or that a slot is answering."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from kvtool.serve.api.errors import ApiError, internal_error
from kvtool.serve.events import End, Event, PromptCounts

MAX_EVENTS = 2**14
"""If this many events are unsent, the client has probably stopped reading. The job is then cancelled."""


class Job:
    """A request and the events of its answer.

    Attributes
    ----------
    prompt
        The rendered and tokenized prompt. `Slot.prepare` sets it. None until then.
    prompt_counts
        Set before the prompt is read. None until then.
    end
        The last event. None until it was sent to the client.
    error
        The error that ended a stream after the stream had begun, or None.
    is_cancelled
        True if the client has left. The engine checks it before each step.
    """

    def __init__(self, request: Any, client: str) -> None:
        self.request = request
        self.client = client
        self.prompt: Any = None
        self.prompt_counts: PromptCounts | None = None
        self.end: End | None = None
        self.error: ApiError | None = None
        self.is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def next_event(self, *skipped: str) -> Event:
        """Return the next event whose kind is not in `skipped`. The last event is an "end" or an "error"."""
        while (event := await self._events.get())["kind"] in skipped:
            pass
        return event

    def emit(self, event: Event) -> None:
        """Add an event. The engine's thread calls this. If nobody reads the events, the job is cancelled."""
        if self.is_cancelled:
            return
        if self._events.qsize() >= MAX_EVENTS:
            error = ApiError("the answer was not read", status=408, code="timeout")
            event = {"kind": "error", "error": error}
            self.cancel()
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def cancel(self) -> None:
        """Stop the job before its next step, because the client has left."""
        self.is_cancelled = True


class JobQueue:
    """The waiting jobs. Clients take turns. The prepared jobs of one client keep their order.

    n_max: maximum number of waiting jobs. Jobs for which a slot is free do not count.
    n_slots: `SlotPool.run` keeps this number up to date.

    `running` has the jobs that were taken out of the queue and have not ended.
    """

    def __init__(self, n_max: int, n_slots: int = 0) -> None:
        self.n_max = n_max
        self.n_slots = n_slots
        self._by_client: OrderedDict[str, deque[Job]] = OrderedDict()
        self._unprepared: set[Job] = set()
        self._changed = threading.Condition()
        self._is_closed = False
        self.running: list[Job] = []

    def __len__(self) -> int:
        with self._changed:
            return sum(not job.is_cancelled for jobs in self._by_client.values() for job in jobs)

    def put(self, job: Job, *, is_prepared: bool = True) -> None:
        """Add a job. Raises ApiError if the queue is full or closed.

        is_prepared: False to let `get` leave the job in the queue until `prepared` is called.
        """
        with self._changed:
            if self._is_closed:
                raise stopped()
            self._remove_cancelled()
            # a client that has its answer may ask again before the job's slot is free
            n_busy = sum(not job.end for job in self.running)
            n_waiting = len(self) + n_busy - self.n_slots
            if n_waiting >= self.n_max:
                raise ApiError(
                    f"the queue is full ({n_waiting} waiting); try again later",
                    status=429,
                    kind="rate_limit_error",
                    code="too_many_requests",
                )
            self._by_client.setdefault(job.client, deque()).append(job)
            if not is_prepared:
                self._unprepared.add(job)
            self._changed.notify()

    def prepared(self, job: Job) -> None:
        """Let `get` return a job that was not prepared when it was added."""
        with self._changed:
            self._unprepared.discard(job)
            self._changed.notify()

    def _remove_cancelled(self) -> None:
        """Remove cancelled jobs, whose requests may be large."""
        for client, jobs in list(self._by_client.items()):
            self._by_client[client] = deque(job for job in jobs if not job.is_cancelled)
            if not self._by_client[client]:
                del self._by_client[client]

    def get(self) -> Job | None:
        """Wait for the next prepared job and take it out. Returns None after the queue was closed."""
        with self._changed:
            while not self._is_closed:
                self._remove_cancelled()
                for client, jobs in self._by_client.items():
                    if job := next((each for each in jobs if each not in self._unprepared), None):
                        jobs.remove(job)
                        # the client's next job waits until each other client has had a turn
                        self._by_client.move_to_end(client)
                        self.running.append(job)
                        return job
                self._changed.wait()
        return None

    def done(self, job: Job) -> None:
        with self._changed:
            self.running.remove(job)

    def close(self) -> None:
        """End all jobs with an error, and let `get` return None. Running jobs stop after their step."""
        with self._changed:
            self._is_closed = True
            for job in chain(self.running, *self._by_client.values()):
                job.emit({"kind": "error", "error": stopped()})
                job.cancel()
            self._by_client.clear()
            self._changed.notify()


def stopped() -> ApiError:
    """Return the error for requests that are not answered, because the server stops."""
    return ApiError("the server is stopping", status=503, kind="unavailable_error", code="stopping")


def answer(job: Job, handler: Callable[[Job], None]) -> None:
    """Let a handler answer a job. If the handler fails, only this job ends with an error."""
    try:
        handler(job)
    except ApiError as error:
        job.emit({"kind": "error", "error": error})
    except Exception as error:  # noqa: BLE001
        # this is a bug in kvtool; report it, so that the client does not wait forever
        job.emit({"kind": "error", "error": internal_error(error)})
