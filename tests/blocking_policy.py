"""A policy that waits in an eviction until its test lets it continue.

The test can then act in the middle of the work, however fast the machine is.
"""

from __future__ import annotations

import time

TIMEOUT_S = 300
"""Seconds after which a test counts as hanging. Every step takes far less, even on a busy machine."""

POLICY = '''
"""The newest tokens stay; an eviction waits for a file."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from kvtool.policies.local import Local

WAITING, GO = Path({waiting!r}), Path({go!r})


@dataclass(frozen=True)
class Blocking(Local):
    def plan(self, view, state):
        if {when}:
            (WAITING / str(os.getpid())).touch()
            end = time.monotonic() + {timeout_s}
            while not GO.exists() and time.monotonic() < end:
                time.sleep(0.01)
        return Local.plan(self, view, state)


POLICY = Blocking
'''


class BlockingPolicy:
    """A policy whose evictions wait, and the processes that wait in them.

    when: a Python expression of `view`. An eviction waits if the expression is true.
    """

    def __init__(self, folder, when="True"):
        self.policy, self._waiting, self._go = (folder / name for name in ("blocking.py", "waiting", "go"))
        self._waiting.mkdir()
        code = POLICY.format(waiting=str(self._waiting), go=str(self._go), when=when, timeout_s=TIMEOUT_S)
        self.policy.write_text(code, encoding="utf-8")

    def wait(self, n_process=1):
        """Return once n_process processes wait in an eviction."""
        until(lambda: len(list(self._waiting.iterdir())) >= n_process)

    def go(self):
        """Let all processes continue; later evictions do not wait."""
        self._go.touch()


def until(condition):
    """Return once condition() is true. Raises AssertionError after TIMEOUT_S seconds."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
