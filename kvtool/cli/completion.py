"""What a shell completes after an option. Files are left to the shell: it gets no answer then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import typer

from kvtool.cli.listed import COMMANDS
from kvtool.errors import KvtoolError
from kvtool.units import CACHE_TYPES

_FIRST = b"kvtool session"
"""How a session file begins."""


def policies(incomplete: str) -> list[str]:
    """Names of policies, those of other packages too. A file of one's own is left to the shell."""
    from kvtool import policies as known

    return _from(incomplete, [*known.names(), *known.installed()])


def policy_list(incomplete: str) -> list[str]:
    """The same after the last comma."""
    return _in_list(incomplete, policies)


def parameters(context: typer.Context, incomplete: str) -> list[str]:
    """Parameters of the policy that is typed before, or of the default one."""
    from kvtool import policies as known

    try:
        names = known.params(known.load(context.params.get("policy") or ""))
    except KvtoolError:
        return []
    return _from(incomplete, [f"{name}=" for name in names])


def models(incomplete: str) -> list[str]:
    """Names of models. A GGUF file is left to the shell."""
    from kvtool.models.catalogue import registry

    return _from(incomplete, registry())


def tasks(incomplete: str) -> list[str]:
    """Names of tasks."""
    from kvtool import tasks as known

    return _from(incomplete, known.names())


def cache_type_list(incomplete: str) -> list[str]:
    """Types of cached keys and values, after the last comma."""
    return _in_list(incomplete, lambda last: _from(last, CACHE_TYPES))


def sessions(incomplete: str) -> list[str]:
    """Session files, and folders to look for them in."""
    folder, slash, start = incomplete.rpartition("/")
    found = []
    with suppress(OSError):
        for path in sorted(Path(folder + slash or ".").expanduser().iterdir()):
            if path.name.startswith(start) and (start or path.name[0] != "."):
                shown = f"{folder}{slash}{path.name}"
                found += [f"{shown}/"] if path.is_dir() else [shown] if _is_session(path) else []
    return found


def commands(incomplete: str) -> list[str]:
    """Names of commands."""
    return _from(incomplete, COMMANDS)


def _is_session(path: Path) -> bool:
    with suppress(OSError):
        # a pipe would be waited for
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_FIRST)) == _FIRST
    return False


def _from(incomplete: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]


def _in_list(incomplete: str, one: Callable[[str], list[str]]) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in one(last)]
