"""Replies in a terminal: nothing is lost or printed twice, whatever the size of the window."""

from __future__ import annotations

import errno
import io
import random
import re

import pyte
import pytest
from rich.console import Console

from kvtool.chats.thinking import THINK, Splitter
from kvtool.cli.chat.markdown import ReplyStream
from kvtool.cli.chat.reply import ReplyView

TEXT = """# A heading with `code`

Use `List<String>`, <div>, <think>x</think>, 2*3*4, 2**3, __init__, \\(x\\) and [a](b) &amp; ~tilde~.
A single line break, **bold words** and *one*. A line of prose that is far too long for the window, so that
it has to be broken somewhere between two words; 漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字.

- an item that is too long for the window, so that its next line hangs below its first word
    1. an item in an item that is too long for the window, so that it hangs, too

```python
def f(x):
    return "a line of code that is too long for the window and is not broken between its words", x
```
| a | b |
|---|---|
averyveryveryveryveryveryveryveryveryveryveryveryveryveryveryverylongword
Done."""


class Screen:
    """A console that draws on a terminal with scrollback."""

    def __init__(self, columns=60, rows=20):
        self.screen = pyte.HistoryScreen(columns, rows, history=5000, ratio=0.5)
        self.stream = pyte.Stream(self.screen)
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, width=columns, height=rows, markup=False, emoji=False,
            highlight=False,
        )  # fmt: skip

    def draw(self):
        self.stream.feed(self.file.getvalue().replace("\n", "\r\n"))
        self.file.seek(0)
        self.file.truncate()

    def lines(self):
        """Return all lines. The lines that have scrolled out of the window come first."""
        self.draw()
        old = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        return [line.rstrip() for line in (*old, *self.screen.display)]


def write(out, text, seed=0, most=7):
    draws, offset = random.Random(seed), 0
    while offset < len(text):
        n = draws.randint(1, most)
        out.write(text[offset : offset + n])
        offset += n


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("columns", [20, 60, 80, 400])
def test_printed_reply_keeps_every_character(columns, plain):
    screen = Screen(columns)
    with ReplyStream(screen.console, plain=plain) as out:
        write(out, TEXT, seed=columns)
    output = re.sub(r"\x1b\[[0-9;]*m", "", screen.file.getvalue())
    assert re.sub(r"\s", "", output) == re.sub(r"\s", "", TEXT)
    if plain or columns == 400:
        # lines end only where the model ends them
        assert output == TEXT + "\n"


def test_prose_breaks_between_words_and_code_does_not():
    screen = Screen(60)
    with ReplyStream(screen.console) as out:
        write(out, TEXT)
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", screen.file.getvalue()).split("\n") if line]
    assert all(len(line) <= 60 for line in lines if "code that" not in line and "veryvery" not in line)
    assert TEXT.split("\n")[-2] in lines
    assert (
        '    return "a line of code that is too long for the window and is not broken between its words", x'
        in lines
    )
    assert "- an item that is too long for the window, so that its next" in lines
    assert "  line hangs below its first word" in lines
    assert "A single line break, **bold words** and *one*. A line of" in lines


def test_code_and_bold_text_have_their_own_styles():
    screen = Screen(80)
    with ReplyStream(screen.console) as out:
        write(out, TEXT)
    output = screen.file.getvalue()
    assert "\x1b[36mdef\x1b[0m" in output
    assert "\x1b[36mList<String>\x1b[0m" in output
    assert "\x1b[1mbold\x1b[0m" in output
    for plain in ("2**3", "2*3*4", "__init__", "<div>", "Done."):
        assert re.search(rf"(?<!\[1m)(?<!\[36m){re.escape(plain)}", output), plain


def test_hundred_lines_stay_hundred_lines_after_a_resize():
    screen = Screen(60, 20)
    with ReplyStream(screen.console) as out:
        for i in range(100):
            write(out, f"This is line {i} of the reply.\n", seed=i)
            if i == 50:
                screen.draw()
                screen.screen.resize(20, 40)
                screen.console.width, screen.console.height = 40, 20
    lines = [line for line in screen.lines() if line]
    assert lines == [f"This is line {i} of the reply." for i in range(100)]


def test_control_characters_of_a_reply_are_replaced():
    screen = Screen()
    with ReplyStream(screen.console) as out:
        write(out, "a\x1b[2Jb\x07c\x9bd\r\ne\tf\x00", most=2)
    assert screen.lines()[:2] == ["a\ufffd[2Jb\ufffdc\ufffdd", "e    f\ufffd"]


def test_writing_to_a_closed_terminal_raises_eio():
    out = ReplyStream(Console(file=io.StringIO()))
    with pytest.raises(OSError, match=".") as error:
        out.write("a word ")
    assert error.value.errno == errno.EIO


@pytest.mark.parametrize("hide", [False, True])
def test_finished_thought_is_folded_to_one_line(hide):
    screen = Screen(60, 20)
    view = ReplyView(screen.console, Splitter(THINK), hide=hide)
    with view:
        for i in range(60):
            # make the view update the screen now; usually it waits between two updates
            view._drawn = 0.0
            write(view, f"{'<think>' * (i == 0)}thought {i}\n", seed=i)
        output = "\n".join(screen.lines())
        assert ("thought 58" in output) is not hide
        assert "thought 40" not in output
        write(view, "</think>\n\nIt is **seven**.")
    # on a busy machine, a second may have passed
    lines = [re.sub(r"for \d+ s", "for N s", line) for line in screen.lines() if line]
    folded = [] if hide else ["thought for N s, 120 words; /show thought shows it"]
    assert lines == [*folded, "It is **seven**."]
    assert view.thought.startswith("thought 0\nthought 1\n")


def test_hidden_thoughts_are_hidden_from_plain_output():
    screen = Screen(60, 20)
    with ReplyView(screen.console, Splitter(THINK), plain=True, hide=True) as view:
        write(view, "<think>\nhm\n</think>\n\nseven")
    assert [line for line in screen.lines() if line] == ["seven"]


def test_plain_output_shows_thoughts_as_text():
    screen = Screen(60, 20)
    with ReplyView(screen.console, Splitter(THINK), plain=True) as view:
        write(view, "<think>\nhm\n</think>\n\nseven")
    assert [line for line in screen.lines() if line] == ["<think>", "hm", "</think>", "seven"]
