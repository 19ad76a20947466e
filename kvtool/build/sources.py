"""The sources of a build: the patch files, and the release of llama-cpp-python to which they apply."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvtool.build import process
from kvtool.errors import LibraryError
from kvtool.system.paths import cache_dir, checkout


@dataclass(frozen=True)
class Upstream:
    """The source archive to which the patch applies. sha256: 64 hex digits."""

    package: str
    version: str
    sha256: str

    @classmethod
    def read(cls, folder: Path) -> Upstream:
        """Read patches/UPSTREAM. Raises LibraryError."""
        path = folder / "UPSTREAM"
        pairs = (line.partition("=") for line in path.read_text().splitlines() if line.strip())
        values = {key.strip(): value.strip() for key, _, value in pairs}
        try:
            upstream = cls(**values)
        except TypeError:
            raise LibraryError(f"{path} must name package, version and sha256, and nothing else") from None
        if not re.fullmatch("[0-9a-f]{64}", upstream.sha256):
            raise LibraryError(f"{path}: sha256 must be 64 hex digits")
        return upstream


def patches_dir() -> Path:
    """Return the folder with the patch files. Raises LibraryError if it does not exist.

    This is patches/ of the checkout, or the copy inside an installed kvtool.
    """
    if root := checkout():
        return root / "patches"
    folder = Path(__file__).resolve().parent.parent / "patches"
    if (folder / "UPSTREAM").is_file():
        return folder
    raise LibraryError(f"the patch files are missing from {folder}; install kvtool again")


def manifest(folder: Path) -> tuple[str, ...]:
    """Return the files of the patch as paths below `folder`, in the order in which they are hashed.

    The list is in MANIFEST, which apply.cmake and sync.py also read. Raises LibraryError.
    """
    path = folder / "MANIFEST"
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise LibraryError(f"{path} is missing; install kvtool again") from None
    return tuple(line for line in lines if line and not line.startswith("#"))


def patch_digest(folder: Path) -> str:
    """Return the digest of the patch files, which a library built from them reports. Raises LibraryError."""
    try:
        hexes = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in manifest(folder)]
    except FileNotFoundError as error:
        raise LibraryError(f"{error.filename} is missing; install kvtool again") from None
    return hashlib.sha256("".join(hexes).encode()).hexdigest()


def place(upstream: Upstream) -> Path:
    """Return the path of the source archive that `archive` downloads."""
    return cache_dir() / "source" / f"{upstream.package.replace('-', '_')}-{upstream.version}.tar.gz"


def archive(upstream: Upstream, log: Path) -> Path:
    """Return the path of the source archive, which is downloaded only once.

    pip checks the archive's sha256 before any code of the archive is run.
    """
    cached = place(upstream)
    if cached.is_file() and hashlib.sha256(cached.read_bytes()).hexdigest() == upstream.sha256:
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{upstream.package}=={upstream.version} --hash=sha256:{upstream.sha256}\n")
        command = process.pip("download", "--no-deps", "--no-binary", upstream.package, "--require-hashes")
        another = (
            f"the downloaded {upstream.package} {upstream.version} is not the one that "
            f"patches/UPSTREAM names (its sha256 differs); nothing was built. Log: {log}"
        )
        process.run(
            [*command, "-r", str(wanted), "-d", folder],
            log,
            f"{upstream.package} {upstream.version} could not be downloaded",
            title="downloading the sources of llama.cpp (once; 77 MB)",
            known=("DO NOT MATCH THE HASHES", another),
        )
        os.replace(Path(folder) / cached.name, cached)
    return cached
