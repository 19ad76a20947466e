"""Fixtures that several test files use: they change how kvtool works, or compile a library."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtool.llama.cache.context import Context
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
