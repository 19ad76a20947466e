"""The documents: lines are short, links and commands work, and nothing is left out."""

from __future__ import annotations

import html
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from kvtool import policies
from kvtool.cli import app
from kvtool.cli.settings import all_commands
from kvtool.config.run import POLICY, RunOptions
from kvtool.models.catalogue import registry

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import make_cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LABORATORY = ROOT / "lab" / "papers"
FRONTS = (ROOT / folder / "README.md" for folder in ("", "patches", "lab/benchmarks"))
PAGES = sorted([*FRONTS, *DOCS.rglob("*.md"), *LABORATORY.glob("*.md")])


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of the lines of text. Tables, commands and examples are left out."""
    in_fence = False
    for number, line in enumerate(read(path).splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
        elif not in_fence and not line.startswith(("    ", "|", "<!--", "!")):
            yield number, line


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub derives from the headings."""
    heads = [line.lstrip("#").strip() for _, line in prose(path) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_readme_has_at_most_100_lines_of_120_characters():
    lines = read(ROOT / "README.md").splitlines()
    assert len(lines) <= 100
    assert [line for line in lines if len(line) > 120] == []


def test_readme_examples_use_known_commands_and_existing_files():
    examples = re.findall("^    (.*)", read(ROOT / "README.md"), re.M)
    typed = [line.partition(" # ")[0].strip() for line in examples]
    assert typed.index("source .venv/bin/activate") < typed.index("kvtool chat -m qwen2.5-coder-1.5b")
    words = [shlex.split(line) for line in typed]
    assert {first for first, *_ in words} == {"make", "source", "export", "kvtool"}
    files = [word for line in words if line[0] == "kvtool" for word in line if word.startswith("docs/")]
    assert len(files) >= 3
    assert [name for name in files if not (ROOT / name).is_file()] == []
    # the first examples use this model
    assert "export KVTOOL_MODEL=qwen2.5-coder-1.5b" in typed
    assert "qwen2.5-coder-1.5b" in registry()


def test_chat_picture_shows_the_default_policy_and_no_forgotten_tokens():
    lines = html.unescape(re.sub("<[^>]*>", "", read(DOCS / "chat.svg"))).replace("\xa0", " ")
    text = " ".join(lines.split())
    assert f"with policy {POLICY}, a cache of {RunOptions.default_recall:,} tokens" in text
    share = r"([\d.]+) %"
    status = rf"([\d,]+) tokens: {share} in the cache, {share} archived, 0 % forgotten · cache ([\d.]+ MiB)"
    statuses = re.findall(status, text)
    assert len(statuses) >= 2
    for n, cached, archived, _ in statuses:
        assert float(cached) + float(archived) == pytest.approx(100, abs=0.11)
        n_cached = float(cached) / 100 * int(n.replace(",", ""))
        assert n_cached <= RunOptions.default_recall + 0.001 * int(n.replace(",", ""))
    # the caption in the README has the same numbers
    (caption,) = re.findall(r"!\[(.*)\]\(docs/chat\.svg\)", read(ROOT / "README.md"))
    read_at_once = re.search(r"the turn has ([\d,]+) tokens", text)[1]
    assert f"{read_at_once} tokens" in caption
    assert statuses[-1][-1] in caption
    assert "url(" not in read(DOCS / "chat.svg").replace("url(#", "")


def test_no_line_of_prose_is_longer_than_140_characters():
    lines = ((path, number, line) for path in PAGES for number, line in prose(path))
    assert [f"{path.relative_to(ROOT)}:{number}" for path, number, line in lines if len(line) > 140] == []


EACH_PAGE = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


@EACH_PAGE
def test_every_relative_link_leads_to_a_file_and_a_heading(path):
    text = "\n".join(line for _, line in prose(path)) + "\n".join(re.findall(r"^[|!].*", read(path), re.M))
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text))
    for link in links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def commands(path: Path) -> Iterator[str]:
    """Yield each kvtool command in the examples of a page."""
    # a backslash joins two lines
    for line in read(path).replace("\\\n", " ").splitlines():
        for part in re.split(r"[|;]|&&", line) if line.startswith("    ") else ():
            match = re.match(r"\s*(?:\w+\$|\$)?\s*(?:\.venv/bin/)?(kvtool\s.+)", part)
            if match:
                yield match[1]


@EACH_PAGE
def test_every_example_command_is_valid(path):
    for command in commands(path) if path.name != "cli.md" else ():
        words = shlex.split(re.sub(r"\s[<>].*", "", command), comments=True)[1:]
        called = get_command(app)
        while hasattr(called, "commands"):
            called = called.commands[words.pop(0)]
        # make_context raises for an unknown option, a missing argument or a value of the wrong type. It does
        # not run the command.
        called.make_context(called.name, words)


SHORT = {
    short: next(name for name in param.opts if name.startswith("--"))
    for _, command in all_commands(get_command(app))
    for param in command.params
    if any(name.startswith("--") for name in param.opts)
    for short in param.opts
    if not short.startswith("--")
}
"""Map each short name of an option to its long name."""

OTHERS = ("llama-perplexity -c", "-m 8b.gguf")
"""Options that belong to other programs."""


def short_names(text: str) -> list[str]:
    for other in OTHERS:
        text = text.replace(other, "")
    return [name for name in re.findall(r"(?<![\w-])-[a-z]{1,3}(?![\w-])", text) if name in SHORT]


def test_prose_names_an_option_by_its_long_name():
    for path in {*DOCS.glob("*.md")} - {DOCS / "cli.md"}:
        # short names are allowed in a whole command, but not alone
        named = (span for _, line in prose(path) for span in re.findall(r"`(-[^`]*)`", line))
        assert [span for span in named if short_names(span)] == [], path.name


def test_help_names_an_option_by_its_long_name():
    for words, command in all_commands(get_command(app)):
        for text in (command.help or "", *(param.help or "" for param in command.params)):
            assert short_names(text) == [], (words, text)


def test_cli_page_is_up_to_date():
    assert read(DOCS / "cli.md") == make_cli.page(), "run: make docs"


def test_cli_page_follows_the_docstring_of_an_error(monkeypatch):
    before = make_cli.page()
    monkeypatch.setattr(make_cli.errors.UsageError, "__doc__", "Something else.")
    assert make_cli.page() != before
    assert "| 2 | Something else. |" in make_cli.page()


@pytest.mark.parametrize("folder", [DOCS, LABORATORY], ids=lambda folder: folder.name)
def test_every_page_is_in_the_index(folder):
    index = read(folder / "README.md")
    for path in folder.glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index, path.name


def test_every_policy_is_in_the_table_of_policies_md():
    table = read(DOCS / "policies.md").split("\n## ")[0]
    # columns: policy, which tokens stay, paper, bytes
    rows = re.findall(r"^\| `(\w+)` \| \w[^|]* \|[^|]*\| \d[^|]* \|$", table, re.M)
    assert sorted(rows) == sorted(policies.names())


def tree_paths() -> Iterator[Path]:
    """Yield every path that docs/tree.md names. Its levels are indented by two spaces each."""
    (tree,) = re.findall(r"```text\n(.*?)```", read(DOCS / "tree.md"), re.S)
    folders: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        yield ROOT.joinpath(*folders[:depth], name)
        folders[depth:] = [name]


def test_every_path_in_tree_md_exists():
    assert [path for path in tree_paths() if not path.exists()] == []


@pytest.mark.parametrize("folder", ["kvtool", "."])
def test_tree_md_names_every_entry_of_a_folder(folder):
    paths = set(tree_paths())
    generated = {"__init__.py", "__pycache__", "build", "dist", "fuzz-found", "kvtool.egg-info"}
    for path in (ROOT / folder).iterdir():
        if path.name not in generated and not path.name.startswith("."):
            assert path in paths, path.name


def test_manual_build_in_the_patch_readme_uses_the_flags_of_setup():
    upstream = read(ROOT / "patches" / "UPSTREAM")
    by_hand = read(ROOT / "patches" / "README.md")
    (version,) = set(re.findall(r"llama-cpp-python==([\d.]+)", by_hand))
    assert version in upstream
    by_hand = re.search(r'CMAKE_ARGS="([^"]*)" \\\n', by_hand)[1].split()
    flags = {flag.split("=")[0] for flag in by_hand}
    assert flags >= {"-DCMAKE_PROJECT_llama_cpp_INCLUDE", "-DLLAVA_BUILD"}
    source = "".join(map(read, (ROOT / "kvtool" / "build").glob("*.py")))
    for flag in flags:
        assert flag in source, flag
