"""Errors that a user can see. Each kind of error has a class and an exit code.

A message is one line, which names the fault and a remedy.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_ALIKE = 0.2
"""Maximum difference in similarity (difflib's ratio) between a suggested name and the most similar name."""

_PACKAGE = str(Path(__file__).parent) + os.sep

_LIBRARIES = ("importlib.", "numba.", "numpy.", "kvtool.policy.")
"""Packages whose frames `where` skips: if they raise an error, the fault is in their caller."""


class KvtoolError(Exception):
    """Base class of errors that a user can see."""

    exit_code = 1


class UsageError(KvtoolError):
    """A command, an option, an argument or a user's default is invalid, alone or in combination."""

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
    """The cache, the trained context or the archive has no room for more tokens."""

    exit_code = 6


class PlanError(KvtoolError):
    """A policy failed, or returned an invalid state or plan."""

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


def suggestion(name: str, known: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """Return " Did you mean ...?" with the names from `alike`, or "" if there are no such names.

    shown: maps each known name to the text that is shown for it. None to show the names themselves.
    """
    meant = dict.fromkeys(shown[other] if shown else other for other in alike(name, known))
    return f" Did you mean {' or '.join(meant)}?" if meant else ""


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Return the first three known names that begin with `name`, in upper or lower case.

    If no name does, return up to three similar names, most similar first.
    """
    # imported here, because only a failing command needs it
    from difflib import SequenceMatcher, get_close_matches

    name, spelled = name.lower(), {other.lower(): other for other in known}
    meant = [other for other in spelled if name and other.startswith(name)][:3]
    if not meant and (meant := get_close_matches(name, spelled, n=3)):
        ratios = [SequenceMatcher(a=name, b=other).ratio() for other in meant]
        meant = [other for other, ratio in zip(meant, ratios, strict=True) if ratio > max(ratios) - _ALIKE]
    return [spelled[other] for other in meant]


def users_traceback(error: BaseException) -> list[str]:
    """Return the traceback of an error in a user's policy. kvtool's calls at its beginning are left out.

    The list is empty for any other error.
    """
    # imported here, because only a failing command needs it
    from traceback import TracebackException

    if not (cause := error.__cause__):
        return []
    shown = TracebackException.from_exception(cause)
    while shown.stack and shown.stack[0].filename.startswith((_PACKAGE, "<")):
        shown.stack.pop(0)
    return list(shown.format(chain=False)) if shown.stack or isinstance(cause, SyntaxError) else []


def where(error: BaseException, called: object = None) -> str:
    """Describe an error in one line. Add the source file and the line number if they are known.

    They are from the innermost frame that is neither in kvtool nor in `_LIBRARIES`: if kvtool refuses an
    argument, the fault is in the caller. If there is no such frame, they are from kvtool's innermost frame.
    But if a library raised the error and kvtool had called it, they are left out. If numba cannot compile a
    function, they are from numba's message.

    called: the function whose call failed. If its arguments did not fit, the file and line are those of its
    definition.
    """
    trace, place, is_own = error.__traceback__, "", True
    # skip the traceback of a SyntaxError, because it ends in the import system; the message names the line
    while trace and not isinstance(error, SyntaxError):
        file = trace.tb_frame.f_code.co_filename
        inside = file.startswith(_PACKAGE)
        if f"{trace.tb_frame.f_globals.get('__name__')}.".startswith(_LIBRARIES):
            place = "" if is_own else place
        elif not file.startswith("<") and (is_own or not inside):
            place, is_own = f" ({Path(file).name}, line {trace.tb_lineno})", inside
        trace = trace.tb_next
    code = getattr(called, "__code__", None)
    if code and error.__traceback__ and not error.__traceback__.tb_next:
        place = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    if lines[0].startswith("Failed in nopython mode") and len(lines) > 1:
        # the first line of numba's messages does not name the cause
        del lines[0]
        if compiled := re.search(r'File "(.*)", line (\d+)', text):
            place = f" ({Path(compiled[1]).name}, line {compiled[2]})"
        if lines[0].endswith(":"):
            lines[0] += f" {''.join(lines[1:2]).removeprefix('>>> ')}"
    return f"{type(error).__name__}: {lines[0]}{place}"
