"""`kvtool build`: the key that identifies a build, when a build is reused, and messages about failures.

A script replaces pip, so nothing is downloaded or compiled here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import kvtool.cli.build as command
from kvtool.build import flags, given, kernels, needs, pack, process, sources
from kvtool.build import wheel as build
from kvtool.build.__main__ import main
from kvtool.cli import app
from kvtool.errors import LibraryError, UsageError
from kvtool.kernels import load
from kvtool.system import paths
from tests import fork_server

PATCHES = Path(__file__).parents[2] / "patches"
DIGESTED = ("hooks.patch", "src/a.h", "src/b.cpp")
SOURCES = {"LICENSE.md": "the bindings'", "vendor/llama.cpp/LICENSE": "llama.cpp's"}
CHECK_TOOLS = needs.check_tools

PIP = """\
import os, pathlib, shutil, sys, zipfile
WHEEL = "llama_cpp_python-9.9-py3-none-any.whl"
a = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(a) + "\\n")
if "download" in a:
    shutil.copy(os.environ["ARCHIVE"], a[a.index("-d") + 1])
if "wheel" in a:
    folder = pathlib.Path(a[a.index("-w") + 1])
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("llama_cpp/llama_cpp.py", "from llama_cpp._ctypes_extensions import x")
        wheel.writestr("llama_cpp/_ctypes_extensions.py", "x = 1")
        wheel.writestr("llama_cpp/llama.py", "import llama_cpp.llama_cpp")
        wheel.writestr("llama_cpp/lib/libllama.so", os.environ["CMAKE_ARGS"])
        wheel.writestr("lib/libllama.so", os.environ["CMAKE_ARGS"])
        wheel.writestr("bin/libggml-cpu-haswell.so", "for one CPU")
    for n in range(1, 101):
        print(f"  [{n}/100] /usr/bin/c++ -c x.cpp")
print(os.environ.get("SAYS", ""))
sys.exit(int(os.environ.get("FAILS", "0")))
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Give the test its own cache, environment and pip. Return the folder of the patch files."""
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.setenv("KVTOOL_WHEELS", "")
    monkeypatch.setattr(given, "checkout", lambda: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(needs, "check_tools", lambda cmake_args="": None)
    pip = tmp_path / "pip.py"
    pip.write_text(PIP)
    monkeypatch.setattr(process, "pip", lambda *arguments: [sys.executable, str(pip), *arguments])
    folder = tmp_path / "checkout with spaces" / "patches"
    (folder / "src").mkdir(parents=True)
    (folder / "MANIFEST").write_text("".join(f"{name}\n" for name in DIGESTED))
    for name in (*DIGESTED, "apply.cmake", "amx-gcc.h", "vulkan-old.h"):
        (folder / name).write_text(name)
    archive = tmp_path / "llama_cpp_python-9.9.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for name, text in SOURCES.items():
            (tmp_path / "text").write_text(text)
            packed.add(tmp_path / "text", f"llama_cpp_python-9.9/{name}")
    monkeypatch.setenv("ARCHIVE", str(archive))
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    (folder / "UPSTREAM").write_text(f"package = llama-cpp-python\nversion = 9.9\nsha256 = {sha256}\n")
    monkeypatch.setattr(sources, "patches_dir", lambda: folder)
    return folder


def cmake_args(wheel):
    """Return the CMake arguments of a wheel.

    The script that replaces pip has written them into the wheel's library.
    """
    return zipfile.ZipFile(wheel).read("kvtool_llama/lib/libllama.so").decode()


def calls(tmp_path):
    path = tmp_path / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[0] for line in lines]


def test_second_build_reuses_the_first_wheel(place, tmp_path):
    wheel = build.build(place, "")
    assert wheel.parent.parent == tmp_path / "cache" / "wheels"
    assert build.build(place, "") == wheel
    assert calls(tmp_path) == ["download", "wheel"]
    assert [path.name for path in wheel.parent.parent.iterdir()] == [wheel.parent.name]


def test_builds_with_other_flags_reuse_the_download(place, tmp_path):
    wheels = {build.build(place, ""), build.build(place, "-DA=1"), build.build(place, "", stock=True)}
    assert len(wheels) == 3
    assert calls(tmp_path) == ["download", "wheel", "wheel", "wheel"]


@pytest.mark.parametrize("name", [*DIGESTED, "apply.cmake", "amx-gcc.h", "vulkan-old.h", "UPSTREAM"])
def test_key_changes_with_each_patch_file(place, name):
    before = build.wheel_key(place, "")
    with (place / name).open("a") as file:
        file.write("\n")
    assert build.wheel_key(place, "") != before


def test_key_changes_with_flags_and_cpu(place, monkeypatch):
    before = build.wheel_key(place, "-DA=1 -DB=2")
    assert build.wheel_key(place, "  -DA=1   -DB=2") == before
    assert build.wheel_key(place, "-DA=1") != before
    monkeypatch.setattr(build, "cpu_features", lambda: "x86_64 avx9")
    assert build.wheel_key(place, "-DA=1 -DB=2") != before


def test_key_of_a_stock_build_does_not_depend_on_the_patch(place):
    before = build.wheel_key(place, "", stock=True)
    assert before.startswith("stock-")
    (place / "hooks.patch").write_text("other")
    assert build.wheel_key(place, "", stock=True) == before


def test_cmake_gets_a_path_with_spaces_and_the_users_flags_last(place):
    wheel = build.build(place, "-DGGML_RPC=OFF")
    flags = shlex.split(cmake_args(wheel))
    assert flags[0] == f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={place / 'apply.cmake'}"
    assert flags[-1] == "-DGGML_RPC=OFF"
    assert "-DGGML_RPC=ON" in flags
    assert "-DKVTOOL_PATCH=OFF" in cmake_args(build.build(place, "", stock=True))


def test_pip_does_not_use_its_own_wheel_cache(place, tmp_path):
    build.build(place, "")
    wheel_call = (tmp_path / "calls").read_text().splitlines()[1]
    assert "--no-cache-dir" in wheel_call


def test_progress_without_a_terminal_prints_a_line_per_tenth(place, capfd):
    build.build(place, "")
    lines = [line.strip() for line in capfd.readouterr().err.splitlines() if "/100" in line]
    assert lines == ["1/100", *(f"{n}/100" for n in range(10, 101, 10))]


def test_progress_on_a_terminal_is_one_line(place, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    build.build(place, "")
    line = capsys.readouterr().err.splitlines()[-1].split("\r")[-1]
    assert line.endswith("100/100 [####################]")


def test_failed_build_names_errors_and_log_and_keeps_no_wheel(place, tmp_path, monkeypatch):
    build.build(place, "-DFIRST=1")
    monkeypatch.setenv("FAILS", "1")
    monkeypatch.setenv("SAYS", "x.cpp:7: error: no such thing\nmake it so\nmore")
    with pytest.raises(LibraryError, match=r"x\.cpp:7: error: no such thing") as caught:
        build.build(place, "")
    log = tmp_path / "cache" / "logs" / f"build-{build.wheel_key(place, '')}.log"
    assert str(log) in str(caught.value)
    assert "[100/100]" in log.read_text()
    assert len(list((tmp_path / "cache" / "wheels").iterdir())) == 1


def test_message_after_a_cmake_error_is_shown(place, monkeypatch):
    build.build(place, "-DFIRST=1")
    monkeypatch.setenv("FAILS", "1")
    pip = "  error: subprocess-exited-with-error\n  ERROR: Failed building wheel for x\n" * 4
    message = "CMake Error at apply.cmake:3 (message):\n  kvtool: the patch does not apply\n"
    monkeypatch.setenv("SAYS", message + pip)
    with pytest.raises(LibraryError, match="kvtool: the patch does not apply"):
        build.build(place, "")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: Could not find a version that satisfies x (from versions: none)", "there is no network"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
    ],
)
@pytest.mark.parametrize("has_source", [False, True])
def test_known_build_failures_are_explained_in_one_line(place, monkeypatch, message, reason, has_source):
    if has_source:
        build.build(place, "-DFIRST=1")
    monkeypatch.setenv("FAILS", "1")
    monkeypatch.setenv("SAYS", f"{message}\nERROR: failed")
    with pytest.raises(LibraryError, match=reason) as caught:
        build.build(place, "")
    assert "\n" not in str(caught.value)
    assert ("did not build" if has_source else "could not be downloaded") in str(caught.value)


def test_download_with_a_wrong_hash_is_reported(place, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    monkeypatch.setenv("SAYS", "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.")
    with pytest.raises(LibraryError, match="sha256 differs"):
        build.build(place, "")


def test_damaged_sources_are_downloaded_again(place, tmp_path):
    build.build(place, "")
    (tmp_path / "cache" / "source" / "llama_cpp_python-9.9.tar.gz").write_bytes(b"damaged")
    build.build(place, "-DA=1")
    assert calls(tmp_path) == ["download", "wheel", "download", "wheel"]


def installed(monkeypatch, wheel):
    """Make it appear that this wheel is installed.

    wheel: path, or None for an installed library that kvtool has not built.
    """

    def read_text(name):
        assert name == pack.RECORD_OF_BUILD
        return json.dumps({"key": pack.key_of(wheel)}) if wheel else None

    distribution = SimpleNamespace(read_text=read_text)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: distribution)


def test_wheel_is_installed_unless_the_same_build_is_installed(place, tmp_path, monkeypatch):
    wheel = build.build(place, "")
    installed(monkeypatch, None)
    assert build.install(wheel, "")
    installed(monkeypatch, build.build(place, "-DA=1"))
    assert build.install(wheel, "")
    installed(monkeypatch, wheel)
    assert not build.install(wheel, "")
    assert calls(tmp_path) == ["download", "wheel", "install", "wheel", "install"]


def test_reused_build_is_reported_unless_it_is_installed(place, monkeypatch, capsys):
    installed(monkeypatch, None)
    wheel = build.find_or_build(place, "")
    assert "compiled before" not in capsys.readouterr().err
    assert build.find_or_build(place, "") == wheel
    assert capsys.readouterr().err == f"using {wheel}, compiled before\n"
    installed(monkeypatch, wheel)
    assert build.find_or_build(place, "") == wheel
    assert capsys.readouterr().err == ""


def test_progress_counts_all_kernels(tmp_path, monkeypatch, capsys):
    compiled = [SimpleNamespace(name=str(i), compile=lambda: None) for i in range(25)]
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "0")
    monkeypatch.setattr(kernels, "modules", lambda: ["json"])
    monkeypatch.setattr(kernels, "stamp", lambda: tmp_path / "compiled")
    monkeypatch.setattr("kvtool.kernels.kernel.of_module", lambda module: compiled)
    monkeypatch.setattr("kvtool.kernels.link.link", lambda kernels, path: None)
    kernels.compile_all()
    first, *counted = capsys.readouterr().err.splitlines()
    assert first == "compiling 25 kernels (once)"
    assert counted[-1] == "  25/25"
    assert all(each.endswith("/25") for each in counted)


def test_unwritable_and_system_managed_environments_are_refused(place, tmp_path, monkeypatch):
    needs.check_environment()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    with pytest.raises(LibraryError, match="purelib is not writable; .*virtual environment"):
        needs.check_environment()
    for name in ("purelib", "stdlib"):
        (tmp_path / name).mkdir()
    (tmp_path / "stdlib" / "EXTERNALLY-MANAGED").touch()
    needs.check_environment()
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    with pytest.raises(LibraryError, match="the system manages .*virtual environment"):
        needs.check_environment()


def test_no_build_starts_if_it_could_not_be_installed(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    assert main(["--install"]) == LibraryError.exit_code
    assert "is not writable" in capsys.readouterr().err
    assert calls(tmp_path) == []


def test_missing_pip_error_names_ensurepip(place, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LibraryError, match="-m ensurepip"):
        build.build(place, "")


def test_cmake_flags_of_the_last_install_are_remembered(place, monkeypatch):
    installed(monkeypatch, None)
    assert flags.asked_cmake_args() == ""
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert main(["--install"]) == 0
    monkeypatch.delenv("CMAKE_ARGS")
    assert flags.asked_cmake_args() == "-DGGML_CUDA=on"
    monkeypatch.setenv("CMAKE_ARGS", "")
    assert main(["--install"]) == 0
    monkeypatch.delenv("CMAKE_ARGS")
    assert flags.asked_cmake_args() == ""


def test_flags_of_a_failed_build_are_not_remembered(place, monkeypatch, capsys):
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    monkeypatch.setenv("FAILS", "1")
    assert main(["--install"]) == LibraryError.exit_code
    assert capsys.readouterr().err.splitlines()[-2].startswith("kvtool: ")
    monkeypatch.delenv("CMAKE_ARGS")
    assert flags.asked_cmake_args() == ""


def test_build_prints_the_path_of_the_wheel(place, capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == f"{build.find_wheel(build.wheel_key(place, ''))}\n"


def test_cmake_args_with_an_unclosed_quote_are_refused_in_one_line(kvtool_build, monkeypatch, capsys):
    line = 'kvtool: $CMAKE_ARGS is not a list of flags (No closing quotation), got "-DX=\'a"\n'
    monkeypatch.setenv("CMAKE_ARGS", "-DX='a")
    for arguments in ([], ["--cuda"]):
        done = kvtool_build(*arguments)
        assert (done.exit_code, done.stderr) == (UsageError.exit_code, line)
    assert main([]) == UsageError.exit_code
    assert capsys.readouterr().err == line
    assert not needs._runs("g++ 'x")


@pytest.mark.parametrize("spoil", ["data", "end", "method", "encrypted"])
def test_a_damaged_wheel_has_no_key(place, spoil):
    wheel = build.build(place, "")
    assert pack.key_of(wheel) == build.wheel_key(place, "")
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(pack.RECORD_OF_BUILD)]
        at = packed.getinfo(names[0]).header_offset
    data = bytearray(wheel.read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(names[0].encode()))
    n_name, n_more = (int.from_bytes(data[at + i : at + i + 2], "little") for i in (26, 28))
    begin = at + 30 + n_name + n_more
    if spoil == "data":
        data[begin : begin + 4] = b"\xff" * 4
    elif spoil == "end":
        # its entry says that the file is not compressed, and has more bytes than there are
        data[entry + 10] = data[at + 8] = 0
        data[entry + 20 : entry + 24] = data[entry + 24 : entry + 28] = b"\xff\xff\xff\x7f"
    elif spoil == "method":
        data[entry + 10] = data[at + 8] = 99
    else:
        data[entry + 8] |= 1
        data[at + 6] |= 1
    wheel.write_bytes(data)
    assert pack.key_of(wheel) is None


def test_missing_compiler_is_reported_in_one_line(tmp_path):
    script = (
        "from kvtool import errors\nfrom kvtool.build import needs\n"
        "try: needs.check_tools()\n"
        "except errors.LibraryError as error: print(error)\n"
    )
    env = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    root = Path(__file__).parents[2]
    for path, message in ((str(tmp_path), "C++ compiler"), (env["PATH"], "")):
        done = fork_server.run_python("-c", script, env={**env, "PATH": path}, cwd=root)
        assert done.stderr == ""
        assert message in done.stdout
        assert len(done.stdout.splitlines()) == bool(message)


@pytest.mark.parametrize(
    ("cmake_args", "message"),
    [
        ("-DGGML_CUDA=on", "no nvcc, .*CUDACXX"),
        ("-DGGML_CUDA:BOOL=ON -DX=1", "no nvcc"),
        ("-DGGML_VULKAN=1", "no glslc, .*VULKAN_SDK"),
        ("-DGGML_METAL=on", "on Macs only"),
        ("-DGGML_CUDA=off -DGGML_VULKAN=0 -DGGML_METAL=no", None),
        ("-DGGML_CUDA=on -DGGML_CUDA=off", None),
    ],
)
def test_missing_tools_of_a_device_are_reported_before_the_build(tmp_path, monkeypatch, cmake_args, message):
    monkeypatch.setattr(needs, "_runs", lambda program: program not in ("nvcc", "glslc"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    monkeypatch.delenv("CUDACXX", raising=False)
    if message is None:
        CHECK_TOOLS(cmake_args)
        return
    with pytest.raises(LibraryError, match=message) as caught:
        CHECK_TOOLS(cmake_args)
    assert "\n" not in str(caught.value)


def test_error_names_an_nvcc_that_is_not_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "_runs", lambda program: program != "nvcc")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch()
    with pytest.raises(LibraryError, match=f"CUDACXX={nvcc}"):
        CHECK_TOOLS("-DGGML_CUDA=on")


@pytest.fixture
def kvtool_build(place, tmp_path, monkeypatch):
    """kvtool_build("--cuda", ...) runs `kvtool build --cuda ...`, without examining the library."""
    monkeypatch.setattr(kernels, "compile_all", lambda: None)
    facts = {"library": {"devices": [{"description": "a CPU"}]}, "problems": []}
    monkeypatch.setattr(command, "_examined", lambda: facts)
    monkeypatch.setattr(sys, "platform", "linux")
    installed(monkeypatch, None)
    return lambda *arguments: CliRunner().invoke(app, ["build", *arguments])


@pytest.mark.parametrize(
    ("arguments", "cmake_args", "built"),
    [
        (["--cuda"], None, "-DGGML_CUDA=on"),
        (["--vulkan", "--cuda"], "", "-DGGML_CUDA=on -DGGML_VULKAN=on"),
        (["--cuda"], "-DCMAKE_CUDA_ARCHITECTURES=86", "-DCMAKE_CUDA_ARCHITECTURES=86 -DGGML_CUDA=on"),
        (["--cuda"], "-DGGML_CUDA=on", "-DGGML_CUDA=on"),
        (["--cuda"], "-DGGML_CUDA=off", "-DGGML_CUDA=off -DGGML_CUDA=on"),
        (["--cpu"], "-DGGML_NATIVE=off", "-DGGML_NATIVE=off"),
        (["--cpu"], None, ""),
        ([], "-DGGML_VULKAN=on", "-DGGML_VULKAN=on"),
        ([], "", ""),
        ([], None, "-DFIRST=1"),
    ],
)
def test_command_builds_with_the_given_flags_and_remembers_them(
    kvtool_build, monkeypatch, arguments, cmake_args, built
):
    monkeypatch.setenv("CMAKE_ARGS", "-DFIRST=1")
    assert kvtool_build().exit_code == 0
    monkeypatch.delenv("CMAKE_ARGS")
    if cmake_args is not None:
        monkeypatch.setenv("CMAKE_ARGS", cmake_args)
    done = kvtool_build(*arguments)
    assert done.exit_code == 0, done.output
    words = f" with {built}" if built else ""
    assert done.stdout == f"installed: llama.cpp{words} for a CPU; kvtool doctor shows details\n"
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    assert flags.asked_cmake_args() == built


def test_cpu_build_on_a_mac_turns_metal_off(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert flags.device_args([]) == "-DGGML_METAL=off"
    assert flags.device_args(["metal"]) == "-DGGML_METAL=on"


@pytest.mark.parametrize(
    ("arguments", "cmake_args"), [(["--cpu", "--cuda"], ""), (["--cpu"], "-DGGML_CUDA=on")]
)
def test_cpu_together_with_a_device_is_a_usage_error(
    kvtool_build, monkeypatch, tmp_path, arguments, cmake_args
):
    monkeypatch.setenv("CMAKE_ARGS", cmake_args)
    done = kvtool_build(*arguments)
    assert done.exit_code == UsageError.exit_code
    assert done.stderr.count("\n") == 1
    assert calls(tmp_path) == []


def test_command_prints_the_build_errors_and_then_one_line(kvtool_build, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    monkeypatch.setenv("SAYS", "x.cpp:7: error: no such thing")
    done = kvtool_build("--vulkan")
    assert done.exit_code == LibraryError.exit_code
    *_, line = done.stderr.splitlines()
    assert line.startswith("kvtool: llama-cpp-python 9.9 could not be downloaded; the whole log is ")
    assert "  x.cpp:7: error: no such thing\n" in done.stderr
    assert done.stdout == ""


def test_command_fails_if_the_built_library_does_not_load(kvtool_build, monkeypatch):
    wrong = "llama.cpp does not load (libcuda.so.1)"
    facts = {"library": None, "problems": [{"wrong": wrong, "command": "x"}]}
    monkeypatch.setattr(command, "_examined", lambda: facts)
    done = kvtool_build("--cuda")
    assert done.exit_code == LibraryError.exit_code
    assert done.stderr.splitlines()[-1] == f"kvtool: {wrong}"
    assert done.stdout == ""


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_make_setup_refuses_an_old_python_and_makes_no_venv(tmp_path):
    shutil.copy(Path(__file__).parents[2] / "Makefile", tmp_path)
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = fork_server.run(["make", "setup", f"PYTHON={old}"], cwd=tmp_path)
    assert done.returncode != 0
    assert "Python 3.10 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_kernels_with_bounds_checks_are_cached_in_another_folder(monkeypatch):
    monkeypatch.undo()
    assert paths.kernel_dir() == load.LIBRARY.parent
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "0" if os.environ.get("NUMBA_BOUNDSCHECK") else "1")
    assert paths.kernel_dir() != load.LIBRARY.parent


def test_long_progress_title_fits_the_terminal_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    process.Progress("building with " + "-DGGML_SOMETHING=on " * 9).show(1234, 1234)
    assert all(len(drawn) <= 80 for drawn in capsys.readouterr().err.split("\r"))
