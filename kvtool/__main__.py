"""Start kvtool, for the command `kvtool` and for `python -m kvtool`.

First, a signal handler is installed: at Ctrl-C, it prints one line and ends the process. Only then are the
other modules imported, so that Ctrl-C also works during the imports.
"""

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
    """Replace closed streams (>&-), and make stdin and stdout accept all characters.

    Without the replacement, the next file that is opened would get the descriptor of a closed stream. The new
    stdin is empty. Writing to the new stdout or stderr is an error, as in other programs.

    Characters that the encoding of stdout does not have are printed as "?". Bytes from stdin that are invalid
    in its encoding become surrogates, as in file names.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDONLY) == number:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


if __name__ == "__main__":
    main()
