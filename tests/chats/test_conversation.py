"""Chats: all turns use one cache, only new tokens are decoded, and the template's structure is kept."""

from __future__ import annotations

import io
import os
import re
import signal
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from kvtool import policies
from kvtool.chats import session
from kvtool.chats.conversation import Conversation
from kvtool.chats.prompt import template_of
from kvtool.chats.template import GEMMA, Template
from kvtool.chats.undo import MAX_COPIES, Copy, TurnEnd, UndoStack, turn_label
from kvtool.chats.writer import Writer
from kvtool.cli.chat.files import ChatFiles
from kvtool.cli.chat.screen import Terminal, whereabouts
from kvtool.cli.chat.slash_commands import Commands
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import RunOptions
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import ModelError, SessionError, StreamEnd, UsageError
from kvtool.llama.sampler import Sampler
from kvtool.measure import holdings
from tests import tiny
from tests.engine.exact_engines import KINDS

COUNTS = "{{ thinking_budget or 'any' }} tokens.<think></think>" + tiny.CHAT_TEMPLATE
"""Template whose first words depend on the thinking budget."""


def greedy(model):
    return Sampler(model, seed=1)


@pytest.fixture
def chat(model):
    yield from chats(model)


@pytest.fixture
def real_chat(real_model):
    yield from chats(real_model)


def chats(model):
    talks = []

    def make(policy="buzz", budget=256, system=None, evict_every=None, undoable=False, **settings):
        settings = Settings(n_batch=64, n_threads=1, **settings)
        engine = Engine(model, policies.fit(policy, budget, evict_every), settings)
        writer = Writer(engine, greedy(model))
        talks.append(Conversation(writer, template_of(model), system, undoable=undoable))
        return talks[-1]

    yield make
    for talk in talks:
        talk.close()
        talk.writer.engine.close()


def test_builtin_gemma_template_renders_gemma_format():
    template = Template(GEMMA, "<bos>", "<eos>")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello. "}]
    assert template.render(chat) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHello.<end_of_turn>\n<start_of_turn>model\n"
    )
    assert template.render(chat[1:], reply=False) == "<bos><start_of_turn>user\nHello.<end_of_turn>\n"
    assert template.turn(chat, "Fine.") == (
        "<end_of_turn>\n<start_of_turn>user\nFine.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_template_may_contain_generation_blocks():
    source = "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}"
    assert Template(source, "", "").render([{"role": "assistant", "content": "x"}] * 2) == "<x><x>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{% for %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'x' * 10**15 }}",
        "(".join(["{{ "] * 300) + "1" + ")" * 299,
    ],
)
def test_failing_or_unsafe_templates_raise_a_model_error(source):
    with pytest.raises(ModelError, match="chat template fails"):
        Template(source, "", "").render([{"role": "user", "content": "x"}])


def test_a_turn_decodes_only_new_tokens_and_the_cache_holds_the_whole_chat(chat):
    talk = chat(budget=1024, system="You count waves.")
    writer, model = talk.writer, talk.writer.engine.model
    "".join(talk.reply("Hello!", 12))
    before = writer.engine.n_past
    "".join(talk.reply("And who are you?", 12))
    turn = model.tokenize(talk.template.turn(talk.messages[:-1], "And who are you?"), special=True)
    assert before + len(turn) <= writer.engine.n_past <= before + len(turn) + 12
    whole = talk.template.render(talk.messages, reply=False)
    # the last token of a reply, and the end marker, are decoded only with the next turn
    assert abs(len(model.tokenize(whole, special=True)) - writer.engine.n_past) <= 3
    assert len(writer.tokens) == writer.engine.n_past
    assert whole.startswith("".join(holdings.texts(model, writer.tokens))[:-1])
    talk.reset()
    assert len(writer.tokens) == 0


def test_system_prompt_is_pinned_and_never_evicted(chat):
    talk = chat(policy="local", budget=96, system="You are a lighthouse keeper who counts waves.")
    engine = talk.writer.engine
    talk.pin_system()
    n_pinned = engine.n_pinned
    assert n_pinned > 8
    for text in ("Tell me a long story about the sea.", "More.", "More."):
        "".join(talk.reply(text, 60))
        assert engine.n_pinned == n_pinned
    assert engine.n_evicted > 0
    live = engine.rows.pos[:, : engine.n_kv]
    assert all((live == pos).any(axis=1).all() for pos in range(n_pinned))


def test_system_prompt_larger_than_the_budget_is_refused(chat):
    talk = chat(budget=64, system="word " * 200, undoable=True)
    with pytest.raises(UsageError, match="choose a larger budget"):
        "".join(talk.reply("Hello", 4))
    assert talk.undo() is None


def test_tokens_left_unread_by_a_stop_are_read_before_the_next_tokens(chat, model):
    writer = chat().writer
    tokens = model.tokenize("One two three four five six seven eight nine ten. " * 20)
    # stop after two batches of 64 tokens
    decode = writer.engine._decode

    def stop_after_the_second(*args, **kwargs):
        decode(*args, **kwargs)
        writer.stop = writer.engine.n_past >= 128

    writer.engine._decode = stop_after_the_second
    assert not writer.read(tokens)
    assert writer.engine.n_past == 128
    writer.engine._decode, writer.stop = decode, False
    assert writer.read(tokens[:3])
    assert writer.engine.n_past == len(tokens) + 3


def test_read_waits_once_for_the_device_and_write_does_not(chat, model, monkeypatch):
    writer = chat().writer
    context, calls = writer.engine.context, []
    decode, wait = context.decode, context.wait
    monkeypatch.setattr(context, "decode", lambda *arguments: calls.append("decode") or decode(*arguments))
    monkeypatch.setattr(context, "wait", lambda: calls.append("wait") or wait())
    writer.read(model.tokenize("One two three four. " * 8))
    assert calls == [*["decode"] * 3, "wait"]
    # `write` does not wait for the device
    list(writer.write(2))
    assert calls.count("wait") == 1


@pytest.mark.parametrize("marker", ["<|im_end|>", "<|endoftext|>"])
def test_reply_ends_at_an_end_of_turn_token(real_chat, real_model, monkeypatch, marker):
    writer = real_chat().writer
    (the,) = real_model.tokenize("the").tolist()
    writer.read(real_model.tokenize("the"))
    (end,) = real_model.tokenize(marker, special=True)
    sampled = iter([the, the, int(end)])
    monkeypatch.setattr(writer.sampler, "sample", lambda context: next(sampled))
    assert "".join(writer.write()) == "thethe"
    assert writer.n_written == 2


def test_reset_chat_has_a_new_id_and_answers_like_a_new_chat(chat):
    talk = chat(undoable=True)
    first, id_ = "".join(talk.reply("Name a fruit.", 12)), talk.id
    "".join(talk.reply("Another.", 12))
    talk.remember("/reset")
    talk.reset()
    assert talk.id != id_
    assert "".join(talk.reply("Name a fruit.", 12)) == first
    talk.undo()
    talk.undo()
    assert talk.id == id_


def test_streamed_pieces_never_split_a_character(model, monkeypatch):
    engine = Engine(model, policies.fit("buzz", 256), Settings(n_threads=1))
    euro = "€".encode()
    pieces = iter([euro[:1], euro[1:2], euro[2:], b"\xff"])
    monkeypatch.setattr(model, "piece", lambda token, special=False: next(pieces))
    writer = Writer(engine, greedy(model))
    writer.read(model.tokenize("Hello"))
    assert list(writer.write(4)) == ["€", "\ufffd"]
    engine.close()


def test_undo_takes_back_turn_by_turn_and_keeps_the_system_prompt(chat):
    talk = chat(system="You are a pirate.", undoable=True)
    assert not talk.undo()
    first = "".join(talk.reply("Name a fruit.", 12))
    before = (talk.writer.engine.n_past, list(talk.messages))
    reply = "".join(talk.reply("And a colour.", 12))
    assert talk.undo()
    assert (talk.writer.engine.n_past, talk.messages) == before
    # sampling is greedy, so the same question gets the same reply
    assert "".join(talk.reply("And a colour.", 12)) == reply
    assert talk.undo() == 'the turn "And a colour."'
    assert talk.messages == before[1]
    assert talk.undo() == 'the turn "Name a fruit."'
    assert talk.writer.is_new
    assert talk.undo() is None
    assert "".join(talk.reply("Name a fruit.", 12)) == first


def test_undo_restores_the_thinking_budget(chat):
    talk = chat(undoable=True)
    files = ChatFiles(talk, RunOptions(policy="buzz"), GenerationOptions())
    talk.use_template(Template(COUNTS, "", ""))
    "".join(talk.reply("Name a fruit.", 4))
    past = talk._past(talk.template)
    for budget in (64, None):
        before = talk.thought_budget
        assert talk.remember(f"/set think_budget {budget}")
        talk.set_effort(None, budget)
        assert files.generation.think_budget == budget
        assert talk.undo() == f"/set think_budget {budget}"
        assert talk.thought_budget == files.generation.think_budget == before
        talk.set_effort(None, budget)
    assert talk._past(talk.template) == past


def test_thinking_budget_that_the_session_lacks_is_restored(chat, tmp_path):
    talk = chat(undoable=True)
    files = ChatFiles(talk, RunOptions(policy="buzz"), GenerationOptions(), tmp_path / "chat.kvs")
    "".join(talk.reply("Name a fruit.", 4))
    files.keep()
    talk.set_effort(None, 64)
    assert talk.remember("/reset")
    talk.reset()
    talk.set_effort(None, 7)
    talk.undo()
    assert talk.thought_budget == 64
    files.close()


def test_session_of_an_earlier_version_has_the_thinking_budget_among_its_options(chat, tmp_path):
    talk, resumed = chat(), chat()
    talk.set_effort(None, 64)
    "".join(talk.reply("Name a fruit.", 4))
    ChatFiles(talk, RunOptions(policy="buzz"), GenerationOptions()).save(tmp_path / "chat.kvs")
    meta, arrays = session.read(tmp_path / "chat.kvs")
    assert meta.pop("thought_budget") == meta["options"]["think_budget"] == 64
    resumed.resume(meta, arrays)
    assert resumed.thought_budget == 64


def test_turns_rendered_with_another_thinking_budget_cannot_be_undone(chat):
    talk = chat()
    talk.use_template(Template(COUNTS, "", ""))
    "".join(talk.reply("Name a fruit.", 4))
    messages = list(talk.messages)
    talk.set_effort(None, 64)
    assert talk.undo() is None
    assert talk.newest_turn == "Name a fruit."
    assert talk.messages == messages
    # later turns can be taken back
    "".join(talk.reply("And a colour.", 4))
    assert talk.undo() == 'the turn "And a colour."'
    assert talk.messages == messages
    stream, piece = [*talk.writer.tokens, *talk.writer.unread], talk.writer.engine.model.piece
    text = b"".join(piece(int(token), special=True) for token in stream)
    assert text.decode() == talk._past(talk.template)


@pytest.mark.parametrize("n_system", [0, 1])
def test_reread_splits_thoughts_and_reads_all_other_text(chat, model, n_system):
    thought = {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}
    replies = {
        "Four.": {"role": "assistant", "content": "Four."},
        "<think>Hm.</think>\n\nFour.": thought,
        # the reply header has opened the thought
        "Hm.</think>\n\nFour.": thought,
        "The tags are <think> and </think>.": {
            "role": "assistant",
            "content": "The tags are <think> and </think>.",
        },
    }
    user = {"role": "user", "content": "Hm.</think>Why?"}
    other_messages = [{"role": "system", "content": "Be brief."}][:n_system]
    for text in replies:
        other_messages += [user, {"role": "assistant", "content": text}]
    reread = chat()
    reread.reread(other_messages)
    expected = [each for reply in replies.values() for each in (user, reply)]
    expected_all = [*other_messages[:n_system], *expected]
    assert reread.messages == expected_all
    # the penalties count the replies
    texts = [each["content"] for each in replies.values()]
    tokens = np.concatenate([model.tokenize(text) for text in texts])
    assert [*reread.writer.sampler.recent] == tokens[-reread.writer.sampler.recent.maxlen :].tolist()
    assert (reread.system, reread.n_turn, reread.n_reply) == ("Be brief." if n_system else None, 4, 4)
    text = b"".join(model.piece(token, special=True) for token in reread.writer.unread.tolist()).decode()
    assert text + "[e]" == reread.template.render(reread.messages, reply=False)
    # the next turn first reads the text; to undo this turn, nothing is read again
    reread.writer.read(reread.writer.unread[:0])
    n = reread.writer.engine.n_past
    list(reread.reply("and now?", 4))
    reread.undo()
    assert (reread.writer.engine.n_past, len(reread.writer.unread)) == (n, 0)
    # of the old turns, only the last can be taken back
    assert reread.undo() == turn_label(user["content"])
    assert reread.undo() is None
    text = b"".join(model.piece(token, special=True) for token in reread.writer.stream.tolist()).decode()
    assert text + "[e]" == reread.template.render(expected_all[:-2], reply=False)
    list(reread.reply("and now?", 4))
    assert reread.messages[:-1] == [*expected_all[:-2], {"role": "user", "content": "and now?"}]


@pytest.mark.parametrize("is_read", [False, True])
def test_only_turn_of_a_reread_chat_can_be_replaced(chat, is_read):
    other, reread = chat(), chat()
    reread.reread([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}], "Be brief.")
    if is_read:
        reread.writer.read(reread.writer.unread[:0])
    assert reread.undo_turn() == "one"
    other.reset("Be brief.")
    for each in (reread, other):
        each.read_turn("three")
    assert reread.writer.stream.tolist() == other.writer.stream.tolist()
    assert reread.writer.engine.n_pinned == other.writer.engine.n_pinned


def test_reread_of_a_chat_without_turns_starts_a_new_chat(chat):
    reread = chat()
    reread.reread([])
    reread.reread([{"role": "system", "content": "Be brief."}])
    assert (reread.system, reread.n_turn, reread.writer.is_new) == ("Be brief.", 0, True)


def test_undo_of_reset_restores_the_chat_even_if_saving_failed(chat, tmp_path, monkeypatch):
    talk = chat(undoable=True)
    files = ChatFiles(talk, RunOptions(policy="buzz"), GenerationOptions(), tmp_path / "chat.kvs")

    def turn(text):
        "".join(talk.reply(text, 12))
        files.keep()

    def reset():
        talk.remember("/reset")
        talk.reset()
        turn("Name another chat.")
        assert talk.undo() == 'the turn "Name another chat."'
        assert talk.undo() == "/reset"

    turn("Name a fruit.")
    before, messages = everything(talk), list(talk.messages)
    # `undo` restores a copy of the chat. Here the session file serves as the copy, so no temporary file is
    # made.
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", None)
        reset()
    assert (everything(talk), talk.messages) == (before, messages)
    # If saving fails, the session file lacks the last turn. Then `undo` needs a temporary file for the copy.
    monkeypatch.setattr(files, "_write", _fails)
    turn("And an animal.")
    before, messages = everything(talk), list(talk.messages)
    reset()
    assert (everything(talk), talk.messages) == (before, messages)
    files.close()


def test_undo_after_reset_ignores_the_old_session_file(chat, tmp_path):
    talk = chat(undoable=True)
    files = ChatFiles(talk, RunOptions(policy="buzz"), GenerationOptions(), tmp_path / "chat.kvs")
    "".join(talk.reply("Name a fruit.", 4))
    files.keep()
    talk.remember("/reset")
    talk.reset()
    "".join(talk.reply("Name a colour.", 4))
    assert talk.undo() == 'the turn "Name a colour."'
    assert (talk.n_turn, talk.writer.is_new) == (0, True)
    assert talk.undo() == "/reset"
    assert talk.n_turn == 1
    files.close()


@pytest.fixture
def keep(chat):
    """keep(path): return a chat with a tiny archive, and its ChatFiles.

    path: the session file, or None.
    """
    files_to_close = []

    def make(path):
        # the archive has the same type as the cache, so a restored state equals the saved state
        talk = chat("recall", 64, "Be brief.", archive_type="f16", undoable=True)
        files_to_close.append(ChatFiles(talk, RunOptions(policy="recall"), GenerationOptions(), path))
        return talk, files_to_close[-1]

    yield make
    for files in files_to_close:
        files.close()


def say(talk, files, text):
    "".join(talk.reply(text, 24))
    files.keep()
    files.check()


def everything(talk):
    return {name: array.tobytes() for name, array in talk.writer.engine.save()}


def check_alike(talk, other):
    """Check that two chats hold and archive the same tokens.

    Tokens may be in different cells. The archived keys and values may therefore differ by rounding errors.
    """
    saved, others = (dict(each.writer.engine.save()) for each in (talk, other))
    for name in ("engine", "live", "archive"):
        assert (saved[name] == others[name]).all(), name
    assert (np.sort(saved["pos"]) == np.sort(others["pos"])).all()
    for name in ("archive.0", "archive.1"):
        assert np.abs(saved[name].view(np.float16) - others[name].view(np.float16)).max() < 0.05


@pytest.mark.parametrize("has_session", [True, False])
def test_undone_turns_leave_no_trace_in_the_archive(keep, tmp_path, has_session):
    story = "Tell me a story of the sea, of the keeper of a light, and of the waves that he counts."
    talk, files = keep(tmp_path / "chat.kvs" if has_session else None)
    for text in (story, "And of a storm that lasts for a week.", "And then?"):
        say(talk, files, text)
    archived = talk.archive.end
    for text in ("What did he eat?", "And of a storm that lasts for a week."):
        for _ in range(2):
            assert talk.undo()
            files.keep_session(undone=True)
        assert talk.archive.end < archived
        for question in (text, "Of whom?"):
            say(talk, files, question)
    plain, plain_files = keep(tmp_path / "plain.kvs")
    for text in (story, "And of a storm that lasts for a week.", "Of whom?"):
        say(plain, plain_files, text)
    assert talk.messages == plain.messages
    check_alike(talk, plain)
    if has_session:
        resumed, resumed_files = keep(tmp_path / "chat.kvs")
        files.close()
        resumed_files.resume(tmp_path / "chat.kvs")
        check_alike(resumed, plain)
        for each in (resumed, resumed_files), (plain, plain_files):
            say(*each, "Why?")
        assert resumed.messages == plain.messages
        # turns from before the session was resumed can be undone
        assert resumed.undo() == 'the turn "Why?"'
        assert resumed.undo() == 'the turn "Of whom?"'
        resumed_files.keep_session(undone=True)
        for text in ("Of whom?", "Why?"):
            say(resumed, resumed_files, text)
        assert resumed.messages == plain.messages
        check_alike(resumed, plain)
        assert sorted(path.name for path in tmp_path.glob("chat*")) == ["chat.kvs", "chat.kvs.archive"]


def test_recall_undoes_turns_without_copies(chat, monkeypatch):
    talk = chat("recall", 64, "Be brief.", archive_type="f16", undoable=True)
    monkeypatch.setattr(session, "dump", _fails)
    texts = [
        "Tell me a story of the sea, and of the keeper of a light.",
        *(f"And then, {n}?" for n in range(12)),
    ]
    replies, sizes = [], []
    for text in texts:
        sizes.append(talk.writer.engine.n_past)
        replies.append("".join(talk.reply(text, 12)))
    engine, n_all = talk.writer.engine, talk.writer.engine.n_past
    assert engine.n_archived > 200
    assert len(talk.undo_stack) == len(talk.undo_stack.turn_ends) == len(texts)
    read, plain = [], engine.context.decode
    monkeypatch.setattr(
        engine.context, "decode", lambda tokens, *rest: read.append(tokens) or plain(tokens, *rest)
    )
    # undo until `turn` turns are left, and then ask the next question again
    for turn in (12, 11, 5, 4, 1):
        while len(talk.undo_stack) > turn:
            assert talk.undo()
        assert not read
        assert (engine.n_past, talk.n_turn) == (sizes[turn], turn)
        assert "".join(talk.reply(texts[turn], 12)) == replies[turn]
        # each new token was decoded once
        assert sum(map(len, read)) == engine.n_past - sizes[turn]
        read.clear()
    while talk.undo():
        pass
    assert talk.writer.is_new
    assert n_all > 300


@pytest.mark.parametrize("policy", KINDS)
def test_evicting_policies_undo_turns_without_copies_even_after_resume(chat, tmp_path, monkeypatch, policy):
    def talker():
        talk = chat(policy, 64, "Be brief.", undoable=True)
        files = ChatFiles(talk, RunOptions(policy=policy), GenerationOptions(), tmp_path / "chat.kvs")
        return talk, files

    def say(talk, text):
        return "".join(talk.reply(text, 12))

    talk, files = talker()
    history = []
    monkeypatch.setattr(talk, "_files", None)
    for text in ("Name a fruit. " * 9, "And a colour. " * 7, "And an animal."):
        history.append((list(talk.messages), text, say(talk, text)))
        files.keep()
    # corm decides for itself how much to keep, so it may evict nothing
    assert talk.writer.engine.n_evicted > 0 or policy == "corm"
    later, later_files = talker()
    later.resume(*later_files.read(tmp_path / "chat.kvs"))
    files.close(), later_files.close()
    for each in (talk, later):
        for messages, text, reply in reversed(history):
            assert each.undo_turn() == text
            assert each.messages == messages
            # the same stream and the same seed give the same reply
            each.n_reply = len(messages) // 2
            assert say(each, text) == reply
            assert each.undo_turn() == text
        assert each.undo() is None


@pytest.mark.share(2, "policy")
@pytest.mark.parametrize("policy", ["recall", "h2o", "full"])
@pytest.mark.parametrize("loaded", ["other", "chat"])
def test_undo_takes_back_the_turns_of_a_loaded_chat_and_then_the_load(chat, tmp_path, policy, loaded):
    def talker(name):
        talk = chat(policy, 1024 if policy == "full" else 64, "Be brief.", undoable=True)
        path = tmp_path / f"{name}.kvs"
        return talk, ChatFiles(talk, RunOptions(policy=policy), GenerationOptions(), path)

    def take_back(talk, files, *changes):
        for change in changes:
            assert talk.undo() == change
            files.keep_session(undone=True)
            files.check()

    texts = "Name a fruit. " * 9, "And a colour. " * 7, "And an animal."
    turns = [turn_label(text) for text in texts]
    for name, n_turn in (("other", 3), ("chat", 2)):
        talk, files = talker(name)
        for text in texts[:n_turn]:
            say(talk, files, text)
        files.close()
    talk, files = talker("chat")
    files.resume(files.path)
    before, messages = everything(talk), list(talk.messages)
    n_loaded = 3 if loaded == "other" else 2
    for _ in range(2):
        saved = files.read(tmp_path / f"{loaded}.kvs")
        assert talk.remember("/load")
        files.continue_chat(*saved)
        assert talk.newest_turn == texts[n_loaded - 1]
        take_back(talk, files, *turns[:n_loaded][::-1])
        assert talk.n_turn == 0
        take_back(talk, files, "/load")
        assert (everything(talk), talk.messages) == (before, messages)
    # a chat that was loaded and saved can be undone by a later process
    saved = files.read(tmp_path / f"{loaded}.kvs")
    talk.remember("/load")
    files.continue_chat(*saved)
    say(talk, files, "And then?")
    assert files.save(tmp_path / "saved.kvs")
    take_back(talk, files, 'the turn "And then?"', *turns[:n_loaded][::-1], "/load", *turns[:2][::-1])
    assert talk.undo() is None
    files.close()
    resumed, files = talker("saved")
    files.resume(files.path)
    take_back(resumed, files, 'the turn "And then?"', *turns[:n_loaded][::-1])
    assert resumed.undo() is None
    files.close()


@pytest.mark.parametrize(
    "settings",
    [{"policy": "recall", "archive": 60}, {"policy": "h2o", "checkpoints": 0}],
    ids=["recall", "h2o"],
)
def test_undo_reads_the_chat_again_if_archive_or_checkpoints_lack_it(chat, settings):
    talk = chat(budget=64, **settings, undoable=True)
    text = "Tell me a story of the sea, and of the keeper of a light."
    for _ in range(6):
        "".join(talk.reply(text, 12))
    messages, writer = list(talk.messages), talk.writer
    stream = writer.tokens
    before = talk.undo_stack.turn_ends[3]
    for _ in range(3):
        assert talk.undo_turn() == text
    assert talk.messages == messages[:6]
    assert (writer.engine.n_past, len(writer.unread)) == (0, before.n_past)
    assert (writer.unread == stream[: before.n_past]).all()
    "".join(talk.reply(text, 12))
    assert (writer.tokens[: before.n_past] == stream[: before.n_past]).all()
    assert talk.n_turn == 4


def test_archive_file_follows_its_session_on_save_rename_and_load(keep, tmp_path):
    def names():
        return sorted(path.name for path in tmp_path.iterdir())

    talk, files = keep(tmp_path / "a")
    for text in ("Tell me a story of the sea, of the keeper of a light, and of waves.", "And of a storm."):
        say(talk, files, text)
    first = everything(talk)
    # the session under the new name gets its own archive file
    assert files.save(tmp_path / "b")
    assert names() == ["a", "a.archive", "b", "b.archive"]
    for path in tmp_path.glob("a*"):
        path.rename(path.with_name(path.name.replace("a", "moved", 1)))
    other, other_files = keep(tmp_path / "a")
    say(other, other_files, "Name as many fruits as you can think of, and then their colours, in a list.")
    say(other, other_files, "And animals.")
    second = everything(other)
    # the first turn after /load moves the old session to a.1
    assert other.remember("/load")
    other.restore(*other_files.read(tmp_path / "b"))
    assert everything(other) == first
    say(other, other_files, "And then?")
    assert names() == ["a", "a.1", "a.1.archive", "a.archive", "b", "b.archive", "moved", "moved.archive"]
    third = everything(other)
    for path, expected in (("a.1", second), ("a", third), ("moved", first)):
        with_archive, its_files = keep(tmp_path / path)
        its_files.resume(tmp_path / path)
        assert everything(with_archive) == expected
        with_archive.writer.engine.close()
    # Undo the turn and the /load. The chat is `second` again, and its file is renamed from a.1 to a.
    for _ in range(2):
        assert other.undo()
        other_files.keep_session(undone=True)
        other_files.check()
    assert everything(other) == second
    expected_names = ["b", "b.archive", "moved", "moved.archive"]
    # the chat that began with /load moves from a to a.2
    assert names() == ["a", "a.2", "a.2.archive", "a.archive", *expected_names]
    # start a new stream that has different tokens at the same positions
    other.remember("/reset")
    other.reset("Be brief.")
    for text in ("Tell me of the moon, of the sun, of the stars and of all that is above.", "And then?"):
        say(other, other_files, text)
    fourth = everything(other)
    resumed, resumed_files = keep(tmp_path / "a")
    resumed_files.resume(tmp_path / "a")
    assert everything(resumed) == fourth


def test_save_never_replaces_another_chat_without_confirmation(chat, tmp_path):
    path = tmp_path / "chat.kvs"
    first, second = chat(), chat()
    for talk in (first, second):
        files = ChatFiles(talk, RunOptions(policy="buzz"), GenerationOptions())
        "".join(talk.reply("Name a fruit.", 4))
        assert files.save(path) == (talk is first)
        assert session.read_meta(path)["id"] == first.id
    assert files.save(path, lambda what: "holds another chat (1 turn, saved " in what)
    assert session.read_meta(path)["id"] == second.id


def copy_of(n):
    file = tempfile.TemporaryFile()  # noqa: SIM115  (the copies close it)
    file.write(b"x" * n)
    file.flush()
    return file


def test_undo_stack_drops_its_oldest_copies_first():
    copies, files = UndoStack(), [copy_of(1) for _ in range(MAX_COPIES + 2)]
    for i, file in enumerate(files):
        copies.push(TurnEnd(i, 0, 0, {"unread": []}))
        copies.push(Copy(str(i), file))
    # the end of the turn before the oldest copy that is left belongs to the same stream
    assert len(copies) == 2 * MAX_COPIES
    assert [file.closed for file in files] == [True] * 2 + [False] * MAX_COPIES
    assert copies.pop().command == str(MAX_COPIES + 1)
    copies.close()
    assert [file.closed for file in files] == [True] * (MAX_COPIES + 1) + [False]
    files[-1].close()


def test_full_disk_drops_older_undo_copies_and_leaves_no_gap(chat, monkeypatch):
    talk = chat(undoable=True)
    "".join(talk.reply("one", 2))
    for text in ("two", "three"):
        assert talk.remember(text)
    "".join(talk.reply("four", 2))
    plain, n_free = session.dump, 1

    def dump(file, *what):
        if sum(isinstance(point, Copy) for point in talk.undo_stack._points) >= n_free:
            raise OSError("no space left")
        plain(file, *what)

    monkeypatch.setattr(session, "dump", dump)
    assert talk.remember("five")
    assert [talk.undo() for _ in range(3)] == ["five", 'the turn "four"', None]
    n_free = 0
    assert not talk.remember("/reset")
    assert talk.undo() is None
    assert talk.n_turn == 1


def damage(file):
    file.seek(-1, os.SEEK_END)
    last = file.read(1)
    file.seek(-1, os.SEEK_END)
    file.write(bytes([last[0] ^ 1]))
    file.flush()


def test_undo_drops_a_damaged_copy_and_uses_the_one_before(chat):
    talk = chat(undoable=True)
    for text in ("one", "two"):
        "".join(talk.reply(text, 2))
        talk.remember(f"/{text}")
    damage(talk.undo_stack.newest.file)
    with pytest.raises(SessionError, match="is damaged"):
        talk.undo()
    assert talk.n_turn == 2
    assert talk.undo() == "/one"
    assert talk.n_turn == 1


def test_damaged_copy_also_drops_older_marks_of_another_stream(chat):
    talk = chat("recall", 64, undoable=True)
    "".join(talk.reply("one", 2))
    talk.remember("/reset")
    talk.reset()
    "".join(talk.reply("two", 2))
    assert talk.undo() == 'the turn "two"'
    damage(talk.undo_stack.newest.file)
    with pytest.raises(SessionError, match="and its chat cannot continue"):
        talk.undo()
    assert talk.undo() is None
    assert talk.n_turn == 0


@pytest.mark.parametrize("system", ["s", "system", "<|im_start|>"])
def test_system_prompt_that_repeats_template_words_is_pinned_whole(real_chat, system):
    talk = real_chat(system=system)
    talk.pin_system()
    model = talk.writer.engine.model
    expected = [*model.tokenize("<|im_start|>", special=True), *model.tokenize(f"system\n{system}")]
    assert talk.writer.engine.n_pinned == len(expected)


def _fails(path):
    raise SessionError("no room")


@pytest.mark.parametrize("policy", ["tova", "knorm", "corm"])
def test_reply_header_is_never_evicted_before_the_reply(real_chat, real_model, share_of, policy):
    talk = real_chat(policy=policy, budget=64, evict_every=1)
    pieces = talk.reply("The sea is wide and the road is long. " * share_of(12, 30), 1)
    next(pieces, None)
    engine = talk.writer.engine
    marker = real_model.tokenize("<|im_end|>\n<|im_start|>assistant\n", special=True)
    live = engine.rows.pos[:, : engine.n_kv]
    assert engine.n_evicted > 0
    assert all((live == engine.n_past - 1 - i).any(axis=1).all() for i in range(len(marker)))


def test_full_context_within_a_text_keeps_the_tokens_read(model):
    engine = Engine(model, policies.fit("local", 64), Settings("original", n_ctx=80, n_batch=16, n_threads=1))
    writer = Writer(engine, greedy(model))
    tokens = model.tokenize("One two three four five six seven eight nine ten. " * 20)
    with pytest.raises(StreamEnd):
        writer.read(tokens)
    assert 0 < engine.n_past <= 80
    assert writer.tokens.tolist() == tokens[: engine.n_past].tolist()
    engine.close()


def test_cells_and_status_count_forgotten_tokens(chat, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    talk = chat(policy="local", budget=48)
    terminal = Terminal(talk, None, "local")
    out = io.StringIO()
    terminal.console = Console(file=out, width=100)
    commands = Commands(terminal)
    commands.run("/cells")
    assert out.getvalue() == "the cache is empty\n"
    "".join(talk.reply("Tell me a long story about the sea.", 60))
    engine = talk.writer.engine
    n_forgotten = engine.n_past - engine.n_kv
    assert n_forgotten > 0
    cached, forgotten = (f"{100 * n / engine.n_past:.1f} %" for n in (engine.n_kv, n_forgotten))
    line = f"{engine.n_past} tokens: {cached} in the cache, {forgotten} forgotten · cache "
    assert line in terminal.status()
    commands.run("/cells 12")
    assert f"the last 12 tokens; {engine.n_past - 12} earlier ones are not shown" in out.getvalue()
    assert f"{engine.n_kv} held by every row, 0 by some, {n_forgotten} forgotten" in out.getvalue()
    # Python refuses to convert more than 4,300 digits
    for wrong in ("0", "-3", "many", "9" * 5000):
        commands.run(f"/cells {wrong}")
        commands.run(f"/undo {wrong}")
    assert out.getvalue().count("/cells takes a number of tokens") == 4
    assert out.getvalue().count("/undo takes a number of changes") == 4


def test_recall_reports_every_token_as_cached_or_archived(chat):
    talk = chat("recall", 48)
    "".join(talk.reply("Tell me a long story about the sea.", 60))
    engine, terminal = talk.writer.engine, Terminal(talk, None, "recall")
    terminal.console = Console(file=(out := io.StringIO()), width=100)
    cached, archived = (100 * n / engine.n_past for n in (engine.n_kv, engine.n_archived))
    assert cached + archived == 100
    shares = f"{cached:.1f} % in the cache, {archived:.1f} % archived, 0 % forgotten"
    line = f"{engine.n_past} tokens: {shares} · cache "
    assert line in terminal.status()
    Commands(terminal).run("/stats")
    n_recalled = engine.policy.recall.n_cell
    # this chat has written no reply, so there is no speed to show
    assert "speed" not in out.getvalue()
    stats = " ".join(out.getvalue().split())
    cached = f"{engine.mean_live:.0f} tokens per row and {n_recalled} places for archived text"
    assert f"in the cache {cached}, at most 48 (--budget)" in stats
    assert f"archived {engine.n_archived} of at most" in stats
    assert f"context {engine.n_ctx:,} tokens (trained: {engine.model.n_ctx_train:,})" in stats


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "closed"])
def test_ctrl_c_before_first_token_undoes_the_turn_but_sighup_keeps_it(chat, tmp_path, monkeypatch, number):
    # if the terminal closes, the chat stops the reply and raises SIGHUP again; these handlers ignore SIGHUP
    handlers = [(each, signal.signal(each, lambda *_: None)) for each in (signal.SIGINT, signal.SIGHUP)]
    talk, path = chat("recall", 64, undoable=True), tmp_path / "chat.kvs"
    files = ChatFiles(talk, RunOptions(policy="recall"), GenerationOptions(), path)
    out = io.StringIO()
    terminal = Terminal(talk, files, "recall", console=Console(file=out, force_terminal=True))
    try:
        terminal.say("Name a fruit.")
        before, answer = [*talk.messages], talk.answer
        monkeypatch.setattr(talk, "answer", lambda n: (signal.raise_signal(number), answer(n))[1])
        terminal.say("Name a colour.")
    finally:
        for each, handler in handlers:
            signal.signal(each, handler)
        files.close()
    is_kept = number == signal.SIGHUP
    assert talk.n_turn == len(session.read_meta(path)["messages"]) // 2 == 1 + is_kept
    assert ("cancelled; the chat is as it was before" in out.getvalue()) == (not is_kept)
    assert is_kept or talk.messages == before


def stream(talk):
    return [*talk.writer.tokens, *talk.writer.unread]


@pytest.mark.share(2, "policy")
@pytest.mark.parametrize("policy", ["recall", "h2o", "full"])
@pytest.mark.parametrize("stopped", ["answer", "read_prompt"])
def test_ctrl_c_during_a_retry_restores_the_replaced_turn(chat, tmp_path, monkeypatch, policy, stopped):
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    talk, path = chat(policy, 1024 if policy == "full" else 64, undoable=True), tmp_path / "chat.kvs"
    files = ChatFiles(talk, RunOptions(policy=policy), GenerationOptions(n=12), path)
    out = io.StringIO()
    terminal = Terminal(talk, files, policy, console=Console(file=out, force_terminal=True))
    try:
        for text in ("Name a fruit. " * 5, "Name a colour.", "Name a car."):
            terminal.say(text)
        terminal.typed_of = {"Name a car.": "@car.txt"}
        before, plain, messages = stream(talk), getattr(talk, stopped), list(talk.messages)
        saved = path.read_bytes()
        monkeypatch.setattr(
            talk, stopped, lambda *args: (signal.raise_signal(signal.SIGINT), plain(*args))[1]
        )
        for text, n_cancelled in (("Name a car.", 1), ("Name a boat.", 2), ("Name a car.", 3)):
            terminal.say(text, again=True)
            assert out.getvalue().count("cancelled; the chat is as it was before") == n_cancelled
            assert (stream(talk), talk.messages) == (before, messages)
            assert terminal.typed_of["Name a car."] == "@car.txt"
            # the prompt offers an edited turn again, and sending it replaces the last turn
            assert (terminal.typed, terminal.edits) == (("", False) if "car" in text else (text, True))
            terminal.typed, terminal.edits = "", False
            assert path.read_bytes() == saved
        monkeypatch.setattr(talk, stopped, plain)
        terminal.say("Name a star.")
        assert talk.messages[:-2] == messages
        assert stream(talk)[: len(before)] == before
        for text in ("Name a star.", "Name a car.", "Name a colour."):
            assert talk.undo_turn() == text
        assert talk.messages == messages[:2]
    finally:
        signal.signal(signal.SIGINT, handler)
        files.close()


@pytest.mark.share(2, "policy")
@pytest.mark.parametrize("policy", ["recall", "full", "h2o"])
@pytest.mark.parametrize("n_before", [0, 2])
def test_replacing_a_turn_reads_only_the_tokens_that_differ(chat, monkeypatch, policy, n_before):
    budget = 1024 if policy == "full" else 64
    talk, plain = (chat(policy, budget, "Be brief.") for _ in range(2))
    prompt = "Tell me a story of the sea, and of the keeper of a light. " * 4
    for each in (talk, plain):
        for i in range(n_before):
            "".join(each.reply(f"Name a fruit of the sea, {i}.", 12))
        "".join(each.reply(prompt, 12))
    engine, read = talk.writer.engine, []
    decode = engine.context.decode
    monkeypatch.setattr(
        engine.context, "decode", lambda tokens, *rest: read.extend(tokens) or decode(tokens, *rest)
    )

    def check_read(old):
        """Check that the tokens were read from the first one on that differs, and at least the last one."""
        new = stream(talk)
        n_same = len(os.path.commonprefix([old, new[:-1]]))
        assert read == new[talk.undo_stack.newest.n_past if policy == "h2o" else n_same :]
        read.clear()

    before = talk.last_turn().before
    for text in (prompt, f"{prompt}And then?", prompt[:90], "Why?", prompt):
        # as a reference, take the last turn back, and then read the other turn whole
        plain.undo_turn()
        plain.read_turn(text)
        old = stream(talk)
        assert talk.read_turn(text, talk.last_turn())
        check_read(old)
        assert stream(talk) == stream(plain)
        assert talk.messages == plain.messages
        assert policy != "recall" or engine.n_kv + engine.n_archived == engine.n_past
        for each in (talk, plain):
            "".join(each.answer(12))
        read.clear()
        # a replaced turn that is restored is not read again either, except for its end
        last, messages, old = talk.last_turn(), talk.messages, stream(talk)
        for stops in (False, True):
            with talk.writer.showing(lambda done, n, stops=stops: setattr(talk.writer, "stop", stops)):
                assert talk.read_turn(f"{text}Stop.", last) != stops
            assert not (stops and read)
            talk.put_back(last)
            assert (stream(talk), talk.messages) == (old, messages)
            assert policy == "h2o" or len(talk.writer.unread) < 40
            talk.writer.stop = False
            talk.writer.read(talk.writer.unread[:0])
            read.clear()
        assert len(talk.undo_stack) == n_before + 1
    assert talk.undo_turn() == prompt
    assert (stream(talk), engine.n_past) == (stream(plain)[: before.n_token], before.n_past)


def test_replaced_first_turn_may_unpin_the_system_prompt(chat):
    talk, plain = chat("recall", 64, "Be brief."), chat("recall", 64, "Be brief.")
    template = tiny.CHAT_TEMPLATE.replace("for m in messages", "for m in messages[alone:]")
    template = "{% set alone = 1 if messages[1:] and 'alone' in messages[1].content else 0 %}" + template
    for each in (talk, plain):
        each.use_template(Template(template, "", ""))
    "".join(talk.reply("Tell me a story of the sea. " * 6, 12))
    assert talk.writer.engine.n_pinned
    assert talk.writer.engine.n_archived
    assert talk.read_turn("Are you alone?", talk.last_turn())
    plain.read_turn("Are you alone?")
    assert stream(talk) == stream(plain)
    assert talk.writer.engine.n_pinned == plain.writer.engine.n_pinned == 0


def test_status_line_differs_if_rows_hold_different_tokens():
    # if all rows hold the same tokens, the shares add up to 100 %
    assert whereabouts(400, 100, 300, 0) == "400 tokens: 25.0 % in the cache, 75.0 % archived, 0 % forgotten"
    assert whereabouts(400, 100, 0, 300) == "400 tokens: 25.0 % in the cache, 75.0 % forgotten"
    # if rows hold different tokens, the shares do not add up to 100 %
    assert whereabouts(400, 100, 0, 20) == "400 tokens: each KV head keeps 25.0 %, 5.0 % is forgotten"
    assert whereabouts(0, 0, 0, 0) == "0 tokens: 0 % in the cache, 0 % forgotten"


def test_stats_say_which_draft_tokens_are_counted(chat, monkeypatch):
    talk = chat(policy="local", budget=48)
    terminal = Terminal(talk, None, "local")
    out = io.StringIO()
    terminal.console = Console(file=out, width=100)
    monkeypatch.setattr(talk.writer, "drafter", SimpleNamespace(n_accepted=1200, n_drafted=1300))
    Commands(terminal).run("/stats")
    shown = re.sub(" +", " ", out.getvalue())
    assert "accepted 1,200 of 1,300 draft tokens since the start (--draft)\n" in shown
