"""The loaded llama.cpp: its path, functions in several libraries, and its builds for this CPU."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest

from kvtool.errors import LibraryError
from kvtool.llama.libllama import bindings


def packages(monkeypatch, **modules):
    """Pretend that only the packages in `modules` are installed.

    modules: {package: its bindings, or the error that its import raises}.
    """

    def import_module(name):
        package = name.partition(".")[0]
        if package not in modules:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        if isinstance(modules[package], Exception):
            raise modules[package]
        return modules[package]

    monkeypatch.setattr(bindings, "import_module", import_module)


def test_only_kvtool_llama_is_loaded(monkeypatch):
    package = SimpleNamespace(_lib=SimpleNamespace(llama_kvtool_abi=None))
    packages(monkeypatch, kvtool_llama=package, llama_cpp="stock")
    assert bindings._load() is package
    packages(monkeypatch, llama_cpp="stock")
    with pytest.raises(LibraryError, match=r"^there is no llama\.cpp yet; build it: "):
        bindings._load()


def test_library_without_the_patch_is_refused(monkeypatch):
    packages(monkeypatch, kvtool_llama=SimpleNamespace(_lib=SimpleNamespace()))
    with pytest.raises(LibraryError, match="was built without kvtool's patch; build the one"):
        bindings._load()


@pytest.mark.parametrize(
    ("error", "repair"),
    [
        (RuntimeError("libllama.so: file too short"), bindings.build_command()),
        (RuntimeError("libcuda.so.1: cannot open"), "install NVIDIA's driver, or: kvtool build --cpu"),
        (ModuleNotFoundError("No module named 'typing_extensions'", name="typing_extensions"), "make setup"),
        (ImportError("no such symbol"), bindings.build_command()),
    ],
)
def test_broken_kvtool_llama_is_an_error(monkeypatch, error, repair):
    packages(monkeypatch, kvtool_llama=error)
    with pytest.raises(LibraryError, match=re.escape(f"({error}); repair it with: {repair}")):
        bindings._load()


def test_functions_are_looked_up_in_each_library_on_windows():
    llama = SimpleNamespace(_name="llama.dll", decode=lambda: "llama's")
    ggml = SimpleNamespace(_name="ggml.dll", decode=lambda: "ggml's", count=lambda: 3)
    parts = bindings.Parts(llama, ggml)
    assert (parts._name, parts.decode(), parts.count()) == ("llama.dll", "llama's", 3)
    assert not hasattr(parts, "llama_kvtool_abi")


def library(monkeypatch, *, is_there, loads):
    """Fake a library.

    is_there: True if it includes the CPU part.
    loads: True if load_all loads the CPU part.
    """
    state = SimpleNamespace(there=is_there, folders=[])

    def dev_by_type(kind):
        return int(state.there)

    def load_all(folder):
        state.folders.append(folder)
        state.there = loads

    fake = SimpleNamespace(
        _name="/site/kvtool_llama/lib/libllama.so",
        ggml_backend_dev_by_type=dev_by_type,
        ggml_backend_load_all_from_path=load_all,
    )
    monkeypatch.setattr(bindings, "lib", fake)
    return state


def test_missing_cpu_parts_are_loaded_from_the_folder_of_the_library(monkeypatch):
    state = library(monkeypatch, is_there=True, loads=True)
    bindings.load_parts()
    assert state.folders == []
    state = library(monkeypatch, is_there=False, loads=True)
    bindings.load_parts()
    bindings.load_parts()
    assert state.folders == [os.fsencode("/site/kvtool_llama/lib")]


def test_cpu_that_no_part_supports_is_an_error(monkeypatch):
    library(monkeypatch, is_there=False, loads=False)
    with pytest.raises(LibraryError, match=r"no part of llama\.cpp in /site/kvtool_llama/lib runs here"):
        bindings.load_parts()
