"""Start kvtool, for the command `kvtool` and for `python -m kvtool`.

First, a signal handler is installed: at Ctrl-C, it prints one line and ends the process. Only then are the
other modules imported, so that Ctrl-C also works during the imports.
"""

import io
import os
import sys
from contextlib import suppress

from kvtool.system import interrupt


def main() -> None:
    interrupt.ends()
    _open_streams()
    from kvtool.cli import main as run

    run()


class _Notes(io.TextIOWrapper):
    """stderr. Text that cannot be written is dropped, so that a full disk does not cost the result."""

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def _open_streams() -> None:
    """Replace closed streams (>&-), make stdin and stdout accept all characters, and make stderr never fail.

    With $PYTHONUNBUFFERED, stdout gets a buffer, because Python's text layer drops the rest of a short write.

    Without the replacement, the next file that is opened would get the descriptor of a closed stream. The new
    stdin is empty. Writing to the new stdout is an error, as in other programs.

    Characters that the encoding of stdout does not have are printed as "?". Bytes from stdin that are invalid
    in its encoding become surrogates, as in file names.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None and os.open(os.devnull, os.O_RDONLY) == number:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(out := sys.stdout, io.TextIOWrapper) and isinstance(out.buffer, io.RawIOBase):
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(out.buffer), out.encoding, line_buffering=True)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    if isinstance(err := sys.stderr, io.TextIOWrapper):
        file = open(err.fileno(), "wb", closefd=False)  # noqa: SIM115
        sys.stderr = _Notes(file, err.encoding, err.errors, line_buffering=True)


if __name__ == "__main__":
    main()
