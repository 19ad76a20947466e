"""Names, paths, errors and typed texts are printed literally: rich does not read them as markup."""

from __future__ import annotations

import io
import os
import pty
import re
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from rich.table import Table

from kvtool.cli import console
from kvtool.cli.chat.markdown import ReplyStream
from kvtool.cli.console import plain_console, print_table, table, table_console
from kvtool.cli.progress import _bytes_bar, tokens_progress

SOURCES = Path(__file__).parents[2] / "kvtool"
TEXT = "[/] [bold]x[/red] :smile: [@click=f(]"


def test_console_prints_markup_and_emoji_codes_literally():
    table = Table(TEXT, title=TEXT, box=None)
    table.add_row(TEXT)
    for what in (TEXT, table):
        out = io.StringIO()
        plain_console(file=out, width=200).print(what)
        assert set(map(str.strip, out.getvalue().splitlines())) == {TEXT}


def test_a_table_in_a_pipe_has_no_blanks_at_the_ends_of_lines():
    out = io.StringIO()
    table_console(file=out).print(table(["a", "b"], [["1", "2"], ["long", "longer"]]))
    assert out.getvalue() == "a     b\n1     2\nlong  longer\n"


def test_progress_bar_shows_names_literally():
    bar = _bytes_bar()
    bar.add_task(TEXT, total=1)
    with bar.console.capture() as capture:
        bar.console.width = 200
        bar.console.print(bar.get_renderable())
    assert TEXT in capture.get()


def test_sources_create_no_console_or_column_with_markup():
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "console.py":
            assert not re.search(r"(?<!_)Console\(", text), path
        assert "from_markup" not in text, path
        assert all("markup=False" in call for call in re.findall(r"TextColumn\(.*", text)), path
        # rich's `status` reads a string as markup, even if the console's markup is off. It prints only
        # objects of class Text literally.
        assert all("Text(" in call for call in re.findall(r"console\.status\(.*", text)), path


def test_writing_a_reply_fails_after_the_terminal_has_closed():
    master, slave = pty.openpty()
    wrote_on = []

    def write():
        with ReplyStream(plain_console(file=file, width=80)) as out:
            out.write("Once")
            os.close(master)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                out.write(" and again")
                time.sleep(0.02)
            wrote_on.append(True)

    file = os.fdopen(slave, "w", encoding="utf-8")
    with pytest.raises(OSError, match="Input/output error"):
        write()
    assert not wrote_on
    with suppress(OSError):
        file.close()


def test_remaining_time_is_shown_from_the_first_step_on(monkeypatch):
    from rich.progress import Progress

    bars, clock = [], count(time.monotonic() + 40, 40)
    entered = Progress.__enter__
    monkeypatch.setattr(Progress, "__enter__", lambda bar: bars.append(bar) or entered(bar))
    with tokens_progress("perplexity", 100, 10) as step:
        bars[0].get_time = lambda: next(clock)
        step(20)
        (task,) = bars[0].tasks
        assert task.time_remaining > 0
        # Each step takes 40 seconds. By default, rich drops samples that are older than 30 seconds, and could
        # then not estimate the remaining time.
        step(30)
        assert task.time_remaining > 0


@pytest.mark.parametrize(
    ("width", "least", "text", "words"),
    [
        (30, 2, "yes", "name size downloaded qwen3-8b 4.7 GiB yes"),
        (20, 2, "yes", "name size qwen3-8b 4.7 GiB"),
        (20, 3, "yes", "downl name size oaded qwen3- 4.7 yes 8b GiB"),
        # a wider terminal breaks a long word instead
        (41, 2, "x" * 30, f"name size downloaded qwen3-8b 4.7 GiB {'x' * 22} {'x' * 8}"),
    ],
)
def test_narrow_terminals_show_the_first_columns(monkeypatch, capsys, width, least, text, words):
    monkeypatch.setattr(console, "table_console", lambda: plain_console(force_terminal=True, width=width))
    print_table(["name", "size", "downloaded"], [["qwen3-8b", "4.7 GiB", text]], least=least)
    out = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert out.split() == words.split()
    assert max(map(len, out.splitlines())) <= width
