"""A text that comes in pieces and ends before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import AnyStr


class Stops:
    """Passes pieces on, and keeps back what may be the start of a stop string.

    Attributes
    ----------
    found
        The stop string that the text has come to. It has ended there. "": none so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = ""
        self._stops = stops
        self._kept = ""

    def feed(self, piece: str) -> str:
        """What can be passed on after this piece; "" if that is nothing."""
        text = self._kept + piece
        # the first that is complete, however the text is cut; of those the longest
        if ends := [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]:
            end, at = min(ends)
            self.found, self._kept = text[at:end], ""
            return text[:at]
        n = max((n_begun(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - n :]
        return text[: len(text) - n]

    def rest(self) -> str:
        """What was kept back, once the text has ended without a stop string."""
        kept, self._kept = self._kept, ""
        return kept


def n_begun(text: AnyStr, mark: AnyStr) -> int:
    """The most characters at the end of a text that a mark begins with, and more of it must follow."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
