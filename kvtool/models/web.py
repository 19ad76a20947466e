"""Models by URL. The files of a URL are in a folder that is named by a digest of it."""

import hashlib
import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from kvtool.errors import ModelError
from kvtool.models.catalogue import models_dir
from kvtool.models.fetch import Progress, Remote, fetch, storing
from kvtool.models.header import read_file
from kvtool.models.split import part_names

URL_FILE = "url.txt"
"""In each folder: the URL of its first file."""


def is_url(text: str) -> bool:
    """Whether `-m` names a URL."""
    return text.lower().startswith(("http://", "https://"))


def urls_dir() -> Path:
    """The folder of the folders."""
    return models_dir() / "urls"


def folder_of(url: str) -> Path:
    """Where the files of a URL are, or will be. A model that was split has one folder. Raises ModelError."""
    return urls_dir() / hashlib.sha256(_files(url)[0][0].encode()).hexdigest()[:16]


def cached(url: str) -> Path | None:
    """The file of a URL, or the first of its parts; None unless all are there. Raises ModelError."""
    folder = folder_of(url)
    paths = [folder / name for _, name in _files(url)]
    return paths[0] if all(path.is_file() for path in paths) else None


def pull(url: str, progress: Progress | None = None) -> Path:
    """Download the file of a URL, or all its parts. Returns the first. Raises ModelError.

    A second call needs no network.
    """
    if found := cached(url):
        return found
    folder, files = folder_of(url), _files(url)
    with storing(files[0][1], folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / URL_FILE).write_text(files[0][0], encoding="utf-8")
        for each, name in files:
            fetch(Remote(each, each), folder / name, progress)
            try:
                # a server that does not say the size may have sent a part of the file
                read_file(folder / name)
            except ModelError:
                (folder / name).unlink()
                raise
    return folder / files[0][1]


def _files(url: str) -> list[tuple[str, str]]:
    """URL and file name of each file. Raises ModelError."""
    parts = urlsplit(url)
    before, _, last = parts.path.rpartition("/")
    name = unquote(last)
    if not parts.netloc or not name.lower().endswith(".gguf"):
        raise ModelError(f"{url} does not name a GGUF file: a URL for -m ends in .gguf")
    names = part_names(name)
    if len(names) == 1:
        return [(url, _plain(name))]
    return [(urlunsplit(parts._replace(path=f"{before}/{quote(each)}")), _plain(each)) for each in names]


def _plain(name: str) -> str:
    """A name that every file system takes, and that leads to no other folder."""
    return re.sub(r"[^\w.+-]", "_", name)
