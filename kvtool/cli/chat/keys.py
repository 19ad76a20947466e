"""Hide characters that the user types while a chat is busy."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from kvtool.system import interrupt


class Keys:
    """Hides characters that the user types while the chat is busy. The next prompt gets them."""

    _before: Any = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not show typed characters inside the block, because they would disturb the output."""
        try:
            import termios
        except ImportError:
            yield
            return
        self._before = termios.tcgetattr(sys.stdin)
        waiting = termios.tcgetattr(sys.stdin)
        waiting[3] &= ~termios.ECHO
        # turn off the terminal's own handling of Ctrl-D, so that the next prompt gets this key
        waiting[6][termios.VEOF] = bytes([os.fpathconf(sys.stdin.fileno(), "PC_VDISABLE") & 0xFF])
        try:
            with _attributes(waiting):
                yield
        finally:
            self._before = None

    @contextmanager
    def normal(self) -> Iterator[None]:
        """Show typed characters inside the block, although `waiting` hides them. Used to ask questions."""
        with _attributes(self._before) if self._before else nullcontext():
            yield


@contextmanager
def _attributes(attributes: Any) -> Iterator[None]:
    """Set the terminal's attributes inside the block.

    If the user suspends the program with Ctrl-Z, the shell changes the attributes. The program sets them
    again when it continues.
    """
    import termios

    before = termios.tcgetattr(sys.stdin)

    def set_to(values: Any) -> None:
        # this fails if the terminal is closed, and would stop a program in the background
        with suppress(termios.error):
            if not _is_in_background():
                termios.tcsetattr(sys.stdin, termios.TCSANOW, values)

    def restore() -> None:
        set_to(before)

    set_to(attributes)
    interrupt.before_end.append(restore)
    handler = signal.signal(signal.SIGCONT, lambda *_: set_to(attributes))
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, handler)
        interrupt.before_end.remove(restore)
        restore()


def _is_in_background() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp()
    except OSError:
        # stdin is not the terminal that controls this process
        return False
