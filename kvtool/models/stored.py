"""List the downloaded models, count their bytes, and delete them."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.errors import ModelError
from kvtool.models import hub, web
from kvtool.models.catalogue import Entry, models_dir, registry, unknown
from kvtool.models.split import part_names
from kvtool.system.paths import expanded
from kvtool.system.texts import exists


@dataclass(frozen=True, slots=True)
class Stored:
    """A downloaded model, or the remains of an interrupted download.

    name: the model's name for `-m`: a name of models.txt, a URL or a repository.
    files: paths of the files. The first is the model itself or its first part.
    is_whole: True if all files of the model are complete.
    """

    name: str
    files: tuple[Path, ...]
    is_whole: bool

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        total = 0
        for path in self.files:
            # another process may have removed the file
            with suppress(OSError):
                total += path.stat().st_size
        return total


def of_entry(entry: Entry) -> Stored | None:
    """Return the stored files of an entry of models.txt, or None if nothing is stored."""
    if entry.here:
        return Stored(entry.name, (entry.path,), True)
    remains = sorted((models_dir() / f"{entry.name}.part").rglob("*"))
    files = tuple(path for path in remains if path.is_file())
    return Stored(entry.name, files, False) if files else None


def downloads() -> list[Stored]:
    """Return the models that were downloaded by URL or from a repository, and incomplete downloads."""
    return [*_of_urls(), *_of_hub()]


def total(stored: Iterable[Stored]) -> int:
    """Return the size of all files in bytes. A file that several models share is counted once."""
    return Stored("", tuple({path.resolve() for model in stored for path in model.files}), True).size


def remove(name: str) -> tuple[Stored, int]:
    """Delete a model from the caches. Return the model and the number of freed bytes. Raises ModelError.

    name: a name of models.txt, a URL, a repository, or the path of a file in a cache. Files outside the
    caches are not deleted. Files that another model also uses are kept.
    """
    model = _find(name)
    # check all files before the first is deleted
    if outside := [path for path in model.files if not _is_in(path, models_dir(), hub.cache_folder())]:
        raise _not_ours(outside[0])
    n_bytes = 0
    try:
        for path in model.files:
            n_bytes += _unlink(path)
        for path in model.files:
            _tidy(path.parent)
    except OSError as error:
        raise ModelError(f"cannot delete {error.filename or name}: {error.strerror or error}") from None
    return model, n_bytes


def _find(name: str) -> Stored:
    entries = registry()
    if name in entries:
        model = of_entry(entries[name])
    elif web.is_url(name):
        folder = web.folder_of(name)
        model = next((stored for stored in _of_urls() if stored.files[0].parent == folder), None)
    elif exists(name):
        path = expanded(name).absolute()
        ours = map(of_entry, entries.values())
        model = next((stored for stored in (*ours, *downloads()) if stored and path in stored.files), None)
        if not model:
            raise _not_ours(name)
    elif reference := hub.parse(name):
        model = _in_hub(reference)
    else:
        raise ModelError(unknown(name, entries))
    if not model:
        raise ModelError(f"{name} is not downloaded; see `kvtool models list`")
    return model


def _not_ours(path: object) -> ModelError:
    return ModelError(f"{path} is not in a cache, and kvtool deletes nothing else; delete it yourself")


def _of_urls() -> Iterator[Stored]:
    for folder in sorted(web.urls_dir().glob("*")):
        # skip folders that kvtool did not make, and folders that were removed meanwhile
        with suppress(OSError, ModelError):
            url = (folder / web.URL_FILE).read_text(encoding="utf-8")
            if files := sorted(path for path in folder.iterdir() if path.name != web.URL_FILE):
                yield Stored(url, (*files, folder / web.URL_FILE), web.cached(url) is not None)


def _of_hub() -> Iterator[Stored]:
    for folder in sorted(hub.cache_folder().glob("models--*--*")):
        reference = hub.Reference(folder.name.removeprefix("models--").replace("--", "/", 1))
        newest, refs = hub.snapshot_of(reference), _refs(folder)
        for snapshot in sorted((folder / "snapshots").glob("*")):
            revision = None if snapshot == newest else refs.get(snapshot.name, snapshot.name)
            yield from _of_snapshot(snapshot, replace(reference, revision=revision))
        if remains := _incomplete(reference):
            yield Stored(str(reference), remains, False)


def _refs(folder: Path) -> dict[str, str]:
    """Return a dict from commits to the name of a branch or tag. Commits without a name are left out.

    folder: a repository's folder.
    """
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
            # The quantization does not identify this file, so use the file's name. There are three possible
            # reasons: the name has no quantization, an earlier file has the same quantization, or the file is
            # not a model
            quant = name
        parts = [part for part in part_names(name) if part in names]
        files = tuple(snapshot / part for part in parts)
        yield Stored(str(replace(reference, quant=quant)), files, parts == part_names(name))


def _in_hub(reference: hub.Reference) -> Stored | None:
    """Return the cached model that a reference names.

    If the model is not cached, return the remains of interrupted downloads, or None if there are no remains.
    Raises ModelError if the reference fits several models.
    """
    snapshot = hub.snapshot_of(reference)
    known = list(_of_snapshot(snapshot, reference)) if snapshot else []
    if len(known) > 1 and not reference.quant:
        names = ", ".join(model.name for model in known)
        raise ModelError(f"{reference} is one of several; name one: {names}")
    if snapshot and known:
        name = hub.choose((part_names(name)[0] for name in hub.names_in(snapshot)), reference.quant)
        for model in known:
            if name and model.files[0] == snapshot / name:
                return model
    remains = _incomplete(reference)
    return Stored(str(reference), remains, False) if remains else None


def _incomplete(reference: hub.Reference) -> tuple[Path, ...]:
    """Return the remains of interrupted downloads in a repository's folder."""
    return tuple(sorted((reference.folder / "blobs").glob("*.incomplete")))


def _is_in(path: Path, *folders: Path) -> bool:
    """Return True if a path, with its `..` resolved, is in one of the folders. Links are not followed."""
    return any(Path(os.path.abspath(folder)) in Path(os.path.abspath(path)).parents for folder in folders)


def _unlink(path: Path) -> int:
    """Delete a file. Return the number of bytes freed.

    If the file is a link in huggingface_hub's cache to a file in this cache, also delete this file, unless
    another link has the same target. The user made all other links: their targets stay.
    """
    if not path.is_symlink():
        n_bytes = path.stat().st_size
        path.unlink()
        return n_bytes
    target = _target(path)
    path.unlink()
    if not (_is_in(path, hub.cache_folder()) and _is_in(target, hub.cache_folder())):
        return 0
    # In huggingface_hub's cache, a file of a model is a link to a blob. The blob itself may be a link to a
    # blob that several repositories share
    links = (link for link in hub.cache_folder().glob("models--*/**/*") if link.is_symlink())
    is_needed = any(_target(link) == target for link in links)
    return _unlink(target) if target.exists() and not is_needed else 0


def _target(link: Path) -> Path:
    return Path(os.path.normpath(link.parent / os.readlink(link)))


def _tidy(folder: Path) -> None:
    """Delete a folder of a cache if it has no files. Then do the same with the folder above it, and so on."""
    for root in (models_dir(), hub.cache_folder()):
        while root in folder.parents and not _has_files(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder = folder.parent


def _has_files(folder: Path) -> bool:
    is_repo = folder.name.startswith("models--")
    # only these two folders of a repository contain models; its other folders contain records about files
    folders = (folder / "blobs", folder / "snapshots") if is_repo else (folder,)
    return any(path.is_file() or path.is_symlink() for inside in folders for path in inside.rglob("*"))
