"""Samplers (compared with their definitions), stop strings, log-probabilities, and options."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvtool import api as kvtool_api
from kvtool import policies
from kvtool.chats import session as sessions
from kvtool.chats.conversation import Conversation
from kvtool.chats.logprobs import logprobs
from kvtool.chats.prompt import template_of
from kvtool.chats.stops import Stops
from kvtool.chats.writer import Writer
from kvtool.cli.chat.command import chat
from kvtool.cli.chat.files import ChatFiles
from kvtool.cli.generate import generate
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import RunOptions
from kvtool.errors import InputError, UsageError
from kvtool.kernels.likelihood import token_nll
from kvtool.llama.libllama.library import api
from kvtool.llama.sampler import Sampler
from kvtool.llama.sampling import MAX_LOOK_BACK, Sampling
from kvtool.options import declared
from tests import tiny
from tests.cli.in_process_command import run_kvtool
from tests.cli.test_chat_session import exported, talk  # noqa: F401
from tests.engine.exact_engines import LOGIT_TOLERANCE, open_engine

A, B, C, D = (3 + ord(letter) for letter in "abcd")


@pytest.fixture
def engine(chat_model):
    with open_engine(chat_model, policies.fit("h2o", 64)) as engine:
        engine.read(engine.model.tokenize("Hello"))
        yield engine


def logits_of(engine, **values):
    """Return logits that have the given values for some letters, and -20 for all other tokens."""
    logits = np.full(engine.model.n_vocab, -20, np.float32)
    for letter, logit in values.items():
        logits[3 + ord(letter)] = logit
    return logits


def draw_tokens(engine, sampler, logits, n):
    """Return n tokens that are sampled from the same logits."""
    tokens = []
    for _ in range(n):
        engine.context.logits()[-1] = logits
        tokens.append(sampler.sample(engine.context))
    return tokens


def many(engine, logits, n=400, **settings):
    """Return the set of tokens in n draws at temperature 1."""
    sampler = Sampler(engine.model, Sampling(temp=1, **settings), seed=1)
    tokens = set(draw_tokens(engine, sampler, logits, n))
    sampler.close()
    return tokens


# each sampler, by its definition


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.3},
        {"repeat_penalty": 1.4},
        {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repeat_penalty": 1.2, "repeat_last_n": 9},
        {"presence_penalty": -0.5, "repeat_penalty": 1.3, "repeat_last_n": 100},
        {"presence_penalty": 3, "repeat_last_n": 0},
    ],
)
def test_penalties_match_the_definition(engine, settings):
    rng = np.random.default_rng(1)
    base = rng.normal(0, 1, engine.model.n_vocab).astype(np.float32)
    sampling = Sampling(**settings)
    sampler = Sampler(engine.model, sampling)
    tokens = []
    for token in draw_tokens(engine, sampler, base, 150):
        logits = base.astype(np.float64)
        recent = tokens[-sampling.repeat_last_n :] if sampling.repeat_last_n else []
        for past in set(recent):
            logits[past] *= sampling.repeat_penalty if logits[past] <= 0 else 1 / sampling.repeat_penalty
            logits[past] -= recent.count(past) * sampling.frequency_penalty + sampling.presence_penalty
        assert token == logits.argmax()
        tokens.append(token)
    sampler.close()
    assert len(set(tokens)) == 1 or sampling.presence_penalty < 1


@pytest.mark.parametrize("allowed", [1, 2, 3])
def test_dry_matches_the_definition(engine, allowed):
    rng = random.Random(allowed)
    sampling = Sampling(dry_multiplier=0.8, dry_allowed_length=allowed, dry_sequence_breaker=())
    sampler = Sampler(engine.model, sampling)
    n_changed = 0
    for _ in range(150):
        history = [rng.choice((A, B, C)) for _ in range(rng.randrange(2, 30))]
        base = logits_of(engine, a=rng.random() * 3, b=rng.random() * 3, c=rng.random() * 3)
        logits = base.astype(np.float64)
        for each in (A, B, C):
            longest = max(
                (
                    n
                    for i in range(1, len(history))
                    for n in range(1, i + 1)
                    if history[i] == each and history[i - n : i] == history[len(history) - n :]
                ),
                default=0,
            )
            if longest >= allowed:
                logits[each] -= 0.8 * 1.75 ** (longest - allowed)
        sampler.recent.clear()
        sampler.recent.extend(history)
        sampler.start(0)
        assert draw_tokens(engine, sampler, base, 1) == [logits.argmax()]
        n_changed += logits.argmax() != base.argmax()
    sampler.close()
    assert n_changed > 5


def test_dry_sequences_end_at_a_breaker(engine):
    for breaker, expected in (((), D), ((":",), C)):
        sampler = Sampler(engine.model, Sampling(dry_multiplier=5, dry_sequence_breaker=breaker))
        sampler.recent.extend(3 + ord(letter) for letter in "a:bca:b")
        sampler.start(0)
        # DRY penalizes a token that would lengthen a repetition. The text has a:b twice, and c follows the
        # first a:b, so c is penalized. With the breaker, a repetition cannot contain a colon. Then only b is
        # repeated, which is too short for a penalty
        assert draw_tokens(engine, sampler, logits_of(engine, c=5, d=4), 1) == [expected]
        sampler.close()


def test_logit_bias_is_added_and_can_ban_tokens(engine):
    logits = logits_of(engine, a=5, b=4, c=3)
    for bias, expected in ((((B, 1.5),), B), (((A, -math.inf), (B, -1.5)), C)):
        for settings in ({}, {"mirostat": 2}):
            sampler = Sampler(engine.model, Sampling(logit_bias=bias, **settings))
            assert draw_tokens(engine, sampler, logits, 1) == [expected]
            sampler.close()
    assert many(engine, logits, logit_bias=((A, -math.inf),)) == {B, C}
    with pytest.raises(UsageError, match=r"token 320 is not in the vocabulary, which is 0\.\.319"):
        Sampler(engine.model, Sampling(logit_bias=((320, 1.0),)))


@pytest.mark.parametrize("settings", [{}, {"temp": 1.0}, {"mirostat": 2}, {"logit_bias": ((A, 1.0),)}])
def test_tokens_that_the_file_suppresses_are_never_sampled(tmp_path, settings):
    path = tmp_path / "suppressing.gguf"
    tiny.write_llama(path, suppressed=[A, B])
    with open_engine(path, policies.fit("h2o", 64)) as engine:
        engine.read(engine.model.tokenize("Hello"))
        logits = logits_of(engine, a=9, b=8, c=5)
        for grammar in (None, "root ::= [a-c]+"):
            sampler = Sampler(engine.model, Sampling(grammar=grammar, **settings), seed=1)
            assert set(draw_tokens(engine, sampler, logits, 20)) == {C}
            sampler.close()


@pytest.mark.parametrize("p", [0.05, 0.3, 0.6, 0.9])
def test_typical_keeps_the_tokens_of_expected_surprise(engine, p):
    chances = np.array([0.45, 0.2, 0.15, 0.12, 0.08])
    logits = np.full(engine.model.n_vocab, -80, np.float32)
    logits[A : A + 5] = np.log(chances)
    entropy = -(chances * np.log(chances)).sum()
    expected, total = set(), 0.0
    for at in np.argsort(abs(-np.log(chances) - entropy)):
        expected.add(A + int(at))
        total += chances[at]
        if total > p:
            break
    assert many(engine, logits, typical=p) == expected


def test_xtc_drops_all_above_its_threshold_but_the_least_likely(engine):
    chances = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}
    logits = logits_of(engine, **{letter: math.log(p) for letter, p in chances.items()})
    assert many(engine, logits, xtc_probability=1, xtc_threshold=0.15) == {C, D}
    assert many(engine, logits, xtc_probability=1, xtc_threshold=0.35) == {A, B, C, D}
    assert many(engine, logits, xtc_probability=0.5, xtc_threshold=0.15) == {A, B, C, D}
    assert many(engine, logits, xtc_probability=1, xtc_threshold=0.6) == {A, B, C, D}


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_reaches_its_target_and_ignores_other_samplers(engine, version):
    n = engine.model.n_vocab
    logits = -1.1 * np.log(np.arange(1, n + 1)).astype(np.float32)
    bits = -np.log2(np.exp(logits) / np.exp(logits).sum())
    means = []
    for target in (2.0, 3.0, 4.0):
        sampling = Sampling(temp=1, top_k=1, presence_penalty=1000, mirostat=version, mirostat_ent=target)
        sampler = Sampler(engine.model, sampling, seed=2)
        tokens = draw_tokens(engine, sampler, logits, 1200)[200:]
        sampler.close()
        means.append(bits[tokens].mean())
    assert means == sorted(means)
    assert np.ptp(np.array(means) - [2, 3, 4]) < 1
    assert abs(means[1] - 3) < 1


@pytest.mark.parametrize(
    "settings",
    [
        {"temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"temp": 1.5, "top_p": 0.5, "repeat_penalty": 1.3},
        {"temp": 2.0, "top_k": 7},
        {"temp": 1.0, "min_p": 0.2, "repeat_penalty": 1.1},
    ],
)
def test_sampler_draws_like_a_llama_cpp_chain(engine, settings):
    sampling = Sampling(**settings)
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    links = [
        api.llama_sampler_init_penalties(engine.model.n_vocab, 64, sampling.repeat_penalty, 0, 0),
        api.llama_sampler_init_top_k(sampling.top_k),
        api.llama_sampler_init_top_p(sampling.top_p, 1),
        api.llama_sampler_init_min_p(sampling.min_p, 1),
        api.llama_sampler_init_temp(sampling.temp),
        api.llama_sampler_init_dist((5 + 3 * 0x9E3779B9) % 0xFFFFFFFF),
    ]
    for link in links:
        api.llama_sampler_chain_add(chain, link)
    sampler = Sampler(engine.model, sampling, seed=5)
    sampler.start(3)
    rng = np.random.default_rng(4)
    for _ in range(100):
        logits = rng.normal(0, 2, engine.model.n_vocab).astype(np.float32)
        engine.context.logits()[-1] = logits
        assert sampler.sample(engine.context) == api.llama_sampler_sample(chain, engine.context.handle, -1)
    api.llama_sampler_free(chain)
    sampler.close()


def test_changed_settings_keep_recent_tokens_and_seed(engine):
    logits = logits_of(engine, a=5, b=4.5, c=1)
    sampler = Sampler(engine.model, Sampling(repeat_last_n=200), seed=9)
    assert draw_tokens(engine, sampler, logits, 90) == [A] * 90
    sampler.change(replace(sampler.settings, presence_penalty=1.0, repeat_last_n=80))
    assert (sampler.seed, len(sampler.recent)) == (9, 80)
    assert draw_tokens(engine, sampler, logits, 1) == [B]
    settings = sampler.settings
    for wrong in ({"grammar": "root = x"}, {"logit_bias": ((999, 1.0),)}):
        with pytest.raises(UsageError):
            sampler.change(replace(settings, **wrong))
        assert sampler.settings == settings
    assert sampler.sample(engine.context) in (A, B)
    sampler.close()


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"dry_multiplier": 2.0}])
def test_penalties_look_back_across_texts(engine, penalty):
    reach = {
        "dry_penalty_last_n" if "dry_multiplier" in penalty else "repeat_last_n": 150,
        "dry_sequence_breaker": (),
    }
    sampler = Sampler(engine.model, Sampling(**penalty, **reach))
    # c was written about 120 tokens ago, and the penalty looks back at 150 tokens. For DRY, c followed a and
    # b, and the text now ends with a and b again
    sampler.recent.extend([A, B, C, *([D] * 116), A, B] if "dry_multiplier" in penalty else [C, *([D] * 119)])
    sampler.start(1)
    assert draw_tokens(engine, sampler, logits_of(engine, c=5, b=4), 1) == [B]
    sampler.close()


# ranges of settings, and options


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temp": -1}, "--temp must be in 0..10000, got -1; 0 picks the most likely token"),
        ({"temp": math.nan}, "--temp must be in 0..10000, got nan; 0 picks the most likely token"),
        ({"top_p": 2}, "--top-p must be in 0..1, got 2"),
        ({"min_p": -0.1}, "--min-p must be in 0..1, got -0.1"),
        ({"typical": 0}, "--typical must be in 0.001..1, got 0; 1 is off"),
        ({"xtc_probability": 1.5}, "--xtc-probability must be in 0..1, got 1.5"),
        ({"xtc_threshold": -1}, "--xtc-threshold must be in 0..1, got -1"),
        ({"repeat_penalty": 0}, "--repeat-penalty must be in 0.001..1000, got 0; 1 is off"),
        ({"repeat_last_n": -1}, "--repeat-last-n must be in 0..1048576, got -1"),
        ({"presence_penalty": math.inf}, "--presence-penalty must be in -10000..10000, got inf"),
        ({"dry_base": 0.9}, "--dry-base must be in 1..10000, got 0.9"),
        ({"dry_penalty_last_n": 2**31}, "--dry-penalty-last-n must be in 0..1048576, got 2147483648"),
        ({"mirostat": 3}, "--mirostat must be in 0..2, got 3"),
        ({"mirostat_lr": -0.1}, "--mirostat-lr must be in 0..10000, got -0.1"),
        (
            {"logit_bias": ((5, math.inf),)},
            "--logit-bias of token 5 must be in -10000..10000 or -inf, got inf",
        ),
        ({"stop": ("",)}, "the text of --stop and --dry-sequence-breaker must not be empty"),
    ],
)
def test_settings_out_of_range_are_refused_with_one_line(wrong, words):
    with pytest.raises(UsageError) as caught:
        Sampling(**wrong)
    assert str(caught.value) == words


def test_chat_and_generate_and_python_have_the_same_settings():
    defaults = {name: getattr(Sampling, name) for name in declared(Sampling)}
    for command, temp in ((chat, 0.8), (generate, 0.4)):
        expected = {"temp": temp, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
        actual = {name: each.default for name, each in inspect.signature(command).parameters.items()}
        for name, value in defaults.items():
            assert actual[name] == (expected.get(name, value) if not isinstance(value, tuple) else None)
        named = {"json_schema", "seed", "n", "think", "think_budget", "stop_loops"}
        assert {*defaults, *named} == set(declared(GenerationOptions))


def test_python_refuses_an_unknown_setting(engine):
    with pytest.raises(UsageError, match=r"^there is no setting top_kk\. Did you mean top_k"):
        next(kvtool_api.generate(engine, "Hello", top_kk=1))


def test_options_are_read_as_llama_cpp_reads_them():
    raw = {
        "logit_bias": ["15-2.5", " 7 + 1 ", "9-inf"],
        "stop": [r"\n\n", "", r"a\\n", r"\end"],
        "dry_sequence_breaker": [r"\t", "x"],
    }
    generation = GenerationOptions.from_values(raw)
    sampling = generation.sampling()
    assert sampling.logit_bias == ((15, -2.5), (7, 1.0), (9, -math.inf))
    assert sampling.stop == ("\n\n", "a\\n", "\\end")
    assert sampling.dry_sequence_breaker == ("\t", "x")
    assert sampling == Sampling(
        **{"temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "stop": sampling.stop},
        **{"logit_bias": sampling.logit_bias, "dry_sequence_breaker": sampling.dry_sequence_breaker},
    )
    assert GenerationOptions.from_values({"dry_sequence_breaker": ["none"]}).dry_sequence_breaker == ()
    assert GenerationOptions.from_values({"dry_sequence_breaker": None}) == GenerationOptions()
    # options do not change when a session saves and loads them
    for each in (generation, GenerationOptions(dry_sequence_breaker=()), GenerationOptions()):
        assert GenerationOptions().resumed(json.loads(json.dumps(each.session_values()))) == each


def test_typed_grammar_replaces_the_schema_of_a_session():
    typed = GenerationOptions.from_values({"grammar": "root ::= [a]"}, typed=["grammar"])
    mixed = typed.resumed({"json_schema": "{}", "temp": 0.5})
    assert (mixed.grammar, mixed.json_schema, mixed.temp) == ("root ::= [a]", None, 0.5)


def test_settings_are_changed_by_name(engine, tmp_path):
    sampler = Sampler(engine.model, GenerationOptions().sampling())
    chat = SimpleNamespace(
        writer=SimpleNamespace(sampler=sampler), kept=None, effort=None, thought_budget=None
    )
    files = ChatFiles(chat, RunOptions(), GenerationOptions())
    sampler.recent.append(A)
    files.set("top-k", "5")
    files.set("stop", r"\n")
    files.set("temperature", "0.5")
    (tmp_path / "yes.gbnf").write_text('root ::= "yes"')
    files.set("grammar", str(tmp_path / "yes.gbnf"))
    changed = {"top_k": 5, "stop": ("\n",), "grammar": 'root ::= "yes"', "temp": 0.5}
    assert sampler.settings == replace(GenerationOptions().sampling(), **changed)
    assert list(sampler.recent) == [A]
    before, settings = files.generation, sampler.settings
    for name, text, error, words in (
        ("top_p", "2", UsageError, "top_p must be"),
        ("top_k", "many", UsageError, "top_k must be a whole number, got 'many'"),
        ("top_kk", "1", UsageError, "there is no setting top_kk. Did you mean top_k"),
        ("grammar", "root ::= x", UsageError, "no rule defines x"),
        ("json_schema", "nowhere.json", InputError, "cannot read nowhere.json"),
        ("n", "0", UsageError, "n must be at least 1, or -1 for no limit, got 0"),
    ):
        with pytest.raises(error, match=words.replace(".", r"\.")):
            files.set(name, text)
        assert (files.generation, sampler.settings) == (before, settings)
    # a schema replaces the grammar; an empty text removes the schema
    files.set("json_schema", '{"type": "null"}')
    assert "null" in sampler.settings.json_schema
    files.set("json_schema", "")
    assert sampler.settings.grammar is None
    files.set("seed", "7")
    files.set("n", "-1")
    assert (sampler.seed, files.generation.n) == (7, None)
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        files.set(name, "-1")
        assert getattr(sampler.settings, name) == MAX_LOOK_BACK
        with pytest.raises(UsageError, match=rf"{name} must be in 0\.\.1048576, got -2"):
            files.set(name, "-2")
    sampler.close()


# stop strings


def test_text_ends_before_its_first_stop_string_in_any_pieces():
    rng = random.Random(3)
    n_found = 0
    for _ in range(3000):
        text = "".join(rng.choice("ab\u00e9") for _ in range(rng.randrange(12)))
        stops = [
            "".join(rng.choice("ab\u00e9") for _ in range(rng.randrange(1, 5)))
            for _ in range(rng.randrange(3))
        ]
        # (end, begin) of each stop string that is in the text. The writer has to stop at the one that ends
        # first
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        finder, passed, fed = Stops(stops), "", ""
        for piece in pieces:
            fed += piece
            passed += finder.feed(piece)
            if finder.found:
                break
            # the finder keeps text back only if this text may be the start of a stop string
            begun = [n for stop in stops for n in range(1, len(stop)) if fed.endswith(stop[:n])]
            assert passed == fed[: len(fed) - max(begun, default=0)]
        assert passed + finder.rest() == (text[: min(ends)[1]] if ends else text)
        assert bool(finder.found) == bool(ends)
        n_found += bool(finder.found)
    assert 500 < n_found < 2500


@pytest.fixture
def scripted(engine, monkeypatch):
    """scripted(text, *stop) returns a writer. Its sampler gives the text, one token per byte."""

    def make(text, *stop):
        writer = Writer(engine, Sampler(engine.model, Sampling(stop=stop)))
        tokens = iter([3 + byte for byte in text.encode()])
        monkeypatch.setattr(writer.sampler, "sample", lambda context: next(tokens))
        return writer

    return make


def test_stop_strings_and_characters_may_span_several_tokens(scripted):
    # each byte is a token: a dash has three, a letter with an accent two
    writer = scripted("na\u00efve \u2014 caf\u00e9\u2014\u00e9nd", "\u2014\u00e9", "never")
    pieces = list(writer.write())
    assert "".join(pieces) == "na\u00efve \u2014 caf\u00e9"
    # an n (of "never") and a dash may begin a stop string, so they are shown with the next character
    assert pieces[0] == "na"
    assert pieces[4:7] == [" ", "\u2014 ", "c"]
    assert writer.n_written == len("na\u00efve \u2014 caf\u00e9\u2014\u00e9".encode())


def test_withheld_text_is_shown_when_the_text_ends(scripted):
    writer = scripted("one\nUse", "\nUser:")
    assert "".join(writer.write(5)) == "one\nU"
    assert writer.n_written == 5


def test_withheld_text_is_shown_before_an_error(scripted, monkeypatch):
    writer = scripted("one\nUse", "\nUser:")
    read, n_read = writer.engine.read, itertools.count(1)

    def fail_at_the_line_break(tokens, stop):
        if next(n_read) == 4:
            raise InputError("full")
        read(tokens, stop)

    monkeypatch.setattr(writer.engine, "read", fail_at_the_line_break)
    pieces = []
    with pytest.raises(InputError, match="full"):
        pieces.extend(writer.write())
    assert pieces == ["o", "n", "e", "\n"]


def test_chat_keeps_the_tokens_but_not_the_text_of_a_stop_string(scripted):
    writer = scripted("yes.##no", "##")
    conversation = Conversation(writer, template_of(writer.engine.model))
    assert "".join(conversation.reply("Well?")) == "yes."
    assert conversation.messages[-1] == {"role": "assistant", "content": "yes."}
    # the second # was sampled, but it is decoded only when the next turn begins
    assert bytes(token - 3 for token in writer.tokens.tolist()).endswith(b"yes.#")
    writer.read(writer.tokens[:0])
    assert bytes(token - 3 for token in writer.tokens.tolist()).endswith(b"yes.##")


def test_generate_ends_before_a_stop_string(smollm2):
    command = ("generate", "--raw", "-p", "One, two, three,", "-n", 12, "--temp", 0, "-t", 1, "-m", smollm2)
    whole = run_kvtool(*command).stdout
    assert "five" in whole
    assert (
        run_kvtool(*command, "--stop", "never", "--stop", "five").stdout == whole.partition("five")[0] + "\n"
    )


# log-probabilities


def test_logprobs_are_those_of_the_model_without_samplers(engine, smollm2):
    text = "One, two, three,"
    done = run_kvtool(
        *("generate", "--raw", "-p", text, "-n", 6, "--seed", 1, "--temp", 2, "-t", 1, "-m", smollm2),
        *("--json", "--logprobs", 3, "--presence-penalty", 1, "-fa", "off", "-ctk", "f32", "-ctv", "f32"),
    )
    result = json.loads(done.stdout)
    records = result["logprobs"]["content"]
    assert len(records) == result["tokens"] == 6
    assert b"".join(bytes(record["bytes"]) for record in records).decode() == result["text"]
    with open_engine(smollm2, policies.fit("h2o", 1024)) as other:
        model = other.model
        other.read(model.tokenize(text, start=True))
        for record in records:
            logits, nll = other.context.logits()[-1:].copy(), np.empty(1)
            token_nll(logits, np.array([record["id"]], np.int32), nll)
            assert record["logprob"] == pytest.approx(-nll[0], abs=LOGIT_TOLERANCE)
            assert record["token"] == model.piece(record["id"]).decode()
            top = record["top_logprobs"]
            assert [token["id"] for token in top] == np.argsort(-logits[0])[:3].tolist()
            assert [token["logprob"] for token in top] == sorted(
                (token["logprob"] for token in top), reverse=True
            )
            other.read(np.array([record["id"]], np.int32))


def test_logprobs_have_no_tokens_of_the_stop_string(chat_model):
    def answer(*more):
        args = ("generate", "--raw", "-p", "Hi.", "-n", 16, "--seed", 1, "--temp", 1, "--draft", "off")
        done = run_kvtool(*args, "-m", chat_model, "--json", "--logprobs", 0, *more)
        return json.loads(done.stdout)

    whole = answer()
    tokens = [record["token"] for record in whole["logprobs"]["content"]]
    result = answer("--stop", "".join(tokens[6:9]))
    assert (result["text"], result["tokens"]) == ("".join(tokens[:6]), 9)
    assert result["logprobs"]["content"] == whole["logprobs"]["content"][:6]


def test_logprobs_of_all_tokens_add_up_to_one(engine):
    model = engine.model
    record = logprobs(model, np.linspace(-900, 900, model.n_vocab, dtype=np.float32), 5, model.n_vocab)
    assert sum(math.exp(token["logprob"]) for token in record["top_logprobs"]) == pytest.approx(1)
    equal = logprobs(model, np.zeros(model.n_vocab, np.float32), 70, 4)
    assert [token["id"] for token in equal["top_logprobs"]] == [0, 1, 2, 3]
    assert equal["logprob"] == pytest.approx(-math.log(model.n_vocab))
    # a token that is only a part of a character
    assert logprobs(model, np.zeros(model.n_vocab, np.float32), 3 + 0xC3, 0) == {
        **{"token": "\ufffd", "bytes": [0xC3], "id": 3 + 0xC3},
        **{"logprob": equal["logprob"], "top_logprobs": []},
    }


# sessions

_MANY = [
    *("--temp", "0.9", "--seed", "7", "--repeat-last-n", "200", "--presence-penalty", "0.5"),
    *("--frequency-penalty", "0.1", "--typical", "0.95"),
    *("--xtc-probability", "0.3", "--dry-multiplier", "0.8"),
    *("--dry-penalty-last-n", "150", "--dry-sequence-breaker", r"\n", "--stop", "e ", "-l", "70-1"),
]


@pytest.mark.parametrize("more", [_MANY, ["--seed", "7", "--mirostat", "2", "--mirostat-ent", "3"]])
def test_a_session_keeps_the_settings(talk, tmp_path, more):  # noqa: F811
    first = ["--policy", "h2o", "--budget", "96", *more]
    turns = [f"turn {i}" for i in range(8)]
    assert talk(turns, *first, session="whole").returncode == 0
    assert talk(turns[:4], *first).returncode == 0
    done = talk(turns[4:])
    assert (done.returncode, done.stderr) == (0, "")
    assert exported(tmp_path / "chat.kvs") == exported(tmp_path / "whole")


def test_session_with_fewer_settings_continues_with_defaults(talk, tmp_path):  # noqa: F811
    path = tmp_path / "chat.kvs"
    assert talk(["one"], "--policy", "h2o", "--budget", "96", "--temp", "0").returncode == 0
    meta, arrays = sessions.read(path)
    names = ("temp", "top_k", "top_p", "min_p", "repeat_penalty")
    for name in (declared(GenerationOptions).keys() & meta["options"].keys()) - {*names, "n"}:
        del meta["options"][name]
    sessions.write(path, meta, list(arrays.items()))
    done = talk(["two"])
    assert (done.returncode, done.stderr) == (0, "")
    assert sessions.read_meta(path)["options"]["temp"] == 0
    assert sessions.read_meta(path)["options"]["mirostat"] == 0


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("grammar", 'root :== "x"', "a grammar, whose rules look like root ::= ..."),
        ("grammar", "'a' | 'b'" * 99, "a grammar, whose rules look like root ::= ..."),
        *(
            ("json_schema", text, "a JSON schema, which is an object {...} or true")
            for text in ("[1]", '"x"', "-5", " false", "null")
        ),
    ],
)
def test_text_that_is_neither_grammar_nor_file_is_refused(name, text, kind, tmp_path, monkeypatch):
    with pytest.raises(UsageError) as error:
        GenerationOptions.from_values({name: text})
    flag = f"--{name.replace('_', '-')}"
    assert str(error.value) == f"{flag}: {text} is neither a file nor {kind}"
    with pytest.raises(InputError, match="^cannot read x.gbnf: No such file or directory"):
        GenerationOptions.from_values({name: "x.gbnf"})
    # if there is a file with this name, the file is read
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[1]").write_text("root ::= [a]")
    assert GenerationOptions.from_values({"grammar": "[1]"}).grammar == "root ::= [a]"


def test_a_session_keeps_the_text_of_a_grammar(talk, tmp_path):  # noqa: F811
    file = tmp_path / "two.gbnf"
    file.write_text('root ::= [xy]{2} "."')
    assert talk(["one"], "--policy", "h2o", "--budget", "96", "--grammar", file).returncode == 0
    file.unlink()
    # each reply begins at the root of the grammar
    done = talk(["two", "three"])
    assert (done.returncode, done.stderr) == (0, "")
    for reply in done.stdout.splitlines():
        assert len(reply) == 3
        assert set(reply[:2]) <= {"x", "y"}
        assert reply[2] == "."
    assert len(talk(["four"], "--grammar", "", "--temp", "0").stdout) > 4
