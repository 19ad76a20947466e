"""Functions that return the values with which a shell completes options.

Most of them return no file names, because the shell itself completes file names.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import typer

from kvtool.cli.listed import COMMANDS
from kvtool.errors import KvtoolError
from kvtool.system.paths import expanded

_FIRST = b"kvtool session"
"""The bytes with which a session file begins."""


def policies(incomplete: str) -> list[str]:
    """Return names of policies."""
    from kvtool import policies as known

    return _from(incomplete, known.names())


def parameters(context: typer.Context, incomplete: str) -> list[str]:
    """Return the parameters of the policy that the user typed, or else of the default policy."""
    from kvtool import policies as known

    try:
        names = known.params(known.load(context.params.get("policy") or ""))
    except KvtoolError:
        return []
    return _from(incomplete, [f"{name}=" for name in names])


def models(incomplete: str) -> list[str]:
    from kvtool.models.catalogue import registry

    return _from(incomplete, registry())


def tasks(incomplete: str) -> list[str]:
    from kvtool import tasks as known

    return _from(incomplete, known.names())


def sessions(incomplete: str) -> list[str]:
    """Return session files, and folders that may contain session files."""
    folder, slash, start = incomplete.rpartition("/")
    names = []
    with suppress(OSError):
        for path in sorted(expanded(folder + slash or ".").iterdir()):
            if path.name.startswith(start) and (start or path.name[0] != "."):
                shown = f"{folder}{slash}{path.name}"
                names += [f"{shown}/"] if path.is_dir() else [shown] if is_session(path) else []
    return names


def commands(incomplete: str) -> list[str]:
    return _from(incomplete, COMMANDS)


def is_session(path: Path) -> bool:
    """Return True if a file begins as session files do."""
    with suppress(OSError):
        # open regular files only: opening a pipe would wait for a writer
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_FIRST)) == _FIRST
    return False


def _from(incomplete: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]
