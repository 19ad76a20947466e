"""Find, download and check the model that `-m` names."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool import models
from kvtool.errors import ModelError, UsageError
from kvtool.models.catalogue import Entry, registry, unknown
from kvtool.models.header import ModelInfo, read
from kvtool.models.split import first_part
from kvtool.models.supported import unsupported
from kvtool.system.paths import expanded
from kvtool.system.texts import exists

if TYPE_CHECKING:
    from kvtool.models.fetch import Progress


def named(name: str | None = None) -> str:
    """Return the given name, or else $KVTOOL_MODEL, or else the first name in models.txt."""
    return name or os.environ.get("KVTOOL_MODEL") or next(iter(registry()))


def resolve(name: str | None = None, progress: Progress | None = None) -> Path:
    """Download a model if necessary. Return the path of its file, or of its first part if it is split.

    name: a name in models.txt, a path, a URL, or a repository (hf:OWNER/REPO:QUANT). If it is None, `named`
    chooses the model. Without `progress`, `models.show_download` shows the progress. Raises ModelError.
    """
    name = named(name)
    with nullcontext(progress) if progress else models.show_download(name) as shown:
        return _pull(name, shown)


def _pull(name: str, progress: Progress | None) -> Path:
    entries = registry()
    if name in entries:
        entry = entries[name]
        if entry.here:
            return entry.path
        # imported here, because only a download needs it
        from kvtool.models import download

        return download.pull(entry, progress)
    if _is_file(name):
        path = first_part(expanded(name))
        if not path.is_file():
            folder = path.absolute().parent
            raise ModelError(
                f"{path.name}, the first part of the model, is missing; it has to be in {folder}"
            )
        return path

    from kvtool.models import hub, web

    if web.is_url(name):
        return web.pull(name, progress)
    if reference := hub.parse(name):
        return hub.pull(reference, progress)
    raise ModelError(_unknown(name, entries))


def check_name(name: str) -> None:
    """Raise ModelError if a name is not in models.txt and is not a file, a URL or a repository.

    Raises UsageError for an empty name. Nothing is downloaded, so a URL or repository may not exist.
    """
    if name == "":
        raise UsageError("the model's name is empty; leave out --model for the default")
    if name in (entries := registry()) or _is_file(name):
        return

    from kvtool.models import hub, web

    if not (web.is_url(name) or hub.parse(name)):
        raise ModelError(_unknown(name, entries))


def _is_file(name: str) -> bool:
    return exists(name) and expanded(name).is_file()


def _unknown(name: str, entries: dict[str, Entry]) -> str:
    from kvtool.models import hub

    path = os.path.expanduser(name)
    if exists(name):
        if os.path.isdir(path):
            return f"{name} is a folder; name the GGUF file in it"
        return f"{name} is not a regular file; name a GGUF file"
    if os.path.islink(path):
        return f"{name} is a broken link: there is no file {os.path.realpath(path)}"
    is_repository = not name.endswith(".gguf") and hub.is_repository(name)
    if not is_repository and ("/" in name or os.sep in name or name.endswith(".gguf")):
        return f"there is no file {name}"
    message = unknown(name, entries, or_file=True)
    return f"{message} A repository is hf:{name}." if is_repository else message


def check(path: Path) -> ModelInfo:
    """Read a model's header. Raises ModelError for a damaged file and for a model that kvtool cannot run."""
    info = read(path)
    if reason := unsupported(info):
        raise ModelError(reason)
    return info
