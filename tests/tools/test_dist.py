"""The wheel of llama.cpp: its contents, the machines that it runs on, and when it replaces a build."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvtool import __version__
from kvtool.build import dist, given, pack, sources
from kvtool.build import wheel as build
from kvtool.build.__main__ import main
from kvtool.errors import LibraryError

ROOT = Path(__file__).parents[2]
UPSTREAM = sources.Upstream("llama-cpp-python", "9.9", "0" * 64)
BINDINGS = "from llama_cpp._ctypes_extensions import (\n    byref,\n)\n# llama_cpp.llama_decode\n"


def archive(folder, *names):
    path = folder / "llama_cpp_python-9.9.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name in names:
            (folder / "licence").write_text(f"licence in {name}")
            packed.add(folder / "licence", f"llama_cpp_python-9.9/{name}")
    return path


def built(folder, *names):
    """Write a wheel of llama-cpp-python with its bindings and these files. Return its path."""
    path = folder / "llama_cpp_python-9.9-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as out:
        for name in names:
            out.writestr(name, f"made {Path(name).name}")
        out.writestr("llama_cpp/llama_cpp.py", BINDINGS)
        out.writestr("llama_cpp/_ctypes_extensions.py", "")
        out.writestr("llama_cpp/llama.py", "import numpy")
        out.writestr("include/llama.h", "")
    return path


@pytest.fixture
def packed(tmp_path):
    """A wheel of kvtool-llama, opened as a ZIP file."""
    twice = ("llama_cpp/lib/libllama.so", "lib/libllama.so", "bin/libggml-cpu-zen4.so", "lib/ggml.dll")
    licences = archive(tmp_path, "LICENSE.md", "vendor/llama.cpp/LICENSE")
    wheel = pack.pack(built(tmp_path, *twice), licences, UPSTREAM, "portable-1", "-DA=1", tmp_path / "out")
    assert wheel.name == f"kvtool_llama-{__version__}-py3-none-linux_x86_64.whl"
    assert pack.key_of(wheel) == "portable-1"
    return zipfile.ZipFile(wheel)


def test_wheel_contains_only_the_bindings_and_each_library_once(packed):
    names = [name for name in packed.namelist() if name.startswith("kvtool_llama/")]
    assert sorted(names) == [
        "kvtool_llama/__init__.py",
        "kvtool_llama/_ctypes_extensions.py",
        "kvtool_llama/lib/ggml.dll",
        "kvtool_llama/lib/libggml-cpu-zen4.so",
        "kvtool_llama/lib/libllama.so",
        "kvtool_llama/llama_cpp.py",
        "kvtool_llama/py.typed",
    ]
    assert packed.read("kvtool_llama/lib/libllama.so") == b"made libllama.so"
    # The package imports only its own files, even if llama-cpp-python is installed.
    text = packed.read("kvtool_llama/llama_cpp.py").decode()
    assert text.startswith("from kvtool_llama._ctypes_extensions import (")
    assert 'UPSTREAM = "9.9"' in packed.read("kvtool_llama/__init__.py").decode()


def test_wheel_contains_all_licences_and_its_metadata_names_them(packed):
    info = f"kvtool_llama-{__version__}.dist-info"
    metadata = packed.read(f"{info}/METADATA").decode()
    named = re.findall(r"^License-File: (.+)$", metadata, re.M)
    assert [packed.read(f"{info}/licenses/{name}").decode() for name in named] == [
        "licence in LICENSE.md",
        "licence in vendor/llama.cpp/LICENSE",
        (ROOT / "LICENSE").read_text(),
    ]
    assert f"Name: kvtool-llama\nVersion: {__version__}\n" in metadata
    # pip ignores the lines of METADATA after the first empty line
    assert metadata.index("Requires-Dist:") < metadata.index("\n\n")


def test_record_lists_every_file_with_its_hash_and_size(packed):
    (record,) = (name for name in packed.namelist() if name.endswith("/RECORD"))
    lines = [line.split(",") for line in packed.read(record).decode().splitlines()]
    assert [name for name, *_ in lines] == packed.namelist()
    for name, digest, size in lines[:-1]:
        data = packed.read(name)
        assert size == str(len(data))
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert digest == f"sha256={expected}"


def test_packing_without_a_library_or_a_licence_is_refused(tmp_path):
    licences = archive(tmp_path, "LICENSE.md", "vendor/llama.cpp/LICENSE")
    with pytest.raises(LibraryError, match="has no library in it"):
        pack.pack(built(tmp_path), licences, UPSTREAM, "1", "", tmp_path / "out")
    wheel = built(tmp_path, "lib/libllama.so")
    with pytest.raises(LibraryError, match=r"has no vendor.llama.cpp.LICENSE"):
        pack.pack(wheel, archive(tmp_path, "LICENSE.md"), UPSTREAM, "1", "", tmp_path / "out")


def test_damaged_wheels_and_wheels_of_other_packages_have_no_key(tmp_path):
    assert pack.key_of(built(tmp_path, "lib/libllama.so")) is None
    (tmp_path / "x.whl").write_bytes(b"PK damaged")
    assert pack.key_of(tmp_path / "x.whl") is None
    assert pack.key_of(tmp_path / "none.whl") is None
    assert [pack.key_in(text) for text in ("", "[]", "{}", '{"key": 1}')] == [None] * 4


LINUX = ("linux", "x86_64", ("glibc", "2.36"), "")
MUSL = ("linux", "x86_64", ("", ""), "")
ARM = ("linux", "aarch64", ("glibc", "2.36"), "")
MAC = ("darwin", "arm64", ("", ""), "14.5")
WINDOWS = ("win32", "AMD64", ("", ""), "")


@pytest.mark.parametrize(
    ("machine", "tag", "runs"),
    [
        (LINUX, "manylinux_2_36_x86_64", True),
        (LINUX, "manylinux_2_9_x86_64", True),
        (LINUX, "manylinux_2_37_x86_64", False),
        (LINUX, "manylinux_2_28_aarch64", False),
        (LINUX, "manylinux_2_40_x86_64.manylinux_2_28_x86_64", True),
        (LINUX, "linux_x86_64", True),
        (LINUX, "musllinux_1_2_x86_64", False),
        (LINUX, "macosx_11_0_x86_64", False),
        (LINUX, "win_amd64", False),
        (MUSL, "manylinux_2_17_x86_64", False),
        (ARM, "manylinux_2_28_aarch64", True),
        (ARM, "manylinux_2_28_x86_64", False),
        (MAC, "macosx_11_0_arm64", True),
        (MAC, "macosx_14_5_universal2", True),
        (MAC, "macosx_15_0_arm64", False),
        (MAC, "macosx_11_0_x86_64", False),
        (WINDOWS, "win_amd64", True),
        (WINDOWS, "win_arm64", False),
    ],
)
def test_wheel_runs_on_its_system_and_on_newer_versions(monkeypatch, machine, tag, runs):
    system, processor, libc, mac = machine
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    monkeypatch.setattr("platform.mac_ver", lambda: (mac, ("", "", ""), ""))
    assert given.runs_here(f"kvtool_llama-0.1.0-py3-none-{tag}.whl") is runs


def test_wheel_for_a_single_python_version_is_rejected():
    assert not given.runs_here("kvtool_llama-0.1.0-cp312-cp312-linux_x86_64.whl")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Pretend to be a Linux machine with an empty cache and no wheel."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVTOOL_WHEELS", raising=False)
    monkeypatch.setattr(given, "checkout", lambda: tmp_path / "checkout")


PATCHES = ROOT / "patches"


def put(folder, key, tag="manylinux_2_28_x86_64", version=__version__):
    """Write a wheel of kvtool-llama with this key. Return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"kvtool_llama-{version}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr(f"kvtool_llama-{version}.dist-info/kvtool.json", f'{{"key": "{key}"}}')
    return path


def portable():
    return build.wheel_key(PATCHES, "", portable=True)


def test_portable_key_is_the_same_on_every_machine(monkeypatch):
    before, native = portable(), build.wheel_key(PATCHES, "")
    monkeypatch.setattr(build, "cpu_features", lambda: "another CPU")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "9.9"))
    assert portable() == before
    assert build.wheel_key(PATCHES, "") != native


def test_portable_key_changes_with_the_patch_and_kvtool_version(monkeypatch):
    before = portable()
    with monkeypatch.context() as patch:
        patch.setattr(build, "patch_digest", lambda folder: "another patch")
        assert portable() != before
    monkeypatch.setattr(pack, "VERSION", "9.9")
    assert portable() != before


def test_first_compatible_wheel_is_chosen(machine, tmp_path, monkeypatch):
    places = [tmp_path / "no folder", tmp_path / "a", tmp_path / "b"]
    put(places[1], portable(), "manylinux_2_99_x86_64")
    put(places[1], "portable-of-another-patch", version="0.0.1")
    (places[1] / "kvtool_llama-damaged-py3-none-linux_x86_64.whl").touch()
    assert given.find(places, portable()) is None
    wheel = put(places[2], portable())
    assert given.find(places, portable()) == wheel


def test_folders_of_kvtool_wheels_are_searched_before_dist(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTOOL_WHEELS", f"{tmp_path / 'a'}:{tmp_path / 'b'}:")
    assert given.folders() == [tmp_path / "a", tmp_path / "b", tmp_path / "checkout" / "dist"]


def test_compatible_wheel_is_used_instead_of_a_build(machine, tmp_path, monkeypatch, capsys):
    built = []
    monkeypatch.setattr(build, "build", lambda *arguments: built.append(arguments))
    build.find_or_build(PATCHES, "")
    assert built == [(PATCHES, "")]
    assert capsys.readouterr().err == ""
    wheel = put(tmp_path / "checkout" / "dist", portable())
    assert build.find_or_build(PATCHES, "") == wheel
    assert capsys.readouterr().err == f"using {wheel}: nothing is compiled\n"
    assert len(built) == 1


def test_portable_wheel_is_not_used_with_flags_or_a_native_build(machine, tmp_path, monkeypatch):
    put(tmp_path / "checkout" / "dist", portable())
    monkeypatch.setattr(build, "build", lambda *arguments: "built")
    assert build.find_or_build(PATCHES, "-DGGML_CUDA=on") == "built"
    put(tmp_path / "cache" / "wheels" / build.wheel_key(PATCHES, ""), "x")
    assert build.find_or_build(PATCHES, "") == "built"


def test_message_says_if_no_wheel_in_kvtool_wheels_fits(machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVTOOL_WHEELS", str(tmp_path))
    monkeypatch.setattr(build, "build", lambda *arguments: "built")
    assert build.find_or_build(PATCHES, "") == "built"
    assert capsys.readouterr().err.startswith("no wheel in KVTOOL_WHEELS fits")


def test_native_and_portable_keys_fit_if_no_flags_are_given():
    assert build.fitting_keys(PATCHES, " ") == (build.wheel_key(PATCHES, ""), portable())
    assert build.fitting_keys(PATCHES, "-DA=1") == (build.wheel_key(PATCHES, "-DA=1"),)


MENDER = """\
import pathlib, sys
*_, folder, wheel = sys.argv
name = pathlib.Path(wheel).name.replace("linux", "manylinux_2_36")
pathlib.Path(folder, name).write_bytes(pathlib.Path(wheel).read_bytes())
"""


@pytest.fixture
def mender(machine, tmp_path, monkeypatch):
    """Replace auditwheel by a small program, and `build` by a function that returns a wheel for every CPU."""
    (tmp_path / "mender.py").write_text(MENDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(dist._MENDERS, "linux", ("mender", "repair"))
    wheel = put(tmp_path / "built", portable(), "linux_x86_64")
    monkeypatch.setattr(build, "build", lambda *arguments, portable: wheel)


def test_dist_repairs_the_wheel_and_replaces_older_wheels(mender, tmp_path, capsys):
    folder = tmp_path / "dist"
    put(folder, "older", version="0.0.1")
    (folder / "kvtool-0.1.0-py3-none-any.whl").touch()
    assert main(["--dist", str(folder)]) == 0
    wheel = folder / f"kvtool_llama-{__version__}-py3-none-manylinux_2_36_x86_64.whl"
    assert capsys.readouterr().out == f"{wheel}\n"
    assert sorted(folder.iterdir()) == [folder / "kvtool-0.1.0-py3-none-any.whl", wheel]
    assert pack.key_of(wheel) == portable()


def test_missing_or_failing_repair_tool_is_named(mender, tmp_path, monkeypatch, capsys):
    (tmp_path / "mender.py").write_text("import sys; sys.exit('error: cannot repair')")
    put(tmp_path / "dist", "older")
    assert main(["--dist", str(tmp_path / "dist")]) == LibraryError.exit_code
    assert "mender cannot mend" in capsys.readouterr().err
    monkeypatch.setitem(dist._MENDERS, "linux", ("no_such_mender", "repair"))
    assert main(["--dist", str(tmp_path / "dist")]) == LibraryError.exit_code
    line = "kvtool: there is no no_such_mender; install it: pip install 'kvtool[dist]'\n"
    assert capsys.readouterr().err == line
    # the older wheel is kept
    assert len(list((tmp_path / "dist").iterdir())) == 1


def test_cpu_extra_pins_the_version_of_kvtool_llama():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'cpu = ["{pack.DISTRIBUTION}=={__version__}"]' in text
    assert f'\nversion = "{__version__}"\n' in text
