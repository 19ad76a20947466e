"""A chat in a pseudo-terminal, as a person sees and types it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN = "from kvtool.__main__ import main; main()"
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """kvtool chat in a terminal of 400 columns. own: it is the process's own, whose end is a SIGHUP."""

    def __init__(self, model, *options, own=True, env=None):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 400, 0, 0))
        self.seen = self.all = ""

        def prepare():
            os.setsid()
            if own:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            else:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

        ends = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        command = [sys.executable, "-c", RUN, "chat", "--temp", "0", "-t", "1", "-m", str(model)]
        environment = os.environ | {"TERM": "xterm"} | (env or {})
        self.process = subprocess.Popen(
            [*command, *map(str, options)], cwd=ROOT, preexec_fn=prepare, env=environment, **ends
        )
        os.close(slave)

    def wait_for(self, words, seconds=60, pressing=""):
        """Reads up to the words and returns what came before; `pressing` is typed every half second."""
        end = time.monotonic() + seconds
        while words not in self.seen:
            assert time.monotonic() < end, self.seen[-2000:]
            if select.select([self.master], [], [], 0.5)[0]:
                self._read()
            else:
                self.type(pressing)
        before, _, self.seen = self.seen.partition(words)
        return before

    def _read(self):
        try:
            new = os.read(self.master, 65536).decode("utf-8", "replace")
        except OSError:
            new = ""
        assert new, f"the chat has ended: {self.all[-2000:]}"
        self.seen += new
        self.all += new

    def type(self, text):
        os.write(self.master, text if isinstance(text, bytes) else text.encode())

    def say(self, line):
        """Types a line at a prompt, waits for the next prompt and returns what was shown between."""
        self.type(line if isinstance(line, bytes) else line.encode())
        self.type("\n")
        # the line is shown first
        self.wait_for("\n")
        return _STYLES.sub("", self.wait_for("\n> ")).replace("\r", "").strip()

    def kill(self):
        self.process.kill()
        self.process.wait()
