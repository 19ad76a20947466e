"""Run a command in this process, to get its output and exit code without starting another process."""

from __future__ import annotations

import os
import re
import signal
from subprocess import CompletedProcess

from typer.testing import CliRunner

from kvtool import cli
from kvtool.system import interrupt

RECALL_LINE = (
    r"text that leaves the cache is kept in host memory and still used: up to [0-9.]+ .iB "
    r"\([0-9,]+ tokens\)\n"
)
"""Pattern of the line that a chat or server with recall prints at its start."""


def assert_one_line(done, exit_code, words="", prints=False):
    """Check the exit code of a command, and check that its stderr is one line that contains `words`.

    prints: True to allow text on stdout.
    """
    assert done.returncode == exit_code, done.stderr[-2000:]
    assert prints or not done.stdout
    (line,) = done.stderr.splitlines(keepends=True)
    assert line.startswith("kvtool: ")
    assert line.endswith("\n")
    assert words in line


CUT_LINE = r"stopped after [0-9,]+ tokens? \(-n\)\n"
"""Pattern of the line that says that -n has cut an answer."""


def drop_cut_lines(done):
    """Remove the lines from a command's stderr that say that -n has cut an answer. Return the result.

    Most tests use a small -n to be fast, and do not check these lines.
    """
    if isinstance(done.stderr, bytes):
        done.stderr = re.sub(CUT_LINE, "", done.stderr.decode("latin-1")).encode("latin-1")
    elif done.stderr:
        done.stderr = re.sub(CUT_LINE, "", done.stderr)
    return done


def run_kvtool(*arguments, stdin="", cwd=".", env=None):
    """Run `kvtool ...` in this process, and return a result like that of subprocess.run.

    Errors are reported as in a real process.
    """
    words = [*map(str, arguments)]
    numbers = {signal.SIGINT, signal.SIGTERM, *interrupt.not_ignored()}
    old_folder, handlers = os.getcwd(), {number: signal.getsignal(number) for number in numbers}
    # a command that does not handle SIGTERM must not end the tests
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.chdir(cwd)
    try:
        done = CliRunner().invoke(
            cli.app, words, input=stdin, env=env, prog_name="kvtool", catch_exceptions=False
        )
    finally:
        os.chdir(old_folder)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return CompletedProcess(words, done.exit_code, done.stdout, done.stderr)
