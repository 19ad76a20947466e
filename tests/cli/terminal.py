"""A chat in a pseudo-terminal: a test types into it, and reads the screen that a person would see."""

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
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pyte

from kvtool.chats import session
from tests import fork_server
from tests.blocking_policy import TIMEOUT_S

ROOT = Path(__file__).parents[2]
RUN = "from kvtool.__main__ import main; main()"
PROMPT = "\n> "


class Terminal:
    """`kvtool chat` in a terminal.

    The test's screen has 600 rows, many more than the program is told. Therefore no line scrolls off.

    model: name or path; None for the default model.
    is_controlling: True to make this the controlling terminal. The process then gets a SIGHUP when the
    terminal closes.
    raw: bytes that the program has written.
    """

    def __init__(self, model, *options, is_controlling=True, env=None, columns=400, rows=50):
        self.model = model
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self._screen = pyte.Screen(columns, 600)
        # texts of the rows that have not changed since they were last asked for
        self._rows = {}
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        # number of characters of `text` that the test has already waited for
        self._at = 0

        ends = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        command = [sys.executable, "-c", RUN, "chat", "--temp", "0", "-t", "1"]
        command += ["-m", str(model)] if model else []
        # this terminal does not answer requests for the cursor's position
        environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | (env or {})
        prepare = (
            partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0) if is_controlling else fork_server.ignore_sighup
        )
        self.process = fork_server.Popen(
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
        """All lines up to the cursor. Blanks at line ends are removed, except in the last line."""
        cursor = self._screen.cursor
        rows = [self._row(y).rstrip() for y in range(cursor.y)]
        return "\n".join([*rows, self._row(cursor.y).ljust(cursor.x)[: cursor.x]])

    def _row(self, y):
        for changed in self._screen.dirty:
            self._rows.pop(changed, None)
        self._screen.dirty.clear()
        if y not in self._rows:
            # pyte's `display` would draw all rows of the screen
            row = self._screen.buffer[y]
            self._rows[y] = "".join(row[x].data for x in range(max(row, default=-1) + 1))
        return self._rows[y]

    @property
    def unread_text(self):
        return self.text[self._at :]

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, words, pressing=""):
        """Read until these words appear. Return the text before them.

        With PROMPT, read until the text ends with PROMPT: a continued chat also prints "> " before its last
        turn.

        pressing: keys to type after each half second without output.
        """
        self._read_until(
            lambda: self.unread_text.endswith(words) if words == PROMPT else words in self.unread_text,
            pressing,
        )
        before, _, _ = (
            self.unread_text.rpartition(words) if words == PROMPT else self.unread_text.partition(words)
        )
        self._at += len(before) + len(words)
        return before

    def until(self, *words):
        """Read until one of these words is anywhere on the screen. (`wait_for` looks only at new text.)"""
        self._read_until(lambda: any(word in self.text for word in words))
        self._at = len(self.text)

    def _read_until(self, is_there, pressing=""):
        end = time.monotonic() + TIMEOUT_S
        while not is_there():
            assert time.monotonic() < end, self.text[-2000:]
            if select.select([self.master], [], [], 0.5)[0]:
                self._read()
            else:
                self.type(pressing)

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

    def say(self, line):
        """Type a line at a prompt and wait for the next prompt; return the text between them."""
        offset = len(self.text)
        self.type(line)
        self.type("\r")
        # the terminal shows the typed line first
        self._read_until(lambda: self.text[offset:].endswith(PROMPT))
        output = self.text[offset:]
        self._at = len(self.text)
        width = self._screen.columns
        typed = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
        n_line = (2 + len(typed)) // width + 1
        return "\n".join(output.split("\n")[n_line:]).removesuffix("> ").strip()

    def ended(self, pressing):
        """Type a key every half second until the program has ended. Return the program's exit code.

        One key is not enough, because it is lost if it arrives before the prompt reads the keyboard.
        """
        end = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text[-2000:]
            with suppress(OSError):
                self.type(pressing)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.5)
        return self.process.returncode

    def leave(self):
        """Type /exit and wait for the end of the program."""
        self.type("/exit\r")
        assert self.process.wait(TIMEOUT_S) == 0

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        os.close(self.master)


def user_messages(path):
    """Return the texts of the user's turns in a session file."""
    return [message["content"] for message in session.read(path)[0]["messages"] if message["role"] == "user"]


@contextmanager
def terminals(model, *options, env=None):
    """Yield a function that starts a chat and waits for its prompt. Its arguments are further options."""
    with ExitStack() as stack:

        def start(*more, **kwargs):
            kwargs["env"] = (env or {}) | kwargs.get("env", {})
            chat = stack.enter_context(closing(Terminal(model, *options, *more, **kwargs)))
            chat.wait_for(PROMPT)
            return chat

        yield start
