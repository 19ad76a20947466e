"""The patch: its header, its digest, and how it is applied. A patch that does not fit changes nothing."""

from __future__ import annotations

import importlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from kvtool.build import sources
from kvtool.errors import LibraryError
from tests import fork_server

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches"
SRC = PATCHES / "src"
MANIFEST = sources.manifest(PATCHES)
sys.path.insert(0, str(PATCHES))
apply = importlib.import_module("apply")
sync = importlib.import_module("sync")

BEFORE = "one\ntwo\nthree\nfour\nfive\nsix\n"
AFTER = "one\ntwo\nTHREE\nfour\nfive\nsix\nseven\n"
PATCH = b"""\
Subject: a test
Why: to test
Remove-when: never
Touches: nothing

diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -2,3 +2,3 @@ one
 two
-three
+THREE
 four
@@ -6 +6,2 @@
 six
+seven
"""

needs_cmake = pytest.mark.skipif(not shutil.which("cmake"), reason="there is no cmake to ask")
needs_git = pytest.mark.skipif(not shutil.which("git"), reason="there is no git to compare with")


@pytest.fixture
def tree(tmp_path):
    """A tree with only the file that the test patch changes."""
    folder = tmp_path / "tree"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "a.cpp").write_text(BEFORE)
    return folder


def included(path):
    """Return the names that a C++ file includes. kvtool's own files get the form folder/file."""
    names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.M)
    return {f"{path.parent.name}/{name}" if (path.parent / name).is_file() else name for name in names}


def read(tree):
    return (tree / "src" / "a.cpp").read_text()


def test_patch_header_has_all_fields():
    assert sync.header((PATCHES / "hooks.patch").read_text())


@pytest.mark.parametrize("field", sync.FIELDS)
def test_a_header_without_a_field_is_refused(field):
    text = PATCH.decode().replace(field, "Other:")
    with pytest.raises(apply.PatchError, match=field):
        sync.header(text)


def test_hooks_change_fewer_than_115_lines():
    lines = (PATCHES / "hooks.patch").read_bytes().split(b"diff --git", 1)[1].splitlines()
    changed = [line for line in lines if line[:1] in (b"+", b"-") and line[:4] not in (b"+++ ", b"--- ")]
    assert 0 < len(changed) < 115


def test_conditions_in_hooks_end_with_a_brace_or_a_semicolon():
    lines = (PATCHES / "hooks.patch").read_text().splitlines()
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    conditions = [line for line in added if re.match(r"(\} )?(if|else|for|while)\b", line)]
    assert len(conditions) > 3
    assert [line for line in conditions if not line.endswith(("{", ";"))] == []


@pytest.mark.parametrize("name", MANIFEST)
def test_patch_files_are_ascii(name):
    assert (PATCHES / name).read_bytes().isascii()


def test_manifest_names_every_kvtool_file_once():
    paths = [path.relative_to(PATCHES).as_posix() for path in SRC.rglob("*") if path.is_file()]
    assert sorted(MANIFEST) == sorted(["hooks.patch", *paths])


def test_kvtool_files_have_no_circular_includes():
    names: dict[str, set[str]] = {}  # {file: files that it includes}; a .h and its .cpp are one file
    for path in SRC.glob("*/*.*"):
        unit = path.relative_to(SRC).with_suffix("").as_posix()
        names.setdefault(unit, set()).update({name.removesuffix(".h") for name in included(path)} - {unit})
    assert {"hooks/state", "llama-context"} <= set(TopologicalSorter(names).static_order())


def test_archive_includes_only_ggml_and_cache_layer():
    """Apart from headers of ggml, the archive includes only cache/layer.h.

    Its C++ tests therefore need no library except ggml.
    """
    ggml = r"ggml[\w-]*\.h|\.\./ggml/src/ggml-impl\.h"
    names = {name for path in (SRC / "archive").iterdir() for name in included(path)}
    files = {path.relative_to(SRC).as_posix() for path in (SRC / "archive").iterdir()}
    assert {name for name in names - files if not re.fullmatch(ggml, name)} == {"cache/layer.h"}
    for name in ("cache/layer.h", "cache/rope.h", "cache/rope.cpp"):
        assert included(SRC / name) <= {"ggml.h", "cache/rope.h"}, name


def test_missing_manifest_is_reported(tmp_path):
    with pytest.raises(LibraryError, match=r"MANIFEST is missing; install kvtool again"):
        sources.manifest(tmp_path)


def test_pyproject_pins_the_version_that_the_patch_is_for():
    upstream = sources.Upstream.read(PATCHES)
    assert f'"{upstream.package}=={upstream.version}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("text", ["version = 1\n", "package = a\nversion = 1\nsha256 = 12\n", "", "x = 1\n"])
def test_incomplete_upstream_file_is_refused(tmp_path, text):
    (tmp_path / "UPSTREAM").write_text(text)
    with pytest.raises(LibraryError, match="sha256"):
        sources.Upstream.read(tmp_path)


def test_patch_is_applied_only_once(tree):
    assert apply.apply(PATCH, tree)
    assert read(tree) == AFTER
    assert not apply.apply(PATCH, tree)
    assert read(tree) == AFTER


@pytest.mark.parametrize(
    "content",
    [
        BEFORE.replace("three", "3"),
        BEFORE.replace("two", "2"),
        BEFORE.replace("six\n", "six"),
        BEFORE.replace("\n", "\r\n"),
        "zero\n" + BEFORE,
        AFTER.replace("seven\n", ""),
        "",
    ],
)
def test_source_that_does_not_match_is_refused_unchanged(tree, content):
    (tree / "src" / "a.cpp").write_bytes(content.encode())
    with pytest.raises(apply.PatchError, match=r"src/a\.cpp:\d+ is not what"):
        apply.apply(PATCH, tree)
    assert (tree / "src" / "a.cpp").read_bytes() == content.encode()


def test_no_file_changes_if_one_of_two_does_not_match(tree):
    (tree / "src" / "b.cpp").write_text(BEFORE.replace("four", "4"))
    both = PATCH + PATCH[PATCH.index(b"diff") :].replace(b"a.cpp", b"b.cpp")
    with pytest.raises(apply.PatchError, match=r"b\.cpp:4"):
        apply.apply(both, tree)
    assert read(tree) == BEFORE


def test_missing_source_file_is_named(tree):
    (tree / "src" / "a.cpp").unlink()
    with pytest.raises(apply.PatchError, match=r"src/a\.cpp is not in"):
        apply.apply(PATCH, tree)


@pytest.mark.parametrize(
    "patch",
    [
        b"",
        b"no diff at all\n",
        PATCH[: PATCH.index(b"+seven")],
        PATCH.replace(b"-2,3 +2,3", b"-2,2 +2,3"),
        PATCH.replace(b"+++ b/src/a.cpp", b"+++ b/../a.cpp"),
        PATCH.replace(b"--- a/", b"new file mode 100644\n--- a/"),
    ],
)
def test_a_damaged_patch_is_refused(tree, patch):
    (tree.parent / "a.cpp").write_text(BEFORE)
    with pytest.raises(apply.PatchError):
        apply.apply(patch, tree)
    assert read(tree) == (tree.parent / "a.cpp").read_text() == BEFORE


def test_last_line_without_a_newline_stays_without_one(tree):
    (tree / "src" / "a.cpp").write_text("one\ntwo")
    head, hunk = b"--- a/src/a.cpp\n+++ b/src/a.cpp\n", b"@@ -1,2 +1,2 @@\n-one\n+ONE\n two\n"
    assert apply.apply(head + hunk + b"\\ No newline at end of file\n", tree)
    assert read(tree) == "ONE\ntwo"


@needs_git
def test_exported_patch_is_applied_equally_by_kvtool_and_git(tree):
    sync.commit(tree)
    (tree / "src" / "a.cpp").write_text(AFTER)
    patch = sync.exported(tree, sync.header(PATCH.decode()))
    assert patch.startswith(PATCH[: PATCH.index(b"diff")] + b"diff --git a/src/a.cpp b/src/a.cpp\nindex ")
    sync._git(tree, "checkout", "-q", "--", ".")
    assert apply.apply(patch, tree)
    assert read(tree) == AFTER
    assert sync.exported(tree, sync.header(PATCH.decode())) == patch
    sync._git(tree, "checkout", "-q", "--", ".")
    (tree / "p.patch").write_bytes(patch)
    sync._git(tree, "apply", "p.patch")
    assert read(tree) == AFTER


@pytest.fixture
def archive(tree, tmp_path, monkeypatch):
    """Make a source distribution for the test patch. Return the folder of its file."""
    path = tmp_path / "source.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tree / "src" / "a.cpp", "package-1/vendor/llama.cpp/src/a.cpp")
        tar.add(tree / "src" / "a.cpp", "package-1/.git/modules/vendor/llama.cpp/HEAD")
        tar.add(tree / "src" / "a.cpp", "package-1/vendor/llama.cpp/.git")
    monkeypatch.setattr(sync, "_source", lambda: path)
    monkeypatch.setattr(sync, "PATCH", tmp_path / "hooks.patch")
    sync.PATCH.write_bytes(PATCH)
    return tmp_path


@needs_git
def test_check_passes_after_import_and_export(archive):
    sync.import_(archive / "work")
    assert sorted(path.name for path in (archive / "work").iterdir()) == [".git", "src"]
    assert read(archive / "work") == AFTER
    with pytest.raises(apply.PatchError, match="other bytes"):
        sync.check()
    sync.export(archive / "work")
    sync.check()


def release(folder: Path, **files: str) -> Path:
    """Write a source distribution and return its path.

    files: the text of each file in src/, by the file's name without .cpp.
    """
    path = folder / "other.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            data = text.encode()
            member = tarfile.TarInfo(f"package-2/vendor/llama.cpp/src/{name}.cpp")
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    return path


def untar(archive: Path, tree: Path) -> Path:
    tree.mkdir()
    sync.unpack(archive, tree)
    return tree


@pytest.fixture
def exported(archive):
    """The folder of `archive`, after `export` has written the patch.

    Such a patch has index lines, which Git needs for a three-way merge.
    """
    sync.import_(archive / "first")
    sync.export(archive / "first")
    return archive


@needs_git
def test_import_moves_changes_to_shifted_lines_of_a_newer_release(exported):
    newer = release(exported, a="zero\n" * 9 + BEFORE)
    with pytest.raises(apply.PatchError, match=r"a\.cpp:\d is not what"):
        apply.apply(sync.PATCH.read_bytes(), untar(newer, exported / "plain"))
    report = sync.import_(exported / "work", newer)
    assert "by hand" not in report
    assert read(exported / "work") == "zero\n" * 9 + AFTER
    sync.export(exported / "work")
    assert apply.apply(sync.PATCH.read_bytes(), untar(newer, exported / "again"))


@needs_git
def test_import_lists_conflicts_and_export_refuses_them(exported):
    newer = release(exported, a=BEFORE.replace("three", "3"))
    report = sync.import_(exported / "work", newer).splitlines()
    assert report[:2] == ["src/a.cpp:3 is in conflict", "left to do by hand: 1"]
    assert "<<<<<<< " in read(exported / "work")
    assert "seven" in read(exported / "work")
    before = sync.PATCH.read_bytes()
    with pytest.raises(apply.PatchError, match="a conflict is left: <<<<<<< "):
        sync.export(exported / "work")
    assert sync.PATCH.read_bytes() == before
    (exported / "work" / "src" / "a.cpp").write_text(AFTER.replace("THREE", "3 THREE"))
    sync.export(exported / "work")
    assert apply.apply(sync.PATCH.read_bytes(), untar(newer, exported / "again"))


@needs_git
def test_import_prints_the_changes_of_a_file_that_upstream_removed(exported):
    report = sync.import_(exported / "work", release(exported, b=BEFORE))
    assert report.startswith("src/a.cpp is not in this llama.cpp; its changes:\ndiff --git a/src/a.cpp")
    assert "\n+THREE\n" in report
    assert "\nleft to do by hand: 1\n" in report


@needs_git
def test_import_of_an_archive_without_llama_cpp_is_refused(exported):
    with pytest.raises(apply.PatchError, match=r"other\.tar\.gz is not a source distribution"):
        sync.import_(exported / "work", release(exported))


def test_check_refuses_a_patch_that_does_not_apply(archive):
    sync.PATCH.write_bytes(PATCH.replace(b"-three", b"-3"))
    with pytest.raises(apply.PatchError, match=r"a\.cpp:3"):
        sync.check()


def test_check_without_git_reports_that_git_is_missing(archive, monkeypatch):
    monkeypatch.setenv("PATH", str(archive))
    assert "no git" in sync.check()


OURS = ("src/sources.cmake", "src/x/a.h", "src/x/a.cpp", "src/y/b.cpp")
"""kvtool's own files in a `project`."""


def project(folder: Path) -> Path:
    """Write a source distribution for CMake, and patch files, into `folder`."""
    patches = folder / "patches"
    patches.mkdir()
    for name in ("apply.cmake", "apply.py"):
        shutil.copy(PATCHES / name, patches)
    (patches / "hooks.patch").write_bytes(PATCH)
    (patches / "MANIFEST").write_text("".join(f"{name}\n" for name in ("# files", "hooks.patch", *OURS)))
    (patches / "src").mkdir()
    shutil.copy(PATCHES / "src" / "sources.cmake", patches / "src")
    for name in OURS[1:]:
        (patches / name).parent.mkdir(exist_ok=True)
        (patches / name).write_text(f"// {name}\n")
    source = folder / "source distribution"
    (source / "vendor/llama.cpp/src").mkdir(parents=True)
    (source / "vendor/llama.cpp/src/a.cpp").write_text(BEFORE)
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\n"
        "project(llama_cpp LANGUAGES NONE)\n"
        'set(LLAMA_BUILD_COMMON ON CACHE BOOL "as llama-cpp-python does it" FORCE)\n'
        "add_subdirectory(vendor/llama.cpp)\n"
    )
    (source / "vendor/llama.cpp/CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.14...3.28)\n"
        'project("llama.cpp" LANGUAGES NONE)\n'
        'option(LLAMA_BUILD_COMMON "as llama.cpp does it" OFF)\n'
        'message(STATUS "common: ${LLAMA_BUILD_COMMON}")\n'
        "set(LLAMA_CORE_SOURCES llama.cpp)\n"
        "if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/src/kvtool)\n"
        "    include(src/kvtool/sources.cmake)\n"
        "endif()\n"
        'message(STATUS "sources: ${LLAMA_CORE_SOURCES}")\n'
    )
    return source


def configure(source: Path, *flags: str) -> subprocess.CompletedProcess:
    include = source.parent / "patches" / "apply.cmake"
    command = ["cmake", "-G", "Unix Makefiles", "-S", source, "-B", source / "build"]
    command += [f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={include}", f"-DPython3_EXECUTABLE={sys.executable}"]
    return fork_server.run([*command, *flags])


@needs_cmake
def test_cmake_applies_the_patch_and_writes_the_same_digest_as_python(tmp_path):
    source = project(tmp_path)
    for _ in range(2):  # in the second round, the tree is already patched
        done = configure(source)
        assert done.returncode == 0, done.stderr
        llama = source / "vendor/llama.cpp"
        assert read(llama) == AFTER
        assert (llama / "src/kvtool/x/a.h").read_text() == "// src/x/a.h\n"
        assert "sources: llama.cpp;kvtool/x/a.cpp;kvtool/y/b.cpp\n" in done.stdout
        define = f'#define LLAMA_KVTOOL_DIGEST "{sources.patch_digest(tmp_path / "patches")}"\n'
        assert (llama / "src/kvtool/digest.h").read_text() == define


@needs_cmake
@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (
            "source distribution/vendor/llama.cpp/src/a.cpp",
            BEFORE.replace("three", "3"),
            r"(?s)(?=.*src/a\.cpp:3).*does not apply to this llama\.cpp",
        ),
        ("patches/apply.py", "print('hooks.patch: applied')\n", "does not apply"),
        *((f"patches/{name}", None, f"{name} is missing") for name in ("MANIFEST", "hooks.patch", *OURS)),
    ],
)
def test_cmake_fails_if_the_patch_is_not_applied(tmp_path, file, content, reason):
    source = project(tmp_path)
    if content:
        (tmp_path / file).write_text(content)
    else:
        (tmp_path / file).unlink()
    done = configure(source)
    assert done.returncode != 0
    assert re.search(reason, " ".join(done.stderr.split()))


@needs_cmake
@needs_git
def test_patch_is_applied_inside_another_git_work_tree(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    source = project(tmp_path)
    done = configure(source)
    assert done.returncode == 0, done.stderr
    assert read(source / "vendor/llama.cpp") == AFTER


@needs_cmake
def test_a_stock_build_is_not_patched(tmp_path):
    source = project(tmp_path)
    done = configure(source, "-DKVTOOL_PATCH=OFF")
    assert done.returncode == 0, done.stderr
    assert read(source / "vendor/llama.cpp") == BEFORE
    assert [path.name for path in (source / "vendor/llama.cpp/src").iterdir()] == ["a.cpp"]


@needs_cmake
@pytest.mark.parametrize(("flags", "common"), [([], "ON"), (["-DLLAVA_BUILD=OFF"], "OFF")])
def test_common_library_is_built_only_with_llava(tmp_path, flags, common):
    assert f"common: {common}\n" in configure(project(tmp_path), *flags).stdout


LIBRARIES = """
enable_language(CXX)
add_library(ggml SHARED src/a.cpp)
add_library(ggml-cpu-zen4 MODULE src/a.cpp)
set_target_properties(ggml ggml-cpu-zen4 PROPERTIES VERSION 1.2.3 SOVERSION 1)
install(TARGETS ggml ggml-cpu-zen4 LIBRARY DESTINATION lib)
"""


@needs_cmake
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="there is no g++")
def test_libraries_are_unversioned_and_find_others_in_their_folder(tmp_path):
    source = project(tmp_path)
    with (source / "vendor/llama.cpp/CMakeLists.txt").open("a") as file:
        file.write(LIBRARIES)
    done = configure(source, "-DCMAKE_CXX_COMPILER=g++")
    assert done.returncode == 0, done.stderr
    below = source / "build/vendor/llama.cpp"
    install = (below / "cmake_install.cmake").read_text()
    assert "/libggml.so" in install
    assert not re.search(r"\.so\.\d", install)
    # CMake 4.4 writes the run path in brackets
    assert len(re.findall(r'NEW_RPATH (?:"\\\$ORIGIN"|\[\[\$ORIGIN\]\])', install)) == 2
    # amx-gcc.h is for intrinsics, which only libraries for one kind of CPU may use
    flags = {
        name: (below / f"CMakeFiles/{name}.dir/flags.make").read_text() for name in ("ggml", "ggml-cpu-zen4")
    }
    assert [name for name, text in flags.items() if "amx-gcc.h" in text] == ["ggml-cpu-zen4"]
