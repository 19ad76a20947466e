"""Share the processor between slots: they get time slices. Slots that write answers decode in joint steps."""

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
from kvtool.llama.cache.context import Context
from kvtool.llama.cache.joint import MAX_CONTEXTS, JointContext, Part

SLICE_STEPS, SLICE_S = 16, 0.25
"""A time slice ends after SLICE_STEPS steps or SLICE_S seconds, but never during a step."""

FIRST_SLICE_S, N_SHORT = 2.0, 256
"""If at most N_SHORT tokens of a request are unread, its first time slice may take FIRST_SLICE_S seconds.

In this way a short prompt is read in one slice. A long prompt gets slices of the usual length, so that other
requests wait less.
"""


def _locked() -> threading.Lock:
    """Return a lock that is already locked. Another thread will release it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class ComputeLock:
    """A lock for computing. One thread holds it; other threads get it in the order in which they came.

    The members of a `StepBatcher` share a time slice. Until the slice ends, they pass the lock to each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Lock] = deque()
        # locks of members that can continue, because their joint step is decoded
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
        """Give the compute lock to other threads, and wait until another member has decoded the joint step.

        mine: a lock of the waiting member. The member that decodes the step passes this lock to `resume`.
        """
        self.release()
        mine.acquire()
        if not self._is_shared:
            self._begin_slice(is_shared=True)

    def resume(self, others: list[threading.Lock]) -> None:
        """Let the other members of a joint step continue. The member that decoded the step calls this."""
        with self._lock:
            self._resumed.extend(others)
        if not self._is_shared:
            self._begin_slice(is_shared=True)
        self._n_step += 1

    def step(self, n_left: int = 0) -> None:
        """Count a step. Call this before the step: if the time slice is over, waiting threads compute first.

        n_left: number of tokens of the prompt that are unread.
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
    """The next step of a member. The member waits until this step is decoded."""

    part: Part
    lock: threading.Lock = field(default_factory=_locked)
    error: Exception | None = None


class StepBatcher:
    """Decodes the next tokens of several engines in one joint step.

    The engines that are writing answers are called members. A member with new tokens waits until all members
    have new tokens. The last member then decodes the tokens of all members. Each thread that calls a method
    must hold `lock`.

    say: called with one line if joint steps are impossible, because the model does not support them or memory
    is short. Members then take turns like other threads.
    """

    def __init__(self, lock: ComputeLock, n_max: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.n = 0
        self._lock, self._n_joint, self._say = lock, min(n_max, MAX_CONTEXTS), say
        self._waiting: list[_DueStep] = []
        self._joint: JointContext | None = None
        self._is_joint = n_max > 1
        # decode all joint steps in the same thread: llama.cpp starts workers for each thread that decodes,
        # and idle workers slow down busy workers
        self._thread = ThreadPoolExecutor(1, "joint-steps")

    def close(self) -> None:
        """Free the thread and the joint context."""
        self._thread.shutdown()
        if self._joint:
            self._joint.close()
            self._joint = None

    @property
    def is_several(self) -> bool:
        """True if a step decodes the tokens of several members. Then members do not use draft tokens."""
        return self._is_joint and self.n > 1

    def step(self, engine: Engine, n_left: int) -> None:
        """Count a step. Joint steps are not counted here, because `resume` counts them."""
        if engine.joint_decoder is None or not self.is_several:
            self._lock.step(n_left)

    @contextmanager
    def writing(self, engine: Engine) -> Iterator[None]:
        """Make an engine a member while the block runs."""
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
        """Decode the steps of all waiting members, and let these members continue.

        mine: the step of the calling member, which does not wait.
        """
        waiting, self._waiting = self._waiting, []
        try:
            self._thread.submit(self._decode, waiting).result()
        except Exception as error:  # noqa: BLE001
            # Raised in each member's own thread. If only the calling member raised it, the others would wait
            # forever
            for step in waiting:
                step.error = error
        self._lock.resume([step.lock for step in waiting if step is not mine])

    def _decode(self, waiting: list[_DueStep]) -> None:
        # a step may have draft tokens if it began with a single member: decode such a step separately
        single = [step for step in waiting if len(step.part.tokens) == 1]
        for first in range(0, len(single), self._n_joint):
            group = single[first : first + self._n_joint]
            if len(group) > 1 and self._decode_joint([step.part for step in group]):
                waiting = [step for step in waiting if step not in group]
        for step in waiting:
            part = step.part
            try:
                part.context.decode(part.tokens, part.pos_0, part.n_output)
            except Exception as error:  # noqa: BLE001  (raised in the member's own thread)
                step.error = error

    def _decode_joint(self, parts: list[Part]) -> bool:
        """Decode the parts in one step. If this is impossible, decode nothing and return False."""
        if not self._joint:
            try:
                self._joint = JointContext(parts[0].context, self._n_joint, self._n_joint)
            except KvtoolError as error:
                # try this only once, because every further try would also fail
                self._is_joint = False
                self._say(f"answers are written one after the other: {error}")
                return False
        try:
            self._joint.decode(parts)
        except KvtoolError:
            # the caller then decodes the parts one by one, so that only the faulty part fails
            return False
        return True
