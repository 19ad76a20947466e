"""Sessions of `kvtool chat`: kills, resuming, use by two processes, and full disks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from contextlib import closing
from functools import partial
from itertools import pairwise

import pytest

from kvtool.chats import archive_file, session
from kvtool.chats.prompt import prefix_tokens, template_of
from kvtool.chats.writer import Writer
from kvtool.cli.chat.files import ChatFiles
from kvtool.llama.cache.segment import CLUSTERS
from kvtool.llama.libllama.devices import has_gpu
from kvtool.llama.loaded.model import Model
from tests import fork_server, tiny
from tests.blocking_policy import TIMEOUT_S
from tests.cli.in_process_command import RECALL_LINE, assert_one_line, drop_cut_lines, run_kvtool
from tests.cli.test_cli import KVTOOL
from tests.serve.subprocess_server import ONE_THREAD

OTHER_TEMPLATE = tiny.CHAT_TEMPLATE.replace("[e]", "[end]")

TURNS = [f"line {i} of the chat, and some more words" for i in range(24)]


@pytest.fixture
def talk(chat_model, tmp_path):
    """talk(turns, *options): run a chat with replies of 12 tokens.

    The chat soon exceeds the budget and the context.
    """

    def run(turns, *options, session="chat.kvs", **kwargs):
        done = fork_server.run(
            _command(chat_model, tmp_path / session, *options),
            input="".join(f"{turn}\n" for turn in turns),
            encoding="utf-8",
            errors="replace",
            **kwargs,
        )
        return drop_cut_lines(done)

    return run


def _words(chat_model, session, *options):
    base_options = ["-m", chat_model, "-n", 12, "-t", 1, "--session", session]
    return ["chat", *map(str, [*base_options, *options])]


def _command(chat_model, session, *options):
    return [*KVTOOL, *_words(chat_model, session, *options)]


FIRST = ["--policy", "h2o", "--budget", "96", "--temp", "0"]
RECALL = ["--policy", "recall", *FIRST[2:]]


def of_session(*arguments):
    done = run_kvtool("session", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported(path):
    return json.loads(of_session("export", "--json", path))


@pytest.mark.parametrize(
    ("policy", "sampling"),
    [("h2o", "--temp 0"), ("h2o", "--temp 1 --seed 7 --repeat-penalty 1.2"), ("recall", "--temp 0")],
)
def test_resumed_chat_gives_the_same_replies_as_an_uninterrupted_chat(
    talk, tmp_path, share_of, policy, sampling
):
    first = ["--policy", policy, "--budget", "96", *sampling.split()]
    ends = share_of((1, 6, 10, 14), (1, 9, 17, 24))
    assert talk(TURNS[: ends[-1]], *first, session="whole").returncode == 0
    for begin, end in pairwise((0, *ends)):
        done = talk(TURNS[begin:end], *([] if begin else first))
        assert done.returncode == 0
        assert re.fullmatch(RECALL_LINE if policy == "recall" else "", done.stderr)
    assert exported(tmp_path / "chat.kvs") == exported(tmp_path / "whole")
    summary = json.loads(of_session("show", "--json", tmp_path / "chat.kvs"))
    # the chat is longer than the context (512), but its cells do not exceed the budget (96)
    assert summary["tokens"] > 512
    assert summary["cells"] <= 96
    if policy == "recall":
        assert summary["cells"] + summary["archived"] == summary["tokens"]
    assert summary["turns"] == ends[-1]


# with h2o, a chat changes fewer files, so a share of its kills finds little
@pytest.mark.parametrize("policy", [pytest.param("h2o", marks=pytest.mark.share(0)), "recall"])
def test_kill_at_any_file_operation_loses_no_chat(talker, tmp_path, share_of, policy):
    # kill at every eighth call, or at every call with --long
    step = 8 // share_of(1, 8)
    done = fork_server.run(
        [sys.executable, "-m", "tests.cli.killed_chats", str(talker), str(tmp_path), str(step), policy],
        env=os.environ | ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 30


def test_a_reply_is_shown_whole_only_once_it_is_saved(talker, tmp_path, monkeypatch):
    keep, n_shown = ChatFiles.keep, []

    def kept(files):
        # the talker's replies have no line breaks, so each line on stdout is a whole reply
        n_shown.append(sys.stdout.buffer.getvalue().count(b"\n"))
        keep(files)

    monkeypatch.setattr(ChatFiles, "keep", kept)
    assert run_kvtool(*_words(talker, tmp_path / "chat.kvs"), stdin="one\ntwo\nthree\n").returncode == 0
    assert n_shown == [0, 1, 2]


def test_options_that_contradict_a_session_are_refused_and_leave_it_unchanged(chat_model, talk, tmp_path):
    talk(TURNS[:2], *FIRST)
    path = tmp_path / "chat.kvs"
    before = path.read_bytes()
    other_model = tmp_path / "other.gguf"
    tiny.write_llama(other_model, chat_template=tiny.CHAT_TEMPLATE, seed=1)
    same_name = tmp_path / "other" / chat_model.name
    same_name.parent.mkdir()
    shutil.copy(other_model, same_name)

    advice = f"read its text again with `--reread {path} --session NEW.kv`\n"

    def out(*flags):
        return f"; leave out {' and '.join(flags)} to continue it, or {advice}"

    for options, word in (
        (["--policy", "tova"], "--policy h2o; it cannot continue with --policy tova" + out("--policy")),
        (["--budget", "128"], "--budget 96; it cannot continue with --budget 128" + out("--budget")),
        (["-o", "window=9"], "it cannot continue with -o window=9" + out("-o")),
        (["-m", other_model], f"{chat_model.name}; it cannot continue with other.gguf" + out("-m")),
        (["-m", same_name], f"{chat_model.name} of SHA-256 "),
        (
            ["-ctk", "q8_0", "--positions", "original"],
            "with --positions original --cache-type-k q8_0" + out("--positions", "--cache-type-k"),
        ),
        (["--evict-every", "8"], out("--evict-every")),
        (
            ["--positions", "original"],
            "--positions auto; it cannot continue with --positions original" + out("--positions"),
        ),
    ):
        done = run_kvtool(*_words(chat_model, path, *options), stdin=f"{TURNS[2]}\n")
        assert_one_line(done, 9, word)
        assert done.stderr.startswith(f"kvtool: {path} was started with ")
        assert path.read_bytes() == before
    done = run_kvtool(*_words(chat_model, path, "--system", "Be brief."), stdin=f"{TURNS[2]}\n")
    assert_one_line(done, 9, f"another system prompt; leave --system out, or {advice.replace('its', 'the')}")
    assert path.read_bytes() == before
    # Without -m, kvtool finds the model of the session itself. If another file has replaced the model, the
    # error can name no option to leave out.
    model_copy = shutil.copy(chat_model, tmp_path / "own.gguf")
    assert run_kvtool(*_words(model_copy, tmp_path / "own.kv", *FIRST), stdin="one\n").returncode == 0
    shutil.copy(other_model, model_copy)
    done = run_kvtool("chat", "--session", tmp_path / "own.kv", stdin="two\n")
    assert_one_line(done, 9, "own.gguf of SHA-256 ")
    assert done.stderr.endswith(f"; {advice.replace('chat.kvs', 'own.kv')}")
    # options that change only the sampling may differ
    assert talk(TURNS[2:3], "--temp", "0.5", "--seed", "3").returncode == 0


@pytest.mark.parametrize("options", [["--policy", "full"], ["--budget", "64"], RECALL])
def test_reread_chat_begins_with_the_rendered_text_of_another_session(chat_model, talk, tmp_path, options):
    talk(TURNS[:4], *FIRST, "--system", "Be brief.")
    old, new = tmp_path / "chat.kvs", tmp_path / "new.kvs"
    before, text = old.read_bytes(), exported(old)
    other_model = tmp_path / "other.gguf"
    tiny.write_llama(other_model, chat_template=OTHER_TEMPLATE, n_ctx_train=2048, seed=1)
    words = _words(other_model, new, "--reread", old, *options)
    assert run_kvtool(*words).returncode == 0
    # the session is written before the first turn
    assert exported(new) == text
    resumed = run_kvtool(*words, stdin=f"{TURNS[4]}\n")
    assert_one_line(
        resumed, 2, f"{new} holds a chat; leave out --reread to continue it, or name a new file\n"
    )
    assert run_kvtool("chat", "--session", new, stdin=f"{TURNS[4]}\n").returncode == 0
    assert exported(new)[:-2] == text
    meta, arrays = session.read(new)
    assert meta["system"] == "Be brief."
    assert meta["options"]["model"] == str(other_model)
    with closing(Model(other_model)) as model:
        prompt = prefix_tokens(model, template_of(model).render(exported(new)[:-1]), 0)[0]
    assert arrays["tokens"][: len(prompt)].tolist() == prompt.tolist()
    assert old.read_bytes() == before


def test_reread_takes_the_model_of_the_session_and_a_typed_system_prompt(chat_model, talk, tmp_path):
    talk(TURNS[:1], *FIRST, "--system", "Be brief.")
    old, new = tmp_path / "chat.kvs", tmp_path / "new.kvs"
    done = run_kvtool("chat", "--session", new, "--reread", old, "--system", "Be long.", "-t", 1)
    assert done.returncode == 0, done.stderr
    assert session.read_meta(new)["options"]["model"] == str(chat_model)
    assert exported(new) == [{"role": "system", "content": "Be long."}, *exported(old)[1:]]
    # an empty system prompt removes the old one
    none = tmp_path / "none.kvs"
    assert run_kvtool("chat", "--session", none, "--reread", old, "--system", " ", "-t", 1).returncode == 0
    assert exported(none) == exported(old)[1:]
    assert_one_line(
        run_kvtool("chat", "--session", old, "--system", "", "-t", 1), 9, "has another system prompt; leave "
    )
    assert run_kvtool("chat", "--session", none, "--system", "", "-t", 1).returncode == 0


def test_reread_takes_an_exported_chat(chat_model, tmp_path):
    path, new = tmp_path / "chat.json", tmp_path / "new.kvs"
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One \u00e9?"},
        {"role": "assistant", "content": "Yes."},
    ]
    words = ("chat", "-m", chat_model, "-t", 1, "--session", new, "--reread", path)
    message = f"{path} is neither a session nor a JSON list of messages, each with role and content; "
    for wrong in (
        '["One?"]',
        "[" * 9999,
        '[{"role": "user", "content": null}]',
        json.dumps([{**chat[2], "tool_calls": [{"id": "c1"}]}]),
    ):
        path.write_text(wrong)
        assert_one_line(run_kvtool(*words), 9, message)
    exported_as = "the output of `kvtool session export --json`; name such a file\n"
    for wrong in ('{"messages": []}', "user: One?\n", ""):
        path.write_text(wrong)
        assert_one_line(run_kvtool(*words), 9, f"{path} is neither a session nor {exported_as}")
    path.write_text(json.dumps([*chat, chat[1], {**chat[2], "tool_calls": [call]}], indent=1))
    assert run_kvtool(*words).returncode == 0
    assert exported(new)[:4] == [*chat, chat[1]]
    assert '{"name": "add", "arguments": {}}' in exported(new)[4]["content"]
    assert session.read_meta(new)["options"]["model"] == str(chat_model)


def test_reread_that_is_stopped_or_refused_writes_nothing(chat_model, talk, tmp_path, monkeypatch):
    talk(TURNS[:4], *FIRST)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    words = _words(chat_model, tmp_path / "new.kvs", "--reread", tmp_path / "chat.kvs")
    full = (
        "does not fit in the cache (100) and `full` never evicts; use --policy recall or a larger --ctx-size"
    )
    assert_one_line(run_kvtool(*words, "--policy", "full", "-c", 100, stdin="five\n"), 5, full)
    # the context cannot be longer than the model was trained for
    short, original_positions = tmp_path / "short.gguf", ("--budget", 64, "--positions", "original")
    tiny.write_llama(short, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=100)
    for options, advice in (
        (("--policy", "full"), "use --policy recall or leave out --reread\n"),
        (
            ("--policy", "h2o", *original_positions),
            "choose --positions auto or in-cache, or leave out --reread\n",
        ),
    ):
        assert_one_line(run_kvtool(*words, "-m", short, *options, stdin="five\n"), 5, advice)
    short.unlink()
    read = Writer.read

    def stopped(writer, tokens):
        writer.stop = True
        return read(writer, tokens)

    monkeypatch.setattr(Writer, "read", stopped)
    done = run_kvtool(*words, *FIRST, stdin="five\n")
    assert (done.returncode, done.stdout) == (130, "")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_refusal_names_the_context_if_it_sets_the_budget(talk):
    assert talk(TURNS[:1], "--policy", "full", "-c", 200).returncode == 0
    words = "--ctx-size 200; it cannot continue with --ctx-size 250; leave out --ctx-size to continue it, or"
    assert_one_line(talk(TURNS[:1], "-c", 250), 9, f"was started with {words} read its text again with ")


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ("--policy full -c 200", "raise --ctx-size, or choose another policy, such as --policy recall"),
        (
            "--policy h2o --budget 96 --positions original -c 200",
            "continue with --positions auto or in-cache",
        ),
    ],
    ids=["full", "original"],
)
def test_full_session_advises_a_new_session(talk, tmp_path, options, advice):
    path = tmp_path / "chat.kvs"
    long = "many words " * 40
    first = talk([long], *options.split())
    # nothing is saved yet, so other options work
    assert first.stderr.endswith(f"; {advice}\n")
    assert talk(TURNS[:1], *options.split()).returncode == 0
    done = talk([long])
    assert (first.returncode, done.returncode) == (6, 6)
    reread_advice = f"`--reread {path} --session NEW.kv` reads this chat's text again\n"
    assert done.stderr.endswith(f"; {advice}, in a new session: {reread_advice}")


def test_damaged_session_gets_one_line_and_its_text_can_be_exported(talk, tmp_path):
    talk(TURNS[:2], *FIRST)
    path = tmp_path / "chat.kvs"
    text = exported(path)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    assert_one_line(talk(TURNS[2:3]), 9, "is damaged")
    assert path.read_bytes() == data
    named = shutil.copy(path, tmp_path / "a b.kvs")
    assert_one_line(
        talk(TURNS[2:3], session="a b.kvs"), 9, f"--reread '{named}' --session NEW.kv` reads its text again\n"
    )
    assert exported(path) == text
    assert talk(TURNS[2:3], *FIRST, "--reread", path, session="new.kvs").returncode == 0
    assert exported(tmp_path / "new.kvs")[:-2] == text


@pytest.mark.parametrize("n_cut", [None, 100, 9_000])
def test_show_says_that_a_file_is_damaged(talk, tmp_path, n_cut):
    talk(TURNS[:2], *FIRST)
    path = tmp_path / "chat.kvs"
    assert json.loads(of_session("show", "--json", path))["problem"] is None
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data[: -n_cut if n_cut else None])
    done = run_kvtool("session", "show", path)
    # the command still prints the values that it can read from the damaged file
    assert re.search(r"^turns +2 *$", done.stdout, re.M), done.stdout
    assert_one_line(done, 9, f"kvtool: {path} is damaged and its chat cannot continue; ", prints=True)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_undamaged_messages_can_be_exported_if_the_text_is_damaged(talk, tmp_path, flags):
    talk(TURNS[:2], *FIRST)
    path = tmp_path / "chat.kvs"
    data = path.read_bytes()
    path.write_bytes(data.replace(TURNS[1].encode() + b'"', TURNS[1].encode() + b"#", 1))
    done = run_kvtool("session", "export", path, *flags)
    assert TURNS[0] in done.stdout
    assert TURNS[1] not in done.stdout
    line = f"kvtool: {path} is damaged, and so is its text; messages may be missing or have wrong characters"
    assert_one_line(done, 9, line, prints=True)


def test_session_truncated_within_its_text_is_reported(talk, tmp_path):
    talk(TURNS[:2], *FIRST)
    path = tmp_path / "chat.kvs"
    # the first 200 bytes hold no message
    path.write_bytes(path.read_bytes()[:200])
    for command in ("show", "export"):
        line = f"kvtool: {path} is truncated, and so is its text; restore a copy, or name another file\n"
        assert_one_line(run_kvtool("session", command, path), 9, line)


def test_session_show_prints_readable_names_and_json_stable_keys(talk, tmp_path):
    system = "Be [b]brief[/b].\nAnd kind, and very patient."
    talk(TURNS[:2], *FIRST, "--system", system)
    path = tmp_path / "chat.kvs"
    record = json.loads(of_session("show", "--json", path))
    assert list(record) == [
        *("file", "size", "saved", "kvtool", "llama_cpp", "model", "model_sha256", "policy", "parameters"),
        *("turns", "tokens", "cells", "kv_bytes", "archived", "archive_bytes", "system", "problem"),
    ]
    output = of_session("show", path)
    names = re.findall(r"^(\S+(?: \S+)*)  ", output, re.M)
    assert names == [
        *("file", "size", "saved", "kvtool", "llama.cpp", "model", "sha256", "policy", "eviction", "turns"),
        *("tokens so far", "cells", "cache", "system prompt"),
    ]
    assert record["system"] == system
    assert re.search(r"^system prompt +Be \[b\]brief\[/b\]\. And kind, and very pat\u2026 *$", output, re.M)
    assert re.search(rf"^cells +{record['cells']:.0f} of 96 per row *$", output, re.M)
    assert re.search(r"^eviction +every 12 tokens *$", output, re.M)
    # the policy's line omits budget and eviction, which have their own lines
    assert re.search(r"^policy +h2o window=\d+ sinks=0 ", output, re.M)


def test_turn_with_recall_appends_only_new_data_to_the_archive(talk, tmp_path):
    path, archive = tmp_path / "chat.kvs", tmp_path / "chat.kvs.archive"
    talk(TURNS[:2], *RECALL, "--archive-type", "q8_0")
    before = archive.read_bytes(), archive.stat().st_ino, path.stat().st_size
    assert talk(TURNS[2:12]).returncode == 0
    data = archive.read_bytes()
    # the archive file only grows: new bytes are appended, and the old bytes do not change
    assert data.startswith(before[0])
    assert archive.stat().st_ino == before[1]
    assert len(data) > 4 * len(before[0])
    saved = session.read(path)[1]
    n_bytes = (saved["archive"][1] - saved["archive"][0]) * saved["archive.layers"].sum()
    # in addition to tokens, the archive has clusters of tokens
    n_more = len(data) - archive_file._N_FIRST - n_bytes
    assert saved[CLUSTERS][:, 3].sum() <= n_more < 0.01 * len(data)
    assert path.stat().st_size - before[2] < 0.1 * len(data)
    summary = json.loads(of_session("show", "--json", path))
    assert summary["size"] == len(data) + path.stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat.kvs", "chat.kvs.archive"]


@pytest.mark.parametrize("what", ["is damaged", "is missing", "belongs to another session"])
def test_unreadable_archive_gets_one_line_and_the_text_can_be_exported(talk, tmp_path, what):
    talk(TURNS[:6], *RECALL)
    path, archive = tmp_path / "chat.kvs", tmp_path / "chat.kvs.archive"
    before, text = path.read_bytes(), exported(path)
    if what == "is damaged":
        data = bytearray(archive.read_bytes())
        data[len(data) // 2] ^= 4
        archive.write_bytes(data)
    elif what == "is missing":
        archive.unlink()
    else:
        talk(TURNS[:6], *RECALL, session="other")
        (tmp_path / "other.archive").rename(archive)
    assert_one_line(talk(TURNS[6:7]), 9, f"{archive} {what}, and the chat in {path} cannot continue")
    named = shutil.copy(path, tmp_path / "a b.kvs")
    if what == "is missing":
        assert_one_line(
            talk(TURNS[6:7], session="a b.kvs"), 9, f"`kvtool chat --reread '{named}' --session NEW.kv`\n"
        )
    assert path.read_bytes() == before
    assert exported(path) == text
    done = run_kvtool("session", "show", "--json", path)
    assert done.returncode == 9
    assert json.loads(done.stdout)["turns"] == 6
    assert f"{archive} {what}" in json.loads(done.stdout)["problem"]


def test_archive_of_a_moved_session_is_renamed_and_the_chat_says_so(talk, tmp_path):
    assert talk(TURNS[:12], *RECALL).returncode == 0
    (tmp_path / "chat.kvs").rename(tmp_path / "moved")
    line = "chat.kvs.archive belonged to another chat; it is now chat.kvs.1.archive"
    assert re.fullmatch(rf"{RECALL_LINE}{line}\n", talk(TURNS[:2], *RECALL).stderr)


def test_session_of_an_earlier_version_with_inline_archive_continues(talk, tmp_path):
    # Both chats must round keys equally. With draft tokens, the number of tokens in a step, and so the
    # rounding of keys, would depend on the machine's speed.
    for name in ("chat.kvs", "whole"):
        talk(TURNS[:6], *RECALL, "--draft", "off", session=name)
    path = tmp_path / "chat.kvs"
    meta, arrays = session.read(path)
    listing = ("archive.segments", "archive.sha256", "archive.id", "archive.layers")
    session.write(path, meta, [(name, array) for name, array in arrays.items() if name not in listing])
    (tmp_path / "chat.kvs.archive").unlink()
    assert path.read_bytes().startswith(b"kvtool session 1 ")
    for name in ("chat.kvs", "whole"):
        assert talk(TURNS[6:9], "--draft", "off", session=name).returncode == 0
    assert exported(path) == exported(tmp_path / "whole")
    assert path.read_bytes().startswith(b"kvtool session 2 ")
    saved, whole = (session.read(each)[1] for each in (path, tmp_path / "whole"))
    for name in set(whole) - set(listing):
        assert (saved[name] == whole[name]).all(), name


def _with_meta(path, line):
    """Replace the JSON line of a session file, and update the hash of this line."""
    first, _, rest = path.read_bytes().split(b"\n", 2)
    name, number, _, of_arrays = first.rsplit(b" ", 3)
    digest = hashlib.sha256(line + b"\n").hexdigest().encode()
    path.write_bytes(b"\n".join([b" ".join([name, number, digest, of_arrays]), line, rest]))


def test_session_without_chat_values_is_refused_and_not_replaced(chat_model, talk, tmp_path):
    path = tmp_path / "chat.kvs"
    talk(TURNS[:1], *FIRST)
    meta = session.read_meta(path)
    commands = ["session", "show", path], ["session", "export", path], _words(chat_model, path)
    commands += (["chat", "-m", chat_model, "--reread", path],)
    lacking = ({**meta, name: None} for name in ("messages", "fixed", "n_turn"))
    for changed in ({}, [], {**meta, "messages": [{"role": "user"}]}, *lacking):
        _with_meta(path, json.dumps(changed).encode())
        before = path.read_bytes()
        for command in commands:
            done = run_kvtool(*command, stdin="hello\n")
            assert_one_line(done, 9, "chat.kvs lacks values of a chat", prints="export" in command)
        assert path.read_bytes() == before
    _with_meta(path, b"[" * 100_000)
    for command in commands:
        assert_one_line(run_kvtool(*command, stdin="hello\n"), 9, "chat.kvs has no text that kvtool can read")


def test_second_chat_on_the_same_session_is_refused(chat_model, talk, tmp_path):
    chat = fork_server.Popen(
        _command(chat_model, tmp_path / "chat.kvs", *FIRST), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    chat.stdin.write(b"hello\n")
    chat.stdin.flush()
    assert chat.stdout.readline()
    assert_one_line(talk(TURNS[:1]), 9, "in use by another chat")
    chat.communicate(b"bye\n", timeout=TIMEOUT_S)
    assert chat.returncode == 0
    assert len(exported(tmp_path / "chat.kvs")) == 4
    assert talk(TURNS[:1]).returncode == 0
    assert not list(tmp_path.glob("*.lock"))


def test_full_disk_keeps_the_last_saved_session_and_archive(talk, tmp_path):
    talk(TURNS[:6], *RECALL, "--archive-type", "q8_0")
    path, archive = tmp_path / "chat.kvs", tmp_path / "chat.kvs.archive"
    before = path.read_bytes(), archive.read_bytes()
    # the limit has room for the whole session file, but only for a part of the new archive segment
    assert len(before[0]) < len(before[1])
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (len(before[1]) + 99, resource.RLIM_INFINITY))
    done = talk(TURNS[6:8], preexec_fn=full)
    assert done.returncode == 9
    assert re.fullmatch(RECALL_LINE + r"kvtool: cannot write [^\n]+\n", done.stderr)
    assert f"cannot write {archive}: File too large; the last saved version is still there" in done.stderr
    assert (path.read_bytes(), archive.read_bytes()) == before
    assert len(list(tmp_path.iterdir())) == 2
    assert talk(TURNS[6:8]).returncode == 0


def test_unwritable_session_is_refused_before_the_chat(talk):
    assert_one_line(talk(TURNS[:1], *FIRST, session="no/such/folder/chat.kvs"), 9)


def test_the_transcript_is_appended(talk, tmp_path):
    path = tmp_path / "said.txt"
    for turns in (TURNS[:2], TURNS[2:3]):
        assert talk(turns, *FIRST, "--transcript", path).returncode == 0
    transcript = of_session("export", tmp_path / "chat.kvs")
    assert path.read_bytes().decode().replace("\r\n", "\n") == transcript
    assert transcript.count("> line") == 3


def test_chat_keeps_the_archive_type_of_its_session(talk, tmp_path):
    path = tmp_path / "chat.kvs"

    def stored():
        return session.read_meta(path)["fixed"]["archive_type"]

    talk(TURNS[:6], *RECALL, "--archive-type", "q8_0")
    assert talk(TURNS[6:7]).returncode == 0
    assert stored() == "q8_0"
    done = talk(TURNS[7:8], "--archive-type", "f16")
    assert done.returncode == 9
    assert "was started with --archive-type q8_0; it cannot continue with --archive-type f16" in done.stderr
    path.unlink()
    talk(TURNS[:6], *RECALL, "--archive-type", "q4_1")
    assert stored() == "rotated q4_1"
    assert talk(TURNS[6:7], "--archive-type", "q4_1").returncode == 0
    # earlier versions stored q4_1 without a Hadamard matrix
    meta, arrays = session.read(path)
    meta["fixed"]["archive_type"] = "q4_1"
    session.write(path, meta, arrays.items())
    for options in ((), ("--archive-type", "q4_1")):
        assert talk(TURNS[7:8], *options).returncode == 0
        assert stored() == "q4_1"
    done = talk(TURNS[8:9], "--archive-type", "q4_0")
    assert "was started with --archive-type q4_1; it cannot continue with --archive-type q4_0" in done.stderr
    path.unlink()
    talk(TURNS[:6], *RECALL)
    assert stored() == ("q8_0" if has_gpu() else "rotated iq4_nl")
    # the session stores the type that kvtool chose here, because the choice depends on whether there is a GPU
    assert session.read_meta(path)["options"]["archive_type"] == stored().removeprefix("rotated ")
    assert talk(TURNS[6:7]).returncode == 0


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("name", ["chat.kvs.archive", "chat.kvs.archive.next"])
@pytest.mark.parametrize("options", [RECALL, ("--policy", "h2o", "--budget", "64")], ids=["recall", "h2o"])
def test_foreign_file_at_the_archives_path_is_refused_before_the_first_turn(
    talk, tmp_path, is_new, name, options
):
    path, archive = tmp_path / "chat.kvs", tmp_path / name
    line = f"{name} is not an archive of kvtool; rename it, or name another session"
    if not is_new:
        talk(TURNS[:3], *options)
        before = path.read_bytes()
        assert archive.exists() == (name == "chat.kvs.archive")
        archive.unlink(missing_ok=True)
    archive.mkdir()
    assert_one_line(talk(TURNS[3:4], *options), 9, line)
    archive.rmdir()
    archive.write_bytes(b"my own file")
    assert_one_line(talk(TURNS[3:4], *options), 9, line)
    assert archive.read_bytes() == b"my own file"
    assert path.exists() != is_new
    assert is_new or path.read_bytes() == before
    if "h2o" in options:
        # the chat continues even without its checkpoints
        archive.rename(tmp_path / "mine")
        assert talk(TURNS[3:4], *options).returncode == 0
        assert session.read_meta(path)["n_turn"] == (1 if is_new else 4)


def test_search_options_of_recall_may_change_and_old_options_are_dropped(talk, tmp_path):
    talk(TURNS[:6], *RECALL, "-o", "exact=64")
    assert talk(TURNS[6:7], "-o", "exact=32", "-o", "chunk=8").returncode == 0
    done = talk(TURNS[7:8], "-o", "sinks=2")
    assert done.returncode == 9
    assert "was started with -o sinks=4; it cannot continue with -o sinks=2" in done.stderr
    path = tmp_path / "chat.kvs"
    meta, arrays = session.read(path)
    had = meta["fixed"]["parameters"] | {"index": "q8", "search": "tokens", "exact": 512, "recalled": 9}
    meta["fixed"]["parameters"] = had
    meta["options"]["options"] = ["sinks=4", "index=q8", "search=tokens", "recalled=9"]
    session.write(path, meta, arrays.items())
    done = talk(TURNS[7:8])
    assert done.returncode == 0, done.stderr
    assert len(exported(path)) == 2 * 8
    assert session.read_meta(path)["options"]["options"] == ["sinks=4"]


def test_session_of_a_policy_that_had_no_such_parameter_yet_continues_with_the_default(talk, tmp_path):
    talk(TURNS[:2], *FIRST, "--policy", "scissorhands")
    path = tmp_path / "chat.kvs"
    meta, arrays = session.read(path)
    assert meta["fixed"]["parameters"].pop("t") == "stream"
    session.write(path, meta, arrays.items())
    done = talk(TURNS[2:3], "-o", "t=cells")
    assert done.returncode == 9
    assert "was started with -o t=stream; it cannot continue with -o t=cells; leave out -o" in done.stderr
    assert talk(TURNS[2:3]).returncode == 0
    assert session.read_meta(path)["fixed"]["parameters"]["t"] == "stream"


@pytest.mark.parametrize("command", [["session", "show"], ["session", "export"], ["chat", "--session"]])
def test_file_without_read_permission_is_reported_as_no_session(monkeypatch, tmp_path, command):
    (tmp_path / "chat.kv").write_text("no session")
    # root may read all files, so the test replaces the check of permissions
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert_one_line(run_kvtool(*command, tmp_path / "chat.kv"), 9, "chat.kv is not a kvtool session")


def test_only_a_typed_system_prompt_counts_for_an_earlier_chat(chat_model, talk, tmp_path):
    path, new, other = (tmp_path / name for name in ("chat.kvs", "new.kvs", "other.kvs"))
    talk(TURNS[:1], *FIRST)
    (tmp_path / "text").write_text("Be brief.")
    for env in ({"KVTOOL_CHAT_SYSTEM": "Be brief."}, {"KVTOOL_CHAT_SYSTEM_FILE": str(tmp_path / "text")}):
        done = run_kvtool("chat", "--session", path, "-n", 4, stdin=f"{TURNS[1]}\n", env=env)
        assert done.returncode == 0, done.stderr
    env = {"KVTOOL_CHAT_SYSTEM": "Be brief."}
    assert [message["role"] for message in exported(path)] == ["user", "assistant"] * 3
    assert run_kvtool("chat", "--session", new, "--reread", path, "-t", 1, env=env).returncode == 0
    assert exported(new) == exported(path)
    done = run_kvtool("chat", "--session", path, "--system", "Be long.", env=env)
    assert_one_line(done, 9, "has another system prompt; leave --system out, or ")
    # a new chat takes it
    assert run_kvtool(*_words(chat_model, other), stdin="one\n", env=env).returncode == 0
    assert session.read_meta(other)["system"] == "Be brief."
