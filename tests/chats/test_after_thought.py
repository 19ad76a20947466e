"""Constraints of an answer that follows a thought, for several formats of thoughts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvtool.chats.after_thought import AfterThought, after_thought
from kvtool.chats.template import Template
from kvtool.chats.thinking import THINK, Splitter, tags_in
from kvtool.llama.grammar import gbnf, schema
from kvtool.llama.grammar.constraint import Matcher, Vocabulary
from kvtool.llama.grammar.rules import Rules
from kvtool.llama.grammar.triggered import Triggered
from kvtool.llama.loaded.model import Model
from tests import tiny

CHANNELS = tags_in("<|channel|>analysis<|message|>")
GEMMA = tags_in("<|channel>thought")
CITY = {"type": "object", "properties": {"city": {"enum": ["Lille", "Nice"]}}, "required": ["city"]}

KINDS = {
    "the header opens it": (THINK, "<|im_start|>assistant\n<think>\n", (), ("<think>", "</think>")),
    "the model opens it": (THINK, "<|im_start|>assistant\n", (), ("<think>", "</think>")),
    "tags that are no tokens": (THINK, "[a]", (), ()),
    "gpt-oss": (
        CHANNELS,
        "<|start|>assistant",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        ("analysis", "final", "assistant"),
    ),
    "Gemma 4": (GEMMA, "<|turn>model\n", ("<|channel>", "<channel|>", "<|turn>"), ("thought\n",)),
    "Mistral": (tags_in("[THINK]"), "", ("[THINK]", "[/THINK]"), ()),
}
"""Kinds of templates. Each has the tags of thoughts, the reply header, control tokens, and other tokens."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """make(kind): return a model whose vocabulary has the tokens of this kind of template.

    The vocabulary also has tokens like ">x": the last character of a tag, and text after the tag.
    """
    folder, models_by_kind = tmp_path_factory.mktemp("vocabularies"), {}

    def make(kind):
        if kind not in models_by_kind:
            _, _, control, words = KINDS[kind]
            path = folder / f"{len(models_by_kind)}.gguf"
            tiny.write_vocab(path, control=control, words=(*words, '>{"', ">\n", ">x", "\n\n"))
            models_by_kind[kind] = Model(path, vocab_only=True)
        return models_by_kind[kind]

    yield make
    for model in models_by_kind.values():
        model.close()


def json_of(model):
    return Matcher(Vocabulary.of(model), schema.enforced(CITY).rules)


def fitting(constraint, model):
    """Return the tokens that a constraint's mask allows."""
    mask = constraint.mask()
    if mask is None:
        return np.arange(model.n_vocab)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=model.n_vocab, bitorder="little"))


def wander(constraint, model, rng, preferred):
    """Draw random tokens that the constraint allows, until the turn ends.

    preferred: tokens to draw more often.
    """
    tokens = []
    while len(tokens) < 400:
        allowed = fitting(constraint, model)
        drawable = np.intersect1d(allowed, preferred)
        token = int(rng.choice(drawable if len(drawable) and rng.random() < 0.3 else allowed))
        assert constraint.accept(token)
        if model.ends_turn(token):
            return tokens
        tokens.append(token)
    raise AssertionError("no end")


def parts(model, tokens, tags, header):
    """Split tokens like a server does. Return (thought, answer, True if there was a thought)."""
    is_open = tags.start in header and tags.end not in header
    splitter = Splitter(tags, is_open=is_open)
    pieces = [model.piece(token, special=True) for token in tokens]
    texts = [*splitter.feed(b"".join(pieces).decode("utf-8", "replace")), *splitter.end()]
    thought, answer = (
        "".join(text for is_thought, text in texts if is_thought is kind) for kind in (True, False)
    )
    return thought, answer, splitter.had_thought


@pytest.mark.parametrize("budget", [0, 1, 7, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_answer_fits_the_schema_after_any_thought(models, kind, budget):
    model, (tags, header, _, _) = models(kind), KINDS[kind]
    rng, n_thoughts = np.random.default_rng(budget), 0
    opens = [Vocabulary.of(model).tokens_of(tag.encode())[0] for tag in (tags.start, tags.end)]
    for _ in range(10):
        constraint = AfterThought(json_of(model), model, tags, header, budget)
        tokens = wander(constraint, model, rng, preferred=opens)
        thought, answer, had_thought = parts(model, tokens, tags, header)
        assert json.loads(answer)["city"] in ("Lille", "Nice")
        assert not answer.startswith("\n" * 3)
        n_thoughts += had_thought
        n_tags = sum(len(Vocabulary.of(model).tokens_of(tag.encode())) for tag in (tags.start, tags.end))
        n_answer = len(Vocabulary.of(model).tokens_of(answer.encode()))
        # the model may write a tag with one token per character, although the tokenizer would use fewer
        # tokens
        assert len(tokens) <= budget + n_answer + len(tags.start + tags.end) + n_tags, (thought, answer)
    assert n_thoughts or (budget == 0 and tags.plain)


@pytest.mark.parametrize("kind", KINDS)
def test_unlimited_thought_ends_at_the_models_end_tag(models, kind):
    model, (tags, header, _, _) = models(kind), KINDS[kind]
    is_open = tags.start in header
    thought = "Is it </thin, or Lille? \u00e9 "
    for gap in ("", "\n", "\n\n"):
        text = f"{'' if is_open else tags.start}{thought}{tags.end}{gap}" + '{"city": "Nice"}'
        constraint = AfterThought(json_of(model), model, tags, header)
        tokens = model.tokenize(text, special=True).tolist()
        for n, token in enumerate(tokens):
            assert token in fitting(constraint, model), (n, text)
            assert constraint.accept(token)
        assert {*fitting(constraint, model).tolist()} == {*Vocabulary.of(model).ends}
        assert parts(model, tokens, tags, header) == (thought, '{"city": "Nice"}', True)


def test_end_token_is_forbidden_in_a_thought_if_an_answer_is_required(models):
    model = models("the header opens it")
    tags, header, *_ = KINDS["the header opens it"]
    end = model.eos
    constraint = AfterThought(json_of(model), model, tags, header)
    assert end not in fitting(constraint, model)
    assert not constraint.accept(end)
    free = AfterThought(None, model, tags, header, 9)
    assert free.mask() is None
    assert free.accept(end)


def test_text_after_the_end_tag_in_the_same_token_must_fit_the_schema(models):
    model = models("tags that are no tokens")
    of = {piece: token for token, piece in enumerate(Vocabulary.of(model).pieces)}
    constraint = AfterThought(json_of(model), model, THINK, "<think>")
    for piece in (b"a", b"<", b"/", b"t", b"hi", b"n", b"k"):
        token = of.get(piece)
        for each in [token] if token else [of[bytes([byte])] for byte in piece]:
            assert constraint.accept(each)
    allowed = fitting(constraint, model)
    assert {of[b'>{"'], of[b">\n"], of[b">"]} <= {*allowed.tolist()}
    # ">x" is not allowed, because its x would be the first character of the answer, and the schema forbids x
    assert of[b">x"] not in allowed
    assert not constraint.accept(of[b">x"])
    assert constraint.accept(of[b'>{"'])
    assert {Vocabulary.of(model).pieces[token][:1] for token in fitting(constraint, model)} == {b"c"}


@pytest.mark.parametrize("header", ["<|im_start|>assistant\n<think>\n\n</think>\n\n", "</think>"])
def test_answer_begins_after_a_header_that_closes_the_thought(models, header):
    model = models("the model opens it")
    constraint = AfterThought(json_of(model), model, THINK, header, 5)
    assert {Vocabulary.of(model).pieces[token][:1] for token in fitting(constraint, model)} == {b"{"}


def test_a_reply_may_begin_with_a_thought_or_with_the_answer(models):
    model = models("the model opens it")
    for text in ('{"city": "Nice"}', '<think>x</think>{"city": "Nice"}'):
        constraint = AfterThought(json_of(model), model, THINK, "")
        tokens = model.tokenize(text, special=True).tolist()
        assert all(map(constraint.accept, tokens))
        assert fitting(constraint, model).tolist() == [*Vocabulary.of(model).ends]
    # after "<t", both the answer "<t>" and the tag "<think>" are possible
    constraint = AfterThought(
        Matcher(Vocabulary.of(model), gbnf.rules_of('root ::= "<t>" | "a"')), model, THINK, ""
    )
    for token in Vocabulary.of(model).tokens_of(b"<t"):
        assert constraint.accept(token)
    pieces = {Vocabulary.of(model).pieces[token] for token in fitting(constraint, model)}
    assert {b">", b"h"} <= pieces
    assert b"a" not in pieces


def test_thought_limit_without_a_schema_forces_only_the_end_tag(models):
    for kind in ("the header opens it", "the model opens it", "gpt-oss"):
        model, (tags, header, _, _) = models(kind), KINDS[kind]
        constraint = AfterThought(None, model, tags, header, 3)
        start = [] if tags.start in header else model.tokenize(tags.start, special=True).tolist()
        for token in [*start, *model.tokenize("a b").tolist()[:3]]:
            assert constraint.mask() is None
            assert constraint.accept(token)
        for token in model.tokenize(tags.end, special=True).tolist():
            assert fitting(constraint, model).tolist() == [token]
            assert not constraint.accept(token - 1)
            assert constraint.accept(token)
        assert constraint.mask() is None


@pytest.mark.parametrize(
    ("begun", "rest", "n_fitting"),
    [
        ("So <call>", "x</call>", None),
        ("So <ca", "ll>x</call>", 0),
        ("So <call>x</call>", "<call>y</call>", None),
    ],
)
@pytest.mark.parametrize("has_rules", [False, True])
def test_limit_reached_within_a_call_in_the_thought_leaves_the_call_whole(
    models, begun, rest, n_fitting, has_rules
):
    model = models("tags that are no tokens")
    vocabulary = Vocabulary.of(model)
    begun, rest = (vocabulary.tokens_of(text.encode()) for text in (begun, rest))
    rules = Triggered(vocabulary, Rules('"<call>" "now"', triggers=("<call>",))) if has_rules else None
    constraint = AfterThought(rules, model, THINK, "<think>", len(begun), call_opening="<call>")
    assert all(map(constraint.accept, begun))
    assert constraint.n_fitting(rest) == (len(rest) if n_fitting is None else n_fitting)
    for token in [*rest, next(iter(vocabulary.ends))]:
        assert constraint.mask() is None
        assert constraint.accept(token)


def test_limit_holds_in_a_thought_without_a_call_and_before_an_answer_that_must_fit(models):
    model = models("tags that are no tokens")
    vocabulary = Vocabulary.of(model)
    (close, *_) = vocabulary.tokens_of(b"</think>")
    for inner, begun, more in ((None, "So <ca", "lm"), (json_of(model), "So <call>", "")):
        begun, more = (vocabulary.tokens_of(text.encode()) for text in (begun, more))
        constraint = AfterThought(inner, model, THINK, "<think>", len(begun), call_opening="<call>")
        assert all(map(constraint.accept, [*begun, *more[:2]]))
        assert fitting(constraint, model).tolist() == [close]


def test_limit_reached_within_the_end_tag_forces_the_rest_of_the_tag(models):
    model = models("tags that are no tokens")
    constraint = AfterThought(json_of(model), model, THINK, "<think>", 5)
    tokens = Vocabulary.of(model).tokens_of(b"abc</think>")
    for token in tokens[:5]:
        assert constraint.accept(token)
    rest = Vocabulary.of(model).bytes_of(tokens)[len(Vocabulary.of(model).bytes_of(tokens[:5])) :]
    for token in Vocabulary.of(model).tokens_of(rest):
        assert fitting(constraint, model).tolist() == [token]
        assert constraint.accept(token)


@pytest.mark.parametrize("budget", [None, 0])
def test_end_tag_may_begin_in_the_given_beginning_of_the_thought(models, budget):
    model = models("tags that are no tokens")
    vocabulary = Vocabulary.of(model)
    around = after_thought(model, Template("<think>", "", ""), budget, "", "<think>So </thi")
    constraint = around(json_of(model))
    for token in vocabulary.tokens_of(b"nk>"):
        assert budget is None or fitting(constraint, model).tolist() == [token]
        assert constraint.accept(token)
    assert {vocabulary.pieces[token][:1] for token in fitting(constraint, model)} == {b"{", b"\n"}


def test_call_that_the_given_beginning_of_the_thought_began_stays_whole(models):
    model = models("tags that are no tokens")
    for begun, is_call in (("So <call>x", True), ("So", False)):
        around = after_thought(
            model, Template("<think>", "", ""), 0, "", f"<think>{begun}", call_opening="<call>"
        )
        assert (around(None).mask() is None) == is_call


def test_n_fitting_counts_valid_draft_tokens_without_changing_state(models):
    model, (tags, header, _, _) = models("the header opens it"), KINDS["the header opens it"]
    constraint = AfterThought(json_of(model), model, tags, header, 4)
    guesses = Vocabulary.of(model).tokens_of(b"so many words that")
    assert constraint.n_fitting(guesses) == 4
    (close,) = Vocabulary.of(model).tokens_of(tags.end.encode())
    assert constraint.n_fitting([guesses[0], close, guesses[1]]) == 1
    for token in guesses[:4]:
        constraint.accept(token)
    assert constraint.n_fitting([close, close]) == 1
    constraint.accept(close)
    answer = Vocabulary.of(model).tokens_of(b'{"city": "Nice"}')
    assert constraint.n_fitting([*answer, answer[0]]) == len(answer)
    # `n_fitting` has not changed the constraint
    assert all(map(constraint.accept, answer))
    constraint.restart()
    assert constraint.n_fitting(guesses) == 4


def test_calls_in_the_answer_follow_rules_and_calls_in_the_thought_are_free(models):
    model = models("the model opens it")
    vocabulary = Vocabulary.of(model)
    triggered = Triggered(vocabulary, Rules('"<call>" "now"', triggers=("<call>",)))
    end = next(iter(vocabulary.ends))
    for header, text, tag in (("<think>", "So <call>x", "</think>"), ("", "<think>So <call>x", "</think>")):
        constraint = AfterThought(triggered, model, THINK, header)
        for token in vocabulary.tokens_of(text.encode()):
            assert constraint.mask() is None
            assert constraint.accept(token)
        # the reply may end in the thought, as without rules
        assert constraint.mask() is None
        for token in vocabulary.tokens_of(f"{tag}\n\nI <call>".encode()):
            assert constraint.mask() is None
            assert constraint.accept(token)
        assert {vocabulary.pieces[token][:1] for token in fitting(constraint, model)} == {b"n"}
        assert constraint.n_fitting(vocabulary.tokens_of(b"nox")) < 3
        for token in vocabulary.tokens_of(b"now"):
            assert constraint.accept(token)
        assert constraint.mask() is None
    ended = AfterThought(triggered, model, THINK, "<think>")
    assert ended.accept(end)
    limited = AfterThought(triggered, model, THINK, "<think>", 1)
    assert limited.accept(vocabulary.tokens_of(b"a")[0])
    assert limited.mask() is not None
