"""A chat in a pseudo-terminal, as a person sees and types it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyte

from tests import forked

ROOT = Path(__file__).parent.parent
RUN = "from kvtool.__main__ import main; main()"
PROMPT = "\n> "


class Terminal:
    """kvtool chat in a terminal of so many columns and rows.

    The screen has far more rows than a program is told of, so that nothing leaves it.
    model: None for the default. own: it is the process's own terminal, whose end is a SIGHUP.
    """

    def __init__(self, model, *options, own=True, env=None, columns=400, rows=50):
        self.model = model
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self._screen = pyte.Screen(columns, 2000)
        self._stream = pyte.ByteStream(self._screen)
        # what was written, and how much of the text was waited for
        self.raw = b""
        self._at = 0

        ends = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        command = [sys.executable, "-c", RUN, "chat", "--temp", "0", "-t", "1"]
        command += ["-m", str(model)] if model else []
        # no answer comes to a question for the cursor's place
        environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | (env or {})
        prepare = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0) if own else forked.deaf
        self.process = forked.Popen(
            [*command, *map(str, options)],
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=prepare,
            env=environment,
            **ends,
        )
        os.close(slave)

    @property
    def text(self):
        """The lines up to the cursor; blanks at the ends of lines count in the last one only."""
        cursor = self._screen.cursor
        rows = [self._row(y).rstrip() for y in range(cursor.y)]
        return "\n".join([*rows, self._row(cursor.y).ljust(cursor.x)[: cursor.x]])

    def _row(self, y):
        # not `display`: it draws all of the screen
        row = self._screen.buffer[y]
        return "".join(row[x].data for x in range(max(row, default=-1) + 1))

    @property
    def all(self):
        return self.text

    @property
    def seen(self):
        return self.text[self._at :]

    def resize(self, columns, rows):
        """Tells the program another size."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, words, seconds=60, pressing=""):
        """Reads up to the words and returns what came before; `pressing` is typed every half second.

        A prompt is one only at the end: a chat that goes on shows its last turn behind another.
        """
        end = time.monotonic() + seconds
        while not (self.seen.endswith(words) if words == PROMPT else words in self.seen):
            assert time.monotonic() < end, self.text[-2000:]
            if select.select([self.master], [], [], 0.5)[0]:
                self._read()
            else:
                self.type(pressing)
        before, _, _ = self.seen.rpartition(words) if words == PROMPT else self.seen.partition(words)
        self._at += len(before) + len(words)
        return before

    def until(self, *words, seconds=60):
        """Reads until the whole text has one of these; drawing may change what came before."""
        end = time.monotonic() + seconds
        while not any(word in self.text for word in words):
            assert time.monotonic() < end, self.text[-2000:]
            if select.select([self.master], [], [], 0.5)[0]:
                self._read()
        self._at = len(self.text)

    def _read(self):
        try:
            new = os.read(self.master, 65536)
        except OSError:
            new = b""
        assert new, f"the chat has ended: {self.text[-2000:]}"
        self.raw += new
        self._stream.feed(new)

    def type(self, text):
        os.write(self.master, text if isinstance(text, bytes) else text.encode())

    def say(self, line, seconds=60):
        """Types a line at a prompt, waits for the next prompt and returns what was shown between."""
        at = len(self.text)
        self.type(line if isinstance(line, bytes) else line.encode())
        self.type("\r")
        end = time.monotonic() + seconds
        # the line itself is shown first
        while not self.text[at:].endswith(PROMPT):
            assert time.monotonic() < end, self.text[-2000:]
            if select.select([self.master], [], [], 0.5)[0]:
                self._read()
        shown = self.text[at:]
        self._at = len(self.text)
        width = self._screen.columns
        typed = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
        n_line = (2 + len(typed)) // width + 1
        return "\n".join(shown.split("\n")[n_line:]).removesuffix("> ").strip()

    def ended(self, pressing, seconds=60):
        """Types a key every half second until the program has ended, and returns its exit code.

        What is typed before a prompt listens is lost.
        """
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text[-2000:]
            with suppress(OSError):
                self.type(pressing)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.5)
        return self.process.returncode

    def kill(self):
        self.process.kill()
        self.process.wait()
