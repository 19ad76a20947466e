"""A policy that waits in an eviction until its test lets it continue.

The test can then act in the middle of the work, however fast the machine is.
"""

from __future__ import annotations

import time

PATIENCE_S = 300
"""Seconds after which a test counts as hanging. Every step takes far less, even on a busy machine."""

POLICY = '''
"""The newest tokens stay; an eviction waits for a file."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from kvtool.policies.local import Local

THERE, GO = Path({there!r}), Path({go!r})


@dataclass(frozen=True)
class Held(Local):
    def plan(self, view, state):
        if {when}:
            (THERE / str(os.getpid())).touch()
            end = time.monotonic() + {patience_s}
            while not GO.exists() and time.monotonic() < end:
                time.sleep(0.01)
        return Local.plan(self, view, state)


POLICY = Held
'''


class Held:
    """A policy whose evictions wait, and the processes that wait in them.

    when: a Python expression of `view`. An eviction waits if the expression is true.
    """

    def __init__(self, folder, when="True"):
        self.policy, self._there, self._go = (folder / name for name in ("held.py", "there", "go"))
        self._there.mkdir()
        code = POLICY.format(there=str(self._there), go=str(self._go), when=when, patience_s=PATIENCE_S)
        self.policy.write_text(code, encoding="utf-8")

    def wait(self, n_process=1):
        """Return once n_process processes wait in an eviction."""
        until(lambda: len(list(self._there.iterdir())) >= n_process)

    def go(self):
        """Let all processes continue; later evictions do not wait."""
        self._go.touch()


def until(condition):
    """Return once condition() is true. Raises AssertionError after PATIENCE_S seconds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
