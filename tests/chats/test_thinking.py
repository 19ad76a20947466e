"""Thoughts are separated from the answer, shown dimmed and folded, and hidden from later turns."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvtool import policies
from kvtool.chats.conversation import Conversation, transcript
from kvtool.chats.stops import Stops
from kvtool.chats.template import Template
from kvtool.chats.thinking import THINK, Splitter, Tags, tags_in, without_thought
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler

# a template that renders earlier replies without their thoughts, as many templates do
DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n%OPEN%{% endif %}"
)
KEEPS = DROPS.replace(".split('</think>')[-1].lstrip('\n')", "").replace("%OPEN%", "{# <think> #}")
# a template that asks for tags around the answer, as Granite's does
RESPONSE = "Think in <think></think> and answer in <response></response>.\n" + KEEPS


def parts(text, n, tags=THINK, **options):
    splitter = Splitter(tags, **options)
    pieces = [text[i : i + n] for i in range(0, len(text), n)]
    texts = [part for piece in pieces for part in splitter.feed(piece)] + [*splitter.end()]
    return tuple("".join(text for is_thought, text in texts if is_thought is kind) for kind in (True, False))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>one</think>two", "one", "two"),
        ("\n <think>\none </thin k></think>\n\ntwo", "\none </thin k>", "two"),
        ("<think>one</think>\n\n two\n", "one", " two\n"),
        ("<think></think>\n\n", "", ""),
        ("\n\ntwo", "", "\n\ntwo"),
        ("<think>never closed", "never closed", ""),
        ("<think></think>", "", ""),
        # A tag that is not at the beginning of a reply is text. An incomplete tag is also text.
        ("Use <think>x</think> here", "", "Use <think>x</think> here"),
        ("<thin air", "", "<thin air"),
        ("  <thi", "", "  <thi"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("no tags", "", "no tags"),
    ],
)
def test_splitter_separates_thought_and_answer_for_any_piece_size(text, thought, answer, n):
    assert parts(text, n) == (thought, answer)


def test_splitter_handles_a_thought_opened_by_the_reply_header():
    assert parts("one</think>two", 3, is_open=True) == ("one", "two")
    assert without_thought("one</think>\n\ntwo", Splitter(THINK, is_open=True)) == "two"
    assert without_thought("\ntwo", Splitter(THINK)) == "\ntwo"


HEADERS = Tags(
    "<filename>analysis<gh_stars>", "<file_sep><filename>final<gh_stars>", "<filename>final<gh_stars>"
)
"""Tags with the structure of gpt-oss's tags, but made of SmolLM2's control tokens."""

HEADED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}"
    "{% if '<filename>analysis<gh_stars>' in m.content %}{{ raise_exception('a header') }}{% endif %}"
    "{% if m.role == 'assistant' %}<filename>final<gh_stars>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@pytest.mark.parametrize("n", [1, 2, 7, 100])
@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (HEADERS.start + "one" + HEADERS.end + "two", "one", "two"),
        (HEADERS.plain + "two", "", "two"),
        ("<filename>fin", "", "<filename>fin"),
        ("<filename>final<gh_stars>", "", ""),
        ("none", "", "none"),
    ],
)
def test_header_of_the_answer_is_not_part_of_the_answer(text, thought, answer, n):
    assert parts(text, n, tags=HEADERS) == (thought, answer)


@pytest.mark.parametrize("n", [1, 3, 100])
@pytest.mark.parametrize(
    ("sign", "text", "thought", "answer"),
    [
        ("<channel|>", "<|channel>thought\nHm<channel|>Yes.<|channel>thought\n<channel|>", "Hm", "Yes."),
        ("<channel|>", "<|channel>thought\nHm<channel|>Yes.<channel|>", "Hm", "Yes."),
        ("<channel|>", "<|channel>thought<channel|>Yes.", "", "Yes."),
        ("<channel|>", "<|channel><|channel>thought\n<channel|>Yes.", "", "Yes."),
        ("<channel|>", "Yes.<|channel>thought\nHm<channel|> No.", "Hm", "Yes. No."),
        ("<channel|>", "Yes. <|chan", "", "Yes. <|chan"),
        (
            "<|open|>think<|sep|>",
            "<|open|>think<|sep|>Hm<|close|>think<|sep|><|open|>response<|sep|>Yes."
            "<|close|>response<|sep|><|close|>message<|sep|>",
            "Hm",
            "Yes.",
        ),
    ],
)
def test_control_tokens_of_thoughts_are_not_part_of_the_answer(sign, text, thought, answer, n):
    assert parts(text, n, tags=tags_in(sign)) == (thought, answer)


@pytest.mark.parametrize("n", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>Hm</think>\n<response>Yes.</response>", "Hm", "Yes."),
        ("<think>Hm</think><response>\n One </resp.</response>\n", "Hm", " One </resp.\n"),
        ("<response>Yes.</response> Sources: a", "", "Yes. Sources: a"),
        ("<think>Hm</think>\n<response>cut </respon", "Hm", "cut </respon"),
        ("<think>Hm</think>\n<resp", "Hm", "<resp"),
        ("<think>Hm</think>\n\nUse <response>x</response>", "Hm", "Use <response>x</response>"),
        ("<think>One</think><think>Two</think>Yes.", "OneTwo", "Yes."),
        ("Yes.</response>", "", "Yes.</response>"),
        ("\n\nYes.", "", "\n\nYes."),
    ],
)
def test_tags_around_the_answer_are_not_part_of_the_answer(text, thought, answer, n):
    assert parts(text, n, tags=tags_in(RESPONSE)) == (thought, answer)
    # other models may write such tags as text
    assert parts("<think>a</think><response>b</response>", n) == ("a", "<response>b</response>")


@pytest.mark.parametrize("n", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("One.\n\nTwo.</think>\n\nYes.\n\nNo.", "One.\n\nTwo.</think>\n\nYes."),
        ("One.\n\nTwo.", "One.\n\nTwo."),
        ("</think>\n\n", "</think>\n\n"),
    ],
)
def test_stop_strings_end_only_the_answer(text, shown, n):
    stops, written = Stops(["\n\n"], Splitter(THINK, is_open=True)), ""
    for i in range(0, len(text), n):
        written += stops.feed(text[i : i + n])
        if stops.found:
            break
    assert written + stops.rest() == shown
    assert bool(stops.found) == (shown != text)


@pytest.mark.parametrize("n", [1, 3, 1000])
@pytest.mark.parametrize(
    ("sign", "start", "end"),
    [
        ("<channel|>", "<|channel>thought\nOne. Two.<channel|>", "<channel|>"),
        (
            "<|open|>think<|sep|>",
            "<|open|>think<|sep|>One. Two.<|close|>think<|sep|><|open|>response<|sep|>",
            "<|close|>response<|sep|>",
        ),
        (RESPONSE, "<think>One. Two.</think>\n<response>", "</response>"),
    ],
)
def test_stop_string_is_found_before_a_tag_that_ends_the_answer(sign, start, end, n):
    stops, text, written = Stops([". T"], Splitter(tags_in(sign))), f"{start}One. Two.{end}", ""
    for i in range(0, len(text), n):
        written += stops.feed(text[i : i + n])
        if stops.found:
            break
    assert (written, stops.found) == (f"{start}One", ". T")


def test_stop_string_of_a_chat_is_not_searched_in_the_thought(talk):
    chat = talk(KEEPS)
    chat.writer.sampler.change(replace(chat.writer.sampler.settings, stop=("\n\n",)))
    says(chat, "<think>\nOne.\n\nTwo.</think>\n\nYes.\n\nNo.")
    assert "".join(chat.reply("And?")) == "<think>\nOne.\n\nTwo.</think>\n\nYes."
    assert chat.writer.stopped_by == "\n\n"


def test_thought_is_read_from_a_field_of_messages_only():
    block = "{% for b in m['content'] if b['type'] == 'thinking' %}{{ b['thinking'] }}{% endfor %}"
    loop = "{% for m in messages %}{{ m['role'] }}BODY{% endfor %}"
    bodies = {
        "{{ m.reasoning }}": True,
        "{{ m['thinking'] }}": True,
        "{{ m.get('thought') }}": True,
        "{{ 'thinking' in m }}": True,
        block: False,
    }
    assert {body: Template(loop.replace("BODY", body), "", "").takes_thoughts for body in bodies} == bodies


def test_thought_tags_are_found_in_the_template_source():
    assert tags_in("... [THINK] ... [/THINK]") == Tags("[THINK]", "[/THINK]")
    assert tags_in("content.split('</think>')") == THINK
    assert tags_in("nothing") == THINK
    assert tags_in(RESPONSE) != THINK
    # MiniMax M2's template writes the results of tools in these tags
    assert tags_in("{{ '<response>' ~ m.content ~ '</response>' }}<think>") == THINK
    assert tags_in("{{ '<|channel|>analysis<|message|>' }}").plain == "<|channel|>final<|message|>"
    assert tags_in("split('<channel|>')").start == "<|channel>thought\n"


def test_template_detects_whether_it_opens_or_drops_thoughts():
    drops, keeps = (Template(source, "", "") for source in (DROPS.replace("%OPEN%", ""), KEEPS))
    assert (drops.drops_thoughts, keeps.drops_thoughts) == (True, False)
    assert (drops.opening, keeps.opening) == ("", "")
    opens = Template(DROPS.replace("%OPEN%", "<think>\n"), "", "")
    assert (opens.opening, opens.opens_thought, opens.drops_thoughts) == ("<think>\n", True, True)
    closes = Template(DROPS.replace("%OPEN%", "<think>\n\n</think>\n\n"), "", "")
    assert not closes.opens_thought


@pytest.fixture(scope="module")
def model(smol):
    model = Model(smol)
    yield model
    model.close()


@pytest.fixture
def talk(model):
    talks = []

    def make(source, policy="h2o", budget=64, tags=None):
        engine = Engine(model, policies.fit(policy, budget), Settings(n_batch=32, n_threads=1))
        writer = Writer(engine, Sampler(model, seed=1))
        template = Template(source, "", "")
        template.tags = tags or template.tags
        talks.append(Conversation(writer, template))
        return talks[-1]

    yield make
    for talk in talks:
        talk.close()
        talk.writer.engine.close()


def says(talk, text):
    """Make the model write this text next. Markers in the text become control tokens."""
    model, sampler = talk.writer.engine.model, talk.writer.sampler
    end = model.tokenize("<|im_end|>", special=True)
    tokens = iter([*model.tokenize(text, special=True).tolist(), *end.tolist()])
    fixed = SimpleNamespace(
        sample=lambda cache: next(tokens), start=lambda n, around: None, seed=1, recent=sampler.recent,
        settings=sampler.settings, resume=lambda recent, seed: None,
    )  # fmt: skip
    talk.writer.sampler = fixed


def test_sampler_history_has_each_token_once_after_thoughts_are_dropped(talk, monkeypatch):
    chat, sampled = talk(DROPS.replace("%OPEN%", ""), "full", 512), []
    model, sampler = chat.writer.engine.model, chat.writer.sampler

    def sample(cache):
        sampler.recent.append(unsampled.pop(0))
        sampled.append(sampler.recent[-1])
        return sampled[-1]

    monkeypatch.setattr(sampler, "sample", sample)
    for reply in ("Seven.", "Yes."):
        unsampled = model.tokenize(f"<think>\nHm.</think>\n\n{reply}<|im_end|>", special=True).tolist()
        "".join(chat.reply("And?"))
    assert list(sampler.recent) == sampled


def test_stopped_thought_is_dropped_from_the_next_turn(talk):
    chat = talk(DROPS.replace("%OPEN%", ""), "h2o")
    says(chat, "<think>\nlong and longer and longer</think>\n\nSeven.")
    pieces = chat.reply("Name a number.")
    for _ in range(6):
        next(pieces)
    chat.writer.stop = True
    list(pieces)
    n = len(chat.writer.tokens)
    says(chat, "Yes.")
    assert "".join(chat.reply("And now?")) == "Yes."
    assert "long" not in read(chat)
    assert n < len(chat.writer.tokens)


SWITCHED = DROPS.replace("%OPEN%", "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}")
OPENED = DROPS.replace(
    "%OPEN%", "<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
)
# this template renders an empty thought in earlier replies, and puts the effort into the prompt
SHOWS_EFFORT = "effort {{ reasoning_effort or 'medium' }}. " + DROPS.replace(
    "{{ m.content.split", "<think></think>{{ m.content.split"
).replace("%OPEN%", "<think>\n")


# These templates get the thought as `reasoning_content`. SHOWS renders the thoughts of all replies. HIDES
# renders only the thought of the last message.
SHOWS, HIDES = (
    KEEPS.replace("{{ m.content }}", f"{thought}{{{{ m.content }}}}", 1)
    for thought in (
        "{{ '<think>\n' ~ m.reasoning_content.strip() ~ '\n</think>\n\n' if m.reasoning_content }}",
        "<think>{{ m.reasoning_content if loop.last }}</think>",
    )
)


def read(talk):
    """Return the text of the stream, without markers."""
    return b"".join(map(talk.writer.engine.model.piece, talk.writer.tokens.tolist())).decode()


def read_afresh(talk):
    """Render the whole chat with its template, and return its tokens."""
    whole = talk.template.render([*talk.messages, {"role": "user", "content": "."}])
    text = whole.removesuffix(talk.template.turn(talk.messages[:-1], "."))
    return talk.writer.engine.model.tokenize(text, special=True).tolist()


@pytest.mark.parametrize("policy", ["full", "h2o", "recall"])
@pytest.mark.parametrize("source", [SWITCHED, OPENED, SHOWS_EFFORT, SHOWS, HIDES, KEEPS, HEADED, RESPONSE])
def test_cache_equals_a_fresh_reading_of_the_chat_after_each_reply(talk, source, policy):
    tags = HEADERS if source is HEADED else Tags("<think>\n", "\n</think>\n\n")
    chat = talk(source, policy, 512 if policy == "full" else 64, HEADERS if source is HEADED else None)
    efforts = [None, "low", "high", None] if source is SHOWS_EFFORT else [None, "off", "off", "on"]
    efforts = efforts if source in (SWITCHED, OPENED, SHOWS_EFFORT) else [None] * 3
    for turn, effort in enumerate(efforts):
        chat.set_effort(effort)
        thought = ("" if chat.template.opens_thought else tags.start) + "A number." * 9 + tags.end
        around = chat.template.tags.answer_start, chat.template.tags.answer_end
        says(chat, (effort != "off") * thought + f"It is {turn}.".join(around))
        pieces = "".join(chat.reply(f"And {turn}?"))
        assert without_thought(pieces, chat.splitter()) == f"It is {turn}."
        assert chat.writer.tokens.tolist() == read_afresh(chat)


def test_effort_that_changes_only_the_header_keeps_the_cache(talk):
    chat = talk(OPENED)
    says(chat, "Hm.\n</think>\n\nSeven.")
    "".join(chat.reply("Name a number."))
    before = chat.writer.tokens.tolist()
    assert chat.splitter().had_thought
    assert not chat.rereads("off")
    chat.set_effort("off")
    assert (chat.effort, chat.splitter().had_thought) == ("off", False)
    assert chat.writer.tokens.tolist() == before
    says(chat, "Yes.")
    "".join(chat.reply("Sure?"))
    assert chat.writer.tokens.tolist()[: len(before)] == before


def test_earlier_replies_are_divided_by_the_effort_under_which_they_were_written(talk):
    chat = talk(OPENED)
    for effort, text in (("off", "Seven."), ("on", "Hm.\n</think>\n\nYes."), ("on", "It never ends")):
        chat.set_effort(effort)
        says(chat, text)
        "".join(chat.reply("And?"))
    replies = [message["content"] for message in chat.messages if message["role"] == "assistant"]
    assert replies == ["Seven.", "<think>\nHm.\n</think>\n\nYes.", "<think>\nIt never ends"]
    for effort in ("on", "off"):
        chat.set_effort(effort)
        answers = [without_thought(reply, chat.splitter_of(reply)) for reply in replies]
        assert answers == ["Seven.", "Yes.", ""]
        # sessions of earlier versions have only the end tag
        assert without_thought("Hm.</think>Yes.", chat.splitter_of("Hm.</think>Yes.")) == "Yes."
    assert "<think>\nHm.\n</think>\n\nYes.\n" in transcript(chat.messages)


@pytest.mark.parametrize("policy", ["h2o", "recall"])
def test_effort_in_the_prompt_rereads_the_chat_and_can_be_undone(talk, policy):
    chat = talk(SHOWS_EFFORT, policy)
    chat.undoable = True
    says(chat, "Hm.</think>Seven.")
    "".join(chat.reply("Name a number."))
    before, template = chat.writer.tokens.tolist(), chat.template
    assert chat.rereads("low")
    assert chat.remember("/think low")
    chat.set_effort("low")
    # `set_effort` empties the cache, and the next message reads the chat again
    assert chat.writer.engine.n_past == 0
    says(chat, "Hm.</think>Yes.")
    "".join(chat.reply("Sure?"))
    assert "effort low." in read(chat)
    assert chat.writer.tokens.tolist() == read_afresh(chat)
    assert chat.undo().startswith("the turn")
    assert (chat.undo(), chat.effort, chat.template.variables) == ("/think low", None, template.variables)
    assert chat.writer.tokens.tolist() == before


@pytest.mark.parametrize("n_turn", [1, 2])
@pytest.mark.parametrize("policy", ["full", "h2o", "recall"])
def test_last_turn_is_answered_again_with_another_effort(talk, policy, n_turn):
    chat, fresh = (talk(SHOWS_EFFORT, policy, 512 if policy == "full" else 64) for _ in range(2))
    chat.undoable = True
    fresh.set_effort("low")
    for i in range(n_turn):
        for each in (chat, fresh):
            says(each, f"Hm.</think>It is {i}.")
            "".join(each.reply(f"And {i}?"))
    cached, messages = chat.writer.tokens.tolist(), chat.messages
    assert chat.remember("/think low")
    chat.set_effort("low")
    says(chat, "Hm, hm.</think>It is another one.")
    assert chat.read_turn(chat.newest_turn, chat.last_turn())
    "".join(chat.answer())
    assert (chat.n_turn, chat.messages[:-1]) == (n_turn, fresh.messages[:-1])
    assert chat.writer.tokens.tolist() == read_afresh(chat)
    assert "effort low." in read(chat)
    assert chat.undo().startswith("the turn")
    assert chat.messages == messages[:-2]
    assert chat.undo() == "/think low"
    assert (chat.messages, chat.writer.tokens.tolist()) == (messages, cached)
    # the undone turn can be replaced as before
    assert chat.newest_turn == f"And {n_turn - 1}?"


def test_reply_that_was_cut_goes_on_with_another_effort(talk):
    chat, text = talk(SHOWS_EFFORT), "Hm.</think>It is seven."
    model = chat.writer.engine.model
    pieces = [model.piece(token, special=True) for token in model.tokenize(text, special=True).tolist()]
    n = next(n for n in range(len(pieces)) if b"".join(pieces[:n]).endswith(b"It is"))
    says(chat, text)
    "".join(chat.reply("Name a number.", n))
    chat.set_effort("low")
    begun = chat.unfinished_reply()
    assert begun.endswith("</think>It is")
    says(chat, " seven.")
    assert chat.read_turn(chat.newest_turn, chat.last_turn(), begun)
    "".join(chat.answer())
    assert without_thought(chat.messages[-1]["content"], chat.splitter()) == "It is seven."
    assert chat.writer.tokens.tolist() == read_afresh(chat)


def test_unsupported_effort_is_refused_and_changes_nothing(talk):
    chat = talk(OPENED)
    chat.set_effort("off")
    with pytest.raises(UsageError, match="think low: the model's chat template takes off and on"):
        chat.set_effort("low")
    with pytest.raises(UsageError, match="has no thinking to switch on"):
        talk(DROPS.replace("</think>", "</x>").replace("%OPEN%", "")).set_effort("high")
    assert (chat.effort, chat.template.opens_thought) == ("off", False)


def test_changed_effort_pins_the_changed_system_prompt(talk):
    # the system prompt of low effort has two more tokens than that of medium effort
    longer = "effort {{ 'very very ' if reasoning_effort == 'low' }}{{"
    chat = talk(SHOWS_EFFORT.replace("effort {{", longer, 1), budget=512)
    chat.reset("Be brief.")
    chat.pin_system()
    engine = chat.writer.engine
    n = engine.n_pinned
    chat.set_effort("low")
    assert engine.n_pinned == n + 2
    chat.set_effort("high")
    assert chat.writer.is_new


def test_each_line_of_a_transcript_shows_who_wrote_it():
    texts = {"system": "Be brief.\nBe kind.", "user": "Add these:\n\n3\n4", "assistant": "7\n\n> seven"}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    expected = "# Be brief.\n# Be kind.\n\n> Add these:\n> \n> 3\n> 4\n\n7\n\n> seven\n\n"
    assert transcript(messages) == expected


def test_transcript_shows_thoughts_between_tags_for_both_message_formats():
    plain = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSeven."}
    apart = {"role": "assistant", "content": "Seven.", "reasoning_content": "Hm.\n"}
    assert transcript([apart]) == transcript([plain]) == "<think>\nHm.\n</think>\n\nSeven.\n\n"
