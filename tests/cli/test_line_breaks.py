"""Prompts and chats read texts with CRLF or CR like the same texts with LF.

Commands that measure read them as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvtool
from kvtool.cli.chat.input import with_files
from kvtool.config.generation import GenerationOptions
from kvtool.config.system import SystemOptions
from kvtool.system.texts import with_lf
from tests.cli.in_process_command import run_kvtool
from tests.cli.terminal import user_messages

TEXT = "one two three\nfour five six\n\nseven eight nine\n" * 3

BREAKS = {"CRLF": "\r\n", "CR": "\r"}
every_break = pytest.mark.parametrize("end", BREAKS.values(), ids=BREAKS)

READ_TO_BE_PARSED = {"cli/settings.py", "serve/api/fields.py", "tasks/data.py", "tasks/haystack.py"}
"""Modules that decode input without `kvtool.system.texts.decoded`, which converts line ends to LF.

They parse TOML or JSON, or let Python open a text file, so they need no conversion.
"""


def write_lines(folder, text, end):
    path = folder / "text.txt"
    path.write_bytes(text.replace("\n", end).encode())
    return path


WAYS = {
    "generate -p": (("generate", "-n", 2, "-p", "{text}"), False),
    "generate -f": (("generate", "-n", 2, "-f", "{file}"), False),
    "generate -f -": (("generate", "-n", 2, "-f", "-"), True),
    "generate, a pipe": (("generate", "-n", 2), True),
    "generate --system": (("generate", "-n", 2, "-p", "Hi", "--system", "{text}"), False),
    "generate --system-file": (("generate", "-n", 2, "-p", "Hi", "--system-file", "{file}"), False),
}
MEASURED = {
    "perplexity": (("perplexity", "{file}"), False),
    "perplexity, a pipe": (("perplexity", "-"), True),
    "inspect": (("inspect", "{file}"), False),
    "inspect, a pipe": (("inspect",), True),
}


def n_token(command, is_piped, model, folder, end):
    """Number of tokens that a command reads if the lines of the text end with `end`."""
    text, file = TEXT.replace("\n", end), write_lines(folder, TEXT, end)
    words = (str(word).format(text=text, file=file) for word in command)
    done = run_kvtool(*words, "--json", "-t", 1, "-m", model, stdin=text if is_piped else "")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    return record.get("prompt_tokens", record["tokens"])


@pytest.mark.parametrize(("command", "is_piped"), WAYS.values(), ids=WAYS)
def test_prompts_have_the_same_tokens_for_crlf_cr_and_lf(command, is_piped, talker, tmp_path):
    crlf, cr, lf = (n_token(command, is_piped, talker, tmp_path, end) for end in ("\r\n", "\r", "\n"))
    assert crlf == cr == lf


@pytest.mark.parametrize(("command", "is_piped"), MEASURED.values(), ids=MEASURED)
def test_measured_texts_keep_their_cr_characters(command, is_piped, talker, tmp_path):
    crlf, lf = (n_token(command, is_piped, talker, tmp_path, end) for end in ("\r\n", "\n"))
    # in this vocabulary each CR is a token
    assert crlf == lf + TEXT.count("\n")


@every_break
def test_a_piped_chat_takes_each_line_as_a_turn(end, talker, tmp_path):
    session_path = tmp_path / "chat.kv"
    options = ("-m", talker, "-n", 1, "-t", 1, "--session", session_path)
    done = run_kvtool("chat", *options, stdin=f"one{end}two{end}")
    assert done.returncode == 0, done.stderr
    assert user_messages(session_path) == ["one", "two"]


@every_break
def test_inserted_files_and_option_texts_are_converted_to_lf(end, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path, TEXT, end)
    assert with_files("Read @text.txt") == f"Read {TEXT.rstrip()}"
    raw = {"system": None, "system_file": "text.txt"}
    assert SystemOptions.from_values(raw).text() == TEXT.rstrip()
    assert SystemOptions.from_values({"system": f"a{end}b", "system_file": None}).text() == "a\nb"
    write_lines(tmp_path, 'root ::= "a"\n', end)
    assert GenerationOptions.from_values({"grammar": "text.txt"}).grammar == 'root ::= "a"\n'
    # typed escapes \r\n are not changed to LF
    assert GenerationOptions.from_values({"stop": [r"\r\n"]}).stop == ("\r\n",)


def test_with_lf_converts_crlf_and_cr():
    assert with_lf("a\r\nb\rc\nd\r\r\ne\n\r") == "a\nb\nc\nd\n\ne\n\n"


def test_only_listed_modules_decode_input_themselves():
    root = Path(kvtool.__file__).parent
    modules = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if '"utf-8-sig"' in path.read_text(encoding="utf-8")
    }
    assert modules == {"system/texts.py", *READ_TO_BE_PARSED}
