"""A server of kvtool in a process of its own, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

from tests import forked

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "NUMBA")}


class Server:
    """A running server. url: of its root. lines: what it has said on stderr until it was ready."""

    def __init__(self, process, url, lines):
        self.process = process
        self.url = url
        self.lines = lines

    def stop(self, how=signal.SIGINT):
        """Ends it; returns (exit code, what it said since)."""
        self.process.send_signal(how)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@contextmanager
def serving(model, *options, **how):
    """Starts `kvtool serve -m model ...` on a free port, and yields it once it is ready.

    how: as for Popen.
    """
    command = [sys.executable, "-m", "kvtool", "serve", "-m", str(model), "--port", "0", "-t", "1", *options]
    process = forked.Popen(
        command, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=os.environ | ONE_THREAD, **how
    )
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"on (http://\S+)/v1", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield Server(process, found[1], lines)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
