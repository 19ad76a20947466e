"""The slots of a server. All slots use the same model. Each has its own chat, and slots take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtool.engine.chunk_size import ChunkSize
from kvtool.errors import KvtoolError
from kvtool.serve import queue
from kvtool.serve.batching import ComputeLock
from kvtool.serve.queue import Job, JobQueue
from kvtool.serve.slot import Slot

STEP_S = 0.5
"""Intended time of a step that reads a prompt, in seconds. Other requests wait this long for their turn."""


class SlotPool:
    """Answers as many requests at the same time as there are slots.

    lock: the thread that computes holds this lock.
    make_slot: called if there is a request while all slots are busy.
    say: called with one line if there is not enough memory for `n_max` slots.

    `cache_bytes` has the bytes of the caches of all slots when they were made. They are stored for other
    threads, which must not call an engine.
    """

    def __init__(
        self,
        lock: ComputeLock,
        first: Slot,
        make_slot: Callable[[], Slot],
        n_max: int,
        say: Callable[[str], None],
    ) -> None:
        self.slots: list[Slot] = []
        self.n_max = n_max
        self.cache_bytes = 0
        self._lock, self._make_slot, self._say = lock, make_slot, say
        # free slots; the most recently used slot is the last
        self._free = [first]
        self._permits = threading.Semaphore(n_max)
        self._add(first)

    def _add(self, slot: Slot) -> None:
        self.slots.append(slot)
        self.cache_bytes += slot.engine.cache_bytes
        if self.n_max > 1:
            slot.engine.chunk_size = ChunkSize(STEP_S)

    def run(self, jobs: JobQueue) -> None:
        """Answer jobs until the queue is closed. If a job fails, only the job's client gets an error."""
        while True:
            jobs.n_slots = self.n_max
            self._permits.acquire()
            if not (job := jobs.get()):
                break
            self._lock.acquire(is_first=True)
            if job.is_cancelled:
                self._end(jobs, job)
                continue
            slot = self._slot_for(job)
            # start a new thread for each answer: llama.cpp's workers end with the thread, and idle workers
            # would slow down the other slots
            threading.Thread(target=self._answer, args=(jobs, slot, job), name="slot", daemon=True).start()
        for _ in range(self.n_max - 1):
            self._permits.acquire()

    def _answer(self, jobs: JobQueue, slot: Slot, job: Job) -> None:
        """Answer a job in its own thread. `run` has acquired the lock for this thread."""
        try:
            queue.answer(job, slot.answer)
        finally:
            # free the slot before `_end` releases the lock, so that the client's next request can use it
            self._free.append(slot)
            self._end(jobs, job)

    def _end(self, jobs: JobQueue, job: Job) -> None:
        jobs.done(job)
        self._lock.release()
        self._permits.release()

    def _slot_for(self, job: Job) -> Slot:
        """Take the free slot whose stream has the most tokens in common with the request.

        Among equally good slots, take the least recently used slot. The caller holds the lock. The lock is
        released while this method waits for a slot.
        """
        if not self._free:
            try:
                self._add(self._make_slot())
                return self.slots[-1]
            except (KvtoolError, MemoryError) as error:
                self._lock.release()
                before, self.n_max = self.n_max, len(self.slots)
                self._say(f"only {self.n_max} at once: {error}")
                # From now on, `_permits` must have one permit for each existing slot: take away the other
                # permits. Each slot is busy with a job that holds a permit. This job also holds a permit, so
                # the last `acquire` waits until another job has ended and its slot is free
                for _ in range(before - self.n_max):
                    self._permits.acquire()
                self._lock.acquire(is_first=True)
        slot = max(self._free, key=lambda each: each.n_shared(job))
        self._free.remove(slot)
        return slot
