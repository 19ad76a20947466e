"""A fork behaves like a new Python process. Most programs here run as both, with equal results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests import fork_server
from tests.blocking_policy import TIMEOUT_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as Linux does it")


@pytest.fixture(scope="module")
def popen():
    """Return fork_server.Popen after it has run two programs, so that the next program is a fork.

    For each environment, the first program is not forked: it is a plain process.
    """
    for _ in range(2):
        process = fork_server.Popen([sys.executable, "-c", ""])
        assert process.wait() == 0
    assert process.is_forked
    return fork_server.Popen


def both(popen, code, *arguments, typed=b"", **options):
    """Run code in a fork and in a new process. Return the result, which must be the same for both."""
    results = []
    for start in (popen, subprocess.Popen):
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr") if name not in options}
        process = start([sys.executable, "-c", code, *arguments], **pipes, **options)
        assert getattr(process, "is_forked", None) == (True if start is popen else None)
        results.append((*process.communicate(typed, timeout=TIMEOUT_S), process.returncode))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("print('out')", 0, b""),
        ("raise SystemExit(7)", 7, b""),
        ("raise SystemExit(-1)", 255, b""),
        ("raise SystemExit('words')", 1, b"words\n"),
        ("import os; os._exit(9)", 9, b""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, b""),
        ("import os; os.abort()", -signal.SIGABRT, b""),
        ("import atexit, sys; atexit.register(print, 'late', file=sys.stderr)", 0, b"late\n"),
        ("import sys; sys.stdout.write('left in a buffer'); sys.exit(3)", 3, b""),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print(1))).start()",
            0,
            b"",
        ),
    ],
)
def test_fork_ends_with_the_same_output_and_exit_code(popen, code, exit_code, error):
    _, stderr, code = both(popen, code)
    assert (stderr, code) == (error, exit_code)


PRINT_STATE = """
import os, sys
print(sys.argv, sys.path[0], os.getcwd(), os.environ["KVTOOL_X"], "HOME" in os.environ, __name__)
print(sys.stdin.read(), os.getppid(), os.getsid(0) == os.getpid(), sorted(os.listdir("/proc/self/fd")))
for s in (sys.stdin, sys.stdout, sys.stderr):
    print(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through)
print("error", file=sys.stderr)
"""


def test_fork_has_its_arguments_environment_folder_and_streams(popen, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment["KVTOOL_X"] = "caf\udce9"
    for in_session in (False, True):
        options = {"cwd": tmp_path, "env": environment, "start_new_session": in_session}
        stdout, stderr, code = both(popen, PRINT_STATE, "a", b"\xe9", typed=b"typed", **options)
        assert str(tmp_path).encode() in stdout
        assert (stderr, code) == (b"error\n", 0)


def test_unsupported_calls_start_a_new_process(popen, tmp_path):
    for command, options in (
        (["true"], {}),
        ([sys.executable, "-c", ""], {"preexec_fn": lambda: None}),
        ([sys.executable, "-c", ""], {"env": os.environ | {"PYTHONUTF8": "0", "OTHER": str(tmp_path)}}),
        ([sys.executable, "-c", "", "x" * fork_server.MAX_REQUEST], {}),
    ):
        process = popen(command, **options)
        assert (process.wait(TIMEOUT_S), process.is_forked) == (0, False)
