"""Fixtures that several test files use: they change how kvtool works, or compile a library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.llama.cache.context import Context
from tests import fork_server
from tests.blocking_policy import TIMEOUT_S


@pytest.fixture
def edits_on_device(monkeypatch):
    """Move and merge cells with a graph on the device, even if the CPU could edit them in host memory.

    The fixture's value is a list with the number of moves of each edit.
    """
    apply, n_moves = Context.apply, []

    def on_the_device(self, moves, *args, **kwargs):
        n_moves.append(len(moves))
        apply(self, moves, *args, force_graph=True, **kwargs)

    monkeypatch.setattr(Context, "apply", on_the_device)
    return n_moves


@pytest.fixture
def however_unlikely(monkeypatch):
    """Draft as many tokens as possible."""
    monkeypatch.setattr("kvtool.drafts.model._MIN_PROBABILITY", 0)
    monkeypatch.setattr("kvtool.drafts.model._GOES_ON", 0)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """compiled(name) compiles NAME.cpp of this folder, and returns the path of the shared library."""

    def compile_library(name):
        source = Path(__file__).with_name(f"{name}.cpp")
        library = tmp_path_factory.mktemp(name) / f"{name}.so"
        compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
        command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", source, "-o", library]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        return library

    return compile_library


@pytest.fixture
def run_preloaded(compiled):
    """run_preloaded(module, *arguments) runs a module with failing_new.cpp preloaded. Returns its JSON."""

    def run(module, *arguments):
        done = fork_server.run(
            [sys.executable, "-m", module, *arguments],
            cwd=fork_server.ROOT,
            env=os.environ | {"LD_PRELOAD": str(compiled("failing_new"))},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run
