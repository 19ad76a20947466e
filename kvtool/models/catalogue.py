"""Catalogue of the models that kvtool knows by name, from models.txt."""

import re
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import ModelError, suggestion
from kvtool.system.paths import cache_dir

_COLUMNS = ("name", "source", "file", "sha256", "size", "licence", "note")

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")

_PIP = re.compile(r"[A-Za-z0-9._-]+(\{[0-9]+\.\.[0-9]+\}[A-Za-z0-9._-]*)?==[A-Za-z0-9.+!_-]+")

_HF = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")

_ABOUT = re.compile(r"(?:; )?about (\d+\.\d) GB")
_TRAINED = re.compile(r"(?:; )?trained for ([\d,]+) tokens")


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of models.txt.

    Attributes
    ----------
    name
        Name for `-m`.
    source
        "pip:NAME==VERSION", "hf:OWNER/REPO" or a folder.
    file
        Name of the GGUF file, without folders.
    sha256
        SHA-256 of the file as 64 hex digits. None if the line has a dash.
    size
        Size in bytes. None if the line has a dash.
    licence
        Licence of the weights.
    note
        Remarks such as "recommended" or "about 2.5 GB", separated by semicolons.
    """

    name: str
    source: str
    file: str
    sha256: str | None
    size: int | None
    licence: str
    note: str

    @property
    def is_download(self) -> bool:
        """True if kvtool downloads the file. False if the file must be in the user's folder `source`."""
        return self.source.startswith(("pip:", "hf:"))

    @property
    def about_bytes(self) -> int | None:
        """Size in bytes, exact or approximate. None if the line gives no size."""
        about = None if self.size else _ABOUT.search(self.note)
        return int(float(about[1]) * 1e9) if about else self.size

    @property
    def n_ctx_train(self) -> int | None:
        """Trained context length in tokens. None if the note does not give it."""
        trained = _TRAINED.search(self.note)
        return int(trained[1].replace(",", "")) if trained else None

    @property
    def remark(self) -> str:
        """The note without the size and the trained context length."""
        return _TRAINED.sub("", _ABOUT.sub("", self.note))

    @property
    def of_base(self) -> str | None:
        """The remark that this is a base model, which was not trained for chats. None for other models."""
        return next((part for part in self.note.split("; ") if part.startswith("a base model")), None)

    @property
    def is_recommended(self) -> bool:
        """True if the model is among the best of its size, is fast without a GPU, and has a free licence."""
        return self.remark == "recommended"

    @property
    def path(self) -> Path:
        """Path of the file. A file that kvtool downloads may not exist there yet."""
        folder = models_dir() if self.is_download else Path(self.source).expanduser()
        return folder / self.file

    @property
    def here(self) -> bool:
        """True if the file exists and has the right size.

        The hash is not checked here. A downloaded file gets its name only after its hash was checked.
        """
        try:
            return self.path.is_file() and self.size in (None, self.path.stat().st_size)
        except OSError:
            return False


def registry() -> dict[str, Entry]:
    """Return the entries by name, in the order of models.txt. Raises ModelError.

    The first entry is the default model.
    """
    package = Path(__file__).parent.parent
    for path in (package / "models.txt", package.parent / "models.txt"):
        if path.is_file():
            return parse(path.read_text(encoding="utf-8"))
    raise ModelError("models.txt is missing from this installation of kvtool; install it again")


def parse(text: str) -> dict[str, Entry]:
    """Parse the text of models.txt. Raises ModelError, which names the line and the mistake."""
    entries: dict[str, Entry] = {}
    names: dict[Path, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            entry = _entry([column.strip() for column in line.split("|")])
            if entry.name in entries:
                raise ValueError(f"the name {entry.name!r} is taken")
            if taken := names.get(entry.path):
                raise ValueError(f"the file {entry.file!r} is taken by {taken}")
        except ValueError as error:
            raise ModelError(f"models.txt, line {number}: {error}") from None
        entries[entry.name] = entry
        names[entry.path] = entry.name
    if not entries:
        raise ModelError("models.txt names no model")
    return entries


def unknown(name: str, known: dict[str, Entry], *, or_file: bool = False) -> str:
    """Return the message for an unknown name. or_file: True if the path of a file is also accepted."""
    no_file = " (and no such file)" if or_file else ""
    names = sorted(known, key=lambda model: known[model].about_bytes or 0)
    return f"unknown model {name!r}{no_file}.{suggestion(name, names)} See `kvtool models list`."


def models_dir() -> Path:
    """Return the folder of downloaded models."""
    return cache_dir() / "models"


def _entry(columns: list[str]) -> Entry:
    if len(columns) != len(_COLUMNS):
        raise ValueError(f"{len(columns)} columns instead of {len(_COLUMNS)} ({' | '.join(_COLUMNS)})")
    name, source, file, sha256, size, licence, note = columns
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name may have lower-case letters, digits and . _ -, got {name!r}")
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
        raise ValueError(f"a source is pip:..., hf:... or a folder that starts with / or ~, got {source!r}")
    if not file or Path(file).name != file:
        raise ValueError(f"a file is a name without folders, got {file!r}")
    if not re.fullmatch("-|[0-9a-f]{64}", sha256):
        raise ValueError(f"a sha256 is 64 hex digits or a dash, got {sha256!r}")
    if not re.fullmatch("-|[1-9][0-9]*", size):
        raise ValueError(f"a size is a number of bytes or a dash, got {size!r}")
    if not licence:
        raise ValueError("the licence is missing")
    known_hash = None if sha256 == "-" else sha256
    return Entry(name, source, file, known_hash, None if size == "-" else int(size), licence, note)
