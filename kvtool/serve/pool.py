"""Several engines on one model: each has a chat of its own, and they take turns to compute."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtool.engine.chunk_size import ChunkSize
from kvtool.errors import KvtoolError
from kvtool.serve import queue
from kvtool.serve.batching import Baton
from kvtool.serve.queue import Job, Waiting
from kvtool.serve.slot import Talk

STEP_S = 0.5
"""Seconds that a step of a prompt may take, about: so long others wait for their turn."""


class Slots:
    """Answers as many requests beside each other as there may be engines.

    Parameters
    ----------
    baton
        The talks' `step` is that of this.
    first
        Has the first engine.
    more
        Makes a talk with another one: once a request comes while all there are answer others.
    most
        How many there may be, the first included; fewer where there is no room for them.
    say
        Called with a line where that is so.

    Attributes
    ----------
    talks
        Those that there are.
    cache_bytes
        Of all their caches, as they were at first: other threads ask, and must not ask an engine.
    """

    def __init__(
        self, baton: Baton, first: Talk, more: Callable[[], Talk], most: int, say: Callable[[str], None]
    ) -> None:
        self.talks = [first]
        self.most = most
        self.cache_bytes = first.engine.cache_bytes
        self._baton, self._more, self._say = baton, more, say
        # the one that was used last is the last
        self._free = [first]
        self._room = threading.Semaphore(most)
        self._keep_pace(first)

    @property
    def first(self) -> Talk:
        return self.talks[0]

    def _keep_pace(self, talk: Talk) -> None:
        if self.most > 1:
            talk.engine.chunk_size = ChunkSize(STEP_S)

    def run(self, waiting: Waiting) -> None:
        """Answers requests until the queue is closed; a failure ends its request alone."""
        while True:
            self._room.acquire()
            if not (job := waiting.take()):
                break
            self._baton.take(is_first=True)
            if job.is_cancelled:
                self._end(waiting, job)
                continue
            talk = self._talk_for(job)
            # its threads of llama.cpp end with it: others' would wait for work beside those that have some
            work = threading.Thread(target=self._answer, args=(waiting, talk, job), name="slot", daemon=True)
            work.start()
        for _ in range(self.most - 1):
            self._room.acquire()

    def _answer(self, waiting: Waiting, talk: Talk, job: Job) -> None:
        """Answers a request in a thread of its own, to which the baton has come with it."""
        try:
            queue.answer(job, talk.answer)
        finally:
            # before others compute: who asks again at once needs no other engine
            self._free.append(talk)
            self._end(waiting, job)

    def _end(self, waiting: Waiting, job: Job) -> None:
        waiting.done(job)
        self._baton.give()
        self._room.release()

    def _talk_for(self, job: Job) -> Talk:
        """The free talk whose stream begins most like the request's; of equal ones the least recently used.

        Called with the baton, which is given to others where there is no talk yet.
        """
        if not self._free:
            try:
                self.talks.append(self._more())
                self._keep_pace(self.talks[-1])
                self.cache_bytes += self.talks[-1].engine.cache_bytes
                return self.talks[-1]
            except (KvtoolError, MemoryError) as error:
                self._baton.give()
                before, self.most = self.most, len(self.talks)
                self._say(f"only {self.most} at once: {error}")
                # with the last of these one of the talks is free
                for _ in range(before - self.most):
                    self._room.acquire()
                self._baton.take(is_first=True)
        # a single one is not asked: that takes as long as a template does
        rest = self._free[1:]
        talk = max(self._free, key=lambda each: each.n_shared(job.request)) if rest else self._free[0]
        self._free.remove(talk)
        return talk
