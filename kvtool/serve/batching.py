"""Sharing the processor between slots: time slices, and joint steps of the slots that write answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvtool.engine.loop import Engine
from kvtool.errors import KvtoolError
from kvtool.llama.context import Context
from kvtool.llama.joint import JointContext, Part

SLICE_STEPS, SLICE_S = 16, 0.25
"""A time slice ends after SLICE_STEPS steps, or after the step in which SLICE_S seconds run out."""

FIRST_SLICE_S, N_SHORT = 2.0, 256
"""A request's first time slice may take FIRST_SLICE_S seconds if at most N_SHORT of its tokens are unread.

A short prompt is thus read at once. A long prompt gets usual slices, so that other requests wait less.
"""


def _locked() -> threading.Lock:
    """Return a locked lock, which another thread will release."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class ComputeLock:
    """A lock held by the one thread that computes. Other threads get it in the order in which they came.

    The members of a `StepBatcher` share a time slice: until it ends, they pass the lock to each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Lock] = deque()
        # locks of members that wait to continue after a joint step
        self._resumed: deque[threading.Lock] = deque()
        self._is_shared = False
        self._n_step, self._since, self._is_first = 0, 0.0, False

    def acquire(self, *, is_first: bool = False) -> None:
        """Wait for the lock, and begin a time slice. is_first: True for the first slice of a request."""
        mine = _locked()
        with self._lock:
            if self._is_held:
                self._waiting.append(mine)
            else:
                self._is_held = True
                mine.release()
        mine.acquire()
        self._begin_slice(is_first=is_first)

    def _begin_slice(self, *, is_first: bool = False, is_shared: bool = False) -> None:
        self._n_step, self._since = 0, time.monotonic()
        self._is_first, self._is_shared = is_first, is_shared

    def release(self) -> None:
        """Give the lock to the next thread."""
        with self._lock:
            if self._resumed and not (self._is_shared and self._waiting and self._is_over(SLICE_S)):
                self._resumed.popleft().release()
            elif self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False

    def await_step(self, mine: threading.Lock) -> None:
        """Let others compute until another member calls `resume` with `mine`, this member's lock."""
        self.release()
        mine.acquire()
        if not self._is_shared:
            self._begin_slice(is_shared=True)

    def resume(self, others: list[threading.Lock]) -> None:
        """Let other members of a finished joint step continue. Called by the member that decoded it."""
        with self._lock:
            self._resumed.extend(others)
        if not self._is_shared:
            self._begin_slice(is_shared=True)
        self._n_step += 1

    def step(self, n_left: int = 0) -> None:
        """Count a step that is about to begin. If the time slice is over, let waiting threads compute first.

        n_left: number of the prompt's unread tokens.
        """
        self._n_step += 1
        is_short = self._is_first and 0 < n_left <= N_SHORT
        if (self._waiting or self._resumed) and self._is_over(FIRST_SLICE_S if is_short else SLICE_S):
            self.release()
            self.acquire()

    def _is_over(self, seconds: float) -> bool:
        return self._n_step > SLICE_STEPS or time.monotonic() - self._since > seconds


@dataclass(eq=False)
class _DueStep:
    """A member's next step. The member waits until it is decoded."""

    part: Part
    lock: threading.Lock = field(default_factory=_locked)
    error: Exception | None = None


class StepBatcher:
    """Joins steps: the next tokens of all engines that are writing answers are decoded together.

    These engines are the members. Each waits until all have their next tokens; the last one decodes for all.
    As everywhere, a thread computes only while it holds the lock.

    Parameters
    ----------
    lock
        Held by each thread that calls a method.
    n_max
        Maximum number of members.
    say
        Called with one line if the model cannot decode joint steps, or memory is short. Members then take
        turns like other threads.

    Attributes
    ----------
    n
        Number of members.
    """

    def __init__(self, lock: ComputeLock, n_max: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.n = 0
        self._lock, self._n_max, self._say = lock, n_max, say
        self._waiting: list[_DueStep] = []
        self._joint: JointContext | None = None
        self._is_joint = n_max > 1
        # a single thread decodes all joint steps: llama.cpp starts workers for each thread that decodes, and
        # idle workers slow down busy ones
        self._thread = ThreadPoolExecutor(1, "joint-steps")

    def close(self) -> None:
        """Free the thread and the joint context."""
        self._thread.shutdown()
        if self._joint:
            self._joint.close()
            self._joint = None

    @property
    def is_several(self) -> bool:
        """True if a step decodes the tokens of several members. No member drafts tokens then."""
        return self._is_joint and self.n > 1

    def step(self, engine: Engine, n_left: int) -> None:
        """Count a step, except a joint one, which `resume` counts. n_left: as in `ComputeLock.step`."""
        if engine.joint_decoder is None or not self.is_several:
            self._lock.step(n_left)

    @contextmanager
    def writing(self, engine: Engine) -> Iterator[None]:
        """Make an engine a member for the block."""
        self.n += 1
        engine.joint_decoder = self
        try:
            yield
        finally:
            engine.joint_decoder = None
            self.n -= 1
            if self._waiting and len(self._waiting) == self.n:
                self._decode_all()

    def decode(self, context: Context, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Decode a member's next tokens. Arguments and errors: see `Context.decode`."""
        if not self.is_several:
            context.decode(tokens, pos_0, n_output)
            return
        mine = _DueStep(Part(context, tokens, pos_0, n_output))
        self._waiting.append(mine)
        if len(self._waiting) == self.n:
            self._decode_all(mine)
        else:
            self._lock.await_step(mine.lock)
        if mine.error:
            raise mine.error

    def _decode_all(self, mine: _DueStep | None = None) -> None:
        """Decode for all waiting members, and let all except `mine` continue."""
        waiting, self._waiting = self._waiting, []
        self._thread.submit(self._decode, waiting).result()
        self._lock.resume([step.lock for step in waiting if step is not mine])

    def _decode(self, waiting: list[_DueStep]) -> None:
        # a member that was alone when its step began may have draft tokens: decode its step separately
        single = [step for step in waiting if len(step.part.tokens) == 1]
        if len(single) > 1 and self._decode_joint([step.part for step in single]):
            waiting = [step for step in waiting if step not in single]
        for step in waiting:
            part = step.part
            try:
                part.context.decode(part.tokens, part.pos_0, part.n_output)
            except Exception as error:  # noqa: BLE001  (raised in the member's own thread)
                step.error = error

    def _decode_joint(self, parts: list[Part]) -> bool:
        """Decode the parts in one step. Returns False if that is impossible; nothing is decoded then."""
        if not self._joint:
            try:
                self._joint = JointContext(parts[0].context, self._n_max, self._n_max)
            except KvtoolError as error:
                # try only once: each further try would fail as well
                self._is_joint = False
                self._say(f"answers are written one after the other: {error}")
                return False
        try:
            self._joint.decode(parts)
        except KvtoolError:
            # decode them one by one, so that only the part at fault fails
            return False
        return True
