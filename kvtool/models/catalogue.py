"""Catalogue of the models that kvtool knows by name, from models.txt."""

import re
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import ModelError, suggestion
from kvtool.system.paths import cache_dir

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
        "pip:NAME==VERSION" or "hf:OWNER/REPO".
    file
        Name of the GGUF file, without folders.
    sha256
        SHA-256 of the file as 64 hex digits. None if the line has a dash.
    size
        Size in bytes. None if the line has a dash.
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
        """Path of the file, which may not exist yet."""
        return models_dir() / self.file

    @property
    def here(self) -> bool:
        """True if the file exists and has the right size.

        The hash is not checked here: the file gets its name only after its hash was checked.
        """
        try:
            return self.path.is_file() and self.size in (None, self.path.stat().st_size)
        except OSError:
            return False


def registry() -> dict[str, Entry]:
    """Return the entries by name, in the order of models.txt. The first is the default. Raises ModelError."""
    package = Path(__file__).parent.parent
    for path in (package / "models.txt", package.parent / "models.txt"):
        if path.is_file():
            return parse(path.read_text(encoding="utf-8"))
    raise ModelError("models.txt is missing from this installation of kvtool; install it again")


def parse(text: str) -> dict[str, Entry]:
    """Parse the text of models.txt. A test checks that file."""
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    entries = (_entry(line) for line in lines)
    return {entry.name: entry for entry in entries}


def unknown(name: str, known: dict[str, Entry], *, or_file: bool = False) -> str:
    """Return the message for an unknown name. or_file: True if the path of a file is also accepted."""
    no_file = " (and no such file)" if or_file else ""
    names = sorted(known, key=lambda model: known[model].about_bytes or 0)
    return f"unknown model {name!r}{no_file}.{suggestion(name, names)} See `kvtool models list`."


def models_dir() -> Path:
    """Return the folder of downloaded models."""
    return cache_dir() / "models"


def _entry(line: str) -> Entry:
    name, source, file, sha256, size, licence, note = (column.strip() for column in line.split("|"))
    known_hash = None if sha256 == "-" else sha256
    return Entry(name, source, file, known_hash, None if size == "-" else int(size), licence, note)
