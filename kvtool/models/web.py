"""Download models by URL. Each model has a folder, whose name is a digest of the first file's URL."""

import hashlib
import os
import re
import shutil
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from kvtool.errors import ModelError
from kvtool.models.catalogue import models_dir
from kvtool.models.fetch import Progress, fetch, storing
from kvtool.models.split import part_names
from kvtool.system.files import locked

URL_FILE = "url.txt"
"""File in each model's folder that holds the URL of the model's first file."""


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def urls_dir() -> Path:
    """Return the folder that holds the folders of all models downloaded by URL."""
    return models_dir() / "urls"


def folder_of(url: str) -> Path:
    """Return the folder for a model's files. All parts of a split model are in it. Raises ModelError."""
    return urls_dir() / hashlib.sha256(_files(url)[0][0].encode()).hexdigest()[:16]


def cached(url: str) -> Path | None:
    """Return the path of the model's file or first part, or None if a part is missing. Raises ModelError."""
    folder = folder_of(url)
    paths = [folder / name for _, name in _files(url)]
    return paths[0] if all(path.is_file() for path in paths) else None


def pull(url: str, progress: Progress | None = None) -> Path:
    """Download the model's file, or all its parts, unless they are here.

    Return the path of the file or the first part. If two processes want the same model, the second waits for
    the first. Raises ModelError.
    """
    if path := cached(url):
        return path
    folder, files = folder_of(url), _files(url)
    with storing(files[0][1], folder):
        models_dir().mkdir(parents=True, exist_ok=True)
        with locked(models_dir() / f"{folder.name}.lock"):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                (folder / URL_FILE).write_text(files[0][0], encoding="utf-8")
                for part_url, name in files:
                    fetch(part_url, folder / name, progress)
            finally:
                if {URL_FILE}.issuperset(os.listdir(folder)):
                    shutil.rmtree(folder)
    return folder / files[0][1]


def _files(url: str) -> list[tuple[str, str]]:
    """Return the URL and the local file name of each file of the model. Raises ModelError."""
    try:
        parts = urlsplit(url)
        is_valid = parts.port != 0 and parts.username is None and (parts.path + parts.query).isascii()
    except ValueError:
        is_valid = False
    if not is_valid or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ModelError(
            f"{url!r} is not a URL for -m: write %20 for a space and %XX for each byte of other letters than "
            "ASCII; leave out a user name; check the host and the port"
        )
    before, _, last = parts.path.rpartition("/")
    name = unquote(last)
    if not parts.netloc or not name.lower().endswith(".gguf"):
        raise ModelError(f"{url} does not name a GGUF file: a URL for -m ends in .gguf")
    names = part_names(name)
    if len(names) == 1:
        return [(url, _safe(name))]
    return [(urlunsplit(parts._replace(path=f"{before}/{quote(part)}")), _safe(part)) for part in names]


def _safe(name: str) -> str:
    """Return a file name that every file system accepts and that stays in its folder."""
    return re.sub(r"[^\w.+-]", "_", name)
