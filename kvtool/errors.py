"""Everything that can go wrong for a user: one tree, one exit code a kind.

A message is one line that says what is wrong and what to do about it.
"""

from pathlib import Path


class KvtoolError(Exception):
    """exit_code: what the command line ends with."""

    exit_code = 1


class UsageError(KvtoolError):
    """An option, a parameter or a combination of them that cannot work."""

    exit_code = 2


class ModelError(KvtoolError):
    """No such model, a damaged file, a failed download, an architecture that is not supported."""

    exit_code = 3


class LibraryError(KvtoolError):
    """llama.cpp is missing, unpatched, stale, or returned an error."""

    exit_code = 4


class InputError(KvtoolError):
    """A text that cannot be read, is empty or too short, or does not fit."""

    exit_code = 5


class StreamEnd(KvtoolError):
    """The cache or the trained context is full, and the policy or the positions allow no more."""

    exit_code = 6


class PlanError(KvtoolError):
    """A policy returned a plan that breaks a rule; nothing was changed."""

    exit_code = 7


class OutOfMemory(KvtoolError):
    """The machine, or the limit that this process runs under, has no memory left."""

    exit_code = 8

    def __init__(self, what: str = "out of memory") -> None:
        super().__init__(f"{what}; choose a smaller --budget, -b or -c, or a smaller model")


class SessionError(KvtoolError):
    """A session's file that cannot be written or read, is damaged, in use, or of another model or policy."""

    exit_code = 9


def where(error: BaseException) -> str:
    """An error in one line, with the innermost place that raised it."""
    trace, place = error.__traceback__, ""
    while trace:
        place = f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}{place}"
