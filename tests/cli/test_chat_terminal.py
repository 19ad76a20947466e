"""Input typed into a chat: nothing is lost, and each mistake gets one line."""

from __future__ import annotations

import re
import shutil
import signal

import pytest

from kvtool.chats.undo import MAX_COPIES
from kvtool.cli.chat.slash_commands import KEYS, NOTES, OF_NAME, SLASHES
from tests import tiny
from tests.cli.terminal import ROOT, terminals, user_messages

SMALL = ("-n", 4, "-c", 2048, "--policy", "h2o", "--budget", 128)
"""Options of most tests.

With h2o, a session is a single file, and /undo needs copies of the chat. With recall, a session can also have
an archive file, and /undo needs no copies.
"""


@pytest.fixture
def terminal(talker):
    with terminals(talker, *SMALL) as start:
        yield start


@pytest.fixture(scope="module")
def four_turns(talker, tmp_path_factory):
    """A session of four turns."""
    path = tmp_path_factory.mktemp("session") / "four.kv"
    with terminals(talker, *SMALL) as start:
        chat = start("--session", path)
        for i in range(4):
            chat.say(f"turn {i}")
    return path


@pytest.fixture
def chat_kv(four_turns, tmp_path):
    return shutil.copy(four_turns, tmp_path / "chat.kv")


FOUR = [f"turn {i}" for i in range(4)]


def test_typed_text_is_never_read_as_markup(terminal):
    chat = terminal("--system", "[/]")
    assert chat.say("/system") == "[/]"
    for line, reply in (
        ("/load x[/].kv", "cannot read x[/].kv: No such file or directory"),
        ("/save [/]/x.kv", "cannot write [/]/x.kv: No such file or directory"),
        ("/load [bold]x:smile:", "cannot read [bold]x:smile:: No such file or directory"),
        ("/cells [/]", "/cells takes a number of tokens, like /cells 2048"),
        ("/system [/bold] :smile:", "started over under the new system prompt; /undo takes this back"),
        ("/system", "[/bold] :smile:"),
    ):
        assert chat.say(line) == reply
    chat.type("/[bold]x\r")
    chat.until("there is no command '/[bold]x'; /help lists them\n\n> ")
    assert chat.say("say [/] :smile:").endswith("tokens/s")
    assert chat.say("/undo").startswith('took back the turn "say [/] :smile:"; the chat has no turns')
    chat.leave()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "ascii"},
    ],
    ids=["UTF-8", "C", "latin-1", "ascii"],
)
def test_input_in_another_encoding_does_not_end_the_chat(terminal, env):
    chat = terminal(env=env)
    assert chat.say(b"caf\xe9").endswith("tokens/s")
    chat.type(b"/caf\xe9\r")
    chat.until("; /help lists them\n\n> ")
    assert "No such file" in chat.say(b"/load caf\xe9.kv")
    assert "started over" in chat.say(b"/system caf\xe9")
    assert "tokens/s" in chat.say("na\u00efve \u4e16\u754c")
    chat.leave()


def test_wrong_command_gets_one_line_and_the_chat_continues(terminal, tmp_path):
    chat = terminal()
    for line, words in (
        ("/save", "/save needs a file"),
        ("/load", "/load needs a file"),
        (f"/load {tmp_path}", "Is a directory"),
        (f"/save {tmp_path}", "is not a regular file"),
        ("/save /dev/null", "/dev/null is not a regular file"),
        ("/load /dev/null", "is not a kvtool session"),
        ("/save ~nobody-of-this-name/x", "No such file or directory"),
        (f"/save {'x' * 300}", "File name too long"),
        ("/cells 0", "/cells takes a number"),
        ("/reset now", "/reset takes no argument"),
        ("/undo three", "/undo takes a number"),
        ("/exit now", "/exit takes no argument"),
        (f"/system {'long ' * 500}", "choose a larger budget"),
    ):
        # the terminal wraps the long line of `/system`, so take only the last line as the message
        message = chat.say(line).split("\n")[-1]
        assert words in message, line
    assert chat.say("/undo") == "there is nothing to undo"
    assert chat.say("hello").endswith("tokens/s")
    chat.leave()


def test_help_lists_all_commands_and_the_limits_of_undo(terminal):
    chat = terminal()
    text = " ".join(chat.say("/help").split())
    for each in (*(f"{command.usage} {command.help}" for command in SLASHES), KEYS):
        assert each in text
    text = " ".join(chat.say("/help more").split())
    for note in NOTES:
        assert note in text
    assert f"up to {MAX_COPIES} changes" in text
    assert f"the last {MAX_COPIES} uses of" in " ".join((ROOT / "docs/chat.md").read_text().split())
    chat.leave()


def test_help_fits_into_a_small_terminal(terminal):
    chat = terminal(columns=80, rows=24)
    # the other three rows show the typed line and the next prompt
    assert len(chat.say("/help").split("\n")) <= 24 - 3
    assert chat.say("/help me") == "/help takes a command or `more`; there is no command me"
    for name in ("set", "/SET"):
        assert chat.say(f"/help {name}") == f"/set [NAME X]  {OF_NAME['/set'].help}"
    assert chat.say("/help quit") == f"/exit, /bye, /quit  {OF_NAME['/exit'].help}"
    chat.leave()


def test_save_replaces_only_sessions_and_empty_files(terminal, tmp_path):
    path = tmp_path / "precious.txt"
    path.write_text("precious\n")
    chat = terminal()
    chat.say("hello")
    assert "is not a kvtool session" in chat.say(f"/save {path}")
    assert path.read_text() == "precious\n"
    assert chat.say(f"/save {tmp_path / 'new.kv'}") == f"saved to {tmp_path / 'new.kv'}"
    (tmp_path / "empty.kv").touch()
    assert "saved to" in chat.say(f"/save {tmp_path / 'empty.kv'}")
    chat.leave()
    assert user_messages(tmp_path / "new.kv") == user_messages(tmp_path / "empty.kv") == ["hello"]
    assert not list(tmp_path.glob("*.lock"))


def test_save_asks_before_it_replaces_another_chat(terminal, chat_kv):
    chat = terminal()
    chat.say("hello")
    for answer, message in (("", "not saved"), ("no", "not saved"), ("\x03", "not saved"), ("y", "saved to")):
        chat.type(f"/save {chat_kv}\n")
        assert f"{chat_kv} holds another chat (4 turns, saved " in chat.wait_for("Replace it? [y/N] ")
        chat.type(answer if answer == "\x03" else f"{answer}\n")
        assert message in chat.wait_for("\n> ")
        assert user_messages(chat_kv) == (FOUR if message == "not saved" else ["hello"])
    # /save replaces an earlier state of the same chat without a question
    chat.say("more")
    assert "saved to" in chat.say(f"/save {chat_kv}")
    assert user_messages(chat_kv) == ["hello", "more"]
    # /save asks before it replaces a later state of the same chat
    chat.say("/undo")
    chat.type(f"/save {chat_kv}\n")
    assert "holds more of this chat (2 turns" in chat.wait_for("Replace it? [y/N] ")
    chat.type("n\n")
    chat.wait_for("\n> ")
    chat.leave()
    assert user_messages(chat_kv) == ["hello", "more"]


def test_save_to_the_session_of_a_running_chat_is_refused(terminal, chat_kv):
    terminal("--session", chat_kv)
    chat = terminal()
    chat.say("hello")
    assert "in use by another chat" in chat.say(f"/save {chat_kv}")
    chat.leave()
    assert user_messages(chat_kv) == FOUR


CHANGES = ("/reset", "/system Be a pirate.", "/load {other}")


@pytest.fixture(scope="module")
def other_turn(talker, tmp_path_factory):
    """A session of one turn, of another chat than `four_turns`."""
    path = tmp_path_factory.mktemp("session") / "other.kv"
    with terminals(talker, *SMALL) as start:
        start("--session", path).say("other")
    return path


@pytest.fixture
def other_kv(other_turn, tmp_path):
    return shutil.copy(other_turn, tmp_path / "other.kv")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("end", ["killed", "left"])
def test_session_keeps_the_previous_chat_until_the_next_reply(terminal, chat_kv, other_kv, change, end):
    chat = terminal("--session", chat_kv)
    message = chat.say(change.format(other=other_kv))
    undo = "/undo 2" if "/load" in change else "/undo"
    assert f"{chat_kv} holds the previous chat until the next reply; {undo} takes this back" in message
    chat.kill() if end == "killed" else chat.leave()
    assert user_messages(chat_kv) == FOUR
    resumed = terminal("--session", chat_kv)
    assert "continuing after 4 turns" in resumed.text


@pytest.mark.parametrize("change", CHANGES)
def test_previous_chat_is_set_aside_at_the_next_reply(terminal, chat_kv, other_kv, change):
    before = chat_kv.read_bytes()
    loaded = ["other"] if "/load" in change else []
    # chat.kv.1 exists already, so the set-aside file will be chat.kv.2
    chat_kv.with_name("chat.kv.1").write_text("mine")
    chat = terminal("--session", chat_kv)
    chat.say(change.format(other=other_kv))
    assert f"the previous chat of {chat_kv} is now in chat.kv.2" in chat.say("five")
    assert chat_kv.with_name("chat.kv.2").read_bytes() == before
    assert user_messages(chat_kv) == [*loaded, "five"]
    assert "previous" not in chat.say("six")
    chat.kill()
    assert user_messages(chat_kv) == [*loaded, "five", "six"]
    assert user_messages(chat_kv.with_name("chat.kv.2")) == FOUR
    assert chat_kv.with_name("chat.kv.1").read_text() == "mine"


@pytest.mark.parametrize("change", CHANGES)
def test_undo_reverts_changes_one_by_one(terminal, chat_kv, other_kv, change):
    n_loaded = 1 if "/load" in change else 0
    chat = terminal("--session", chat_kv)
    chat.say("turn 4")
    name = change.format(other=other_kv)
    chat.say(name)
    chat.say("five")
    assert 'took back the turn "five"; the chat has ' + (
        str(n_loaded) if n_loaded else "no"
    ) + " turn" in chat.say("/undo")
    assert user_messages(chat_kv) == ["other"][:n_loaded]
    if n_loaded:
        assert 'took back the turn "other"; the chat has no turns' in chat.say("/undo")
    command = name if n_loaded else name.split()[0]
    # /undo can also take back the four turns of the earlier process
    assert f"took back {command}; the chat has 5 turns; /undo can take back 5 more" in chat.say("/undo")
    assert user_messages(chat_kv) == [*FOUR, "turn 4"]
    # chat.kv has the whole chat again, so the set-aside file chat.kv.1 is gone
    assert not chat_kv.with_name("chat.kv.1").exists()
    assert 'took back the turn "turn 4"; the chat has 4 turns' in chat.say("/undo")
    chat.kill()
    assert user_messages(chat_kv) == FOUR


def test_undo_keeps_the_session_until_its_own_chat_is_restored(terminal, chat_kv, other_kv):
    saved, previous = chat_kv.read_bytes(), f"{chat_kv} holds the previous chat until the next reply"
    chat = terminal("--session", chat_kv)
    for line in ("/reset", f"/load {other_kv}", "/system Be a pirate."):
        assert previous in chat.say(line)
    for n_turn in ("1 turn", "no turns", "no turns"):
        message = chat.say("/undo")
        assert f"the chat has {n_turn}" in message
        assert message.endswith(previous)
        assert chat_kv.read_bytes() == saved
    assert "previous" not in chat.say("/undo")
    assert user_messages(chat_kv) == FOUR
    # /undo moves the previous chat's file back, and reports this
    chat.say(f"/load {other_kv}")
    assert f"the previous chat of {chat_kv} is now in chat.kv.1" in chat.say("five")
    assert user_messages(chat_kv.with_name("chat.kv.1")) == FOUR
    assert "the chat of chat.kv.1 is in chat.kv again" in chat.say("/undo 3")
    assert user_messages(chat_kv) == FOUR
    assert not chat_kv.with_name("chat.kv.1").exists()
    chat.leave()


def test_session_without_turns_is_announced_as_a_new_chat(terminal, tmp_path):
    path = tmp_path / "talk.kv"
    chat = terminal("--session", path)
    chat.say("one")
    assert "the chat has no turns" in chat.say("/undo")
    assert chat.say("/retry") == "the chat has no turns"
    chat.leave()
    resumed = terminal("--session", path)
    for each in (chat, resumed):
        assert f"\na new chat, saved in {path}\n" in each.text


def test_loading_an_older_copy_sets_the_newer_chat_aside(terminal, chat_kv, tmp_path):
    chat = terminal("--session", chat_kv)
    chat.say(f"/save {tmp_path / 'copy.kv'}")
    chat.say("turn 4")
    message = chat.say(f"/load {tmp_path / 'copy.kv'}")
    assert "continuing after 4 turns" in message
    assert f"{chat_kv} holds the previous chat" in message
    assert "is now in chat.kv.1" in chat.say("another")
    assert user_messages(chat_kv) == [*FOUR, "another"]
    assert user_messages(chat_kv.with_name("chat.kv.1")) == [*FOUR, "turn 4"]
    assert 'the oldest of them the turn "turn 0"; the chat has no turns' in chat.say("/undo 5")
    assert "took back /load" in chat.say("/undo")
    assert user_messages(chat_kv) == [*FOUR, "turn 4"]
    assert not chat_kv.with_name("chat.kv.1").exists()
    chat.leave()


def test_reread_session_is_shown_saved_and_continued(terminal, chat_kv, tmp_path):
    path = tmp_path / "new.kv"
    chat = terminal("--session", path, "--reread", chat_kv, "--budget", 256)
    assert re.search(rf"\ncontinuing after 4 turns, [0-9]+ tokens, saved in {path}\n", chat.text)
    assert "\n> turn 3\n" in chat.text
    assert user_messages(path) == FOUR
    # the last turn of the old text can be answered again
    assert chat.say("/retry").endswith("tokens/s")
    assert user_messages(path) == FOUR
    chat.say("five")
    assert chat.say("/retry").endswith("tokens/s")
    assert user_messages(path) == [*FOUR, "five"]
    assert chat.say("/set budget 512").endswith(
        f"start `kvtool chat --reread {path} --session NEW.kv --budget 512`"
    )
    assert "took back" in chat.say("/undo")
    assert "took back" in chat.say("/undo")
    assert chat.say("/undo") == "/undo cannot go back further: the chat still has 3 turns"
    chat.leave()
    assert user_messages(path) == FOUR[:3]
    assert user_messages(chat_kv) == FOUR


def test_session_behind_a_symlink_keeps_the_symlink(terminal, chat_kv, tmp_path):
    link = tmp_path / "link.kv"
    link.symlink_to(chat_kv)
    chat = terminal("--session", link)
    chat.say("more")
    chat.leave()
    assert link.is_symlink()
    assert user_messages(chat_kv) == [*FOUR, "more"]


def test_chat_warns_if_the_template_cuts_the_system_prompt(tmp_path):
    path = tmp_path / "cuts.gguf"
    tiny.write_llama(path, chat_template="{% for m in messages %}[{{ m.content[:5] }}]{% endfor %}[a]")
    words = "the system prompt may be evicted: the model's chat template leaves it out"
    with terminals(path, "-n", 2, "--budget", 64, "--system", "Be brief.") as start:
        chat = start()
        assert words in chat.text
        assert words in chat.say("/system Be long.")
        chat.leave()


def _edit_last(chat):
    chat.type("/edit-last\r")
    chat.wait_for("press Ctrl-C to keep it\n\n> ")
    chat.say(" again")


@pytest.mark.parametrize("end", ["left", "ended", "killed"])
def test_undo_after_load_of_an_older_copy_leaves_the_session_as_it_is(terminal, chat_kv, tmp_path, end):
    copy = shutil.copy(chat_kv, tmp_path / "copy.kv")
    chat = terminal("--session", chat_kv)
    chat.say("turn 4")
    saved = chat_kv.read_bytes()
    chat.say(f"/load {copy}")
    for n in (3, 2):
        message = chat.say("/undo")
        assert f"the chat has {n} turns" in message
        assert message.endswith(f"{chat_kv} holds the previous chat until the next reply")
        assert chat_kv.read_bytes() == saved
    if end == "left":
        chat.leave()
    else:
        chat.process.send_signal(signal.SIGTERM if end == "ended" else signal.SIGKILL)
        chat.process.wait()
    assert chat_kv.read_bytes() == saved
    resumed = terminal("--session", chat_kv)
    assert "continuing after 5 turns" in resumed.text


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda chat: chat.say("/undo") + chat.say("five"), [*FOUR[:3], "five"]),
        (lambda chat: chat.say("/retry"), FOUR),
        (_edit_last, [*FOUR[:3], "turn 3 again"]),
        (lambda chat: chat.say("/reset") + chat.say("five"), ["five"]),
    ],
    ids=["undo", "retry", "edit-last", "reset"],
)
def test_first_reply_after_load_of_an_older_copy_sets_the_newer_chat_aside(
    terminal, chat_kv, tmp_path, act, expected
):
    copy = shutil.copy(chat_kv, tmp_path / "copy.kv")
    chat = terminal("--session", chat_kv)
    chat.say("turn 4")
    saved = chat_kv.read_bytes()
    chat.say(f"/load {copy}")
    act(chat)
    chat.kill()
    assert user_messages(chat_kv) == expected
    assert chat_kv.with_name("chat.kv.1").read_bytes() == saved
    assert user_messages(copy) == FOUR


def test_many_loads_keep_the_session_from_being_overwritten(terminal, chat_kv, tmp_path):
    copy = shutil.copy(chat_kv, tmp_path / "copy.kv")
    chat = terminal("--session", chat_kv)
    chat.say("turn 4")
    saved = chat_kv.read_bytes()
    # the oldest copies are dropped, so /undo cannot go back to the chat in the session
    for _ in range(MAX_COPIES + 1):
        chat.say(f"/load {copy}")
    for _ in range(MAX_COPIES):
        assert "the oldest of them /load" in chat.say("/undo 5")
    assert "the chat has 3 turns" in chat.say("/undo")
    assert chat_kv.read_bytes() == saved
    chat.leave()


def test_undo_keeps_a_set_aside_file_that_was_loaded(terminal, chat_kv):
    spare = chat_kv.with_name("chat.kv.1")
    chat = terminal("--session", chat_kv)
    chat.say("/reset")
    chat.say("five")
    assert user_messages(spare) == FOUR
    chat.say(f"/load {spare}")
    chat.say("six")
    for n_turn in (4, 3):
        assert f"the chat has {n_turn} turns" in chat.say("/undo")
    chat.leave()
    assert user_messages(chat_kv) == FOUR[:3]
    assert user_messages(spare) == FOUR
