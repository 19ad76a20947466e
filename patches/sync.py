"""For maintainers: the patch to a work tree and back.

python patches/sync.py import DIR   llama.cpp of UPSTREAM as a git repository, the patch in its work tree
python patches/sync.py export DIR   writes hooks.patch from that work tree; the header stays
python patches/sync.py check        the patch applies to UPSTREAM, and export would write the same bytes
"""

from __future__ import annotations

import os
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
"""Where in llama.cpp's tree our own C++ files lie."""


def header(patch: str) -> str:
    """All before the first file's changes. Raises PatchError unless every field of it says something."""
    head, found, _ = patch.partition("diff --git ")
    fields = dict(line.split(":", 1) for line in head.splitlines() if ":" in line)
    missing = [field for field in FIELDS if not fields.get(field[:-1], "").strip()]
    if not found or missing:
        raise apply.PatchError(f"the header lacks {', '.join(missing) or 'a diff after it'}")
    return head


def _git(tree: Path, *arguments: str) -> bytes:
    # no configuration of this machine may change the bytes, and no repository around the tree be taken for it
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent),
        "LC_ALL": "C",
    }
    for role in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{role}_NAME": "kvtool", f"GIT_{role}_EMAIL": "kvtool@localhost"}
    done = subprocess.run(["git", *arguments], cwd=tree, env=env, capture_output=True, check=False)
    if done.returncode:
        raise apply.PatchError(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def unpack(archive: Path, tree: Path, only: set[str] | None = None) -> None:
    """llama.cpp's files from the source distribution into tree, all or only these."""
    with tarfile.open(archive) as tar:
        for member in tar:
            top, _, name = member.name.partition("/vendor/llama.cpp/")
            # the distribution carries its own .git, with another of llama.cpp in it
            if "/" in top or name in ("", ".git") or not member.isfile() or (only and name not in only):
                continue
            path = tree / name
            if not path.resolve().is_relative_to(tree.resolve()):
                raise apply.PatchError(f"{member.name} would land outside {tree}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tar.extractfile(member).read())
            path.chmod(member.mode & 0o777)


def commit(tree: Path) -> None:
    """Makes the tree a repository with all its files in one commit."""
    _git(tree, "init", "-q")
    exclude = tree / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text(f"/{OURS}/\n")
    _git(tree, "add", "-A", "-f")
    _git(tree, "commit", "-q", "-m", "upstream")


def exported(tree: Path, head: str) -> bytes:
    """hooks.patch as the work tree has it: the same bytes on every machine."""
    diff = _git(
        tree,
        *("diff", "-U2", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames"),
        *("--diff-algorithm=myers", "--indent-heuristic", "--src-prefix=a/", "--dst-prefix=b/", "HEAD", "--"),
    )
    return head.encode() + diff


def _source() -> Path:
    return sources.archive(sources.Upstream.read(HERE), cache_dir() / "logs" / "source.log")


def import_(tree: Path) -> str:
    if tree.exists() and any(tree.iterdir()):
        raise apply.PatchError(f"{tree} is not empty")
    tree.mkdir(parents=True, exist_ok=True)
    unpack(_source(), tree)
    commit(tree)
    ours = tree / OURS
    ours.mkdir(parents=True)
    for name in ("MANIFEST", *sources.manifest(HERE)):
        if name != PATCH.name:
            (ours / Path(name).name).symlink_to(HERE / name)
    (ours / "digest.h").write_text('#define LLAMA_KVTOOL_DIGEST "work tree"\n')
    # last, so that what does not fit a new version can be applied there by hand
    apply.apply(PATCH.read_bytes(), tree)
    return f"{tree}: edit, build, then export; {OURS}/ has links to {HERE}"


def export(tree: Path) -> str:
    if not (tree / ".git").is_dir():
        raise apply.PatchError(f"{tree} is no work tree that import made")
    new = exported(tree, header(PATCH.read_text()))
    apply.parse(new)
    PATCH.write_bytes(new)
    return f"wrote {PATCH}"


def check() -> str:
    """Raises PatchError unless the patch and UPSTREAM fit each other."""
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
    try:
        if arguments[:1] == ["check"] and len(arguments) == 1:
            done = check()
        elif arguments[:1] in (["import"], ["export"]) and len(arguments) == 2:
            done = (import_ if arguments[0] == "import" else export)(Path(arguments[1]).absolute())
        else:
            sys.stderr.write(__doc__)
            return 2
    except (apply.PatchError, KvtoolError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"sync: {error}\n")
        return 1
    sys.stdout.write(f"{done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
