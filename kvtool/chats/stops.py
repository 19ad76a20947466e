"""Stop strings in a text that is written piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.chats.thinking import Splitter, n_begun


class Stops:
    """Ends a text before a stop string. Text that may begin a stop string is held back.

    splitter: separates the thought, in which stop strings have no effect. None if there are no thoughts.
    before: text that was written earlier. A stop string may begin in it, but it is not returned.

    Attributes
    ----------
    found
        The stop string that ended the text; "" if the text has not ended.
    """

    def __init__(self, stops: Sequence[str], splitter: Splitter | None = None, before: str = "") -> None:
        self.found = ""
        self._stops = stops
        self._splitter = splitter if stops else None
        self._held = ""
        # end of `before` in which a stop string may begin; "" once other text was returned
        self._before = before[len(before) - self._n_begun(before) :]

    def feed(self, piece: str) -> str:
        """Add a piece. Return the new text that cannot belong to a stop string. It may be empty."""
        text = self._held + piece
        if self._splitter:
            # feed single characters: a tag after the answer is then not fed together with the answer
            for n, character in enumerate(piece, len(self._held) + 1):
                parts = self._splitter.feed(character)
                if answer := "".join(part for is_thought, part in parts if not is_thought):
                    n_before = max(n - self._splitter.n_held - len(answer), 0)
                    self._splitter, self._held = None, ""
                    return text[:n_before] + self.feed(text[n_before:])
            n_before = len(text) - self._splitter.n_held
            self._held = text[n_before:]
            return text[:n_before]
        # Choose the stop string that ends first: this choice does not depend on where the pieces end. If
        # several end at the same place, choose the longest
        whole, n_before = self._before + text, len(self._before)
        if ends := [(at + len(stop), at) for stop in self._stops if (at := whole.find(stop)) >= 0]:
            end, at = min(ends)
            self.found, self._held = whole[at:end], ""
            return whole[n_before:at]
        n = max(len(whole) - self._n_begun(whole), n_before)
        self._held = whole[n:]
        if n > n_before:
            self._before = ""
        return whole[n_before:n]

    def _n_begun(self, text: str) -> int:
        """Number of characters at the end of a text that may begin a stop string."""
        return max((n_begun(text, stop) for stop in self._stops), default=0)

    def rest(self) -> str:
        """Return the text that is held back. Call this when a text ends without a stop string."""
        held, self._held = self._held, ""
        return held
