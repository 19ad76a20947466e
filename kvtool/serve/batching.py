"""Whose turn it is: several threads that compute one after the other, and writers whose steps are one."""

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

TURN_STEPS, TURN_S = 16, 0.25
"""A turn ends after so many steps, or behind the first one that ends so many seconds after its beginning."""

FIRST_S, SHORT = 2.0, 256
"""The seconds of a request's first turn while at most so many tokens of its prompt are left to read.

So a short prompt is read in one go, and who comes just behind a long one waits for no more than a usual turn.
"""


def _closed() -> threading.Lock:
    """A lock that another thread opens."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Baton:
    """Who has it computes; the others get it in the order in which they have come.

    A crew shares its turns: as long as one lasts, its members hand the baton to each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Lock] = deque()
        # members of the crew whose steps are done
        self._crew: deque[threading.Lock] = deque()
        self._is_crews = False
        self._n_step, self._since, self._is_first = 0, 0.0, False

    def take(self, *, is_first: bool = False) -> None:
        """Waits for it. is_first: whether this is a request's first turn."""
        mine = _closed()
        with self._lock:
            if self._is_held:
                self._waiting.append(mine)
            else:
                self._is_held = True
                mine.release()
        mine.acquire()
        self._begin(is_first=is_first)

    def _begin(self, *, is_first: bool = False, is_crews: bool = False) -> None:
        self._n_step, self._since = 0, time.monotonic()
        self._is_first, self._is_crews = is_first, is_crews

    def give(self) -> None:
        """Lets the next one have it."""
        with self._lock:
            if self._crew and not (self._is_crews and self._waiting and self._is_over(TURN_S)):
                self._crew.popleft().release()
            elif self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False

    def rest(self, mine: threading.Lock) -> None:
        """A member of the crew gives it, until another one hands it this lock by `wake`."""
        self.give()
        mine.acquire()
        if not self._is_crews:
            self._begin(is_crews=True)

    def wake(self, others: list[threading.Lock]) -> None:
        """The step of these members of the crew, which rest, is done. Called by a member."""
        with self._lock:
            self._crew.extend(others)
        if not self._is_crews:
            self._begin(is_crews=True)
        self._n_step += 1

    def step(self, n_left: int = 0) -> None:
        """Whoever has it calls this before each step: where others wait, they get their turn.

        n_left: the tokens of a prompt that are not read yet.
        """
        self._n_step += 1
        is_short = self._is_first and 0 < n_left <= SHORT
        if (self._waiting or self._crew) and self._is_over(FIRST_S if is_short else TURN_S):
            self.give()
            self.take()

    def _is_over(self, most_s: float) -> bool:
        return self._n_step > TURN_STEPS or time.monotonic() - self._since > most_s


@dataclass(eq=False)
class _Waiting:
    """A member of the crew whose step is due."""

    part: Part
    lock: threading.Lock = field(default_factory=_closed)
    error: Exception | None = None


class Crew:
    """Those that write answers: their next tokens are decoded in one step.

    Who has come so far waits for the others; the last one decodes for all. As ever, one thread computes at a
    time: who has the baton.

    Parameters
    ----------
    baton
        Whoever calls anything here has it.
    most
        How many there may be.
    say
        Called with a line where a model takes no such steps, or there is no memory for them: then members
        take turns like all others.

    Attributes
    ----------
    n
        How many there are.
    """

    def __init__(self, baton: Baton, most: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.n = 0
        self._baton, self._most, self._say = baton, most, say
        self._waiting: list[_Waiting] = []
        self._joint: JointContext | None = None
        self._is_joint = most > 1
        # always the same one: each thread that decodes has threads of llama.cpp, which would wait for work
        # beside those that have some
        self._thread = ThreadPoolExecutor(1, "crew")

    def close(self) -> None:
        """Frees what it has."""
        self._thread.shutdown()
        if self._joint:
            self._joint.close()
            self._joint = None

    @property
    def is_several(self) -> bool:
        """Whether steps are those of several members now, so that none has guesses."""
        return self._is_joint and self.n > 1

    def step(self, engine: Engine, n_left: int) -> None:
        """Called before a step of an engine; n_left as in `Baton.step`."""
        if engine.joint_decoder is None or not self.is_several:
            self._baton.step(n_left)

    @contextmanager
    def writing(self, engine: Engine) -> Iterator[None]:
        """The engine belongs to the crew inside."""
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
        """Decodes a member's next tokens as `Context.decode` does, and raises what that raises."""
        if not self.is_several:
            context.decode(tokens, pos_0, n_output)
            return
        mine = _Waiting(Part(context, tokens, pos_0, n_output))
        self._waiting.append(mine)
        if len(self._waiting) == self.n:
            self._decode_all(mine)
        else:
            self._baton.rest(mine.lock)
        if mine.error:
            raise mine.error

    def _decode_all(self, mine: _Waiting | None = None) -> None:
        """Decodes for all that wait, and lets the others than mine go on."""
        waiting, self._waiting = self._waiting, []
        self._thread.submit(self._decode, waiting).result()
        self._baton.wake([each.lock for each in waiting if each is not mine])

    def _decode(self, waiting: list[_Waiting]) -> None:
        # guesses of who was alone when they were made
        ones = [each for each in waiting if len(each.part.tokens) == 1]
        if len(ones) > 1 and self._decode_joint([each.part for each in ones]):
            waiting = [each for each in waiting if each not in ones]
        for each in waiting:
            try:
                each.part.context.decode(each.part.tokens, each.part.pos_0, each.part.n_output)
            except Exception as error:  # noqa: BLE001  (each has its own, and none another's)
                each.error = error

    def _decode_joint(self, parts: list[Part]) -> bool:
        """Decodes the parts in one step. Returns False where that cannot be, and nothing is decoded."""
        if not self._joint:
            try:
                self._joint = JointContext(parts[0].context, self._most, self._most)
            except KvtoolError as error:
                # it would fail at each step again
                self._is_joint = False
                self._say(f"answers are written one after the other: {error}")
                return False
        try:
            self._joint.decode(parts)
        except KvtoolError:
            # each for itself: the one whose fault it is says so
            return False
        return True
