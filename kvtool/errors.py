"""Errors that a user can see. Each kind of error has a class and an exit code.

A message is one line, which names the fault and a remedy.
"""

import os
from collections.abc import Iterable
from pathlib import Path

_ALIKE = 0.2
"""Names are suggested if their similarity is almost that of the best name: the difference is less than this.

The similarity is difflib's ratio.
"""

_PACKAGE = str(Path(__file__).parent) + os.sep


class KvtoolError(Exception):
    """Base class of errors that a user can see.

    Attributes
    ----------
    exit_code
        Exit code of a command that ends with this error.
    """

    exit_code = 1


class UsageError(KvtoolError):
    """A command, an option or a default that the user has set does not work, or a combination of them."""

    exit_code = 2


class ModelError(KvtoolError):
    """The model is unknown, damaged, not supported, or could not be downloaded."""

    exit_code = 3


class LibraryError(KvtoolError):
    """llama.cpp is missing, unpatched, out of date, or reported an error."""

    exit_code = 4


class InputError(KvtoolError):
    """An input cannot be read, is empty, is too short, or does not fit in the cache."""

    exit_code = 5


class StreamEnd(KvtoolError):
    """The cache or the trained context is full, and tokens may not be evicted or moved."""

    exit_code = 6


class PlanError(KvtoolError):
    """A policy returned an invalid plan. The cache was not changed."""

    exit_code = 7


class OutOfMemory(KvtoolError):
    """The machine or a GPU has no memory left, or the process has reached its memory limit.

    on_gpu: True if there are layers on a GPU. The message then also suggests fewer layers on the GPU.
    for_weights: True if the memory was for weights. The message then does not suggest a smaller cache.
    """

    exit_code = 8

    def __init__(
        self, what: str = "out of memory", *, on_gpu: bool = False, for_weights: bool = False
    ) -> None:
        smaller = "" if for_weights else "a smaller --budget, --batch-size or --ctx-size, "
        fewer = "fewer --gpu-layers, " if on_gpu else ""
        super().__init__(f"{what}; choose {smaller}{fewer}{'or ' if smaller or fewer else ''}a smaller model")


class SessionError(KvtoolError):
    """A session file is damaged, in use, from another model or policy, or cannot be read or written."""

    exit_code = 9


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with known names that are similar to `name`, or "" if no name is."""
    meant = alike(name, known)
    return f" Did you mean {' or '.join(meant)}?" if meant else ""


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Return known names that are similar to `name`, most similar first.

    But if some known names begin with `name`, return the first three of these names, in the order of `known`.
    """
    # imported here, because only a failing command needs it
    from difflib import SequenceMatcher, get_close_matches

    known = list(known)
    meant = [other for other in known if name and other.startswith(name)][:3]
    if not meant and (meant := get_close_matches(name, known, n=3)):
        ratios = [SequenceMatcher(a=name, b=other).ratio() for other in meant]
        meant = [other for other, ratio in zip(meant, ratios, strict=True) if ratio > max(ratios) - _ALIKE]
    return meant


def where(error: BaseException) -> str:
    """Describe an error in one line, with a source file and a line number from its traceback.

    The line is the innermost line outside kvtool: if kvtool refuses an argument, the fault is in the line of
    the caller. If there is no line outside kvtool, it is the innermost line inside kvtool.
    """
    trace, place, is_own = error.__traceback__, "", True
    # skip the traceback of a SyntaxError, because it ends in the import system; the message names the line
    while trace and not isinstance(error, SyntaxError):
        file = trace.tb_frame.f_code.co_filename
        inside = file.startswith(_PACKAGE)
        if not file.startswith("<") and (is_own or not inside):
            place, is_own = f" ({Path(file).name}, line {trace.tb_lineno})", inside
        trace = trace.tb_next
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}{place}"
