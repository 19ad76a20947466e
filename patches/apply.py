"""Apply hooks.patch to a source tree: `python apply.py PATCH TREE`. apply.cmake calls it.

Nothing is changed unless every old line is exactly where the patch expects it. git and patch(1) are not used
for two reasons: a machine may lack them, and inside another work tree `git apply` exits 0 without a change.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """Raised if the patch is damaged or was made for another tree."""


@dataclass
class Hunk:
    """Consecutive lines of a file, and the lines that replace them.

    Attributes
    ----------
    old_start, new_start
        Index (from 0) of the first line in the old file and in the new file.
    old, new
        The replaced lines and the new lines, with their line ends.
    """

    old_start: int
    new_start: int
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


def _lines(text: bytes) -> list[bytes]:
    # splitlines() is not used because it would also split at a lone carriage return
    return re.findall(rb"[^\n]*\n|[^\n]+", text)


def parse(patch: bytes) -> dict[str, list[Hunk]]:
    """Return the hunks of each changed file.

    Raises PatchError if the patch is damaged, or if it adds, deletes or renames a file.
    """
    files: dict[str, list[Hunk]] = {}
    lines = _lines(patch)
    hunks: list[Hunk] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith((b"new file", b"deleted file", b"rename ", b"GIT binary", b"old mode")):
            raise PatchError(f"line {at}: only changes to existing files are allowed")
        if line.startswith(b"+++ "):
            name = line[4:].split(b"\t")[0].strip().decode()
            if not name.startswith("b/") or ".." in name.split("/"):
                raise PatchError(f"line {at}: expected +++ b/<file>, got {name}")
            hunks = files.setdefault(name[2:], [])
        elif match := HUNK.match(line):
            old_start, old_n, new_start, new_n = (int(n) if n else 1 for n in match.groups())
            hunk = Hunk(old_start - (old_n > 0), new_start - (new_n > 0))
            while len(hunk.old) < old_n or len(hunk.new) < new_n:
                if at == len(lines) or lines[at][:1] not in (b" ", b"-", b"+"):
                    raise PatchError(f"line {at + 1}: the hunk is shorter than it says")
                sign, text = lines[at][:1], lines[at][1:]
                at += 1
                if lines[at : at + 1] and lines[at].startswith(b"\\"):
                    text = text.rstrip(b"\n")
                    at += 1
                if sign in b" -":
                    hunk.old.append(text)
                if sign in b" +":
                    hunk.new.append(text)
            if len(hunk.old) != old_n or len(hunk.new) != new_n:
                raise PatchError(f"line {at}: the hunk is longer than it says")
            hunks.append(hunk)
    if not files or not all(files.values()):
        raise PatchError("the patch changes nothing")
    return files


def _differs(lines: list[bytes], hunks: list[Hunk], *, applied: bool) -> int | None:
    """Return the number (from 1) of the first line that differs from the hunks, or None.

    Lines are compared with the hunks' new lines if `applied` is true, otherwise with their old lines.
    """
    for hunk in hunks:
        start, expected = (hunk.new_start, hunk.new) if applied else (hunk.old_start, hunk.old)
        for offset, line in enumerate(expected):
            if start + offset >= len(lines) or lines[start + offset] != line:
                return start + offset + 1
    return None


def apply(patch: bytes, tree: Path) -> bool:
    """Apply the patch to the tree's files. Returns False if it was applied before.

    Raises PatchError, and changes nothing, if the patch does not fit.
    """
    files = parse(patch)
    contents = {}
    for name in files:
        path = tree / name
        if not path.is_file():
            raise PatchError(f"{name} is not in {tree}")
        contents[name] = _lines(path.read_bytes())
    if all(_differs(contents[name], hunks, applied=True) is None for name, hunks in files.items()):
        return False
    for name, hunks in files.items():
        if line := _differs(contents[name], hunks, applied=False):
            raise PatchError(f"{name}:{line} is not what the patch was made for")
    for name, hunks in files.items():
        for hunk in reversed(hunks):
            contents[name][hunk.old_start : hunk.old_start + len(hunk.old)] = hunk.new
        (tree / name).write_bytes(b"".join(contents[name]))
    return True


def main() -> int:
    patch, tree = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        done = apply(patch.read_bytes(), tree)
    except (OSError, PatchError) as error:
        sys.stderr.write(f"{patch.name}: {error}\n")
        return 1
    sys.stdout.write(f"{patch.name}: {'applied' if done else 'was applied before'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
