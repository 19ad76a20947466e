"""models.txt: the models that kvtool knows by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import ModelError
from kvtool.system.paths import cache_dir

_COLUMNS = ("name", "source", "file", "sha256", "size", "licence", "note")

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")

_PIP = re.compile(r"[A-Za-z0-9._-]+(\{[0-9]+\.\.[0-9]+\}[A-Za-z0-9._-]*)?==[A-Za-z0-9.+!_-]+")

_HF = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")


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
        folder = models_dir() if self.source.startswith(("pip:", "hf:")) else Path(self.source).expanduser()
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
    package = Path(__file__).parent.parent
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


def models_dir() -> Path:
    return cache_dir() / "models"
