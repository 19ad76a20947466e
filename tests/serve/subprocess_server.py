"""A `kvtool serve` that runs in another process, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

from tests import fork_server
from tests.blocking_policy import TIMEOUT_S

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "NUMBA")}


class Server:
    """A running server.

    url: address of its root, without a slash at the end.
    lines: the lines that it wrote to stderr until it was ready.
    """

    def __init__(self, process, url, lines):
        self.process = process
        self.url = url
        self.lines = lines

    def stop(self, signal_number=signal.SIGINT):
        """End the server with a signal. Return (exit code, its text on stderr after it was ready)."""
        self.process.send_signal(signal_number)
        _, stderr = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, stderr


@contextmanager
def start_server(model, *options, program=None, **popen_options):
    """Start `kvtool serve -m model ...` on a free port. Yield the Server when it is ready.

    program: Python code that runs kvtool, or None for `python -m kvtool`.
    popen_options: further arguments of Popen.
    Raises AssertionError with the text on stderr if the server ends before it is ready.
    """
    kvtool = ["-m", "kvtool"] if program is None else ["-c", program]
    command = [sys.executable, *kvtool, "serve", "-m", str(model), "--port", "0", "-t", "1", *options]
    popen_options = {"env": os.environ | ONE_THREAD, **popen_options}
    process = fork_server.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8", **popen_options)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"on (http://\S+)/v1", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield Server(process, match[1], lines)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
