"""The models that were downloaded: which there are, how many bytes they take, and how to delete them."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.errors import ModelError
from kvtool.models import hub, web
from kvtool.models.catalogue import Entry, models_dir, registry, unknown
from kvtool.models.fetch import left_of
from kvtool.models.split import part_names


@dataclass(frozen=True, slots=True)
class Stored:
    """A model, or what a broken download of one left.

    Attributes
    ----------
    name
        What `-m` takes: a name of models.txt, a URL or a repository.
    files
        Its files; the first is the model's own, or its first part.
    is_whole
        Whether it can be used.
    """

    name: str
    files: tuple[Path, ...]
    is_whole: bool

    @property
    def size(self) -> int:
        """Bytes of its files."""
        total = 0
        for path in self.files:
            # another process may have removed it
            with suppress(OSError):
                total += path.stat().st_size
        return total


def of_entry(entry: Entry) -> Stored | None:
    """What there is of an entry of models.txt; None if nothing is."""
    if entry.here:
        return Stored(entry.name, (entry.path,), True)
    # .part: of pip, .hf: of an earlier kvtool
    folders = [models_dir() / f"{entry.name}{suffix}" for suffix in (".part", ".hf")]
    left = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    left += left_of(entry.path) if entry.is_download else []
    return Stored(entry.name, tuple(left), False) if left else None


def downloads() -> list[Stored]:
    """The models that were downloaded by URL or from a repository, and what broken downloads left."""
    return [*_of_urls(), *_of_hub()]


def total(stored: Iterable[Stored]) -> int:
    """Bytes of all of them; a file that several share counts once."""
    return Stored("", tuple({path.resolve() for each in stored for path in each.files}), True).size


def remove(wanted: str) -> tuple[Stored, int]:
    """Delete what `-m` names from the caches. Returns it and the bytes freed. Raises ModelError.

    A file outside of the caches is not deleted, nor one that another name shares.
    """
    found = _find(wanted)
    n_bytes = 0
    try:
        for path in found.files:
            n_bytes += _unlink(path)
        for path in found.files:
            _tidy(path.parent)
    except OSError as error:
        raise ModelError(f"cannot delete {error.filename or wanted}: {error.strerror or error}") from None
    return found, n_bytes


def _find(wanted: str) -> Stored:
    entries = registry()
    if wanted in entries:
        entry = entries[wanted]
        if not entry.is_download:
            raise ModelError(f"{wanted} is {entry.path}, which kvtool did not download; delete it yourself")
        found = of_entry(entry)
    elif web.is_url(wanted):
        folder = web.folder_of(wanted)
        found = next((each for each in _of_urls() if each.files[0].parent == folder), None)
    elif Path(wanted).expanduser().exists():
        path = Path(wanted).expanduser().absolute()
        ours = [of_entry(entry) for entry in entries.values() if entry.is_download]
        found = next((each for each in (*ours, *downloads()) if each and path in each.files), None)
        if not found:
            raise ModelError(
                f"{wanted} is not in a cache, and kvtool deletes nothing else; delete it yourself"
            )
    elif reference := hub.parse(wanted):
        found = _in_hub(reference)
    else:
        raise ModelError(unknown(wanted, entries))
    if not found:
        raise ModelError(f"{wanted} is not downloaded; see `kvtool models list`")
    return found


def _of_urls() -> Iterator[Stored]:
    for folder in sorted(web.urls_dir().glob("*")):
        # not one of ours, or removed meanwhile
        with suppress(OSError, ModelError):
            url = (folder / web.URL_FILE).read_text(encoding="utf-8")
            files = sorted(each for each in folder.iterdir() if each.name != web.URL_FILE)
            yield Stored(url, (*files, folder / web.URL_FILE), web.cached(url) is not None)


def _of_hub() -> Iterator[Stored]:
    for folder in sorted(hub.cache_folder().glob("models--*--*")):
        reference = hub.Reference(folder.name.removeprefix("models--").replace("--", "/", 1))
        newest, refs = hub.snapshot_of(reference), _refs(folder)
        for snapshot in sorted((folder / "snapshots").glob("*")):
            revision = None if snapshot == newest else refs.get(snapshot.name, snapshot.name)
            yield from _of_snapshot(snapshot, replace(reference, revision=revision))
        if left := _broken(reference):
            yield Stored(str(reference), left, False)


def _refs(folder: Path) -> dict[str, str]:
    """The branches and tags of a repository by their commits."""
    refs = folder / "refs"
    return {
        path.read_text(encoding="utf-8", errors="replace").strip(): path.relative_to(refs).as_posix()
        for path in sorted(refs.rglob("*"))
        if path.is_file()
    }


def _of_snapshot(snapshot: Path, reference: hub.Reference) -> Iterator[Stored]:
    names = hub.names_in(snapshot)
    firsts = sorted({part_names(name)[0] for name in names})
    for name in firsts:
        quant = hub.quant_of(name)
        if not quant or hub.choose(firsts, quant) != name:
            # another file has the same quantization, or it is no model
            quant = name
        there = [part for part in part_names(name) if part in names]
        files = tuple(snapshot / part for part in there)
        yield Stored(str(replace(reference, quant=quant)), files, there == part_names(name))


def _in_hub(reference: hub.Reference) -> Stored | None:
    """What is cached of a repository: the file that is meant, or else what a broken download left."""
    snapshot = hub.snapshot_of(reference)
    known = list(_of_snapshot(snapshot, reference)) if snapshot else []
    if len(known) > 1 and not reference.quant:
        names = ", ".join(each.name for each in known)
        raise ModelError(f"{reference} is one of several; name one: {names}")
    if snapshot and known:
        name = hub.choose((part_names(name)[0] for name in hub.names_in(snapshot)), reference.quant)
        for each in known:
            if name and each.files[0] == snapshot / name:
                return each
    left = _broken(reference)
    return Stored(str(reference), left, False) if left else None


def _broken(reference: hub.Reference) -> tuple[Path, ...]:
    """What broken downloads left in a repository's folder: those of kvtool, and of huggingface_hub."""
    blobs = sorted((reference.folder / "blobs").glob("*"))
    return tuple(path for path in blobs if path.name.endswith((".part", ".part.json", ".incomplete")))


def _unlink(path: Path) -> int:
    """Delete a file, and what it is a link to unless another link needs that. Returns the bytes freed."""
    if not path.is_symlink():
        n_bytes = path.stat().st_size
        path.unlink()
        return n_bytes
    target = _target(path)
    path.unlink()
    # from names to blobs, and from those to blobs that they share
    links = (each for each in hub.cache_folder().glob("models--*/**/*") if each.is_symlink())
    is_needed = any(_target(link) == target for link in links)
    return _unlink(target) if target.exists() and not is_needed else 0


def _target(link: Path) -> Path:
    return Path(os.path.normpath(link.parent / os.readlink(link)))


def _tidy(folder: Path) -> None:
    """Delete a folder of the caches and those around it, unless files are left there."""
    for root in (models_dir(), hub.cache_folder()):
        while root in folder.parents and not _has_files(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder = folder.parent


def _has_files(folder: Path) -> bool:
    is_repo = folder.name.startswith("models--")
    # other folders of a repository hold only records of earlier files
    inside = (folder / "blobs", folder / "snapshots") if is_repo else (folder,)
    return any(path.is_file() or path.is_symlink() for each in inside for path in each.rglob("*"))
