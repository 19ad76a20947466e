"""`kvtool doctor` names each fault and its remedy. The exit code is 0 only if there are no faults."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import typer

from kvtool.build import flags, sources, wheel
from kvtool.build import kernels as compiled
from kvtool.cli import doctor
from kvtool.errors import LibraryError
from kvtool.system import paths


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The library's report about itself. It has no faults until a test changes it."""
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(flags, "asked_cmake_args", lambda: "")
    monkeypatch.setattr(wheel, "installed_key", lambda: wheel.wheel_key(sources.patches_dir(), ""))
    compiled.stamp().parent.mkdir(parents=True)
    compiled.stamp().touch()
    paths.kernel_library().touch()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.gguf").write_bytes(b"12345")
    (tmp_path / "models" / "gone.gguf").symlink_to("nowhere")
    info = {
        "version": "0.3.36",
        "path": "lib/libllama.so",
        "abi": 1,
        "abi_wanted": 1,
        "digest": sources.patch_digest(sources.patches_dir()),
        "devices": [
            {"name": "CPU", "description": "x", "type": "cpu", "memory_total": 2**31, "memory_free": 2**30}
        ],
        "system_info": "AVX2 = 1",
    }
    monkeypatch.setitem(
        sys.modules, "kvtool.llama.libllama.devices", SimpleNamespace(library_info=lambda: dict(info))
    )
    return info


@pytest.fixture
def run(library, capsys):
    """run(exit_code, *words, **options): run doctor, check its exit code and words, and return its output."""

    def printed(exit_code, *words, **options):
        with pytest.raises(typer.Exit) as ended:
            doctor.doctor(**options)
        out = capsys.readouterr().out
        assert ended.value.exit_code == exit_code
        assert all(word in out for word in words), out
        return out

    return printed


def test_doctor_without_problems_exits_0(run):
    run(0, "no problems found", "CPU: x, 1.0 GiB of 2.0 GiB free", "small.gguf")


def test_unwritable_cache_folder_is_a_problem(run, monkeypatch, tmp_path):
    (tmp_path / "text").touch()
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "text"))
    run(1, f"problem: cannot write to the cache folder {tmp_path}/text\n", "export KVTOOL_CACHE=FOLDER")


def test_json_reports_library_models_and_kernels(run):
    report = json.loads(run(0, json=True))
    assert (report["ok"], report["problems"]) == (True, [])
    assert report["library"]["digest"] == report["library"]["digest_wanted"]
    assert report["models"]["files"] == [{"name": "small.gguf", "bytes": 5}]
    assert report["kernels"] == {"path": str(paths.kernel_dir()), "compiled": True, "linked": True}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("abi", 0, "version 0 of kvtool's C API, this kvtool needs 1"),
        ("digest", "0" * 64, "different patch files"),
    ],
)
def test_doctor_advises_to_rebuild_a_library_that_does_not_match(library, run, field, value, words):
    library[field] = value
    run(1, words, "make setup")


def test_library_built_for_a_different_cpu_is_a_problem(run, monkeypatch):
    monkeypatch.setattr(wheel, "installed_key", lambda: "0123456789abcdef")
    run(1, "different CPU")


def test_portable_library_is_accepted_but_other_flags_are_a_problem(run, monkeypatch):
    key = wheel.wheel_key(sources.patches_dir(), "", portable=True)
    monkeypatch.setattr(wheel, "installed_key", lambda: key)
    run(0, "built for all CPUs")
    monkeypatch.setattr(flags, "asked_cmake_args", lambda: "-DGGML_CUDA=on")
    run(1, "set of flags")


def test_library_built_by_hand_without_a_key_is_accepted(run, monkeypatch):
    monkeypatch.setattr(wheel, "installed_key", lambda: None)
    run(0)


def test_missing_library_is_a_problem(run, monkeypatch):
    def fails():
        raise LibraryError("no libllama")

    monkeypatch.setitem(sys.modules, "kvtool.llama.libllama.devices", SimpleNamespace(library_info=fails))
    report = json.loads(run(1, json=True))
    assert report["library"] is None
    assert "no libllama" in report["problems"][0]["wrong"]


def test_command_that_builds_a_missing_library_is_shown_once(run, monkeypatch):
    def fails():
        raise LibraryError(f"there is no llama.cpp yet; build it: {paths.build_command()}")

    monkeypatch.setitem(sys.modules, "kvtool.llama.libllama.devices", SimpleNamespace(library_info=fails))
    out = run(1, f"problem: there is no llama.cpp yet\n  fix it with: {paths.build_command()}")
    assert out.count(paths.build_command()) == 1


def test_unlinked_kernels_are_noted(run):
    assert "not linked" not in run(0)
    paths.kernel_library().unlink()
    run(0, f"compiled, not linked: numba takes 100 MiB more memory; {sys.executable} -m kvtool.build.kernels")


def test_uncompiled_kernels_are_noted(run):
    compiled.stamp().unlink()
    note = (
        "not all compiled: a policy's first run takes longer, and numba takes 100 MiB more memory; "
        f"{sys.executable} -m kvtool.build.kernels compiles them"
    )
    run(0, note, "no problems found")


def test_free_memory_of_the_cpu_is_the_value_of_free_bytes(monkeypatch):
    from kvtool.llama.libllama import devices

    monkeypatch.setattr(devices, "free_bytes", lambda: 12345)
    (cpu,) = (device for device in devices.devices() if device["type"] == "cpu")
    assert cpu["memory_free"] == 12345 < cpu["memory_total"]
