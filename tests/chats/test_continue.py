"""/continue: the model goes on with a reply that was stopped or that reached its limit."""

from __future__ import annotations

import io
import re
import signal
from contextlib import closing
from dataclasses import replace

import pytest
from rich.console import Console

from kvtool import policies
from kvtool.chats import session
from kvtool.chats.conversation import Conversation, transcript
from kvtool.chats.effort import Efforts
from kvtool.chats.header import Header
from kvtool.chats.prompt import template_of
from kvtool.chats.reply import message_of
from kvtool.chats.stops import Stops
from kvtool.chats.template import Template
from kvtool.chats.thinking import THINK, Splitter, Tags
from kvtool.chats.writer import Writer
from kvtool.cli.chat.files import ChatFiles, open_transcript
from kvtool.cli.chat.reply import ReplyView
from kvtool.cli.chat.screen import Terminal
from kvtool.cli.chat.slash_commands import Commands
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import RunOptions
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.llama.sampler import Sampler
from tests.chats import published_templates
from tests.chats.published_templates import needs_published
from tests.chats.test_thinking import (
    DROPS,
    HIDES,
    KEEPS,
    OPENED,
    SHOWS,
    SHOWS_EFFORT,
    SWITCHED,
    read_afresh,
    says,
)

POLICIES = pytest.mark.parametrize("policy", ["recall", "h2o", "full"])


@pytest.fixture
def conversation():
    talks = []

    def make(model, policy="recall", source=None):
        budget = 1024 if policy == "full" else 64
        engine = Engine(model, policies.fit(policy, budget), Settings(n_batch=32, n_threads=1))
        template = Template(source, "", "") if source else template_of(model)
        talks.append(Conversation(Writer(engine, Sampler(model, seed=1)), template, undoable=True))
        return talks[-1]

    yield make
    for talk in talks:
        talk.close()
        talk.writer.engine.close()


class Chat:
    """A chat in a terminal. `run` types a command, and returns what the terminal prints."""

    def __init__(self, talk, policy, path, n=9):
        self.talk = talk
        self.files = ChatFiles(talk, RunOptions(policy=policy), GenerationOptions(n=n), path)
        self._out = io.StringIO()
        console = Console(file=self._out, force_terminal=True, width=400, color_system=None)
        self.terminal = Terminal(talk, self.files, policy, console=console)
        self._commands = Commands(self.terminal)

    def run(self, line):
        at = len(self._out.getvalue())
        if line.startswith("/"):
            self._commands.run(line)
        else:
            self.terminal.say(line)
        return self._out.getvalue()[at:]

    @property
    def state(self):
        return self.talk.writer.stream.tolist(), self.talk.messages


@pytest.fixture
def chats(conversation, model, tmp_path):
    handler, files = signal.getsignal(signal.SIGINT), []

    def make(policy="recall", name="chat.kv", n=9):
        chat = Chat(conversation(model, policy), policy, tmp_path / name, n)
        files.append(chat.files)
        return chat

    yield make
    signal.signal(signal.SIGINT, handler)
    for each in files:
        each.close()


def go_on(talk, n=None):
    """Continue the last reply by at most n tokens, and return the new text."""
    assert talk.read_turn(talk.newest_turn, talk.last_turn(), talk.unfinished_reply())
    return "".join(talk.answer(n))


@POLICIES
def test_continued_reply_equals_a_reply_that_was_not_cut(chats, tmp_path, policy):
    cut, whole = chats(policy, "cut.kv", 30), chats(policy, "whole.kv", 90)
    whole.run("Name a fruit.")
    out = cut.run("Name a fruit.")
    assert "stopped after 30 tokens (-n); /set n changes the limit, /continue goes on" in out
    for _ in range(2):
        before = cut.talk.messages[-1]["content"]
        out = cut.run("/continue")
        after = cut.talk.messages[-1]["content"]
        # only the new text is printed
        assert after.startswith(before)
        assert after[len(before) :].strip() in out
        assert before not in out
        assert session.read_meta(tmp_path / "cut.kv")["messages"] == cut.talk.messages
    assert cut.state == whole.state
    assert not (tmp_path / "cut.kv.1").exists()
    for chat in (cut, whole):
        chat.run("Name a colour.")
    assert cut.state[1][:3] == whole.state[1][:3]
    assert 'took back 2 changes, the oldest of them the turn "Name a fruit."' in cut.run("/undo 2")
    assert cut.state == ([], [])


def test_transcript_has_a_continued_reply_once(chats, tmp_path):
    chat, path = chats(), tmp_path / "talk.txt"
    with closing(open_transcript(path)) as chat.files.transcript:
        for line in ("Name a fruit.", "/continue", "/continue"):
            chat.run(line)
            assert path.read_text() == transcript(chat.talk.messages)
        before = path.read_text()
        chat.run("Name a colour.")
        colour = transcript(chat.talk.messages[-2:])
        chat.run("/undo")
        # the last turn in the file is another one, which stays
        chat.run("/continue")
        assert path.read_text() == before + colour + transcript(chat.talk.messages)


@POLICIES
def test_reply_continues_in_another_process_and_after_an_undo(chats, conversation, model, tmp_path, policy):
    chat, whole = chats(policy), chats(policy, "whole.kv", 18)
    chat.run("Name a fruit.")
    whole.run("Name a fruit.")
    for change in ("undo", "restart"):
        if change == "undo":
            chat.run("Name a colour.")
            chat.run("/undo")
        else:
            chat.files.close()
            meta, arrays = session.read(tmp_path / "chat.kv")
            chat = chats(policy)
            chat.talk.resume(meta, arrays)
        before = chat.talk.messages[-1]["content"]
        chat.run("/continue")
        after = chat.talk.messages[-1]["content"]
        assert (after.startswith(before), len(after) > len(before), chat.talk.n_turn) == (True, True, 1)
        if change == "undo":
            assert chat.talk.messages == whole.talk.messages
    assert session.read_meta(tmp_path / "chat.kv")["messages"] == chat.talk.messages
    assert 'took back the turn "Name a fruit."; the chat has no turns' in chat.run("/undo")
    assert "the chat has no turns" in chat.run("/continue")


def test_ended_reply_gets_one_line(chats, conversation, real_model):
    chat = chats()
    assert "the chat has no turns" in chat.run("/continue")
    talk = conversation(real_model)
    says(talk, "It is seven.")
    assert "".join(talk.reply("And?")) == "It is seven."
    with pytest.raises(UsageError, match=r"^/continue needs a reply that you stopped or that reached its"):
        talk.unfinished_reply()


def test_reply_of_a_server_cannot_be_continued(conversation, model):
    talk = conversation(model)
    text = "".join(talk.reply("Name a fruit.", 5))
    assert talk.unfinished_reply() == text
    # a slot writes in these steps
    talk.read_prompt(model.tokenize("And a bird?"))
    list(talk.write(5, may_change=False))
    talk.finish_reply(None)
    with pytest.raises(UsageError, match=r"^/continue needs a reply"):
        talk.unfinished_reply()


def test_turn_that_was_not_read_to_its_end_is_answered_from_the_start(conversation, model, monkeypatch):
    talk = conversation(model)
    assert "".join(talk.reply("Name a fruit.", 5))
    monkeypatch.setattr(talk.writer, "read", lambda tokens: False)
    assert not talk.read_turn("And a bird?")
    monkeypatch.undo()
    assert talk.unfinished_reply() == ""


def test_ctrl_c_after_the_end_of_a_reply_offers_no_continuation(chats, model, monkeypatch):
    chat = chats()
    # the model ends its turn with the newest token of its vocabulary
    chat.talk.writer.ends = {model.n_vocab - 1}
    tokens = iter([*model.tokenize("Yes").tolist(), model.n_vocab - 1])
    monkeypatch.setattr(chat.talk.writer.sampler, "sample", lambda context: next(tokens))
    finish = chat.talk.finish_reply

    def stopped(lead):
        chat.talk.writer.stop = True
        finish(lead)

    monkeypatch.setattr(chat.talk, "finish_reply", stopped)
    shown = chat.run("And?")
    assert "stopped" in shown
    assert "/continue" not in shown


@pytest.mark.parametrize("cut", ["<think>\nHm a <", "<think>\nHm</", "<think>\nHm</think"])
def test_view_of_a_reply_that_was_cut_within_a_tag_shows_each_character_once(cut):
    whole = "<think>\nHm a < b</think>\nIt is." if cut.endswith("<") else "<think>\nHm</think>\nIt is."
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    view = ReplyView(console, Splitter(THINK).after(cut))
    view.resume(Splitter(THINK).feed(cut))
    with view:
        view.write(whole.removeprefix(cut))
    assert view.thought.strip() == ("Hm a < b" if cut.endswith("<") else "Hm")


def test_thought_goes_on_without_the_empty_thought_of_thinking_off(real_model):
    template = Template(SWITCHED, "", "")
    off = template.under(Efforts.of(template).variables("off")[0])
    header = Header.of(real_model, off)
    assert "</think>" in header.lead
    begun = header.with_begun(real_model, off, "<think>\nHm")
    assert "</think>" not in begun.kept + begun.lead


@needs_published
@pytest.mark.parametrize(
    "name",
    [
        "ByteDance-Seed-OSS",
        "GLM-4.7-Flash",
        "HuggingFaceTB-SmolLM3-3B",
        "Kimi-K3",
        "Qwen3.5-4B",
        "Reka-Edge",
        "deepseek-ai-DeepSeek-V3.1",
        "poolside-Laguna-S-2.1",
        "tencent-Hy3",
        "upstage-Solar-Open-100B",
    ],
)
def test_begun_thought_follows_the_same_header_with_thinking_off_and_on(real_model, name):
    template = Template(published_templates.templates()[name], "", "")

    def header(effort):
        switched = template.under(Efforts.of(template).variables(effort)[0])
        begun = Header.of(real_model, switched).with_begun(real_model, switched, f"{template.tags.start}\nHm")
        return switched.reply_start(), begun.kept + begun.lead

    (off, before_off), (on, before_on) = header("off"), header("on")
    assert off != on
    assert before_off.strip()[-12:] == before_on.strip()[-12:]
    assert template.tags.end not in before_off + before_on


@POLICIES
def test_ctrl_c_keeps_what_was_written_and_the_reply_can_go_on(chats, monkeypatch, policy):
    chat = chats(policy)
    chat.run("Name a fruit.")
    before = chat.talk.messages[-1]["content"]
    answer = chat.talk.answer

    def stopped(n):
        for i, piece in enumerate(pieces := answer(n)):
            yield piece
            if i == 2:
                signal.raise_signal(signal.SIGINT)
                yield from pieces

    monkeypatch.setattr(chat.talk, "answer", stopped)
    assert "stopped; /continue goes on" in chat.run("/continue")
    monkeypatch.undo()
    middle = chat.talk.messages[-1]["content"]
    assert (middle.startswith(before), len(middle) > len(before)) == (True, True)
    chat.run("/continue")
    assert chat.talk.messages[-1]["content"].startswith(middle)
    assert chat.talk.n_turn == 1


@POLICIES
def test_ctrl_c_while_the_reply_is_read_again_restores_the_chat(chats, monkeypatch, policy):
    chat = chats(policy)
    chat.run("Name a fruit.")
    chat.run("Name a colour.")
    chat.run("/undo")
    before, plain = chat.state, chat.talk.read_prompt
    monkeypatch.setattr(
        chat.talk, "read_prompt", lambda *args: (signal.raise_signal(signal.SIGINT), plain(*args))[1]
    )
    assert "cancelled; the chat is as it was before" in chat.run("/continue")
    assert chat.state == before
    monkeypatch.undo()
    assert chat.terminal.typed == ""
    chat.run("/continue")
    assert chat.talk.messages[-1]["content"].startswith(before[1][-1]["content"])
    assert len(chat.talk.messages[-1]["content"]) > len(before[1][-1]["content"])


@pytest.mark.parametrize("policy", ["recall", "h2o"])
def test_ctrl_c_while_the_beginning_is_read_again_keeps_the_reply(chats, monkeypatch, policy):
    chat = chats(policy)
    chat.run("Name a fruit.")
    chat.run("Name a colour.")
    chat.run("/undo")
    before, answer = chat.talk.messages, chat.talk.answer
    monkeypatch.setattr(chat.talk, "answer", lambda n: (signal.raise_signal(signal.SIGINT), answer(n))[1])
    assert "stopped; /continue goes on" in chat.run("/continue")
    assert chat.talk.messages == before
    monkeypatch.undo()
    chat.run("/continue")
    assert chat.talk.messages[-1]["content"].startswith(before[-1]["content"])
    assert len(chat.talk.messages[-1]["content"]) > len(before[-1]["content"])


def test_penalties_count_the_beginning_of_a_reply_that_is_read_again(chats):
    chat, whole = chats(), chats("recall", "whole.kv", 18)
    for each in (chat, whole):
        each.run("/set temp 0")
        each.run("/set repeat_penalty 1.5")
        each.run("Name a fruit.")
    chat.run("Name a colour.")
    chat.run("/undo")
    chat.run("/continue")
    assert chat.talk.messages == whole.talk.messages
    assert chat.talk.writer.sampler.recent == whole.talk.writer.sampler.recent


def test_stop_string_that_begins_before_the_cut_ends_the_reply(conversation, real_model):
    talk = conversation(real_model)
    talk.writer.sampler.change(replace(talk.writer.sampler.settings, stop=("seven. Or",)))
    says(talk, "It is seven. Or not.")
    text = "".join(talk.reply("And?", 3))
    while talk.writer.unfinished is not None:
        text += go_on(talk, 1)
    assert (text, talk.writer.stopped_by) == ("It is seven.", "seven. Or")


def test_continued_reply_must_fit_the_grammar(chats):
    chat = chats()
    chat.run('/set grammar root ::= "ab" "cd"* "x"')
    chat.run("/set n 3")
    chat.run("Name a fruit.")
    before = chat.talk.messages[-1]["content"]
    chat.run("/continue")
    text = chat.talk.messages[-1]["content"]
    assert (text.startswith(before), len(text) > len(before)) == (True, True)
    assert text.removeprefix("ab").replace("cd", "").removesuffix("x") in ("", "c")
    chat.run('/set grammar root ::= "z"')
    messages = chat.talk.messages
    assert "the beginning of the reply does not fit its grammar or JSON schema" in chat.run("/continue")
    assert (chat.talk.messages, chat.terminal.typed) == (messages, "")
    # the next reply does not begin with the refused text
    chat.run("Name a colour.")
    assert chat.talk.messages[-1]["content"] == "z"


@pytest.mark.parametrize("n", [1, 2, 100])
@pytest.mark.parametrize(
    ("before", "text", "shown", "found"),
    [
        ("one E", "ND two", "", "END"),
        ("one E", "N two", "N two", ""),
        ("one EN", "EN", "EN", ""),
        ("one EN", "END", "", "END"),
        ("one EN", "D two", "", "END"),
        ("one E", "xENDy", "x", "END"),
        ("one", "END", "", "END"),
    ],
)
def test_stop_string_may_begin_in_the_text_before(before, text, shown, found, n):
    stops, written = Stops(["END"], None, before), ""
    for i in range(0, len(text), n):
        written += stops.feed(text[i : i + n])
        if stops.found:
            break
    assert (written + stops.rest(), stops.found) == (shown, found)


@pytest.mark.parametrize("n", [5, 14, 22])
@pytest.mark.share(2, "policy")
@POLICIES
@pytest.mark.parametrize("source", [SWITCHED, OPENED, SHOWS_EFFORT, SHOWS, HIDES, KEEPS])
def test_reply_that_was_cut_in_its_thought_goes_on(conversation, real_model, source, policy, n):
    talk, whole = (conversation(real_model, policy, source) for _ in range(2))
    tags = Tags("<think>\n", "\n</think>\n\n")
    for turn in range(2):
        thought = ("" if talk.template.opens_thought else tags.start) + "A number." * 5 + tags.end
        for each in (talk, whole):
            says(each, f"{thought}It is {turn}.")
        text = "".join(whole.reply(f"And {turn}?"))
        written = "".join(talk.reply(f"And {turn}?", n))
        while talk.writer.unfinished is not None:
            written += go_on(talk, n)
        assert written == text
        assert talk.messages == whole.messages
        assert talk.writer.tokens.tolist() == read_afresh(talk) == whole.writer.tokens.tolist()
        assert talk.header == whole.header


@needs_published
def test_message_of_a_continued_thought_is_that_of_a_whole_thought():
    template = Template(published_templates.templates()["Qwen3.5-4B"], "", "")
    tags, opening, text = template.tags, template.opening, "Hm.\n</think>\n\nYes."
    whole = message_of(text, template, Splitter(tags, is_open=True), opening)
    assert whole == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.\n"}
    assert message_of(opening + text, template, Splitter(tags), "") == whole


def test_tags_after_the_answer_are_dropped_from_a_continued_reply(conversation, real_model):
    source = DROPS.replace("</think>", "<channel|>").replace("%OPEN%", "")
    talk, whole = (conversation(real_model, source=source) for _ in range(2))
    for each in (talk, whole):
        says(each, "It is seven.<|channel>thought\n<channel|>")
    text = "".join(whole.reply("And?"))
    assert "".join(talk.reply("And?", 3)) + go_on(talk) == text
    assert talk.messages == whole.messages
    assert talk.writer.tokens.tolist() == whole.writer.tokens.tolist()
    assert b"".join(map(real_model.piece, talk.writer.tokens.tolist())).endswith(b"It is seven.")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_character_that_was_cut_is_written_whole(conversation, real_model, n):
    talk, text = conversation(real_model), "Yes \U0001f9d9 no."
    says(talk, text)
    shown = "".join(talk.reply("And?", n)).removesuffix("\ufffd")
    # the model writes an incomplete character again
    says(talk, text.removeprefix(shown))
    go_on(talk)
    assert talk.messages[-1]["content"] == text


def test_full_cache_keeps_what_was_written_and_prints_one_error(conversation, model, tmp_path):
    talk = conversation(model, "full")
    chat = Chat(talk, "full", tmp_path / "chat.kv", 900)
    with closing(chat.files):
        chat.run("Name a fruit.")
        before = talk.messages[-1]["content"]
        out = chat.run("/continue")
        after = talk.messages[-1]["content"]
        assert "start over with /reset" in out
        assert (after.startswith(before), len(after) > len(before)) == (True, True)
        again = chat.run("/continue")
        assert "start over with /reset" in again
        assert (talk.messages[-1]["content"], chat.terminal.typed) == (after, "")


def test_budget_of_a_thought_counts_its_beginning(conversation, real_model):
    talk = conversation(real_model, source=DROPS.replace("%OPEN%", "<think>\n"))
    talk.thought_budget = 12
    text = "".join(talk.reply("And?", 8))
    assert "</think>" not in text
    thought = (text + go_on(talk, 8)).partition("</think>")
    assert thought[1]
    assert len(real_model.tokenize(thought[0])) <= 13


def test_view_of_a_continued_reply_has_the_whole_thought_and_stays_in_its_block_of_code():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=20)
    splitter = Splitter(THINK).after("<think>Hm</think>\n```\none two")
    with ReplyView(console, splitter) as view:
        view.resume([(True, "Hm"), (False, "```\none two")])
        view.write(" three four five six seven\n```\nnine")
    assert view.thought == "Hm"
    # code is coloured, and not wrapped
    lines = out.getvalue().split("\n")
    assert "".join(re.sub(r"\x1b\[[0-9;]*m", "", lines[0])) == " three four five six seven"
    assert "\x1b[36mseven" in lines[0]
    assert lines[2] == "nine"
