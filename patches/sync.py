"""For maintainers: bring the patch into a work tree of llama.cpp, and back.

    python patches/sync.py import DIR [ARCHIVE]   make DIR a repository of llama.cpp, its work tree patched
    python patches/sync.py export DIR             write hooks.patch from that work tree; keep its header
    python patches/sync.py check                  test that the patch fits UPSTREAM, and export reproduces it

ARCHIVE is the source distribution of another release; the default is UPSTREAM's. If the patch does not fit
it exactly, the changes are merged file by file, and the remaining work is listed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import apply  # noqa: E402

from kvtool.build import sources  # noqa: E402
from kvtool.errors import KvtoolError  # noqa: E402
from kvtool.system.paths import cache_dir  # noqa: E402

PATCH = HERE / "hooks.patch"
FIELDS = ("Subject:", "Why:", "Remove-when:", "Touches:")
OURS = "src/kvtool"
"""Folder of our own C++ files in llama.cpp's tree."""


def header(patch: str) -> str:
    """Return the header, which is the text before the first file's changes.

    Raises PatchError if one of its fields is empty or missing.
    """
    head, found, _ = patch.partition("diff --git ")
    fields = dict(line.split(":", 1) for line in head.splitlines() if ":" in line)
    missing = [field for field in FIELDS if not fields.get(field[:-1], "").strip()]
    if not found or missing:
        raise apply.PatchError(f"the header lacks {', '.join(missing) or 'a diff after it'}")
    return head


def _run_git(tree: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    # `export` must write the same bytes on every machine. For this, git must not read the user's
    # configuration, and must not use a repository that contains the tree
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent),
        "LC_ALL": "C",
    }
    for role in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{role}_NAME": "kvtool", f"GIT_{role}_EMAIL": "kvtool@localhost"}
    return subprocess.run(
        ["git", *arguments], cwd=tree, env=env, input=stdin, capture_output=True, check=False
    )


def _git(tree: Path, *arguments: str) -> bytes:
    done = _run_git(tree, *arguments)
    if done.returncode:
        raise apply.PatchError(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def unpack(archive: Path, tree: Path, only: set[str] | None = None) -> None:
    """Unpack llama.cpp from a source distribution into `tree`: all files, or only the files in `only`."""
    with tarfile.open(archive) as tar:
        for member in tar:
            top, _, name = member.name.partition("/vendor/llama.cpp/")
            # skip the .git in the distribution: it belongs to another llama.cpp
            if "/" in top or name in ("", ".git") or not member.isfile() or (only and name not in only):
                continue
            path = tree / name
            if not path.resolve().is_relative_to(tree.resolve()):
                raise apply.PatchError(f"{member.name} would land outside {tree}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tar.extractfile(member).read())
            path.chmod(member.mode & 0o777)


def commit(tree: Path) -> None:
    """Make the tree a git repository with all its files in one commit."""
    _git(tree, "init", "-q")
    exclude = tree / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text(f"/{OURS}/\n")
    _git(tree, "add", "-A", "-f")
    _git(tree, "commit", "-q", "-m", "upstream")


def exported(tree: Path, head: str) -> bytes:
    """Return the contents of hooks.patch for this work tree. They are the same bytes on every machine."""
    diff = _git(
        tree,
        *("diff", "-U2", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames"),
        *("--diff-algorithm=myers", "--indent-heuristic", "--src-prefix=a/", "--dst-prefix=b/", "HEAD", "--"),
    )
    return head.encode() + diff


def _source() -> Path:
    return sources.archive(sources.Upstream.read(HERE), cache_dir() / "logs" / "source.log")


def merge(patch: bytes, tree: Path, before: Path) -> list[str]:
    """Merge each file's changes into another llama.cpp. `before` is the tree that the patch was made for.

    Returns the changes that must be completed by hand. In the files, conflicts have git's conflict markers.
    """
    for name in apply.parse(patch):
        _git(tree, "hash-object", "-w", str(before / name))
    left = []
    for diff in re.split(rb"^(?=diff --git )", patch, flags=re.MULTILINE)[1:]:
        (name,) = apply.parse(diff)
        if not (tree / name).is_file():
            left.append(f"{name} is not in this llama.cpp; its changes:\n{diff.decode().rstrip()}")
            continue
        done = _run_git(tree, "apply", "--3way", "-", stdin=diff)
        lines = (tree / name).read_bytes().splitlines()
        conflicts = [number for number, line in enumerate(lines, 1) if line.startswith(b"<<<<<<< ")]
        left += [f"{name}:{number} is in conflict" for number in conflicts]
        if done.returncode and not conflicts:
            left.append(f"{name}: {done.stderr.decode(errors='replace').strip()}")
    _git(tree, "reset", "-q")
    return left


def import_(tree: Path, archive: Path | None = None) -> str:
    """Make a patched work tree of the archive's llama.cpp (by default UPSTREAM's).

    Returns a message that lists the remaining work.
    """
    if tree.exists() and any(tree.iterdir()):
        raise apply.PatchError(f"{tree} is not empty")
    tree.mkdir(parents=True, exist_ok=True)
    unpack(archive or _source(), tree)
    if not any(tree.iterdir()):
        raise apply.PatchError(f"{archive} is not a source distribution of llama-cpp-python")
    commit(tree)
    ours = tree / OURS
    ours.mkdir(parents=True)
    for name in ("MANIFEST", *sources.manifest(HERE)):
        if name != PATCH.name:
            link = ours / name.removeprefix("src/")
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(HERE / name)
    (ours / "digest.h").write_text('#define LLAMA_KVTOOL_DIGEST "work tree"\n')
    patch, left = PATCH.read_bytes(), []
    try:
        apply.apply(patch, tree)
    except apply.PatchError:
        if archive is None:
            raise
        with tempfile.TemporaryDirectory() as folder:
            before = Path(folder)
            unpack(_source(), before, only=set(apply.parse(patch)))
            left = merge(patch, tree, before)
    if left:
        left.append(f"left to do by hand: {len(left)}")
    return "\n".join([*left, f"{tree}: edit, build, then export; {OURS}/ has links to {HERE}"])


def export(tree: Path) -> str:
    """Write hooks.patch from the work tree."""
    if not (tree / ".git").is_dir():
        raise apply.PatchError(f"{tree} is not a work tree that import made")
    new = exported(tree, header(PATCH.read_text()))
    if marker := re.search(rb"^\+(<<<<<<<|>>>>>>>) .*", new, re.MULTILINE):
        raise apply.PatchError(f"a conflict is left: {marker[0][1:].decode(errors='replace')}")
    apply.parse(new)
    PATCH.write_bytes(new)
    return f"wrote {PATCH}"


def check() -> str:
    """Raise PatchError if the patch does not fit UPSTREAM, or if `export` would write a different patch.

    Returns a message for the user.
    """
    patch = PATCH.read_bytes()
    head = header(patch.decode("ascii"))
    git = shutil.which("git")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        unpack(_source(), tree, only=set(apply.parse(patch)))
        if git:
            commit(tree)
        apply.apply(patch, tree)
        if git and exported(tree, head) != patch:
            raise apply.PatchError("export would write other bytes; run import and export")
    upstream = sources.Upstream.read(HERE)
    without = "" if git else " (there is no git: what export would write was not compared)"
    return f"{PATCH.name} fits {upstream.package} {upstream.version}{without}"


def main(arguments: list[str]) -> int:
    command, paths = arguments[:1], [Path(path).absolute() for path in arguments[1:]]
    try:
        if command == ["check"] and not paths:
            done = check()
        elif command == ["import"] and len(paths) in (1, 2):
            done = import_(*paths)
        elif command == ["export"] and len(paths) == 1:
            done = export(*paths)
        else:
            sys.stderr.write(__doc__)
            return 2
    except (apply.PatchError, KvtoolError, OSError, tarfile.TarError, UnicodeDecodeError) as error:
        sys.stderr.write(f"sync: {error}\n")
        return 1
    sys.stdout.write(f"{done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
