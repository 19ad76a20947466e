"""Run long commands with a log and a progress line, and explain their failures."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections import deque
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen

from kvtool.errors import LibraryError
from kvtool.system.paths import cache_dir

_NINJA = re.compile(r"^\s*\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"^\s*\[ *(\d+)%\]")
_ERROR = re.compile(r"\berror\b|CMake Error|FAILED:|undefined reference|No space left|Killed", re.IGNORECASE)
_PIP_SAYS = re.compile(r"subprocess-exited|from a subprocess|^Building wheel|ERROR: Failed (to )?build")

_CAUSES = {
    "the disk is full: the folder for temporary files (TMPDIR names it) or {cache}": (
        r"No space left on device|Disk quota exceeded"
    ),
    "there is no network, or the package registry does not answer": (
        r"connection broken by|Temporary failure in name resolution|\(from versions: none\)"
    ),
    "not enough memory; try CMAKE_BUILD_PARALLEL_LEVEL=1": r"Killed signal terminated",
}
"""Messages about causes of failures, each with the pattern that finds the cause in the log."""


class Progress:
    """Shows progress on stderr. In a terminal, one line is redrawn. A pipe gets a new line every 10 %."""

    def __init__(self, title: str) -> None:
        # cut the title, because a line that is wrapped cannot be redrawn
        self.title = title[: max(shutil.get_terminal_size().columns - 36, 20)]
        self.shown = -1
        self.tty = sys.stderr.isatty()
        # print only the title, because there is nothing to count yet
        sys.stderr.write(f"\r{self.title} ..." if self.tty else f"{title}\n")
        sys.stderr.flush()

    def show(self, done: int, total: int) -> None:
        # ignore small totals, because they come from CMake's checks of the compiler, which also run ninja
        if total < 20:
            return
        if self.tty:
            bar = "#" * (20 * done // total)
            sys.stderr.write(f"\r{self.title}: {done}/{total} [{bar:-<20}]")
        elif 10 * done // total > self.shown:
            self.shown = 10 * done // total
            sys.stderr.write(f"  {done}/{total}\n")
        sys.stderr.flush()

    def read(self, line: str) -> None:
        """Show the count in a line of ninja's or make's output, if the line has a count."""
        if match := _NINJA.match(line):
            self.show(int(match[1]), int(match[2]))
        elif match := _MAKE.match(line):
            self.show(int(match[1]), 100)

    def close(self) -> None:
        if self.tty:
            sys.stderr.write("\n")


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def run(
    command: list[str],
    log: Path,
    what: str,
    *,
    env: dict[str, str] | None = None,
    title: str = "",
    known: tuple[str, str] = ("", ""),
) -> None:
    """Run a command and append its output to the log.

    Raises LibraryError if the command fails. If the log contains known[0], the message is known[1]. For a
    cause in `_CAUSES`, the message is one line. Otherwise it is `what` and the last errors in the log.

    title: title of the progress line, or "" for no progress line.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    errors: deque[str] = deque(maxlen=8)
    last: deque[str] = deque(maxlen=8)
    n_after = 0
    progress = Progress(title) if title else None
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {shlex.join(command)}\n")
        out.flush()
        # Ctrl-C needs no code here: KeyboardInterrupt ends this block, and the command also gets the signal
        with Popen(
            command, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace"
        ) as process:
            for line in process.stdout or ():
                out.write(line)
                if progress:
                    progress.read(line)
                text = line.strip()
                if not text or _PIP_SAYS.search(text):
                    continue
                last.append(text[:200])
                # also keep the lines after "CMake Error", in which CMake prints its message
                n_after = 6 if "CMake Error" in text else n_after - 1
                if (_ERROR.search(text) and not _NINJA.match(line) and len(text) < 1000) or n_after > 0:
                    errors.append(text[:200])
    if progress:
        progress.close()
    if process.returncode == 0:
        return
    text = log.read_text(encoding="utf-8", errors="replace")
    if known[0] and known[0] in text:
        raise LibraryError(known[1])
    for why, pattern in _CAUSES.items():
        if re.search(pattern, text):
            raise LibraryError(f"{what}: {why.format(cache=cache_dir())}. Log: {log}")
    lines = "\n".join(f"  {line}" for line in (errors or last))
    raise LibraryError(f"{what}; the whole log is {log}; its last errors:\n{lines}")
