"""`kvtool` and `python -m kvtool`: Ctrl-C ends in one line from the first import on."""

import os
import sys

from kvtool.system import interrupt


def main() -> None:
    interrupt.ends()
    _open_streams()
    from kvtool.cli import main as run

    run()


def _open_streams() -> None:
    """Puts something in the place of streams that are closed (>&-), before a file gets their numbers.

    An input is then empty, and writing an error, as it is anywhere else.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDONLY) == number:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    main()
