"""Choose and download a model's file from a repository, hf:OWNER/REPO[@REVISION][:QUANT].

huggingface_hub lists the files of a repository. It downloads them into its cache, where other programs find
them.
"""

import errno
import logging
import re
import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import ModelError
from kvtool.models.catalogue import models_dir
from kvtool.models.fetch import OFFLINE, Progress, full_disk, storing
from kvtool.models.split import part_names

DEFAULTS = ("Q4_K_M", "Q8_0")
"""Quantizations to try if the user names none, in llama.cpp's order.

If a repository has no file of either quantization, its first model file is used.
"""

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"

# as in Git, no part of a revision is empty or begins with a dot, so the revision stays in its folder
_PART = "[A-Za-z0-9_-][A-Za-z0-9._-]*"

_REFERENCE = re.compile(rf"(hf:)?({_NAME}/{_NAME})(?:@({_PART}(?:/{_PART})*))?(?::([^:]+))?")

_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[0-9]+(?:_[A-Z0-9]+)*|TQ[0-9]_[0-9]|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))(?=[-./]|$)",
    re.IGNORECASE,
)

# words in the names of files that accompany a model, from llama.cpp's gguf_filename_is_model
_NO_MODEL = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")

_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository with an optional revision and file, parsed from hf:OWNER/REPO[@REVISION][:QUANT].

    revision: a branch, tag or commit; None for the main branch.
    quant: a quantization, or the path of a file in the repository; "" if the text names neither.
    """

    repo: str
    revision: str | None = None
    quant: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{revision}{':' if self.quant else ''}{self.quant}"

    @property
    def folder(self) -> Path:
        """The repository's folder in huggingface_hub's cache."""
        return cache_folder() / f"models--{self.repo.replace('/', '--')}"


def parse(text: str) -> Reference | None:
    """Parse hf:OWNER/REPO[@REVISION][:QUANT]. Return None for other text.

    The prefix "hf:" may be missing if the text has a quantization. Raises ModelError if the text has this
    prefix but names no repository.
    """
    match = _REFERENCE.fullmatch(text)
    if match and (match[1] or match[4]):
        return Reference(match[2], match[3], match[4] or "")
    if text.startswith("hf:"):
        raise ModelError(f"a repository is hf:OWNER/REPO[@REVISION][:QUANT], got {text!r}")
    return None


def is_repository(text: str) -> bool:
    return re.fullmatch(f"{_NAME}/{_NAME}", text) is not None


def cache_folder() -> Path:
    """Return the folder of huggingface_hub's cache."""
    # imported here, because only a model from a repository needs it
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def quant_of(name: str) -> str | None:
    """Return the quantization in a file's name, in capitals, or None if the name has none."""
    quants = _QUANT.findall(name.removesuffix(".gguf"))
    return str(quants[-1]).upper() if quants else None


def models(names: Iterable[str]) -> list[str]:
    """Return the names of the model files in a repository, sorted. `names` may also contain other files.

    Only the first part of a split model is returned.
    """
    return sorted(
        name
        for name in names
        if name.endswith(".gguf")
        and part_names(name)[0] == name
        and not any(word in name.rpartition("/")[2] for word in _NO_MODEL)
    )


def choose(names: Iterable[str], quant: str) -> str | None:
    """Return the name of the first model file with this quantization, or None.

    quant: a quantization in upper or lower case, or the exact name of a file. The file does not have to be a
    model. If it is a part of a split model, return the first part. If `quant` is empty, use the first
    quantization of DEFAULTS that the repository has, or else return the first model.
    """
    names = list(names)
    known = models(names)
    if quant.endswith(".gguf"):
        first = part_names(quant)[0]
        return first if first in names else None
    for candidate in (quant,) if quant else DEFAULTS:
        pattern = re.compile(rf"(?:^|[-_./]){re.escape(candidate)}(?=[-./])", re.IGNORECASE)
        for name in known:
            if pattern.search(name):
                return name
    return known[0] if known and not quant else None


def cached(reference: Reference, *, sure: bool = True) -> Path | None:
    """Return the path of the model's file or first part in the cache. Return None unless all parts are there.

    sure: used only if the reference names no quantization. True: accept only the first quantization of
    DEFAULTS. If it is not cached, the server may still have it. False: accept the file that `choose` finds in
    the cache.
    """
    snapshot = snapshot_of(reference)
    names = names_in(snapshot) if snapshot else []
    name = choose(names, reference.quant or (DEFAULTS[0] if sure else ""))
    if snapshot is None or name is None or not set(part_names(name)) <= set(names):
        return None
    return snapshot / name


def snapshot_of(reference: Reference) -> Path | None:
    """Return the cache's folder for the reference's revision, or None if the cache does not have it."""
    revision = reference.revision or "main"
    name = reference.folder / "refs" / revision
    # refs has a file for each branch or tag. The file contains the commit, which is the name of the folder
    with suppress(OSError):
        revision = name.read_text(encoding="utf-8", errors="replace").strip()
    snapshot = reference.folder / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def names_in(snapshot: Path) -> list[str]:
    """Return the paths of the GGUF files in the folder of a revision, relative to this folder."""
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.exists()]


def pull(reference: Reference, progress: Progress | None = None) -> Path:
    """Download the model's file, or all its parts, unless they are cached.

    Return the path of the file or the first part. Raises ModelError.
    """
    if path := cached(reference):
        return path
    if progress and not cached(reference, sure=False):
        progress(0, None)
    try:
        names = _files_of(reference)
    except _NoConnection:
        if path := cached(reference, sure=False):
            return path
        raise
    name = choose(names, reference.quant)
    if name is None:
        raise ModelError(_not_there(reference, models(names)))
    if missing := set(part_names(name)) - set(names):
        raise ModelError(f"{reference.repo} does not have all parts of {name}: no {min(missing)}")
    with storing(name, cache_folder(), "HF_HOME"):
        return [download(reference, part, progress) for part in part_names(name)][0]


def download(
    reference: Reference, name: str, progress: Progress | None = None, *, local_dir: Path | None = None
) -> Path:
    """Download one file of a repository into huggingface_hub's cache, or into `local_dir`.

    Raises ModelError, and OSError if the file cannot be written.
    """
    from huggingface_hub import hf_hub_download

    progress = progress or (lambda done, size: None)
    # show the progress at once: the first request may take long
    progress(0, None)
    bar = _bar(progress)
    with _explained(reference, name, models_dir() if local_dir else None):
        if local_dir:
            _check_network(reference, name)
        path = hf_hub_download(
            reference.repo, name, revision=reference.revision, local_dir=local_dir, tqdm_class=bar
        )
    return Path(path)


def _check_network(reference: Reference, name: str) -> None:
    """Raise an error at once if there is no network: `hf_hub_download` would try again for 24 seconds.

    If a server answers with an error, raise nothing here: `hf_hub_download` then tries again.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        url = hf_hub_url(reference.repo, name, revision=reference.revision)
        get_hf_file_metadata(url, timeout=_TIMEOUT_S)
    except Exception as error:
        if _is_of_network(error):
            raise


def _bar(progress: Progress) -> type:
    """Make a class of progress bars that call `progress` and draw nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *_: object, total: int | None = None, initial: int = 0, **__: object) -> None:
            super().__init__(disable=True)  # type: ignore[no-untyped-call]
            self.n, self.total = initial, total

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            progress(self.n, self.total)

        # without these two methods, huggingface_hub would create a second bar for the network's bytes
        def update_transfer(self, n: int) -> None:
            pass

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None:
            pass

    return Bar


class _NoConnection(ModelError):
    """Error if the server gives no usable answer. `pull` then looks for another cached file."""


def _files_of(reference: Reference) -> list[str]:
    """Return the names of the repository's files. Raises ModelError."""
    from huggingface_hub import HfApi

    with _explained(reference, str(reference)):
        info = HfApi().model_info(reference.repo, revision=reference.revision, timeout=_TIMEOUT_S)
    return [file.rfilename for file in info.siblings or []]


def _not_there(reference: Reference, known: list[str]) -> str:
    if not known:
        return f"{reference.repo} has no GGUF file; look for the model's repository whose name ends in GGUF"
    quants = ", ".join(dict.fromkeys(quant_of(name) or name for name in known))
    return f"{reference.repo} has no {reference.quant}; it has {quants}"


@contextmanager
def _explained(reference: Reference, what: str, folder: Path | None = None) -> Iterator[None]:
    """Turn an error of huggingface_hub into a ModelError with a message of one line.

    folder: where the file is missing; None for huggingface_hub's cache. An OSError of a local file is raised
    unchanged.
    """
    from huggingface_hub import errors

    # hide huggingface_hub's warnings: a user of kvtool can do nothing about them
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    repo = reference.repo
    sign_in = "`hf auth login`, or a token in $HF_TOKEN"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        return
    except errors.GatedRepoError:
        message = f"{repo} is gated: accept its terms on its page, then sign in: {sign_in}"
    except errors.RepositoryNotFoundError:
        message = f"there is no repository {repo}, or it is private; a private one needs {sign_in}"
    except errors.RevisionNotFoundError:
        message = f"{repo} has no revision {reference.revision!r}"
    except Exception as caught:
        error: BaseException = caught
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
            # the error says only that the file is not here; its cause says why it could not be downloaded
            error = error.__cause__
        if isinstance(error, errors.OfflineModeIsEnabled):
            raise _NoConnection(
                f"{what} is not in {folder or cache_folder()}, and $HF_HUB_OFFLINE forbids a download; "
                f"unset it; {OFFLINE}"
            ) from None
        if isinstance(error, OSError) and (error.errno or error.filename) and not _is_of_network(error):
            raise
        if full := full_disk(str(error)):
            raise full from None
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        if _is_of_network(error):
            text = re.sub(r"^\[Errno -?\d+\] ", "", text)
            text = f"no connection ({text}); the same command tries again"
        raise _NoConnection(f"cannot download {what}: {text}; {OFFLINE}") from error
    raise ModelError(message)


def _is_of_network(error: BaseException | None) -> bool:
    """Return True if the network caused the error. Return False if a server answered with an error."""
    while error and getattr(error, "response", None) is None:
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return True
        error = error.__cause__ or error.__context__
    return False
