"""A command in this process: what it says and how it ends, without the time that a process takes to start."""

from __future__ import annotations

import os
import signal
from subprocess import CompletedProcess

from typer.testing import CliRunner

from kvtool import cli

KEEPS = (
    r"older text goes to host memory, at most [0-9.]+ .iB \(the newest [0-9,]+ tokens\), and is still used\n"
)
"""What a chat or a server that recalls says at its start."""


def called(*arguments, stdin="", cwd=".", env=None):
    """`kvtool ...` as for subprocess.run: what ends in one line takes the same way to it here."""
    words = [*map(str, arguments)]
    before, interrupt = os.getcwd(), signal.getsignal(signal.SIGINT)
    os.chdir(cwd)
    try:
        done = CliRunner().invoke(
            cli.app, words, input=stdin, env=env, prog_name="kvtool", catch_exceptions=False
        )
    finally:
        os.chdir(before)
        signal.signal(signal.SIGINT, interrupt)
    return CompletedProcess(words, done.exit_code, done.stdout, done.stderr)
