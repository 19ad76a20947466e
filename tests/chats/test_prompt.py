"""Pinned parts of a rendered chat. Pinning must not change the tokens."""

from __future__ import annotations

import pytest

from kvtool import api, policies
from kvtool.chats.conversation import Conversation
from kvtool.chats.prompt import pin_prefix, request_prefix, system_prefix, template_of
from kvtool.chats.template import GEMMA, Template
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from tests import tiny
from tests.tiny import CHATML

UPPER = CHATML.replace("m.content", "(m.content | upper)")
TRIMMED = CHATML.replace("m.content", "(m.content | trim)")
TWICE = CHATML + "{{ messages[0]['content'] }}"
FIRST_WORDS = CHATML.replace("m.content", "m.content[:8]")
DROPPED = CHATML.replace("in messages", "in messages if m.role == 'user'")
LAST = CHATML.replace("in messages", "in messages | reverse")
COUNTED = "{{ messages[0]['content'] | length }}" + CHATML


@pytest.mark.parametrize(
    ("source", "system", "prefix"),
    [
        (CHATML, "s", "<|im_start|>system\ns"),
        (CHATML, "system", "<|im_start|>system\nsystem"),
        (CHATML, "im", "<|im_start|>system\nim"),
        (CHATML, "x", "<|im_start|>system\nx"),
        (CHATML, "y<|im_end|>", "<|im_start|>system\ny<|im_end|>"),
        (CHATML, "user", "<|im_start|>system\nuser"),
        (UPPER, "Be brief.", "<|im_start|>system\nBE BRIEF."),
        (TRIMMED, "Be brief.", "<|im_start|>system\nBe brief."),
        (TWICE, "Be brief.", "<|im_start|>system\nBe brief."),
        (GEMMA, "model", "<start_of_turn>user\nmodel"),
        (FIRST_WORDS, "Be brief, please.", None),
        (DROPPED, "Be brief.", "<|im_start|>user\nBe brief."),
        (LAST, "Be brief.", "<|im_start|>user\nBe brief."),
        (COUNTED, "Be brief.", None),
    ],
)
def test_system_prefix_finds_the_system_prompt_in_the_rendered_chat(source, system, prefix):
    template = Template(source, "", "")
    assert system_prefix(template, system) == prefix
    if prefix is not None:
        for user in ("Hello!", "x", system):
            chat = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            assert template.render(chat).startswith(prefix)


@pytest.mark.parametrize(
    ("source", "request_", "prefix"),
    [
        (CHATML, "user", "<|im_start|>user\nuser"),
        (CHATML, "Summarize: ", "<|im_start|>user\nSummarize: "),
        (UPPER, "Summarize:", "<|im_start|>user\nSUMMARIZE:"),
        (TRIMMED, "  Summarize:", "<|im_start|>user\nSummarize:"),
        (CHATML.replace("m.content", "'a text'"), "Summarize:", None),
    ],
)
def test_request_prefix_finds_the_request_in_the_rendered_chat(source, request_, prefix):
    assert request_prefix(Template(source, "", ""), [], request_, "\n\nA text.") == prefix


def test_turn_starts_with_the_end_of_the_reply_even_if_it_has_the_placeholder():
    template = Template(CHATML, "", "")
    for text in ("two", "kvtool stands in for the reply", "kvtool stands in for the reply. And more."):
        assert template.turn([{"role": "user", "content": "one"}], text) == (
            f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        )


SHAPES = [{}, {"space_prefix": True}, {"space_prefix": True, "add_bos": True}]
TEXT = "</s>ab cd efgh</s>ij klm"


@pytest.fixture(params=SHAPES, ids=["plain", "space", "space and BOS"])
def engine(request, tiny_model):
    model = Model(tiny_model(n_vocab=2000, **request.param))
    engine = Engine(model, policies.fit("h2o", 256), Settings(n_threads=1))
    yield engine
    engine.close()
    model.close()


def pieces(model, tokens):
    return b"".join(model.piece(token, special=True) for token in tokens)


def test_pinning_keeps_all_tokens_and_pins_the_fewest_whole_tokens(engine):
    model = engine.model
    # the text of the tokens differs from TEXT only in spaces and the BOS
    bos = b"<s>" if model.adds_bos else b""
    for n_pinned in range(len(TEXT) + 1):
        tokens = pin_prefix(engine, TEXT, n_pinned)
        assert tokens.tolist() == model.tokenize(TEXT, special=True, start=True).tolist()
        expected, texts = TEXT[:n_pinned].replace(" ", ""), []
        for n in (engine.n_pinned - 1, engine.n_pinned):
            texts.append(pieces(model, tokens[: max(n, 0)]).removeprefix(bos).decode().replace(" ", ""))
        assert texts[1].startswith(expected), n_pinned
        # without the last pinned token, some of the first n_pinned characters of TEXT would not be pinned
        assert not n_pinned or len(texts[0]) < len(expected) or TEXT[n_pinned - 1] == " ", n_pinned


def test_token_that_crosses_the_pinned_border_is_pinned_whole(engine):
    whole = pieces(engine.model, pin_prefix(engine, "ab", 1)).decode()
    assert whole.strip(" ") in ("ab", "<s> ab")
    # Only "a" has to be pinned. If "ab" is one token, the whole token is pinned.
    assert engine.n_pinned == len(engine.model.tokenize("ab", start=True))


def conversation(engine, template, system):
    return Conversation(Writer(engine, Sampler(engine.model)), Template(template, "", ""), system)


def test_is_pinned_is_true_only_if_the_system_prompt_is_pinned(engine):
    for template, is_pinned in ((CHATML, True), (FIRST_WORDS, False), (COUNTED, False)):
        talk = conversation(engine, template, "Be brief.")
        talk.pin_system()
        assert talk.is_pinned == is_pinned
        assert (engine.n_pinned > 0) == is_pinned
        talk.reset()
        talk.pin_system()
        assert talk.is_pinned


def test_checking_a_system_prompt_changes_nothing(engine):
    talk = conversation(engine, CHATML, "Be brief.")
    talk.pin_system()
    before = (engine.n_pinned, engine.n_held, talk.system, talk.messages, talk.is_pinned, talk.version)
    talk.check_system("You count waves.")
    with pytest.raises(UsageError, match="choose a larger budget"):
        talk.check_system("waves " * 300)
    assert before == (
        *(engine.n_pinned, engine.n_held, talk.system, talk.messages, talk.is_pinned, talk.version),
    )


def test_writer_without_a_prompt_raises_usage_error(engine):
    writer = Writer(engine, Sampler(engine.model))
    for _ in range(2):
        with pytest.raises(UsageError, match="there is nothing to continue"):
            next(writer.write(2))
        writer.read(engine.model.tokenize("ab cd"))
        assert "".join(writer.write(2))
        # the context still has the logits after "ab cd", but the writer must not sample from them
        writer.reset()


def test_generate_refuses_an_empty_prompt_without_earlier_text(engine):
    if engine.model.adds_bos:
        pytest.skip("an empty text has a BOS")
    with pytest.raises(UsageError, match="there is nothing to continue"):
        "".join(api.generate(engine, "", 4))
    assert "".join(api.generate(engine, "ab cd", 4))
    # now an empty prompt continues the text above
    assert "".join(api.generate(engine, "", 4))


def test_restored_writer_does_not_sample_from_stale_logits(engine):
    writer = Writer(engine, Sampler(engine.model))
    writer.read(engine.model.tokenize("ab cd"))
    saved, tokens = writer.save(), writer.tokens
    arrays = {name: array.copy() for name, array in engine.save()}
    writer.read(engine.model.tokenize("ef gh"))
    engine.restore(arrays)
    writer.restore(saved, tokens)
    with pytest.raises(UsageError, match="there is nothing to continue"):
        next(writer.write(2))
    writer.read(engine.model.tokenize("ij"))
    assert "".join(writer.write(2))


def test_write_first_reads_tokens_left_unread_by_a_stop(engine):
    tokens = engine.model.tokenize("ab cd ef gh ij kl")
    writer = Writer(engine, Sampler(engine.model))
    writer.stop = True
    assert not writer.read(tokens)
    writer.stop = False
    text = "".join(writer.write(6))
    fresh = Writer(engine, Sampler(engine.model))
    fresh.reset()
    fresh.read(tokens)
    assert text == "".join(fresh.write(6))


@pytest.mark.parametrize(
    ("before", "has_one"),
    [
        ("", False),
        ("<s>", False),
        ("<s>[gMASK]<sop>", False),
        ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", True),
        ("{% if messages[0].role != 'system' %}<|im_start|>system\nOn 1 May<|im_end|>\n{% endif %}", True),
        ("{% if messages[0].role != 'system' %}<|im_start|>system\n<|im_end|>\n{% endif %}", False),
    ],
)  # fmt: skip
def test_has_own_system_is_true_if_the_template_adds_a_system_prompt(before, has_one):
    assert Template(before + CHATML, "<s>", "").has_own_system is has_one


def test_template_of_reads_the_template_from_the_model_file(tiny_model, tmp_path):
    tiny.write_llama(tmp_path / "m.gguf", chat_template=CHATML)
    model = Model(tmp_path / "m.gguf")
    assert template_of(model).render([{"role": "user", "content": "a"}]).startswith("<|im_start|>user\na")
    model.close()
