"""The patched llama-cpp-python as a wheel: built once per machine, kept in the cache, installed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import sysconfig
import tempfile
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from kvtool.build import needs, process
from kvtool.build.flags import FLAGS, remember
from kvtool.build.sources import Upstream, archive, patch_digest
from kvtool.system.cpu import cpu_features
from kvtool.system.paths import cache_dir


def wheel_key(folder: Path, cmake_args: str, *, stock: bool = False) -> str:
    """The name of a build. It changes with everything that the compiled library depends on."""
    parts = [
        "" if stock else patch_digest(folder),
        (folder / "UPSTREAM").read_text(),
        (folder / "apply.cmake").read_text(),
        (folder / "amx-gcc.h").read_text(),
        (folder / "vulkan-old.h").read_text(),
        " ".join(FLAGS),
        " ".join(shlex.split(cmake_args)),
        cpu_features(),
        sysconfig.get_platform(),
        " ".join(platform.libc_ver()),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"stock-{key}" if stock else key


def find_wheel(key: str) -> Path | None:
    """The finished wheel of that build, if there is one."""
    return next((cache_dir() / "wheels" / key).glob("*.whl"), None)


def build_env(folder: Path, cmake_args: str, *, stock: bool = False) -> dict[str, str]:
    """The environment variables for the build. The user's flags come last, so they win."""
    ours = [f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={(folder / 'apply.cmake').as_posix()}", *FLAGS]
    if stock:
        ours.append("-DKVTOOL_PATCH=OFF")
    env = dict(os.environ)
    env["CMAKE_ARGS"] = f"{shlex.join(ours)} {cmake_args}".strip()
    env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(_n_job()))
    # without ninja, make would be used: slower, and without a count
    env.setdefault("SKBUILD_NINJA_MAKE_FALLBACK", "0")
    return env


def build(folder: Path, cmake_args: str, *, stock: bool = False) -> Path:
    """The wheel for these flags and this machine, from the cache or newly built. Raises LibraryError.

    folder: the patch files. stock: build the same version without the patch.
    """
    key = wheel_key(folder, cmake_args, stock=stock)
    if wheel := find_wheel(key):
        return wheel
    needs.check_tools(cmake_args)
    needs.check_pip()
    log = cache_dir() / "logs" / f"build-{key}.log"
    log.unlink(missing_ok=True)
    sources = archive(Upstream.read(folder), log)
    what = "an unpatched llama.cpp" if stock else "llama.cpp"
    flags = f" with {cmake_args}" if cmake_args else ""
    progress = process.Progress(f"building {what}{flags} (once; a few minutes)")
    progress.wait()
    place = cache_dir() / "wheels"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".building-") as temporary:
        made = Path(temporary) / key
        # not from pip's cache, which knows a wheel by its version and not by its flags
        command = process.pip("wheel", "-v", "--no-cache-dir", "--no-deps", "-w", str(made), str(sources))
        failed = process.run(command, log, build_env(folder, cmake_args, stock=stock), progress.read)
        progress.close()
        if failed is not None:
            raise process.failure("llama.cpp did not build", log, failed)
        try:
            os.rename(made, place / key)
        except OSError:  # another process built the same and was faster
            if not find_wheel(key):
                raise
    return next((place / key).glob("*.whl"))


def installed_key() -> str | None:
    """The key of the build that is installed in this environment; None if kvtool did not build it."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = distribution("llama-cpp-python").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    if not origin:
        return None
    path = PurePosixPath(unquote(urlsplit(json.loads(origin).get("url", "")).path))
    return path.parent.name if path.parent.parent.name == "wheels" else None


def install(wheel: Path, cmake_args: str) -> bool:
    """Install the wheel into the running environment and remember its flags. Raises LibraryError.

    Returns False if this very build was installed already.
    """
    is_new = installed_key() != wheel.parent.name
    if is_new:
        log = cache_dir() / "logs" / f"install-{wheel.parent.name}.log"
        log.unlink(missing_ok=True)
        needs.check_pip()
        command = process.pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
        if (failed := process.run(command, log, dict(os.environ))) is not None:
            raise process.failure(f"the built {wheel.name} could not be installed", log, failed)
    remember(cmake_args)
    return is_new


def _n_job() -> int:
    n_cpu = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return n_cpu
    # the largest files take more than 1 GB of memory to compile
    return max(1, min(n_cpu, memory // 1_500_000_000))
