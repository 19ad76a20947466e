"""A fork behaves like a new Python process. Most programs here run as both, with equal results."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
from functools import partial

import pytest

from tests import forked
from tests.held import PATIENCE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as Linux does it")


@pytest.fixture(scope="module")
def popen():
    """Return forked.Popen after it has run two programs, so that the next program is a fork.

    For each environment, the first program is not forked: it is a plain process.
    """
    for _ in range(2):
        process = forked.Popen([sys.executable, "-c", ""])
        assert process.wait() == 0
    assert process.is_forked
    return forked.Popen


def both(popen, code, *arguments, typed=b"", **how):
    """Run code in a fork and in a new process. Return the result, which must be the same for both."""
    results = []
    for start in (popen, subprocess.Popen):
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr") if name not in how}
        process = start([sys.executable, "-c", code, *arguments], **pipes, **how)
        assert getattr(process, "is_forked", None) == (True if start is popen else None)
        results.append((*process.communicate(typed, timeout=PATIENCE_S), process.returncode))
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


def test_exception_in_a_fork_prints_a_traceback(popen):
    process = popen([sys.executable, "-c", "raise ValueError(3)"], stderr=subprocess.PIPE)
    assert process.communicate()[1].endswith(b'  File "<string>", line 1, in <module>\nValueError: 3\n')
    assert process.returncode == 1


GIVEN = """
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
        how = {"cwd": tmp_path, "env": environment, "start_new_session": in_session}
        stdout, stderr, code = both(popen, GIVEN, "a", b"\xe9", typed=b"typed", **how)
        assert str(tmp_path).encode() in stdout
        assert (stderr, code) == (b"error\n", 0)


def test_fork_runs_a_module_like_python_m(popen, tmp_path):
    (tmp_path / "shown.py").write_text("import sys; print(__name__, __spec__.name, sys.argv, sys.path[0])")
    outputs = [
        start([sys.executable, "-m", "shown", "a"], cwd=tmp_path, stdout=subprocess.PIPE).communicate()[0]
        for start in (popen, subprocess.Popen)
    ]
    assert outputs[0] == outputs[1] != b""


def test_fork_obeys_signals_and_its_preexec_fn(popen):
    wait = "import sys, time; print('here', flush=True); time.sleep(60)"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            # under nohup, SIGHUP is ignored by this process and its children
            continue
        process = popen([sys.executable, "-c", wait], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout.readline() == b"here\n"
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == -number
        process.stdout.close()
    process = popen([sys.executable, "-c", wait], stdout=subprocess.PIPE, preexec_fn=forked.deaf)
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)
    process.kill()
    process.communicate()
    code = "open('/dev/shm/x', 'wb').write(bytes(99))"
    small = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (3, 3))
    process = popen([sys.executable, "-c", code], preexec_fn=small, stderr=subprocess.PIPE)
    assert b"Too many open files" in process.communicate()[1]


def test_fork_sees_a_terminal_as_its_standard_streams(popen):
    master, theirs = pty.openpty()
    code = "import sys; print(sys.stdin.isatty(), sys.stdout.isatty()); input()"
    process = popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    written = b""
    while b"\n" not in written:
        written += os.read(master, 100)
    assert written == b"True True\r\n"
    os.write(master, b"\n")
    assert process.wait(PATIENCE_S) == 0
    process.stderr.close()
    os.close(master)


def test_unsupported_calls_start_a_new_process(popen, tmp_path):
    for command, how in (
        (["true"], {}),
        ([sys.executable, "-c", ""], {"preexec_fn": lambda: None}),
        ([sys.executable, "-c", ""], {"env": os.environ | {"PYTHONUTF8": "0", "OTHER": str(tmp_path)}}),
        ([sys.executable, "-c", "", "x" * forked.LONGEST], {}),
    ):
        process = popen(command, **how)
        assert (process.wait(PATIENCE_S), process.is_forked) == (0, False)


def test_run_behaves_like_subprocess_run():
    done = forked.run([sys.executable, "-c", "print(input())"], input="a")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")
    with pytest.raises(subprocess.CalledProcessError):
        forked.run([sys.executable, "-c", "raise SystemExit(1)"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)
