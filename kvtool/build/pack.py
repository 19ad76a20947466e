"""Repack a build of llama-cpp-python as kvtool's wheel, kvtool-llama.

The wheel contains the package kvtool_llama, which has only the libraries and the bindings of
llama-cpp-python. Users can also have their own llama-cpp-python installed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath

from kvtool import __version__
from kvtool.build.sources import Upstream
from kvtool.errors import LibraryError
from kvtool.system.paths import checkout

DISTRIBUTION = "kvtool-llama"
PACKAGE = "kvtool_llama"
VERSION = __version__

RECORD_OF_BUILD = "kvtool.json"
"""Name of the file that describes the build. It is in the same folder as METADATA."""

LAYOUT = 2
"""Version of the wheel's layout. Increase it when the layout changes, so that old wheels are not reused."""

_BINDINGS = ("llama_cpp.py", "_ctypes_extensions.py")
"""Files of llama-cpp-python that kvtool uses."""
_LIBRARIES = (".so", ".dylib", ".dll")
_LICENCES = {"LICENSE.md": "LICENSE-llama-cpp-python", "vendor/llama.cpp/LICENSE": "LICENSE-llama.cpp"}
_OWN_LICENCE = "LICENSE-kvtool"


def pack(built: Path, archive: Path, upstream: Upstream, key: str, cmake_args: str, folder: Path) -> Path:
    """Write kvtool's wheel to `folder`, and return the path of the wheel. Raises LibraryError.

    built: the wheel of llama-cpp-python. archive: its source archive, which has the licences.
    """
    tag = built.stem.split("-", 2)[2]
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{PACKAGE}-{VERSION}-{tag}.whl"
    record: list[str] = []
    info = f"{PACKAGE}-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in _contents(built, archive, upstream, tag, key, cmake_args, info):
            out.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        out.writestr(f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]))
    return wheel


def key_in(record: str) -> str | None:
    """Return the key of a build from the text of its RECORD_OF_BUILD, or None if the text is damaged."""
    try:
        key = json.loads(record)["key"]
    except (ValueError, TypeError, KeyError):
        return None
    return key if isinstance(key, str) else None


def key_of(wheel: Path) -> str | None:
    """Return the key of the build in a wheel. None if the wheel is not kvtool's or cannot be read."""
    try:
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if name.endswith(f".dist-info/{RECORD_OF_BUILD}")]
            return key_in(packed.read(names[0]).decode()) if names else None
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _contents(
    built: Path, archive: Path, upstream: Upstream, tag: str, key: str, cmake_args: str, info: str
) -> Iterator[tuple[str, bytes]]:
    says = f'"""The llama.cpp of kvtool."""\n\nUPSTREAM = "{upstream.version}"\n'
    yield f"{PACKAGE}/__init__.py", says.encode()
    yield f"{PACKAGE}/py.typed", b""
    with zipfile.ZipFile(built) as packed:
        # take each library once, because a build copies it into several folders
        files = map(PurePosixPath, packed.namelist())
        libraries = {path.name: str(path) for path in files if path.suffix in _LIBRARIES}
        if not libraries:
            raise LibraryError(f"{built} has no library in it")
        for name in _BINDINGS:
            text = packed.read(f"llama_cpp/{name}").decode()
            yield f"{PACKAGE}/{name}", text.replace("from llama_cpp.", f"from {PACKAGE}.").encode()
        for name, path in sorted(libraries.items()):
            yield f"{PACKAGE}/lib/{name}", packed.read(path)
    for name, licence in (*_licences(archive), (_OWN_LICENCE, _own_licence())):
        yield f"{info}/licenses/{name}", licence
    yield f"{info}/METADATA", _metadata(upstream).encode()
    about = f"Wheel-Version: 1.0\nGenerator: kvtool\nRoot-Is-Purelib: false\nTag: {tag}\n"
    yield f"{info}/WHEEL", about.encode()
    what = {"key": key, "upstream": upstream.version, "cmake_args": cmake_args}
    yield f"{info}/{RECORD_OF_BUILD}", json.dumps(what).encode()


def _licences(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as packed:
        left = dict(_LICENCES)
        for member in packed:
            if (name := left.pop(member.name.partition("/")[2], "")) and (file := packed.extractfile(member)):
                yield name, file.read()
            if not left:
                return
    raise LibraryError(f"{archive} has no {', '.join(left)}")


def _own_licence() -> bytes:
    """Return the licence of kvtool and of its patch, from the checkout or the installed kvtool."""
    if root := checkout():
        return (root / "LICENSE").read_bytes()
    return (distribution("kvtool").read_text("licenses/LICENSE") or "").encode()


def _metadata(upstream: Upstream) -> str:
    return f"""\
Metadata-Version: 2.4
Name: {DISTRIBUTION}
Version: {VERSION}
Summary: llama.cpp with kvtool's patch, from {upstream.package} {upstream.version}
License-Expression: MIT
{"".join(f"License-File: {name}" + chr(10) for name in (*_LICENCES.values(), _OWN_LICENCE))}\
Requires-Python: >=3.10
Requires-Dist: typing-extensions>=4.5

kvtool runs on it, and finds it by itself.

A wheel for Linux holds GCC's library for OpenMP, libgomp (GPL-3.0-or-later with the GCC Runtime Library
Exception 3.1).
"""
