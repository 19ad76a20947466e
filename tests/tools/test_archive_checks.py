"""C++ checks of the archive in patches/src.

It is compiled here, and linked with ggml but not with llama.cpp. Compiling takes half a minute, so kvtool's
cache folder keeps the program for as long as the sources are the same.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from kvtool.build import sources
from kvtool.llama.libllama.bindings import lib
from kvtool.system.paths import cache_dir
from tests.blocking_policy import TIMEOUT_S

SRC = sources.patches_dir() / "src"
CHECKS = Path(__file__).with_name("archive_checks.cpp")
NAMES = re.findall(r"^CHECK\((\w+)\)", CHECKS.read_text(encoding="utf-8"), re.M)
ARCHIVE = sources.place(sources.Upstream.read(sources.patches_dir()))
HEADER = re.compile(r"[^/]+/vendor/llama\.cpp/(ggml/include/[\w-]+\.h|ggml/src/ggml-impl\.h)")
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or not COMPILER, reason="there is no C++ compiler for Linux"),
    pytest.mark.skipif(not ARCHIVE.is_file(), reason="the sources of ggml are gone"),
]


def unpack_headers(folder: Path) -> None:
    """Put ggml's headers into the same folders as in llama.cpp."""
    with tarfile.open(ARCHIVE) as tar:
        for member in tar:
            if match := HEADER.fullmatch(member.name):
                path = folder / match[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(member).read())


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    libraries = Path(lib._name).resolve().parent
    inputs = [sources.patches_dir() / "UPSTREAM", CHECKS, Path(__file__)]
    inputs += sorted(path for path in SRC.rglob("*") if path.is_file())
    digest = hashlib.sha256(f"{libraries} {COMPILER}".encode())
    for path in inputs:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    program_path = cache_dir() / "archive_checks" / digest.hexdigest()[:16]
    if not program_path.exists():
        program_path.parent.mkdir(parents=True, exist_ok=True)
        # runs at the same time write equal programs: the last one stays
        part = program_path.with_suffix(f".{os.getpid()}")
        compile_checks(tmp_path_factory.mktemp("archive"), libraries, part)
        part.replace(program_path)
    return program_path


def compile_checks(folder: Path, libraries: Path, path: Path) -> None:
    """Compile the archive and its checks in this folder, and write the program to `path`."""
    unpack_headers(folder)
    # an include path for "../ggml/src/...", as in llama.cpp
    (folder / "src").mkdir()
    # All files are compiled as one, so that the standard library's headers, which take most of the time, are
    # read only once.
    parts = sorted((SRC / "archive").glob("*.cpp")) + [SRC / "cache" / "rope.cpp"]
    library = "".join(f'#include "{path}"\n' for path in parts)
    includes = [f"-I{path}" for path in (SRC, folder / "ggml" / "include", folder / "src")]
    # with these assertions, an index beyond a vector's end ends the program; -O1 saves time in all
    command = [COMPILER, "-std=c++17", "-O1", "-D_GLIBCXX_ASSERTIONS", *includes, "-x", "c++", "-c", "-"]
    objects = []
    for name, text in (("archive", library), ("checks", f'#include "{CHECKS}"\n')):
        objects.append(folder / f"{name}.o")
        subprocess.run([*command, "-o", objects[-1]], input=text, text=True, check=True, timeout=TIMEOUT_S)
    link = [f"-L{libraries}", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}", "-pthread"]
    subprocess.run([COMPILER, *objects, *link, "-o", path], check=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("name", NAMES)
def test_archive_check_passes(program, name):
    command = [program, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_more_than_30_checks_exist():
    assert len(NAMES) > 30
