"""`kvtool` and `python -m kvtool`: from the first import on, Ctrl-C ends the program with one line."""

import io
import os
import sys

from kvtool.system import interrupt


def main() -> None:
    interrupt.ends()
    _open_streams()
    from kvtool.cli import main as run

    run()


def _open_streams() -> None:
    """Replace closed streams (>&-) before a file gets their numbers, and let all streams take any character.

    A replaced input is empty, and writing to a replaced output is an error, as with any other program.
    Characters that stdout's encoding lacks are printed as "?". Input bytes that do not fit stdin's encoding
    become surrogates, as in file names.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDONLY) == number:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


if __name__ == "__main__":
    main()
