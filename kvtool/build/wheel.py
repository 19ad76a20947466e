"""The wheel of the patched llama.cpp: find it or build it, cache it, and install it."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sysconfig
import tempfile
from pathlib import Path

from kvtool.build import given, needs, pack, process
from kvtool.build.flags import FLAGS, PORTABLE, remember
from kvtool.build.sources import Upstream, archive, patch_digest
from kvtool.system.cpu import cpu_features, n_cpu
from kvtool.system.memory import total_bytes
from kvtool.system.paths import cache_dir


def wheel_key(folder: Path, cmake_args: str, *, stock: bool = False, portable: bool = False) -> str:
    """Return the key of a build. It is a hash of all sources and flags, the CPU and the platform.

    $CC, $CXX, $CFLAGS and $CXXFLAGS are not included: a shell that sets them later would need another build.
    To build with another compiler, set -DCMAKE_CXX_COMPILER and -DCMAKE_C_COMPILER in $CMAKE_ARGS. A portable
    build has the same key on all machines.
    """
    parts = [
        "" if stock else patch_digest(folder),
        *((folder / name).read_text() for name in ("UPSTREAM", "apply.cmake", "amx-gcc.h", "vulkan-old.h")),
        " ".join((*FLAGS, *PORTABLE) if portable else FLAGS),
        " ".join(shlex.split(cmake_args)),
        str(pack.LAYOUT),
        *([pack.VERSION] if portable else [cpu_features(), *_machine()]),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"stock-{key}" if stock else f"portable-{key}" if portable else key


def fitting_keys(folder: Path, cmake_args: str) -> tuple[str, ...]:
    """Return the keys of all builds that work on this machine and have these flags."""
    key = wheel_key(folder, cmake_args)
    return (key,) if cmake_args.strip() else (key, wheel_key(folder, "", portable=True))


def find_wheel(key: str) -> Path | None:
    """Return the wheel of a build from the cache, or None if the cache does not have it."""
    return next(_place(key).glob("*.whl"), None)


def build_env(folder: Path, cmake_args: str, *, stock: bool, portable: bool) -> dict[str, str]:
    """Return the environment variables for a build. The user's flags come last and override kvtool's."""
    ours = [f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={(folder / 'apply.cmake').as_posix()}", *FLAGS]
    if stock:
        ours.append("-DKVTOOL_PATCH=OFF")
    if portable:
        ours += PORTABLE
    env = dict(os.environ)
    env["CMAKE_ARGS"] = f"{shlex.join(ours)} {cmake_args}".strip()
    env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(_n_job()))
    # do not fall back to make, which is slower and shows no count
    env.setdefault("SKBUILD_NINJA_MAKE_FALLBACK", "0")
    return env


def find_or_build(folder: Path, cmake_args: str) -> Path:
    """Return the wheel for these flags and this machine. Raises LibraryError.

    Look in the cache, then in the folders with wheels that were built elsewhere. Otherwise build it.
    folder: the folder with the patch files.
    """
    key = wheel_key(folder, cmake_args)
    if wheel := find_wheel(key):
        if installed_key() != key:
            given.say(f"using {wheel}, compiled before")
    elif not cmake_args.strip():
        if wheel := given.find(given.folders(), wheel_key(folder, "", portable=True)):
            given.say(f"using {wheel}: nothing is compiled")
            return wheel
        if "KVTOOL_WHEELS" in os.environ:
            given.say("no wheel in KVTOOL_WHEELS fits this machine and these patch files")
    return build(folder, cmake_args)


def build(folder: Path, cmake_args: str, *, stock: bool = False, portable: bool = False) -> Path:
    """Return the wheel for these flags. Build it if it is not in the cache. Raises LibraryError.

    stock: True to build the same version without the patch. portable: True to build a wheel for every CPU.
    """
    key = wheel_key(folder, cmake_args, stock=stock, portable=portable)
    if wheel := find_wheel(key):
        return wheel
    needs.check_tools(cmake_args)
    needs.check_pip()
    place = _place(key)
    log = cache_dir() / "logs" / f"build-{key}.log"
    log.unlink(missing_ok=True)
    upstream = Upstream.read(folder)
    sources = archive(upstream, log)
    what = f"{'an unpatched ' if stock else ''}llama.cpp{' for every CPU' if portable else ''}"
    flags = f" with {cmake_args}" if cmake_args else ""
    title = f"building {what}{flags} (once; a few minutes)"
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".building-") as temporary:
        made = Path(temporary) / "made"
        # do not use pip's cache: it ignores flags and would return a wheel that was built with other flags
        command = process.pip("wheel", "-v", "--no-cache-dir", "--no-deps", "-w", str(made), str(sources))
        env = build_env(folder, cmake_args, stock=stock, portable=portable)
        process.run(command, log, "llama.cpp did not build", env=env, title=title)
        packed = Path(temporary) / "packed"
        pack.pack(next(made.glob("*.whl")), sources, upstream, key, cmake_args, packed)
        try:
            os.rename(packed, place)
        except OSError:  # another process finished the same build first
            if not find_wheel(key):
                raise
    return next(place.glob("*.whl"))


def installed_key() -> str | None:
    """Return the key of the build that this environment has installed, or None if it has no build."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        record = distribution(pack.DISTRIBUTION).read_text(pack.RECORD_OF_BUILD)
    except PackageNotFoundError:
        return None
    return pack.key_in(record or "")


def install(wheel: Path, cmake_args: str) -> bool:
    """Install the wheel into this environment, and remember the flags. Raises LibraryError.

    Returns False if the same build was already installed.
    """
    key = pack.key_of(wheel)
    is_new = installed_key() != key
    if is_new:
        log = cache_dir() / "logs" / f"install-{key}.log"
        log.unlink(missing_ok=True)
        needs.check_pip()
        command = process.pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
        process.run(command, log, f"the built {wheel.name} could not be installed")
    remember(cmake_args)
    return is_new


def _machine() -> list[str]:
    return [sysconfig.get_platform(), " ".join(platform.libc_ver())]


def _place(key: str) -> Path:
    """Return the cache folder of a build's wheel.

    The key of a portable build does not depend on the platform, so the platform is added here.
    """
    if key.startswith("portable-"):
        key += "-" + hashlib.sha256("\0".join(_machine()).encode()).hexdigest()[:8]
    return cache_dir() / "wheels" / key


def _n_job() -> int:
    # allow 1.5 GB of memory for each job, because the largest files need more than 1 GB to compile
    return max(1, min(n_cpu(), total_bytes() // 1_500_000_000))
