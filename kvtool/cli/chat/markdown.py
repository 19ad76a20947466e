"""Print Markdown with colours in a terminal, while the model writes the text.

Every character is printed, including Markdown's marks such as `**`. A printed line is never printed again.
Prose is wrapped between words.
"""

from __future__ import annotations

import errno
import os
import re

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

CODE, BOLD, MARK = "cyan", "bold", "dim"

_WIDE = "\u1100-\u11ff\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\U00020000-\U0003fffd"
_UNITS = re.compile(rf"\n|[^\S\n]+|[^\s{_WIDE}]+|[{_WIDE}]")
"""One of: a line break, blanks, a word, or one character of a script that has no blanks between words."""

_FENCE = re.compile(r"(`{3,}|~{3,})")
_BULLET = re.compile(r"[-*+]|\d+[.)]")
_MARKS = re.compile(r"(\*\*|`+)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ReplyStream:
    """Prints pieces of Markdown, word by word. plain: True for no colours and no wrapped lines."""

    def __init__(self, console: Console, *, plain: bool = False) -> None:
        self._console = console
        self._is_plain = plain
        self._held = ""
        self._fence = ""
        self._column = 0
        self._blanks = ""
        self._start_line()

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def write(self, piece: str) -> None:
        """Print a piece. Raises OSError if the terminal is closed.

        The last word of the piece is printed later, because the next piece may continue it.
        """
        # replace control characters, so that the model cannot control the terminal
        piece = _CONTROL.sub("\ufffd", piece.replace("\r", "").replace("\t", "    "))
        if self._is_plain:
            self._put([(piece, "")])
            self._column = len((self._held + piece).rpartition("\n")[2])
            return
        units = _UNITS.findall(self._held + piece)
        self._held = ""
        if units and not units[-1].isspace() and cell_len(units[-1]) < self._console.width:
            self._held = units.pop()
        self._put(self._parts(units))

    def resume(self, text: str) -> None:
        """Continue a text that was printed before, for example in its block of code, on a new line."""
        self._parts(_UNITS.findall(text))
        self._column, self._blanks = 0, ""

    def end(self) -> None:
        """Print the last word, and end the line."""
        self._put(self._parts([self._held] if self._held else []))
        self._held = ""
        if self._column:
            self._put([("\n", "")])
            self._start_line()

    def _start_line(self) -> None:
        self._column = self._hang = 0
        self._blanks = ""
        self._is_bold = self._is_heading = False
        self._span = ""
        self._n_word = 0

    def _parts(self, units: list[str]) -> list[tuple[str, str]]:
        """Return the texts to print, each with its style."""
        parts: list[tuple[str, str]] = []
        for unit in units:
            if unit == "\n":
                # do not print blanks at the end of a line
                parts.append(("\n", ""))
                self._start_line()
            elif unit.isspace():
                self._blanks += unit
            else:
                self._word(unit, parts)
        return parts

    def _word(self, word: str, parts: list[tuple[str, str]]) -> None:
        fence = _FENCE.match(word) if self._n_word == 0 else None
        if fence and (not self._fence or (word.strip(word[0]) == "" and fence[1].startswith(self._fence))):
            self._fence = "" if self._fence else fence[1]
            styled = [(word, MARK)]
        elif self._fence:
            styled = [(word, CODE)]
        else:
            styled = self._styled(word)
        width = cell_len(word)
        end = self._column + len(self._blanks) + width
        # wrap at blanks, or before a wide character, because its script has no blanks between words
        may_break = not self._fence and (self._blanks or width > len(word))
        if may_break and self._column and end > self._console.width:
            parts.append(("\n" + " " * self._hang, ""))
            self._column = self._hang
        else:
            parts.append((self._blanks, CODE if self._span else ""))
            self._column += len(self._blanks)
        if self._n_word == 0:
            is_bullet = _BULLET.fullmatch(word)
            # Indent wrapped lines to the column where the text of the first line starts. If this column is in
            # the right half of the terminal, do not indent: the text is not an item of a list
            self._hang = len(self._blanks) + (len(word) + 1 if is_bullet else 0)
            self._hang = self._hang if self._hang < self._console.width // 2 else 0
        parts += styled
        self._blanks = ""
        self._column += width
        self._n_word += 1

    def _styled(self, word: str) -> list[tuple[str, str]]:
        """Split a word into parts. Each part has a style: code, bold, Markdown's marks or ordinary text."""
        if self._n_word == 0 and re.fullmatch(r"#{1,6}", word):
            self._is_heading = True
        parts, before = [], ""
        pieces = _MARKS.split(word)
        for i, piece in enumerate(pieces):
            is_mark = i % 2 == 1
            after = pieces[i + 1] if i + 1 < len(pieces) else ""
            style = BOLD if self._is_bold or self._is_heading else ""
            if is_mark and piece[0] == "`" and self._span in ("", piece):
                self._span = "" if self._span else piece
                style = CODE
            elif self._span:
                style = CODE
            elif is_mark and piece == "**":
                is_end = self._is_bold and before[-1:].strip() != ""
                is_start = not self._is_bold and not before[-1:].isalnum() and after[:1].strip() != ""
                if is_end or is_start:
                    self._is_bold = not self._is_bold
                    style = MARK
            if piece:
                parts.append((piece, style))
            before += piece
        return parts

    def _put(self, parts: list[tuple[str, str]]) -> None:
        parts = [part for part in parts if part[0]]
        if not parts:
            return
        if not self._console.is_terminal:
            # the terminal is closed: raise an error, because rich would only print nothing
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._console.print(Text.assemble(*parts), end="", soft_wrap=True)
