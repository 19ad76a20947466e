"""Models by repository, hf:OWNER/REPO[@REVISION][:QUANT]: which file that is, and where it is.

huggingface_hub says what a repository has, and keeps the files in its cache, where other programs find them.
kvtool brings them there itself: since huggingface_hub 2, a download that was stopped starts from nothing.
"""

import errno
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvtool.errors import ModelError
from kvtool.models.fetch import FULL, OFFLINE, Progress, Remote, fetch, storing
from kvtool.models.split import part_names

DEFAULTS = ("Q4_K_M", "Q8_0")
"""The quantizations that are looked for where none is named, as llama.cpp has them; then the first file."""

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"

_REFERENCE = re.compile(rf"(hf:)?({_NAME}/{_NAME})(?:@([A-Za-z0-9._/-]+))?(?::([^:]+))?")

_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[0-9]+(?:_[A-Z0-9]+)*|TQ[0-9]_[0-9]|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))(?=[-./]|$)",
    re.IGNORECASE,
)

# llama.cpp's gguf_filename_is_model: files that go with a model
_NO_MODEL = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")

_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Reference:
    """What stands behind hf:.

    Attributes
    ----------
    repo
        OWNER/REPO.
    revision
        A branch, tag or commit; None for the main branch.
    quant
        A quantization, or the path of a file in the repository; "" if none is named.
    """

    repo: str
    revision: str | None = None
    quant: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{revision}{':' if self.quant else ''}{self.quant}"

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache of huggingface_hub."""
        return cache_folder() / f"models--{self.repo.replace('/', '--')}"


def parse(text: str) -> Reference | None:
    """The repository that `-m` names; None if it names none. Without hf: it needs a quantization.

    Raises ModelError for an hf: that names no repository.
    """
    match = _REFERENCE.fullmatch(text)
    if match and (match[1] or match[4]):
        return Reference(match[2], match[3], match[4] or "")
    if text.startswith("hf:"):
        raise ModelError(f"a repository is hf:OWNER/REPO or hf:OWNER/REPO:QUANT, got {text!r}")
    return None


def is_repository(text: str) -> bool:
    """Whether it is OWNER/REPO, with nothing before or after."""
    return re.fullmatch(f"{_NAME}/{_NAME}", text) is not None


def cache_folder() -> Path:
    """The folder in which huggingface_hub keeps its files."""
    # imported here: only a model from a repository needs it
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def quant_of(name: str) -> str | None:
    """The quantization in a file's name, in capitals; None if there is none."""
    found = _QUANT.findall(name.removesuffix(".gguf"))
    return str(found[-1]).upper() if found else None


def models(names: Iterable[str]) -> list[str]:
    """The models among the files of a repository; of those that were split, the first parts."""
    return sorted(
        name
        for name in names
        if name.endswith(".gguf")
        and part_names(name)[0] == name
        and not any(word in name.rpartition("/")[2] for word in _NO_MODEL)
    )


def choose(names: Iterable[str], quant: str) -> str | None:
    """The file of that quantization, whatever its case; None if there is none. Of several, the first.

    quant: may also name a file, or any part of one; it is then that file, be it a model or not. Without a
    quantization it is the first of DEFAULTS that there is, and else the first file.
    """
    names = list(names)
    known = models(names)
    if quant.endswith(".gguf"):
        first = part_names(quant)[0]
        return first if first in names else None
    for each in (quant,) if quant else DEFAULTS:
        wanted = re.compile(rf"(?:^|[-_./]){re.escape(each)}(?=[-./])", re.IGNORECASE)
        for name in known:
            if wanted.search(name):
                return name
    return known[0] if known and not quant else None


def cached(reference: Reference, *, sure: bool = True) -> Path | None:
    """The file in the cache, or the first of its parts; None if it is not there, or not whole.

    sure: of a reference without a quantization, only the file that would be chosen of any others.
    """
    snapshot = snapshot_of(reference)
    names = names_in(snapshot) if snapshot else []
    name = choose(names, reference.quant or (DEFAULTS[0] if sure else ""))
    if snapshot is None or name is None or not set(part_names(name)) <= set(names):
        return None
    return snapshot / name


def snapshot_of(reference: Reference) -> Path | None:
    """The folder of the revision's files in the cache; None if there is none."""
    revision = reference.revision or "main"
    name = reference.folder / "refs" / revision
    # a commit has no name
    with suppress(OSError):
        revision = name.read_text(encoding="utf-8", errors="replace").strip()
    snapshot = reference.folder / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def names_in(snapshot: Path) -> list[str]:
    """The GGUF files in the folder of a revision, as the repository calls them."""
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.exists()]


def pull(reference: Reference, progress: Progress | None = None) -> Path:
    """Download the file, or all its parts, unless they are cached. Returns the first. Raises ModelError."""
    if found := cached(reference):
        return found
    try:
        names = _listed(reference)
    except _NoConnection:
        if found := cached(reference, sure=False):
            return found
        raise
    name = choose(names, reference.quant)
    if name is None:
        raise ModelError(_none_of(reference, models(names)))
    if missing := set(part_names(name)) - set(names):
        raise ModelError(f"{reference.repo} does not have all parts of {name}: no {min(missing)}")
    return [_pull(reference, part, progress) for part in part_names(name)][0]


def find(repo: str, file: str, revision: str | None = None) -> tuple[Remote, str]:
    """What the server says about a file, and its name in the cache of huggingface_hub. Raises ModelError.

    The name is "" if it has none.
    """
    from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url

    url = hf_hub_url(repo, file, revision=revision)
    with _explained(Reference(repo, revision), file):
        about = get_hf_file_metadata(url, timeout=_TIMEOUT_S)
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    is_same = urlsplit(about.location)[:2] == urlsplit(url)[:2]
    # the token is for this server, and not for the one that it sends us to
    headers = {"Authorization": f"Bearer {token}"} if token and is_same else {}
    # it becomes a file's name
    etag = about.etag if about.etag and re.fullmatch("[A-Za-z0-9_-]+", about.etag) else ""
    sha256 = etag if re.fullmatch("[0-9a-f]{64}", etag) else None
    return Remote(f"{file} of {repo}", about.location, headers, about.size, sha256), etag


class _NoConnection(ModelError):
    """There is no network, or it must not be used."""


def _listed(reference: Reference) -> list[str]:
    """The files of the repository. Raises ModelError."""
    from huggingface_hub import HfApi

    with _explained(reference, str(reference)):
        info = HfApi().model_info(reference.repo, revision=reference.revision, timeout=_TIMEOUT_S)
    return [file.rfilename for file in info.siblings or []]


def _pull(reference: Reference, name: str, progress: Progress | None) -> Path:
    """One file into the cache."""
    from huggingface_hub import constants, hf_hub_download

    found, etag = find(reference.repo, name, reference.revision)
    blob = reference.folder / "blobs" / etag
    with storing(name, cache_folder(), "HF_HOME"):
        # larger files come only from huggingface_hub itself
        if etag and (found.size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            fetch(found, blob, progress)
        with _explained(reference, name):
            # it finds the bytes, and gives them their name
            path = Path(hf_hub_download(reference.repo, name, revision=reference.revision))
    if etag and not path.is_symlink():
        # a file system without links: the name is a copy
        blob.unlink(missing_ok=True)
    return path


def _none_of(reference: Reference, known: list[str]) -> str:
    if not known:
        return f"{reference.repo} has no GGUF file; look for the model's repository whose name ends in GGUF"
    quants = ", ".join(dict.fromkeys(quant_of(name) or name for name in known))
    return f"{reference.repo} has no {reference.quant}; it has {quants}"


@contextmanager
def _explained(reference: Reference, what: str) -> Iterator[None]:
    """Inside, errors of huggingface_hub become a ModelError in one line, except that of a full disk."""
    import logging

    from huggingface_hub import errors

    # it warns of what a user of kvtool cannot change
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    repo = reference.repo
    sign_in = "`hf auth login`, or a token in $HF_TOKEN"
    try:
        yield
        return
    except errors.GatedRepoError:
        said = f"{repo} is gated: accept its terms on its page, then sign in: {sign_in}"
    except errors.RepositoryNotFoundError:
        said = f"there is no repository {repo}, or it is private; a private one needs {sign_in}"
    except errors.RevisionNotFoundError:
        said = f"{repo} has no revision {reference.revision!r}"
    except errors.OfflineModeIsEnabled:
        raise _NoConnection(
            f"{what} is not in {cache_folder()}, and $HF_HUB_OFFLINE forbids a download; unset it; {OFFLINE}"
        ) from None
    except Exception as error:
        if getattr(error, "errno", None) in FULL:
            raise
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        if _is_of_network(error):
            said = re.sub(r"^\[Errno -?\d+\] ", "", said)
            said = f"no connection ({said}); the same command tries again"
        raise _NoConnection(f"cannot download {what}: {said}; {OFFLINE}") from error
    raise ModelError(said)


def _is_of_network(error: BaseException | None) -> bool:
    """Whether the network is at the root of it, and no server's answer."""
    while error and getattr(error, "response", None) is None:
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return True
        error = error.__cause__ or error.__context__
    return False
