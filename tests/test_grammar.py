"""Grammars and JSON schemas: what is written fits them, whatever the policy evicts meanwhile."""

from __future__ import annotations

import json
import os
import re
import tracemalloc

import numpy as np
import pytest

from kvtool import api as kvtool_api
from kvtool import load_model, load_policy, policies
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.llama.grammar import Grammar, grammar_sampler, not_held, schema_grammar
from kvtool.llama.library import api
from kvtool.llama.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.options.sampling import Sampling
from tests.called import called
from tests.running import open_engine
from tests.test_cli import kvtool

COLOURS = ["red", "green", "blue"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 24},
        "age": {"type": "integer"},
        "colour": {"enum": COLOURS},
        "friends": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 16}, "known": {"type": "boolean"}},
                "required": ["name", "known"],
            },
            "minItems": 4,
            "maxItems": 4,
        },
    },
    "required": ["name", "age", "colour", "friends"],
}


@pytest.fixture
def engine(tiny_model):
    with open_engine(tiny_model(), policies.fit("local", 64)) as engine:
        engine.read(engine.model.tokenize("Hello"))
        yield engine


def check_person(text):
    """That a text is JSON of PERSON's schema."""
    person = json.loads(text)
    assert list(person) == ["name", "age", "colour", "friends"]
    assert 3 <= len(person["name"]) <= 24
    assert type(person["age"]) is int
    assert person["colour"] in COLOURS
    assert len(person["friends"]) == 4
    for friend in person["friends"]:
        assert list(friend) == ["name", "known"]
        assert len(friend["name"]) <= 16
        assert type(friend["known"]) is bool


def written(engine, logits, n=60, **settings):
    """What is sampled from the same logits, up to the end of the grammar."""
    sampler = Sampler(engine.model, Sampling(**settings), seed=1)
    tokens = []
    while len(tokens) < n:
        engine.context.logits()[-1] = logits
        tokens.append(sampler.sample(engine.context))
        if engine.model.ends_turn(tokens[-1]):
            break
    sampler.close()
    return tokens


@pytest.mark.engine
def test_greedy_takes_the_likeliest_token_that_fits(engine):
    logits = np.random.default_rng(1).normal(0, 3, engine.model.n_vocab).astype(np.float32)
    logits[259:] = -50
    of = {letter: logits[3 + ord(letter)] for letter in "abcdxyz"}
    want = max("abc", key=of.get) + max("xyz", key=of.get) * 2 + max("ad", key=of.get)
    tokens = written(engine, logits, grammar='root ::= [a-c] [xyz]{2} ("a" | "d")')
    assert bytes(token - 3 for token in tokens[:-1]).decode() == want
    assert engine.model.ends_turn(tokens[-1])


@pytest.mark.engine
def test_a_draw_that_fits_is_the_one_without_a_grammar(engine):
    logits = np.full(engine.model.n_vocab, -90, np.float32)
    logits[[3 + ord(letter) for letter in "abcd"]] = [1, 2, 3, 4]
    settings = {"temp": 2, "presence_penalty": 0.5, "typical": 0.99}
    free = written(engine, logits, **settings)
    assert len(set(free)) == 4
    assert written(engine, logits, grammar="root ::= [abcd]*", **settings) == free


@pytest.mark.engine
@pytest.mark.parametrize("settings", [{"mirostat": 1}, {"mirostat": 2}, {"xtc_probability": 1}, {"top_k": 1}])
def test_what_is_drawn_fits_with_every_sampler(engine, settings):
    # nothing that fits is likely
    logits = np.zeros(engine.model.n_vocab, np.float32)
    logits[3 + ord("q")] = 20
    tokens = written(engine, logits, temp=1, grammar="root ::= [0-9]{20}", **settings)
    assert re.fullmatch(rb"[0-9]{20}", bytes(token - 3 for token in tokens[:-1]))


@pytest.mark.engine
def test_a_character_that_fits_may_come_in_bytes(engine):
    logits = np.zeros(engine.model.n_vocab, np.float32)
    tokens = written(engine, logits, temp=1, grammar="root ::= [\u00e9\u2014]{9}")
    assert re.fullmatch("[\u00e9\u2014]{9}", bytes(token - 3 for token in tokens[:-1]).decode())


@pytest.mark.engine
def test_a_grammar_that_nothing_continues_is_an_error_and_not_a_crash(engine):
    banned = ((3 + ord("a"), -np.inf),)
    sampler = Sampler(engine.model, Sampling(grammar='root ::= "xa"', logit_bias=banned))
    assert sampler.sample(engine.context) == 3 + ord("x")
    with pytest.raises(UsageError, match="the grammar has come to a place that no token of this model"):
        sampler.sample(engine.context)
    sampler.close()


@pytest.mark.engine
def test_each_text_begins_the_grammar_anew(engine):
    # no token of both letters
    engine.context.logits()[-1, 259:] = -90
    sampler = Sampler(engine.model, Sampling(temp=1, grammar='root ::= "ab"'), seed=1)
    for n in range(3):
        sampler.start(n)
        assert [sampler.sample(engine.context) for _ in "ab"] == [3 + ord("a"), 3 + ord("b")]
        assert engine.model.ends_turn(sampler.sample(engine.context))
    sampler.close()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root = x", "expecting ::= in line 1, before `= x`"),
        ('root ::= "a" b\nb ::= "x" )\n', "expecting newline or end in line 2, before `)`"),
        ('# note\n\nroot ::= ("a"', "expecting ')' in line 3, at its end"),
        ("root ::= x", "Undefined rule identifier 'x'"),
        ("a ::= [a]", "grammar does not contain a 'root' symbol"),
        ('root ::= root "a"', "unsupported grammar, left recursion detected for nonterminal at index 0"),
        ('root ::= "a', "unexpected end of input"),
    ],
)
def test_a_grammar_that_does_not_parse_says_why(engine, capfd, grammar, words):
    with pytest.raises(UsageError) as caught:
        grammar_sampler(engine.model, grammar)
    assert str(caught.value) == f"the grammar does not parse: {words}"
    # llama.cpp prints the whole grammar
    assert capfd.readouterr() == ("", "")


@pytest.mark.engine
def test_an_empty_grammar_is_none_of_llama_cpps(engine):
    for grammar in ("", " \n"):
        with pytest.raises(UsageError, match="the grammar is empty"):
            grammar_sampler(engine.model, grammar)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "the JSON schema is not JSON: Expecting property name .*line 1 column 2"),
        ("[]", r"the JSON schema must be an object \{...\}, got \[\]"),
        ('{"type": "text"}', "cannot be turned into a grammar: Unrecognized schema: {'type': 'text'}"),
        ('{"$ref": "#/$defs/no"}', "cannot be turned into a grammar: Error resolving ref"),
        ('{"type": "string", "pattern": "a"}', "cannot be turned into a grammar: Pattern must start with"),
        ('{"properties": 5}', "cannot be turned into a grammar: 'int' object"),
        ('{"const": "\\ud800"}', "cannot be turned into a grammar: 'utf-8' codec"),
        (
            '{"type": "array", "minItems": 1000000}',
            "minItems in the JSON schema must be at most 1000, got 1000000",
        ),
        (
            '{"items": {"minLength": 1e9}}',
            "minLength in the JSON schema must be at most 1000, got 1000000000",
        ),
        ('{"maxLength": -1}', "maxLength in the JSON schema must be a whole number, 0 or more, got -1"),
        ('{"maxLength": "3"}', "maxLength in the JSON schema must be a whole number, 0 or more, got '3'"),
        ('{"maxItems": 1e999}', "maxItems in the JSON schema must be a whole number, 0 or more, got inf"),
        (
            '{"type": "string", "pattern": "^a{1000000000}$"}',
            r"a pattern .* repeats too much: \{1000000000\}",
        ),
        ('{"type": "string", "pattern": "^a{0,2000}$"}', r"a pattern .* repeats too much: \{0,2000\}"),
        ('{"type": "string", "pattern": "^[a]{100}{100}{9}$"}', r"a pattern .* repeats too much: \{9\}"),
        ('{"type": "string", "pattern": "^((a{100}b{9}){100}){2,}$"}', r"a pattern .* too much: \{2,\}"),
        ('{"items": ' * 9000 + "{}" + "}" * 9000, "the JSON schema is nested too deeply"),
    ],
)
def test_a_schema_that_cannot_be_held_says_why(schema, words):
    with pytest.raises(UsageError, match=words) as caught:
        schema_grammar(schema)
    assert "\n" not in str(caught.value)


def test_what_a_schema_repeats_is_bounded_before_it_takes_memory():
    long = '{"type": "string", "maxLength": 1000000000}'
    tracemalloc.start()
    assert schema_grammar(long) == schema_grammar('{"type": "string"}')
    assert not_held(long) == ["maxLength"]
    lists = '{"type": "array", "items": {"maxItems": 1001, "type": "array", "items": {"type": "null"}}}'
    assert not_held(lists) == ["maxItems"]
    assert schema_grammar(lists) == schema_grammar(lists.replace('"maxItems": 1001, ', ""))
    for pattern in (r"^(a{100}){100}$", r"^(a{9}b){99}(c{99}d){99}e{1000}$", r"^\({9}[({]{1000}$", "^a{3,}$"):
        assert "root ::=" in schema_grammar(json.dumps({"type": "string", "pattern": pattern}))
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
    for n in (3, 3.0):
        schema = {"type": "array", "items": {"type": "null"}, "maxItems": n}
        assert schema_grammar(json.dumps(schema)) == schema_grammar(json.dumps({**schema, "maxItems": 3}))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"type": ["string", "null"], "maxLength": 2}, '"ab"', '"abc"'),
        ({"type": ["string", "null"], "enum": ["a", None]}, "null", '"b"'),
        ({"type": "array", "items": {}}, '[1, "a"]', "[1"),
    ],
)
def test_what_a_schema_says_beside_its_types_is_held(engine, schema, fits, fails):
    grammar = schema_grammar(json.dumps({"type": "object", "properties": {"x": schema}, "required": ["x"]}))
    start = '{"x": '
    for text, is_whole in ((fits, True), (fails, False)):
        found = Grammar(engine.model, grammar)
        tokens = engine.model.tokenize(start + text + "}").tolist()
        assert all(map(found.take, tokens)) == is_whole
        found.close()


@pytest.mark.engine
@pytest.mark.parametrize(
    "value",
    ["plain", 'a "quoted" \\ word', "two\nlines\tand more", "caf\u00e9 \U0001f600", [1, {"a\\b": None}]],
)
def test_a_text_of_a_schema_is_written_as_json_has_it(engine, value):
    key = 'the "key"\n'
    schema = {"type": "object", "properties": {key: {"const": value}}, "required": [key]}
    logits = np.zeros(engine.model.n_vocab, np.float32)
    logits[259:] = -90
    tokens = written(engine, logits, 200, grammar=schema_grammar(json.dumps(schema)))
    text = bytes(token - 3 for token in tokens[:-1]).decode()
    assert json.loads(text) == {key: value}
    # as a model knows it
    assert "\\u" not in text


@pytest.mark.engine
@pytest.mark.parametrize("likely", ["\n", "\t", "\0", "\\", '"', "\x7f"])
def test_no_string_has_what_json_does_not_allow(engine, likely):
    logits = np.random.default_rng(2).normal(0, 1, engine.model.n_vocab).astype(np.float32)
    logits[3 + ord(likely)] += 6
    # bytes above are parts of characters, and alone none
    logits[3 + 0x80 :] = -90
    schema = {"type": "string", "minLength": 8, "maxLength": 9}
    tokens = written(engine, logits, 200, temp=1, grammar=schema_grammar(json.dumps(schema)))
    assert 8 <= len(json.loads(bytes(token - 3 for token in tokens[:-1]))) <= 9


@pytest.mark.engine
def test_a_definition_is_not_taken_for_a_property_of_its_name(engine):
    schema = {
        "properties": {
            "pet": {"enum": ["cat"]},
            "other": {"$ref": "#/$defs/pet"},
            "list": {"$ref": "#/$defs/deep/pet"},
        },
        "required": ["pet", "other", "list"],
        "$defs": {
            "pet": {"enum": ["dog"]},
            "deep": {
                "pet": {
                    "anyOf": [
                        {"const": 0},
                        {"items": {"$ref": "#/$defs/deep/pet"}, "minItems": 1, "maxItems": 1},
                    ]
                }
            },
        },
    }
    logits = np.zeros(engine.model.n_vocab, np.float32)
    logits[259:] = -90
    found = set()
    for first in "0[":
        logits[3 + ord("0")], logits[3 + ord("[")] = (5, 0) if first == "0" else (0, 2)
        tokens = written(engine, logits, 400, temp=1, grammar=schema_grammar(json.dumps(schema)))
        value = json.loads(bytes(token - 3 for token in tokens[:-1]))
        assert (value["pet"], value["other"]) == ("cat", "dog")
        found.add(type(value["list"]))
    assert found == {int, list}


def test_what_a_grammar_cannot_hold_is_named():
    schema = {
        **{"$schema": "x", "title": "t", "type": "object", "minProperties": 1},
        "properties": {
            "minimum": {"type": "integer", "maximum": 4, "default": {"not": 1}},
            "list": {"items": {"type": "number", "multipleOf": 2}, "uniqueItems": True},
            "one": {"anyOf": [{"type": "null"}, {"exclusiveMinimum": 1}], "enum": [{"if": 1}]},
        },
    }
    found = not_held(json.dumps(schema))
    assert found == ["exclusiveMinimum", "maximum", "minProperties", "multipleOf", "uniqueItems"]
    assert not_held(json.dumps(PERSON)) == []


@pytest.mark.engine
@pytest.mark.parametrize(("policy", "temp"), [("h2o", 0), ("streamingllm", 1.5), ("recall", 1.5)])
def test_an_object_fits_its_schema_though_its_tokens_are_evicted(smol, policy, temp):
    model = Model(smol)
    engine = Engine(model, policies.fit(policy, 64), Settings(n_threads=1, n_batch=32))
    its = Sampling(temp=temp, grammar=schema_grammar(json.dumps(PERSON)))
    writer = Writer(engine, Sampler(model, its, seed=3))
    writer.read(model.tokenize("A person and four friends as JSON:\n", start=True))
    n_before, text = engine.n_evicted, ""
    evicted = []
    for piece in writer.write(400):
        text += piece
        evicted.append(engine.n_evicted)
    engine.close()
    model.close()
    check_person(text)
    # nothing of the prompt had to go; much of the object did, while it was written
    assert n_before == 0
    assert len(set(evicted)) >= 3
    assert engine.policy.budget == 64


@pytest.mark.engine
def test_generate_writes_json_that_fits_a_schema_under_a_budget(smol, tmp_path):
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    own = ("generate", "-p", "Who is it?", "-n", 400, "--seed", 5, "-t", 1, "-m", smol)
    under = ("--policy", "h2o", "--budget", 64, "-b", 32)
    done = kvtool(*own, *under, "--json-schema", tmp_path / "person.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["evicted"] > 20
    check_person(result["text"])
    # the schema itself, and what it says that no grammar holds
    done = kvtool(*own, *under, "-j", json.dumps(PERSON | {"maxProperties": 9}))
    check_person(done.stdout)
    assert done.stderr == (
        "a grammar cannot hold the text to the schema's maxProperties; check the JSON for that\n"
    )


@pytest.mark.engine
@pytest.mark.parametrize("typed", [["--grammar", "root ::= x"], ["--json-schema", '{"type": 5}']])
def test_a_command_says_why_before_it_reads(chat_model, typed):
    done = called("generate", "-p", "a" * 400, "--policy", "h2o", "--budget", 64, "-m", chat_model, *typed)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvtool: the ")


@pytest.mark.engine
def test_python_takes_a_schema_and_stop_strings(smollm2):
    model = load_model(smollm2)
    engine = Engine(model, load_policy("h2o", budget=64), Settings(n_threads=1))
    schema = {"type": "array", "items": {"enum": COLOURS}, "minItems": 3, "maxItems": 3}
    found = json.loads("".join(kvtool_api.generate(engine, "Colours: ", json_schema=schema)))
    assert len(found) == 3
    assert set(found) <= set(COLOURS)
    engine.reset()
    for stop in (", ", [", ", "?"]):
        text = "".join(kvtool_api.generate(engine, "One, two,", 20, grammar='root ::= "a b, c"', stop=stop))
        assert text == "a b"
    with pytest.raises(UsageError, match="grammar and json_schema say the same"):
        next(kvtool_api.generate(engine, "One", grammar="root ::= [a]", json_schema="{}"))
    engine.close()
    model.close()


@pytest.mark.engine
def test_a_failed_grammar_leaves_stderr_open(engine, capfd):
    for _ in range(300):
        with pytest.raises(UsageError):
            grammar_sampler(engine.model, "root")
    assert api.llama_sampler_free(grammar_sampler(engine.model, "root ::= [a]")) is None
    # as C writes there
    os.write(2, b"still here\n")
    assert capfd.readouterr().err == "still here\n"
