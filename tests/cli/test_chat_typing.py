"""Keys typed into a chat: pastes, blocks, files, the history, and commands that undo."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shutil
import signal
import termios
from contextlib import closing
from types import SimpleNamespace

import pytest
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kvtool.chats import session
from kvtool.chats.undo import first_words
from kvtool.cli.chat import screen
from kvtool.cli.chat import terminal as loop
from kvtool.cli.chat.input import Prompt, _Completer, goes_on, meant, typed_as, with_files
from kvtool.errors import InputError
from tests.blocking_policy import TIMEOUT_S, BlockingPolicy, until
from tests.cli.in_process_command import run_kvtool
from tests.cli.terminal import Terminal, terminals, user_messages

SMALL = ("-n", 4, "-c", 2048, "--budget", 128)
PASTE, PASTED = "\x1b[200~", "\x1b[201~"
UP = "\x1b[A"


@pytest.fixture
def terminal(talker, tmp_path):
    with terminals(talker, *SMALL, env={"XDG_STATE_HOME": str(tmp_path)}) as start:
        yield start


@pytest.mark.parametrize(
    ("typed", "more", "text"),
    [
        ("one", False, "one"),
        ("one\\", True, None),
        ("one\\\ntwo", False, "one\ntwo"),
        ('"""', True, None),
        ('"""one\n\ntwo', True, None),
        ('"""\none\n  two\n"""', False, "one\n  two"),
        ('"""one"""', False, "one"),
        ('say """ now', False, 'say """ now'),
        ("a \\b c", False, "a \\b c"),
    ],
)
def test_quoted_blocks_and_backslashes_continue_a_line(typed, more, text):
    assert goes_on(typed) is more
    if text is not None:
        assert meant(typed) == (text, False)


@pytest.mark.parametrize(
    ("typed", "text", "is_command"),
    [
        ("/help", "/help", True),
        ("/load some/where.kv", "/load some/where.kv", True),
        ("//help", "/help", False),
        # quoted input is a text for the model
        ('"""/help\n\nmore"""', "/help\n\nmore", False),
        ('"""//help"""', "//help", False),
        # A single line with a slash at its start is first tried as a command. If it is not one, the chat asks
        # whether to send it as text. Several lines are a command only if the command takes a text.
        ("/usr/lib/foo.c:12: what is that?", "/usr/lib/foo.c:12: what is that?", True),
        ("//usr/lib/foo.c:12: what is that?", "/usr/lib/foo.c:12: what is that?", False),
        ("/usr/lib/foo.c:12: error: x\nWhat is that?", "/usr/lib/foo.c:12: error: x\nWhat is that?", False),
        ("/exit\nwas typed", "/exit\nwas typed", False),
        ("// a comment\nint x;", "// a comment\nint x;", False),
        ("/system Be brief.\\\nBe kind.", "/system Be brief.\nBe kind.", True),
    ],
)
def test_lines_are_classified_as_command_or_text(typed, text, is_command):
    assert meant(typed) == (text, is_command)
    if not is_command:
        # if the prompt offers this message for editing, Enter must send it unchanged
        assert meant(typed_as(text)) == (text, False)


@pytest.mark.parametrize("text", ["/system\nreads", "ends with \\\nand goes on", '"""', "//", "/a", "/a/b"])
def test_text_offered_for_editing_keeps_its_meaning(text):
    assert meant(typed_as(text)) == (text, False)


def test_at_sign_and_name_are_replaced_by_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.txt").write_text("two\nlines\n")
    (tmp_path / "x.py").write_text("\ufeffprint(1)\n", encoding="utf-8")
    text = with_files('Explain @x.py and @"a b.txt" to me@here.org and @someone')
    assert text == "Explain print(1) and two\nlines to me@here.org and @someone"
    for wrong in ("@no.txt", "(@no.txt)?", "@./no", f"@{tmp_path}/no", '@"no"'):
        with pytest.raises(InputError, match="there is no file "):
            with_files(f"Explain {wrong}")
    os.mkfifo("pipe")
    for name in ("pipe", "/dev/zero"):
        with pytest.raises(InputError, match=f"cannot read {name}: it is not a regular file"):
            with_files(f"Explain @{name}")
    # an @ in code does not name a file
    assert with_files("@app.route\ndef f():") == "@app.route\ndef f():"
    # no file can have a name this long
    assert with_files("@" + "a" * 300) == "@" + "a" * 300
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(InputError, match=r"empty.txt is empty; it must be a text"):
        with_files("Explain @empty.txt")
    files = []
    with_files('@x.py @someone @"a b.txt"', lambda path, text: files.append((path.name, text)))
    assert files == [("x.py", "print(1)"), ("a b.txt", "two\nlines")]
    (tmp_path / "z.bin").write_bytes(b"abc\xff")
    with pytest.raises(InputError, match=r"z.bin is not a text in UTF-8 \(byte 3\)"):
        with_files("@z.bin")
    with pytest.raises(InputError, match="cannot read .*directory"):
        with_files(f"@{tmp_path}")


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("What is in @x.txt?", "What is in text?"),
        ("(see @x.txt).", "(see text)."),
        ("Read \"@x.txt\", @x.txt; '@x.txt'", "Read \"text\", text; 'text'"),
        # the name of a file may end with a punctuation mark
        ("@x.txt! and @x.txt!,", "other and other,"),
    ],
)
def test_punctuation_around_a_file_name_stays(tmp_path, monkeypatch, typed, sent):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "x.txt!").write_text("other")
    assert with_files(typed) == sent


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ('@app.route("/x") what', ['app.route("/x']),
        ("@pytest.mark.parametrize", ["pytest.mark.parametrize"]),
        ("npm i @types/node, @angular/core.", ["types/node", "angular/core"]),
        ("@someone, (@media) and @.", []),
        ('@app.route("/x")\ndef f():', []),
    ],
)
def test_names_that_are_no_files_are_sent_as_text_and_reported(tmp_path, monkeypatch, typed, names):
    monkeypatch.chdir(tmp_path)
    missing = []
    assert with_files(typed, missing=missing.append) == typed
    assert missing == names


@pytest.fixture
def typed_at(monkeypatch, tmp_path):
    """typed_at(keys, default): type these keys at a prompt that offers `default`. Return its text."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def typed(keys, default=""):
        with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
            keyboard.send_text(keys)
            return Prompt({}).ask(default)

    return typed


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("\r", "/foo bar"),
        (" x\r", "/foo bar x"),
        # the next two cases begin with a backspace and Shift-Home
        ("\x7fy\r", "/foo bay"),
        ("\x1b[1;2Hnew\r", "new"),
    ],
)
def test_offered_line_is_edited_at_its_end(typed_at, keys, line):
    assert typed_at(keys, "/foo bar") == line


def test_ctrl_c_swallows_no_key_while_text_is_selected():
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        # Shift-Home selects the line
        keyboard.send_text("one\x1b[1;2H\x03two\r")
        prompt = Prompt({})
        with pytest.raises(KeyboardInterrupt):
            prompt.ask()
        assert prompt.ask() == "two"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("look @my", {'@"my dir/', '@"my file.txt"'}),
        ('look @"my d', {'@"my dir/'}),
        ('look (@"my dir/', {'@"my dir/a.txt"'}),
        ("look @fold", {"@folder/"}),
        ("look @folder/x", {"@folder/x.txt"}),
        ('@"folder/x', {'@"folder/x.txt"'}),
        ('@"my dir"/', set()),
        ("a@my", set()),
        # a session is no text; neither is its archive, nor an empty file such as its lock
        ("@talk", {"@talk.txt"}),
        ("/load talk", {"talk.kv"}),
        ("/load my", {"my dir/"}),
        ("/load my dir/", {"my dir/other.kv"}),
    ],
)
def test_tab_completes_names_with_blanks_folders_and_sessions(tmp_path, monkeypatch, typed, expected):
    monkeypatch.chdir(tmp_path)
    for folder in ("my dir", "folder"):
        (tmp_path / folder).mkdir()
    for name in ("my file.txt", "my dir/a.txt", "folder/x.txt", "talk.txt", "talk.kv.archive"):
        (tmp_path / name).write_text("text")
    for name in ("talk.kv", "my dir/other.kv"):
        (tmp_path / name).write_bytes(b"kvtool session 1")
    (tmp_path / "talk.kv.lock").touch()
    (tmp_path / "my link").symlink_to("nothing")
    completions = _Completer({"/load": None}).get_completions(Document(typed), CompleteEvent())
    assert {completion.text for completion in completions} == expected


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        (f"{PASTE}  if x \\\r    and y:\r{PASTED}\r", "  if x \\\n    and y:"),
        (f'{PASTE}"""Return x.\r\rMore."""\rdef f():\r{PASTED}\r', '"""Return x.\n\nMore."""\ndef f():'),
        (f'{PASTE}"""one\rtwo"""{PASTED}\r', '"""one\ntwo"""'),
        (f"{PASTE}\r  one\rtwo \\{PASTED}\r", "\n  one\ntwo \\"),
        (f"{PASTE}/system is\ra word{PASTED}\r", "/system is\na word"),
        # what is typed before and after a paste belongs to the text
        (f"What is {PASTE}a \\\rb{PASTED}?\r", "What is a \\\nb?"),
        (f"{PASTE}a\rb{PASTED} \\\r", "a\nb \\"),
        # a typed mark or command includes the text that is pasted after it
        (f'"""\r{PASTE}  a \\\rb{PASTED}\r"""\r', "  a \\\nb"),
        (f'{PASTE}a \\\rb{PASTED}\x15\x15\x15"""\rc\r"""\r', "c"),
    ],
)
def test_pasted_lines_are_sent_unchanged(typed_at, keys, sent):
    typed = typed_at(keys)
    assert meant(typed) == (sent, False)
    # if the history offers this text later, Enter sends it again
    assert not goes_on(typed)


def test_lines_pasted_after_a_command_belong_to_it(typed_at):
    assert meant(typed_at(f"/system {PASTE}one\rtwo{PASTED}\r")) == ("/system one\ntwo", True)
    assert meant(typed_at(f"{PASTE}/help\r{PASTED}\r")) == ("/help", True)


def test_ctrl_z_suspends_and_adds_no_text(typed_at, monkeypatch):
    suspended = []
    monkeypatch.setattr(Application, "suspend_to_background", lambda self: suspended.append(self))
    assert typed_at("he\x1allo\r") == "hello"
    assert len(suspended) == 1


def test_pasted_or_quoted_lines_are_sent_as_one_turn(terminal, tmp_path):
    path, file = tmp_path / "chat.kv", tmp_path / "part.txt"
    file.write_text("what the file says\n")
    chat = terminal("--session", path)
    chat.say(f"{PASTE}one\ntwo\n\n  three{PASTED}")
    chat.type('"""\r')
    chat.type("four\r")
    chat.say('five"""')
    chat.type("six\\\r")
    chat.say("seven")
    chat.say("//eight")
    chat.type('"""\r')
    chat.type("/help is text here\r")
    chat.say('really"""')
    chat.say(f"{PASTE}/usr/lib/foo.c:12: error: x\nwhat does that mean?{PASTED}")
    chat.say("//usr/bin")
    chat.say(f"nine: @{file}")
    # Tab puts quotes around a name with blanks
    (tmp_path / "my file.txt").write_text("blanks")
    chat.type(f"@{tmp_path}/my\t")
    chat.until(f'@"{tmp_path}/my file.txt"')
    # the first Enter accepts the completion that Tab shows
    chat.type("\r")
    chat.say("")
    # wrong input returns to the prompt for editing
    chat.type(f"@{path}\r")
    chat.until("chat.kv is not a text in UTF-8 (byte")
    chat.until(f"nothing was sent\n\n> @{path}")
    # after Ctrl-C, the next text can be typed at once
    chat.type("\x03/bye\r")
    assert chat.process.wait(TIMEOUT_S) == 0
    assert user_messages(path) == [
        *("one\ntwo\n\n  three", "four\nfive", "six\nseven", "/eight", "/help is text here\nreally"),
        *("/usr/lib/foo.c:12: error: x\nwhat does that mean?", "/usr/bin", "nine: what the file says"),
        "blanks",
    ]


def test_a_history_is_kept_between_chats(terminal, tmp_path):
    chat = terminal()
    chat.say("the first thing")
    chat.leave()
    path = tmp_path / "kvtool" / "chat-history"
    assert path.stat().st_mode & 0o077 == 0
    resumed = terminal("--session", tmp_path / "chat.kv")
    resumed.type(UP)
    resumed.until("\n> /exit")
    resumed.type(UP)
    resumed.until("\n> the first thing")
    resumed.say("")
    # after a search, Enter accepts the line, and a second Enter sends it
    resumed.type("\x12first")
    resumed.until("first thing")
    resumed.type("\r")
    resumed.say("")
    resumed.kill()
    assert user_messages(tmp_path / "chat.kv") == ["the first thing"] * 2


@pytest.mark.parametrize("state", [os.devnull, "file"])
def test_chat_works_without_a_folder_for_its_history(terminal, tmp_path, state):
    (tmp_path / "file").touch()
    # docs/chat.md turns the history off with /dev/null. This path is absolute, so it replaces tmp_path in the
    # next line.
    chat = terminal(env={"XDG_STATE_HOME": str(tmp_path / state)})
    assert chat.say("hello").endswith("tokens/s")


def test_ctrl_c_while_a_turn_is_read_undoes_the_turn(terminal, tmp_path):
    path, blocking = tmp_path / "chat.kv", BlockingPolicy(tmp_path)
    chat = terminal("--session", path, "-b", 16, "--policy", blocking.policy)
    before = chat.say("hello").split("\n")[-1]
    # the text is so long that most of it is read after the first eviction
    chat.type(f"{PASTE}{'word ' * 6000}{PASTED}\r")
    chat.wait_for("reading")
    blocking.wait()
    chat.type("\x03")
    blocking.go()
    chat.until("cancelled; the chat is as it was before\n\n> ")
    assert user_messages(path) == ["hello"]
    assert f"tokens so far {before.split()[0]} " in " ".join(chat.say("/stats").split())


BUSY = """
import ctypes, os, signal
from dataclasses import dataclass
from pathlib import Path
from kvtool.policies.local import Local

@dataclass(frozen=True)
class Busy(Local):
    def plan(self, view, state):
        # no handler of Python's runs before C returns
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        Path({there!r}).touch()
        ctypes.CDLL(None).open({fifo!r}.encode(), os.O_RDONLY)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        return Local.plan(self, view, state)

POLICY = Busy
"""


def test_ctrl_c_shows_stopping_before_the_step_ends(terminal, tmp_path):
    fifo, started = tmp_path / "fifo", tmp_path / "there"
    os.mkfifo(fifo)
    (tmp_path / "busy.py").write_text(BUSY.format(fifo=str(fifo), there=str(started)))
    chat = terminal("-b", 16, "--policy", tmp_path / "busy.py")
    chat.type(f"{PASTE}{'word ' * 6000}{PASTED}\r")
    chat.wait_for("reading")
    until(started.exists)
    chat.type("\x03")
    try:
        chat.until("stopping")
    finally:
        writer = os.open(fifo, os.O_RDWR)
    chat.until("cancelled; the chat is as it was before\n\n> ")
    os.close(writer)


@pytest.mark.parametrize("policy", [("--policy", "h2o"), ("--budget", 48)], ids=["h2o", "recall"])
def test_undo_retry_and_edit_last_change_the_last_turns(terminal, tmp_path, policy):
    path = tmp_path / "chat.kv"
    chat = terminal("--session", path, *policy)
    assert chat.say("/retry") == chat.say("/edit-last") == "the chat has no turns"
    for turn in ("one", "two", "three"):
        chat.say(turn)
    assert "tokens/s" in chat.say("/retry")
    assert user_messages(path) == ["one", "two", "three"]
    stats = " ".join(chat.say("/stats").split())
    assert "copies for /undo" not in stats
    assert ("checkpoints 2, " in stats) == ("checkpoints" in stats) == ("h2o" in policy)
    assert 'took back 2 changes, the oldest of them the turn "two"; the chat has 1 turn' in chat.say(
        "/undo 2"
    )
    assert user_messages(path) == ["one"]
    assert "/undo takes a number" in chat.say("/undo x")
    # /edit-last shows the last turn at the prompt. The turn stays in the chat until another turn is sent.
    notice = "\nthe last turn is unchanged\n"
    for leaving, expected in (
        ("\x03", f"> one{notice}\n> "),
        ("\x15\r", f"\n>{notice}\n> "),
        ("\x15/x\r", f"> /x{notice}there is no command '/x'; /help lists them\n\n> "),
    ):
        chat.type("/edit-last\r")
        chat.wait_for("press Ctrl-C to keep it\n\n> one")
        chat.type(leaving)
        chat.until(expected)
        assert user_messages(path) == ["one"]
    chat.type("\x15/edit-last\r")
    chat.wait_for("\n> one")
    chat.say(" more")
    assert user_messages(path) == ["one more"]
    assert not path.with_name("chat.kv.1").exists()
    assert chat.say("/undo 9") == "/undo can take back at most 1 change, not 9"
    assert user_messages(path) == ["one more"]
    assert "there is nothing to undo" in chat.say("/undo") + chat.say("/undo 9")


def test_typed_colour_codes_are_ignored(terminal, tmp_path):
    path = tmp_path / "chat.kv"
    chat = terminal("--session", path)
    chat.say("\x1b[31mred\x1b[0m and \x1b[Mabcgreen")
    assert user_messages(path) == ["red and green"]
    chat.type("/no/pe\r")
    chat.until("[y/N] ")
    chat.type("\x1b[31mn\x1b[0m\r")
    chat.until("[y/N] n\n\n> ")
    assert chat.say("/undo").startswith('took back the turn "red and green"; the chat has no turns')


def test_undo_names_a_turn_as_it_was_typed(terminal, tmp_path):
    (tmp_path / "notes.txt").write_text("what the file says")
    chat, typed = terminal(), f"Read @{tmp_path}/notes.txt"
    chat.say(typed)
    chat.say("two")
    assert 'took back the turn "two"' in chat.say("/undo")
    assert chat.say("/undo").startswith(f'took back the turn "{first_words(typed)}"; the chat has no turns')


def test_set_shows_a_schema_from_a_file_on_one_line(terminal, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}\n')
    chat = terminal()
    chat.type(f"/set json_schema {path}\r")
    chat.until('\njson_schema  {"type": "integer"}\n\n> ')


def test_editor_that_does_not_start_gets_one_line(terminal):
    chat = terminal(env={"EDITOR": "no-such-editor", "VISUAL": ""})
    line = "no-such-editor cannot be started: No such file or directory; set $EDITOR to an editor that works"
    assert chat.say("/edit") == line
    assert chat.say("/think") == "think  (the model's own); this model does not think"


def test_a_text_that_is_not_utf_8_does_not_end_the_chat(terminal, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "b\\377" >> "$1"\n')
    editor.chmod(0o755)
    for visual, answer in ((editor, "a text that is not UTF-8 (byte 6)"), ("true", "no text")):
        chat = terminal(env={"VISUAL": str(visual)})
        assert f"the editor returned {answer}" in chat.say(b"/edit a\xff")
        assert chat.say("/cells") == "the cache is empty"


def test_an_empty_reply_is_explained(terminal):
    chat = terminal("--grammar", "root ::= ")
    assert "the reply is empty: the grammar allows no text\n" in chat.say("hello")


@pytest.mark.parametrize("again", [False, True], ids=["new", "edited"])
def test_turn_that_does_not_fit_is_undone_and_offered_for_editing(talker, tmp_path, again):
    path, long = tmp_path / "chat.kv", "many words " * 30
    full = ("-n", 4, "--policy", "full", "-c", 200, "--session", path)
    with terminals(talker, *full, env={"XDG_STATE_HOME": str(tmp_path)}) as start:
        chat = start()
        chat.say("one")
        chat.say("two")
        before = path.read_bytes()
        if again:
            chat.type("/edit-last\r")
            chat.wait_for("\n> two")
        chat.type(f"{long}\r")
        chat.until("or take back turns with /undo N, or start over with /reset\n")
        chat.until("the turn was not answered; the chat is as it was before\n\n> ")
        chat.until(f"{'two' * again}{long.strip()}")
        assert path.read_bytes() == before
        chat.type("\x05\x15/undo\r")
        unchanged = "the last turn is unchanged\n" * again
        chat.until(
            f'{unchanged}took back the turn "two"; the chat has 1 turn; /undo can take back 1 more\n\n> '
        )
        # after /undo the chat has room for another turn
        assert chat.say("three").endswith("tokens/s")
    assert user_messages(path) == ["one", "three"]


@pytest.mark.parametrize(("line", "at_prompt"), [("/edit-last", "one"), ("@none.txt", "@none.txt")])
def test_text_typed_ahead_is_dropped_if_the_prompt_offers_a_line(terminal, tmp_path, line, at_prompt):
    path = tmp_path / "chat.kv"
    chat = terminal("--session", path)
    chat.say("one")
    chat.type(f"{line}\r/exit\rmore\r")
    chat.until(f"the text that you typed ahead was dropped\n\n> {at_prompt}")
    chat.type("\x15")
    chat.say("two")
    # The next prompts are empty, so lines that were typed ahead are read and not dropped.
    chat.type("three\r/exit\r")
    assert chat.process.wait(TIMEOUT_S) == 0
    assert user_messages(path) == [*["one"] * (at_prompt != "one"), "two", "three"]


def test_unknown_slash_line_is_sent_only_after_confirmation(terminal, tmp_path):
    path = tmp_path / "chat.kv"
    chat = terminal("--session", path)
    chat.say("one")
    for line in ("/nope", "/no/pe"):
        chat.type(f"{line}\r")
        if "/" in line[1:]:
            chat.until(f"There is no command {line}. Send the line to the model? [y/N] ")
            chat.type("n\r")
        chat.until("[y/N] n\n\n> ", f"there is no command '{line}'; /help lists them\n\n> ")
        # the next line stands alone, and the history has the refused line
        assert "/undo takes a number" in chat.say("/undo 0")
        chat.type(UP + UP)
        chat.until(f"\n> {line}")
        chat.type("\x15")
    assert user_messages(path) == ["one"]
    chat.type("/no/pe is a path\r")
    chat.until("[y/N] ")
    chat.type("y\r")
    until(lambda: user_messages(path) == ["one", "/no/pe is a path"])


def test_set_refuses_start_options_and_suggests_similar_settings(terminal):
    chat = terminal()
    start = "is fixed when a chat starts; leave with /exit and start `kvtool chat"
    assert chat.say("/set budget 1024") == f"budget {start} --budget 1024`"
    assert chat.say("/set num_ctx") == f"num_ctx {start} --ctx-size`"
    assert chat.say("/set -t 4") == f"-t {start} --threads 4`"
    for value in ("a b.gguf", '"a b.gguf"'):
        assert chat.say(f"/set model {value}") == f"model {start} --model 'a b.gguf'`"
    assert chat.say("/set system x") == "/system TEXT starts over with another system prompt"
    for wrong, right in (("temprature", "temp"), ("num_predikt", "n"), ("topp", "top_p")):
        output = chat.say(f"/set {wrong} 1")
        _, _, names = output.partition("There are: ")
        assert output.startswith(f"there is no setting {wrong}. Did you mean {right}")
        assert right in names.split(", ")


def test_terminal_mode_is_set_again_after_sigcont(monkeypatch):
    master, slave = pty.openpty()
    with open(slave, closefd=False) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        before, (keys, handler) = termios.tcgetattr(slave), (screen.Keys(), signal.getsignal(signal.SIGCONT))

        def echoes_after_stop():
            # restore the terminal's settings, as a shell does between a stop and `fg`
            termios.tcsetattr(slave, termios.TCSANOW, before)
            signal.raise_signal(signal.SIGCONT)
            return bool(termios.tcgetattr(slave)[3] & termios.ECHO)

        with keys.waiting():
            assert not echoes_after_stop()
            with keys.normal():
                assert echoes_after_stop()
            assert not echoes_after_stop()
        assert termios.tcgetattr(slave) == before
        assert signal.getsignal(signal.SIGCONT) == handler
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("ending", ["", "\x03"], ids=["started", "stopped"])
def test_characters_typed_while_a_chat_starts_appear_only_at_the_prompt(talker, tmp_path, ending):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def echoes():
        return bool(termios.tcgetattr(chat.master)[3] & termios.ECHO)

    with closing(Terminal(talker, *SMALL, "--reread", fifo, env={"XDG_STATE_HOME": str(tmp_path)})) as chat:
        # the chat waits until the test has written the messages
        with fifo.open("w") as file:
            assert not echoes()
            chat.type(f"typed early{ending}")
            if ending:
                assert chat.process.wait(TIMEOUT_S) == 130
                assert echoes()
                return
            file.write(json.dumps([{"role": "system", "content": "Be brief."}]))
        chat.until("\n> typed early")
        assert chat.text.count("typed early") == 1
        chat.type("\x15")
        chat.leave()
        assert echoes()


def test_ctrl_c_interrupts_only_the_question_of_a_command(monkeypatch):
    handlers = []
    monkeypatch.setattr(
        screen, "confirmed", lambda question: handlers.append(signal.getsignal(signal.SIGINT))
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        screen.Terminal(None, None, "recall").confirm("Replace it?")
        assert handlers == [signal.default_int_handler]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_a_file_is_inserted_takes_the_turn_back(monkeypatch, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("words")
    model = SimpleNamespace(tokenize=lambda text, start: signal.raise_signal(signal.SIGINT))
    writer = SimpleNamespace(engine=SimpleNamespace(model=model))
    terminal = screen.Terminal(SimpleNamespace(writer=writer), None, "recall")
    before = signal.getsignal(signal.SIGINT)
    try:
        terminal.say(f"@{tmp_path}/a.txt")
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out == "cancelled; the chat is as it was before\n"
    assert (terminal.typed, terminal.edits) == (f"@{tmp_path}/a.txt", False)


def test_more_ctrl_c_between_two_prompts_do_not_end_the_chat():
    handlers = []

    def ask(default):
        handlers.append(signal.getsignal(signal.SIGINT))
        if len(handlers) == 1:
            raise KeyboardInterrupt
        return "words"

    noted = lambda text: signal.raise_signal(signal.SIGINT)  # noqa: E731
    terminal = SimpleNamespace(typed="", edits=False, note=noted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert loop._ask(terminal, SimpleNamespace(ask=ask)) == "words"
    finally:
        signal.signal(signal.SIGINT, before)


def test_blank_line_separates_a_reply_from_the_lines_before_it(terminal):
    chat = terminal()
    assert chat.say("hello").split("\n")[0] != ""
    assert "\n> hello\n\n" in chat.text
    announced, blank, reply, *_ = chat.say("word " * 200).split("\n")
    assert announced.startswith("the turn has ")
    assert not blank
    assert reply


def test_empty_file_is_refused_and_an_inserted_file_is_reported(terminal, tmp_path):
    chat = terminal("--session", tmp_path / "chat.kv")
    (tmp_path / "z.txt").write_text(" \n")
    (tmp_path / "my note.txt").write_text("word " * 9)
    chat.type(f"@{tmp_path}/z.txt\r")
    chat.until(f"{tmp_path}/z.txt is empty; it must be a text; nothing was sent\n\n> @{tmp_path}/z.txt")
    chat.type("\x15")
    output = chat.say(f'Explain @"{tmp_path}/my note.txt"')
    inserted, *_ = output.split("\n")
    assert re.fullmatch(rf"inserted {tmp_path}/my note.txt, \d+ tokens", inserted)
    assert output.count("inserted") == 1
    assert "inserted" not in chat.say("and @someone")


def test_text_of_an_inserted_file_inserts_no_other_file(terminal, tmp_path):
    path, first, other = (tmp_path / name for name in ("chat.kv", "a.txt", "b.txt"))
    first.write_text(f"see @{other} now")
    other.write_text("two")
    typed, sent = f"Read: @{first}", f"Read: see @{other} now"
    chat = terminal("--session", path)
    chat.say(typed)
    assert "inserted" not in chat.say("/retry")
    assert user_messages(path) == [sent]
    chat.type("/edit-last\r")
    chat.wait_for(f"\n> {typed}")
    assert f"inserted {first}" in chat.say(" please")
    assert user_messages(path) == [f"{sent} please"]
    chat.type("/exit\r")
    assert chat.process.wait(TIMEOUT_S) == 0
    # another process knows only the text that was sent
    first.write_text("one")
    chat = terminal("--session", path)
    for more in (f" and @{first}", "!"):
        chat.type("/edit-last\r")
        chat.wait_for(f"\n> {sent} please")
        chat.say(more)
    assert user_messages(path) == [f"{sent} please and one!"]


@pytest.mark.parametrize("leaving", ["/exit\r", "\x04"])
def test_leaving_with_unsaved_turns_needs_a_second_request(terminal, tmp_path, leaving):
    path, other, full = tmp_path / "chat.kv", tmp_path / "other.kv", resource.RLIM_INFINITY
    chat = terminal("--session", path)
    chat.say("one")
    pid = chat.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, full))
    for turn in ("two", "three"):
        assert f"cannot write {path}: File too large" in chat.say(turn)
    asks = "2 turns were not saved; /save FILE saves the chat in another file, and /exit leaves without them"
    chat.type(leaving)
    chat.wait_for(f"{asks}\n\n> ")
    assert "cannot write" in chat.say("/retry")
    chat.type(leaving)
    chat.wait_for(f"{asks}\n\n> ")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (full, full))
    assert f"saved to {other}" in chat.say(f"/save {other}")
    chat.type(leaving)
    assert chat.process.wait(TIMEOUT_S) == 0
    assert user_messages(path) == ["one"]
    assert user_messages(other) == ["one", "two", "three"]
    resumed = terminal("--session", path)
    resource.prlimit(resumed.process.pid, resource.RLIMIT_FSIZE, (100, full))
    resumed.say("four")
    resumed.type(leaving)
    resumed.wait_for("1 turn was not saved; ")
    resumed.wait_for("\n\n> ")
    resumed.type(leaving)
    assert resumed.process.wait(TIMEOUT_S) == 9


def test_plain_has_no_colours(terminal):
    chat = terminal("--plain")
    chat.say("hello")
    chat.type("/nope\r")
    chat.until("there is no command '/nope'; /help lists them\n\n> ")
    chat.say("/stats")
    chat.say("/cells")
    styles = set(re.findall(rb"\x1b\[([0-9;]*)m", chat.raw))
    assert styles <= {b"", b"0"}


def test_verbose_shows_statistics_when_the_chat_ends(terminal):
    chat = terminal("-v")
    chat.say("hello")
    assert "cells per row" not in chat.text
    chat.type("/exit\r")
    assert re.search(r"[0-9]+ tokens.*, [0-9]+/128 $", chat.wait_for("cells per row, cache "))
    assert chat.process.wait(TIMEOUT_S) == 0


def test_set_changes_shows_and_saves_settings(terminal, tmp_path):
    chat = terminal("--system", "Be brief.", "--session", tmp_path / "chat.kv")
    assert chat.say("/set num_predict 2") == "n  2"
    assert chat.say("/set top-p 0.5") == "top_p  0.5"
    assert chat.say("/set top-p") == "top_p  0.5"
    assert chat.say('/set stop "a b"') == 'stop  "a b"'
    # A typed \n means a line break, and \\n means a backslash with an n. Both are shown as they were typed.
    for text in (r"\n\n", r"a\\n", r"\""):
        assert chat.say(f'/set stop "{text}"') == f'stop  "{text}"'
    assert chat.say('/set stop ""') == "stop  (none)"
    # only the = after the name is a separator; an = in the value belongs to the value
    for typed, expected in (
        ("stop x=y", 'stop  "x=y"'),
        ("stop=x=y", 'stop  "x=y"'),
        ("stop =x", 'stop  "=x"'),
        ("top_k = 7", "top_k  7"),
        ("top_k=40", "top_k  40"),
        ('grammar root ::= "yes"', 'grammar  root ::= "yes"'),
        ('json_schema {"const":"x=1"}', 'json_schema  {"const":"x=1"}'),
        ('stop ""', "stop  (none)"),
        ('json_schema ""', "json_schema  (none)"),
    ):
        assert chat.say(f"/set {typed}") == expected
    assert chat.say("/set seed 7") == "seed  7"
    name, seed = chat.say("/set seed -1").split()
    assert name == "seed"
    assert int(seed) >= 0
    assert seed not in ("7", chat.say("/set seed -1").split()[1])
    assert chat.say("/set seed 7") == "seed  7"
    assert chat.say("/set top_p 2") == "top_p must be in 0..1, got 2"
    assert chat.say("/set n -5") == "n must be at least -1, got -5"
    hot = "temp  99.0\nabove 2 a reply is mostly random words; the default is 0.8"
    assert chat.say("/set temp 99") == hot
    assert chat.say("/set temp 0") == "temp  0.0"
    # the word `default` resets a setting; in quotes, it is a text
    for name, value, default in (
        ("min_p", "0.3", "0.05"),
        ("grammar", "root ::= [a-z]", "(none)"),
        ("stop", '"default"', "(none)"),
        ("stop_loops", "off", "on"),
        ("think_budget", "9", "no limit"),
    ):
        assert chat.say(f"/set {name} {value}").endswith(f"{name}  {value}")
        assert chat.say(f"/set {name} Default").endswith(f"{name}  {default}")
    # /set shows the most useful settings, and all settings that were changed
    lines = chat.say("/set").split("\n")
    assert [line.split()[0] for line in lines] == ["n", "temp", "top_k", "top_p", "min_p", "seed", "/show"]
    assert "there is no setting topp" in chat.say("/set topp 1")
    assert "n must be at least 1, or -1 for no limit, got 0" in chat.say("/set n 0")
    expected = {line.split()[0]: line.split()[-1] for line in chat.say("/show settings").split("\n")}
    assert (expected["n"], expected["top_p"]) == ("2", "0.5")
    assert "stopped after 2 tokens (-n); /set n changes the limit" in chat.say("Tell me a story.")
    assert chat.say("/show system") == "Be brief."
    assert "add_generation_prompt" in chat.say("/show template")
    assert "recall" in chat.say("/show policy")
    assert chat.say("/show thought") == "the last reply has no thought"
    assert chat.say("/show last").startswith("> Tell me a story.")
    assert "/show takes one of" in chat.say("/show all")
    chat.leave()
    with terminals(chat.model, "-c", 2048, "--budget", 128) as start:
        settings = start("--session", tmp_path / "chat.kv").say("/show settings")
    expected = {line.split()[0]: line.split()[-1] for line in settings.split("\n")}
    assert (expected["n"], expected["top_p"]) == ("2", "0.5")


def test_edit_sends_the_text_of_the_editor(terminal, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "line one\\nline two\\n" > "$1"\n')
    editor.chmod(0o755)
    chat = terminal("--session", tmp_path / "chat.kv", env={"VISUAL": str(editor)})
    assert chat.say("/edit").endswith("tokens/s")
    assert "> /edit\n> line one\n  line two\n" in chat.text
    chat.kill()
    assert user_messages(tmp_path / "chat.kv") == ["line one\nline two"]


def test_aliases_of_commands_work_and_typos_get_suggestions(terminal):
    chat = terminal()
    assert chat.say("/?").startswith("/help")
    chat.say("hello")
    assert "started over" in chat.say("/clear")
    assert chat.say("/HELP") == chat.say("/help")
    for line, instead in (
        ("/retryy", "/retry"),
        ("/last", "/show last"),
        ("/temp 1", "/set temp"),
        ("/quit?", "/quit"),
    ):
        chat.type(f"{line}\r")
        chat.until(f"there is no command '{line.split()[0]}'. Did you mean {instead}?\n\n> ")
    # Tab completes a command
    chat.type("/sta\t")
    chat.until("\n> /stats")
    assert "tokens so far" in chat.say("")
    chat.type("/bye\r")
    assert chat.process.wait(TIMEOUT_S) == 0


def test_continued_chat_shows_its_last_turn(terminal, tmp_path):
    path = tmp_path / "chat.kv"
    chat = terminal("--session", path)
    chat.say("what was said")
    chat.leave()
    reply = session.read(path)[0]["messages"][-1]["content"]
    resumed = terminal("--session", path)
    last = f"> what was said\n\n{reply.rstrip()}"
    assert last in resumed.text
    copy = shutil.copy(path, tmp_path / "copy.kv")
    assert 'took back the turn "what was said"; the chat has no turns' in resumed.say("/undo")
    assert resumed.say(f"/load {copy}").endswith(last)


def test_chat_warns_at_its_start_about_a_base_model(terminal, talker, tmp_path):
    line = "gemma3-270m is a base model, not for chats; `kvtool generate --raw` continues a text\n"
    assert "base model" not in terminal().text
    # a base model is recognized by the name of its file
    path = shutil.copy(talker, tmp_path / "gemma-3-270m-q4_k_m.gguf")
    with terminals(path, *SMALL) as start:
        assert f"\n{line}" in start().text
    piped = run_kvtool("chat", "-m", path, *SMALL, "-t", 1, stdin="hello\n")
    assert f"\n{line}" in piped.stderr


def test_resized_narrow_window_keeps_each_line_once(terminal):
    chat = terminal(columns=60, rows=20)
    # the lines that the chat prints at its start are wrapped between words
    assert " and still\nused: up to " in chat.text
    chat.say("hello there")
    chat.resize(50, 16)
    chat.say("and again")
    assert chat.text.count("hello there") == chat.text.count("and again") == 1


def test_dumb_terminal_shows_the_last_turn_and_sends_only_what_is_typed(terminal, tmp_path):
    path = tmp_path / "chat.kv"
    chat = terminal("--session", path, env={"TERM": "dumb"})
    chat.say("one")
    assert chat.say("/edit-last").endswith("press Ctrl-C to keep it\ntype it again, with your changes:\none")
    assert chat.say("") == "the last turn is unchanged"
    assert user_messages(path) == ["one"]
    chat.say("/edit-last")
    chat.say("two")
    assert user_messages(path) == ["two"]
    chat.leave()
