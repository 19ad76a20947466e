"""Files that a command writes: check them before the command's work starts, and write them at the end."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.cli.console import say
from kvtool.errors import KvtoolError, UsageError
from kvtool.system import files, interrupt
from kvtool.system.paths import expanded, extra_command
from kvtool.system.texts import exists
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvtool.config.run import RunOptions


class Stopped(KvtoolError):
    """Raised after the user stopped a command. The finished runs have been printed or saved."""

    exit_code = interrupt.EXIT_CODE


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside the block, SIGHUP and SIGTERM do what Ctrl-C does, and the exit code tells which signal came."""
    with interrupt.like_ctrl_c() as came:
        try:
            yield
        except (KeyboardInterrupt, Stopped) as error:
            if not came:
                raise
            stopped = Stopped(str(error) or "stopped")
            stopped.exit_code = 128 + came[0]
            raise stopped from None


def check_writable(path: Path | None) -> None:
    """Raise UsageError if a file cannot be written. Call this before the work starts."""
    if path is None:
        return
    if str(path) == "-":
        raise UsageError("cannot write to -, because stdout has the result; name a file")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: it must be a file in an existing folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission; choose another file")


def check_apart(
    *written: tuple[str, Path | None], read: Iterable[tuple[str, str | Path | None]] = ()
) -> None:
    """Raise UsageError if a file that a command writes is named twice, also by a link.

    written: pairs of an option and its file. read: the same for files that the command reads. One file may be
    read for several options. Options without a file are ignored.
    """
    taken: dict[object, str] = {}
    for flag, path in written:
        if path is not None and (other := taken.setdefault(_identity(path), flag)) != flag:
            raise _same_file(other, flag, path)
    for flag, name in read:
        # the value of --model may be a name and not a file
        if name is not None and exists(str(name)):
            file = expanded(str(name))
            if writes := taken.get(_identity(file)):
                raise _same_file(flag, writes, file)


def _identity(path: Path) -> object:
    """Return a value that is equal for two paths of the same file."""
    try:
        status = path.stat()
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def _same_file(flag: str, other: str, path: Path) -> UsageError:
    return UsageError(f"{flag} and {other} name the same file, {path}; name another file")


def files_read(run: RunOptions) -> Iterator[tuple[str, str | Path | None]]:
    """Yield the files that a run reads, each after the option that names it."""
    yield "--model", run.model
    yield "--draft", getattr(run, "draft", None)
    yield "--policy", run.policy
    yield "--chat-template", run.chat_template
    for adapter in run.adapters:
        yield "--lora", adapter.path


def records_path(path: Path | None, resume: bool) -> Path | None:
    """Check --records and --resume. Return the path, or None without --records. Raises UsageError."""
    if path is None:
        if resume:
            raise UsageError("--resume needs the file to go on with: --records FILE")
        return None
    check_writable(path)
    # the file will be replaced: resolve a link, so that its target is replaced; refuse devices and pipes
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; choose another one")
    # the folder has to be writable, because the lock and the new version will be written to it
    check_writable(path.parent / f"{path.name}.lock")
    if path.exists() and path.stat().st_size and not resume:
        raise UsageError(f"{path} exists; continue it with --resume, or choose another file")
    return path


def stopped(path: Path | None, n_done: int, n: int, unit: str) -> str:
    """Return the message after Ctrl-C. path: the file of --records."""
    if path is None:
        return "stopped; nothing was kept (--records FILE keeps finished ones)"
    if n_done == 0:
        return f"stopped; 0 of {n} {unit} are done"
    return f"stopped; {n_done} of {n} {unit} are in {path}; --resume does the rest"


def check_picture(path: Path | None) -> None:
    """Raise UsageError if the picture of --plot cannot be drawn or written."""
    check_writable(path)
    if path and path.suffix.lower() not in ("", ".png"):
        raise UsageError(f"--plot draws a PNG picture; end its name in .png, not in {path.suffix}")
    if path:
        check_packages("--plot", ("matplotlib",), "plot")


def check_packages(name: str, packages: Sequence[str], extra: str) -> None:
    """Raise UsageError if a package is not installed. extra: the extra of kvtool that installs it."""
    from importlib.util import find_spec

    if missing := [package for package in packages if find_spec(package) is None]:
        raise UsageError(f"{name} needs {', '.join(missing)}, which is not installed: {extra_command(extra)}")


def png(figure: Figure) -> bytes:
    import io

    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def write(path: Path, data: bytes) -> None:
    """Write a file and report it on stderr. Raises KvtoolError."""
    try:
        files.write(path, data)
    except OSError as error:
        raise KvtoolError(f"cannot write {path}: {error.strerror}") from None
    say(f"wrote {path} ({format_bytes(len(data))})")
