"""The output of kvtool inspect and /cells: in a terminal, and as a page."""

from __future__ import annotations

import base64
import io
import json
import re
import resource
import shutil
import subprocess
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from kvtool import policies
from kvtool.cli.inspect import page as inspect_page
from kvtool.cli.inspect import terminal as inspect_terminal
from kvtool.measure import holdings
from tests.blocking_policy import TIMEOUT_S
from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.cli.test_cli import kvtool
from tests.engine.exact_engines import open_engine, random_tokens

SHARES = [1, 0.71, 0.41, 0.1, 0.011, 0]


def rendered(texts, share, last=100, archived=(), **console):
    out = io.StringIO()
    is_archived = np.isin(np.arange(len(texts)), archived)
    inspect_terminal.show(
        Console(**({"file": out, "width": 21, "_environ": {}} | console)),
        *(texts, np.array(share), is_archived, last),
    )
    return out.getvalue()


def drawing(texts, width):
    return [
        "".join(piece for piece, _ in line) for line in inspect_terminal.lines(texts, [0] * len(texts), width)
    ]


def test_text_without_colours_has_marks_below_it():
    out = rendered(["One", " and", " two", "s", ".\n", "\u4e16 end"], SHARES)
    legend, strip, body = (
        out.split("\n\n")[0],
        out.split("right:\n")[1].split("\n")[0],
        out.split("text:\n\n")[1],
    )
    assert ". no row, 1 2%, 2 5%, 3 10%, 4 20%, 5 40%, 6 70%, 7 more, # all rows" in legend
    assert strip == "#7631."
    # the wide character takes two columns, so there are two marks below it
    assert body.split("\n")[:4] == ["One and twos.\u23ce", "###77776666311", "\u4e16 end", "......"]
    assert "6 tokens: 1 held by every row, 4 by some, 1 forgotten" in out


def test_columns_of_the_strip_are_spread_evenly():
    # every second token is held by all rows, the others by none; so a column of two tokens has the mark for
    # one half
    strip = rendered(["a"] * 30, [1, 0] * 15).split("right:\n")[1].split("\n")[0]
    assert strip == "#6.6" * 5


def test_lines_break_between_words_and_show_control_characters():
    assert drawing(["The", " tide", " com", "ing", " in"], 12) == ["The tide", " coming in"]
    assert drawing(["a\n\n", "b\tc", "\x1b[2J", "\r\n"], 20) == [
        "a\u23ce",
        "\u23ce",
        "b\u2192   c\u241b[2J\u23ce",
    ]
    assert drawing(["\u202eabc", "\x9b"], 20) == ["\ufffdabc\ufffd"]
    # one word is longer than a line, and some characters are two columns wide
    assert drawing(["x", "abcdefghijkl"], 5) == ["x", "abcde", "fghij", "kl"]
    assert drawing(["\u4e16\u754c", "\u4e16"], 5) == ["\u4e16\u754c", "\u4e16"]
    assert drawing(["", ""], 5) == []


def test_hidden_earlier_tokens_are_counted():
    out = rendered([f" {i}" for i in range(30)], [0] * 10 + [1] * 20, last=12)
    assert "the whole stream of 30 tokens" in out
    assert "the last 12 tokens; 18 earlier ones are not shown" in out
    assert " 18" in out
    assert " 17" not in out.split("not shown")[1]
    assert "30 tokens: 20 held by every row, 0 by some, 10 forgotten" in out


def test_with_256_colours_tokens_are_shaded():
    colours = {"force_terminal": True, "color_system": "256"}
    out = rendered(["One", " and", " two", " or", " three", " gone"], SHARES, width=60, **colours)
    assert "\x1b[38;5;16;48;5;123mOne\x1b[0m" in out
    assert "\x1b[38;5;231;48;5;17m three\x1b[0m" in out
    assert "\x1b[38;5;244m gone\x1b[0m" in out
    # with colours, the text has no marks, and nothing else is added to it
    assert "\nOne and two or three gone\n" in Text.from_ansi(out).plain


@pytest.mark.parametrize(
    "console",
    [
        {"force_terminal": True, "color_system": "256", "no_color": True},
        {"force_terminal": True, "color_system": "standard"},
        {"force_terminal": True, "_environ": {"TERM": "dumb"}},
        {"color_system": "256"},
    ],
)
def test_terminals_without_256_colours_show_marks(console):
    out = rendered(["One", " two"], [1, 0.5], width=60, **console)
    assert "\nOne two\n###6666\n" in out or "\nOne two\n###7777\n" in out
    assert "\x1b" not in out


def test_lines_about_tokens_are_wrapped_between_words_in_a_terminal():
    arguments = ["One", " two"] * 20, [1, 0.5] * 20, 30, [3]
    lines = rendered(*arguments, width=40, force_terminal=True, color_system=None).split("\n")
    assert max(map(len, lines)) <= 40
    words = re.findall(r"[a-z]+", " ".join(lines))
    assert sorted(words) == sorted(re.findall(r"[a-z]+", rendered(*arguments, width=400)))
    # lines are never wrapped in a pipe
    assert any(len(line) > 40 for line in rendered(*arguments, width=40).split("\n"))


@pytest.mark.parametrize("shaded", [False, True])
def test_archived_tokens_are_not_counted_as_forgotten(shaded):
    colours = {"width": 60, "force_terminal": True, "color_system": "256"} if shaded else {"width": 120}
    out = rendered(["One", " two", " three", " four"], [1, 0, 0, 0], archived=[1, 2], **colours)
    assert "4 tokens: 1 held by every row, 0 by some, 2 archived, 1 forgotten" in " ".join(out.split())
    if shaded:
        assert "\x1b[38;5;231;48;5;53m two\x1b[0m" in out
        assert "\x1b[38;5;244m four\x1b[0m" in out
    else:
        assert "# all rows, a archived" in out
        assert "\n#aa.\n" in out
        assert "One two three four\n###aaaaaaaaaa.....\n" in out
    assert "archived" not in rendered(["One"], [1], **colours)


@pytest.fixture(scope="module")
def watched(tiny_model):
    """Run a policy. Return (its Holdings, {tokens read: positions in each row}, the tokens' texts)."""
    positions = {}

    def record(n):
        positions[n] = [
            set(pos[:k].tolist()) for pos, k in zip(engine.rows.pos, engine.rows.live, strict=True)
        ]

    tokens = random_tokens(180)
    with open_engine(tiny_model(), policies.fit("h2o", 48, 8)) as engine:
        snapshots = holdings.watch(engine, tokens, 7, record)
        texts = holdings.texts(engine.model, tokens)
    texts[5] = "</script><!--"
    return snapshots, [positions[end] for end in snapshots.ends.tolist()], texts


RESULT = {
    **{"policy": "h2o", "params": {"window": 20}, "budget": 48, "tokens": 180, "rows": 4, "cells": 44.0},
    "model": "/models/<tiny>.gguf",
}


def data_of(page):
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    return json.loads(data)


def run_script(page, driver):
    """Run the page's own script and then the script `driver`. Return the JSON that `driver` prints.

    The scripts get the page's data on stdin.
    """
    script = re.findall(r"<script>\n(.*?)\nstart\(\);\n</script>", page, re.S)[0]
    done = subprocess.run(
        ["node", "-e", script + driver],
        input=json.dumps(data_of(page)),
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("last", [1000, 50])
def test_page_contains_the_tokens_that_the_rows_held(watched, last):
    snapshots, rows, texts = watched
    data = data_of(inspect_page.page(RESULT, snapshots, texts, last).decode())
    first = max(180 - last, 0)
    assert data["first"] == first
    assert "".join(data["texts"]) == inspect_terminal.visible("".join(texts[first:]))
    assert data["model"] == "<tiny>.gguf"
    until = np.frombuffer(zlib.decompress(base64.b64decode(data["until"])), np.uint8).reshape(4, -1)
    for snapshot, end in enumerate(data["ends"]):
        for row in range(4):
            positions = {first + i for i in np.flatnonzero(until[row] > snapshot).tolist() if first + i < end}
            assert positions == {pos for pos in rows[snapshot][row] if pos >= first}


def test_page_loads_nothing_and_escapes_the_text(watched):
    snapshots, _, texts = watched
    page = inspect_page.page(RESULT, snapshots, texts, 1000).decode()
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import|\bfetch\(", page)
    assert "default-src 'none'" in page
    assert page.count("</script>") == 2
    assert "{{data}}" not in page


@pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js")
def test_page_counts_rows_like_the_engine(watched):
    snapshots, _, texts = watched
    page = inspect_page.page(RESULT, snapshots, texts, 150).decode()
    driver = """
        const data = JSON.parse(require("fs").readFileSync(0, "utf8"));
        inflate(data.until).then((until) => {
          const counts = [];
          for (const [layer, head] of [[-1, -1], [1, -1], [-1, 0], [0, 1], [0, 7]])
            for (const snapshot of data.ends.keys())
              counts.push([...countRows(data, until, rowsOf(data, layer, head), snapshot)]);
          const levels = [0, 0.02, 0.021, 0.7, 0.99, 1].map((share) => level(data, share));
          data.archived[1] = [data.first + 1, data.first + 3];
          const archived = [0, 1, 2, 3].map((token) => isArchived(data, token, 1));
          data.archived[6] = [0, data.first + 100];
          const parts = [0, 1, 2, 3].map((row) => whereAre(data, until, row, 0, 128, 6));
          console.log(JSON.stringify({ counts, levels, archived, parts }));
        });"""
    actual = run_script(page, driver)
    layer, head = snapshots.layer, snapshots.head
    selections = [layer >= 0, layer == 1, head == 0, (layer == 0) & (head == 1), head == 7]
    expected = [
        snapshots.held(s)[rows, 30:].sum(axis=0).tolist()
        for rows in selections
        for s in range(len(snapshots.ends))
    ]
    assert actual["counts"] == expected
    assert actual["levels"] == inspect_terminal._levels(np.array([0, 0.02, 0.021, 0.7, 0.99, 1]), False)
    assert actual["levels"] == [0, 1, 2, 6, 7, 8]
    assert actual["archived"] == [False, True, True, False]
    # a row's colour depends on two shares of the visible tokens: tokens that the row holds, and tokens that
    # are only in the archive
    is_held = snapshots.held(6)[:, 30:158]
    only_held = ~is_held & (np.arange(128) < 100)
    assert actual["parts"] == np.stack([is_held.mean(axis=1), only_held.mean(axis=1)], axis=1).tolist()
    assert 0 < is_held.mean() < 1


@pytest.fixture(scope="module")
def attended(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), policies.fit("recall", 48, 8)) as engine:
        snapshots = holdings.watch(engine, random_tokens(180), 3)
        return snapshots, holdings.texts(engine.model, random_tokens(180))


@pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js")
def test_page_computes_attention_like_the_engine(attended):
    snapshots, texts = attended
    page = inspect_page.page(RESULT, snapshots, texts, 150).decode()
    driver = """
        const data = JSON.parse(require("fs").readFileSync(0, "utf8"));
        inflate(data.attended.attn).then((bytes) => {
          const attn = new Uint16Array(bytes.buffer);
          const of = [[-1, -1], [1, -1], [0, 1]].map(([layer, head]) =>
            [...shareAttention(data, attn, rowsOf(data, layer, head))]);
          const levels = [0, 1e-9, 0.11, 0.12, 0.33, 0.34, 1].map((part) => attentionLevel(part / 50, 0.02));
          console.log(JSON.stringify([of, levels]));
        });"""
    share = snapshots.attended.row_share()[:, 30:]
    # all rows have the same number of query heads, so this mean needs no weights
    expected = [share.mean(axis=0), share[snapshots.layer == 1].mean(axis=0), share[1]]
    actual, levels = run_script(page, driver)
    assert levels == [0, 1, 6, 7, 7, 8, 8]
    assert np.abs(np.array(actual) - expected).max() < share.max() / 65535
    assert expected[0].max() > 0.001
    data = data_of(page)["attended"]
    assert data["query"] == snapshots.attended.query[30:].tolist()
    assert data["share"] == snapshots.attended.query_share[30:].round(6).tolist()


@pytest.mark.parametrize("width", [80, 44], ids=["wide", "narrow"])
def test_archived_tokens_with_most_attention_are_listed(attended, width):
    snapshots, texts = attended
    record = inspect_terminal.attended_record(snapshots)
    out = io.StringIO()
    inspect_terminal.show_attended(Console(file=out, width=width, _environ={}), snapshots, texts)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines[3:])) <= width
    # the record stores rounded numbers
    share, rows = snapshots.attended.share().round(6), snapshots.attended.row_share().round(6)
    whole = f"archived tokens got at least {share.sum():.0%} of all attention; these got most:"
    assert lines[1] == whole
    assert lines[3].split()[:3] == ["attention", "layer/head", "query"]
    most = np.argsort(-share, kind="stable")[:10].tolist()
    assert len(lines) == 4 + len(most)
    for line, i in zip(lines[4:], most, strict=True):
        row = int(rows[:, i].argmax())
        assert line.split()[:6] == [
            f"{share[i]:.2%}",
            *(f"{snapshots.layer[row]}/{snapshots.head[row]}", f"({rows[row, i]:.1%})"),
            *(f"{snapshots.attended.query[i]}", f"({snapshots.attended.query_share[i].round(6):.1%})"),
            f"{i}",
        ]
    never = int(np.flatnonzero(share == 0)[0])
    of = {name: column[never] for name, column in record.items()}
    assert (of["attention"], of["row_attention"], of["query_attention"]) == (0, 0, 0)
    assert (of["layer"], of["head"], of["query"]) == (-1, -1, -1)


def test_inspect_writes_page_and_json(tiny_model, tmp_path):
    done = kvtool(
        *("inspect", "-m", tiny_model(), "--policy", "streamingllm", "--budget", 32, "--evict-every", 8),
        *("--max-tokens", 100, "--html", tmp_path / "o.html"),
        *("--json", "-t", 1, "--snapshots", 5),
        stdin="word " * 40,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {
        *("tokens", "forgotten", "policy", "budget", "asked", "params", "model", "lora", "rows", "cells"),
        *("held", "kv_bytes", "state_bytes", "archived", "archive_bytes", "archive_limit", "archive_file"),
        *("archive_type", "resident", "repeated", "resident_refusal", "tokens_per_s", "seconds"),
        *("text", "share", "attended"),
    }
    document = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text(encoding="utf-8")
    assert set(result) <= set(re.findall(r"`(\w+)`", document.partition("`--json` prints")[2]))
    assert result["attended"] is None
    assert "".join(result["text"]) == ("word " * 40)[: len("".join(result["text"]))]
    # streamingllm keeps the first 4 tokens and the newest tokens
    assert result["share"] == [1.0] * 4 + [0.0] * 72 + [1.0] * 24
    assert (result["tokens"], result["forgotten"], result["cells"], result["rows"]) == (100, 72, 28, 4)
    assert data_of((tmp_path / "o.html").read_text())["ends"] == [32, 40, 64, 80, 100]
    assert done.stderr.startswith(f"wrote {tmp_path / 'o.html'} (")


def test_unwritable_page_file_does_not_lose_the_result(tiny_model, tmp_path):
    (tmp_path / "text").write_text("word " * 40)
    done = kvtool("inspect", tmp_path / "text", "-m", tiny_model(), "-t", 1, "--json", "--html", "/dev/full")
    assert done.returncode == 1
    assert json.loads(done.stdout)["tokens"] > 40
    assert done.stderr == "kvtool: cannot write /dev/full: No space left on device\n"


def test_full_disk_leaves_no_partial_file(tiny_model, tmp_path):
    (tmp_path / "text").write_text("word " * 40)
    out = tmp_path / "out"
    arguments = ("inspect", tmp_path / "text", "-m", tiny_model(), "-t", 1, "--json", "--html", out)
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    for old in (None, b"old"):
        if old:
            out.write_bytes(old)
        done = kvtool(*arguments, preexec_fn=full)
        assert done.returncode == 1
        assert done.stderr == f"kvtool: cannot write {out}: File too large\n"
        assert json.loads(done.stdout)["tokens"] > 40
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"] * bool(old) + ["text"]
        assert not old or out.read_bytes() == old


def test_text_that_does_not_fit_the_full_cache_is_refused(tiny_model):
    done = run_kvtool("inspect", "-m", tiny_model(), "--policy", "full", "-c", 16, stdin="word " * 40)
    assert_one_line(done, 5, "does not fit in the cache (16)")
