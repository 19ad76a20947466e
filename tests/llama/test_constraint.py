"""Grammars and JSON schemas: all sampled text fits them, even if its first tokens have been evicted."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest

from kvtool import api as kvtool_api
from kvtool import load_model, load_policy, policies
from kvtool.chats.writer import Writer
from kvtool.config.generation import GenerationOptions
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.llama.grammar.constraint import Matcher, Vocabulary
from kvtool.llama.grammar.gbnf import MAX_CHARACTERS, rules_of
from kvtool.llama.grammar.schema import Unenforced, enforced, enforced_text
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.llama.sampling import Sampling
from tests import tiny
from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.engine.exact_engines import open_engine

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


def peak_bytes():
    """Return the largest number of bytes that this process has had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def bounded():
    """Assert that a block ends soon, takes little memory, and raises no error other than a short UsageError.

    The message of a UsageError must be one line.
    """
    before, start, message = peak_bytes(), time.process_time(), ""
    try:
        yield
    except UsageError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 400
    # CPU time is measured, because it does not grow when other programs keep the machine busy
    assert time.process_time() - start < 30
    assert peak_bytes() - before < 600 * 2**20


@pytest.fixture
def engine(tiny_model):
    with open_engine(tiny_model(), policies.fit("local", 64)) as engine:
        engine.read(engine.model.tokenize("Hello"))
        yield engine


def check_person(text):
    """Assert that a text is JSON of PERSON's schema."""
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


def generate_text(engine, logits, n=60, **settings):
    """Return the text of up to n tokens, sampled from the same logits each time, until the grammar ends."""
    sampler = Sampler(engine.model, Sampling(**settings), seed=1)
    text = b""
    for _ in range(n):
        engine.context.logits()[-1] = logits
        token = sampler.sample(engine.context)
        if engine.model.ends_turn(token):
            break
        text += engine.model.piece(token)
    sampler.close()
    return text.decode()


def test_greedy_takes_the_likeliest_token_that_fits(engine):
    logits = np.random.default_rng(1).normal(0, 3, engine.model.n_vocab).astype(np.float32)
    logits[259:] = -50
    of = {letter: logits[3 + ord(letter)] for letter in "abcdxyz"}
    expected = max("abc", key=of.get) + max("xyz", key=of.get) * 2 + max("ad", key=of.get)
    assert generate_text(engine, logits, grammar='root ::= [a-c] [xyz]{2} ("a" | "d")') == expected


def test_sampled_text_that_fits_is_the_same_without_a_grammar(engine):
    logits = np.full(engine.model.n_vocab, -90, np.float32)
    logits[[3 + ord(letter) for letter in "abcd"]] = [1, 2, 3, 4]
    settings = {"temp": 2, "presence_penalty": 0.5, "typical": 0.99}
    free = generate_text(engine, logits, **settings)
    assert len(set(free)) == 4
    assert generate_text(engine, logits, grammar="root ::= [abcd]*", **settings) == free


@pytest.mark.parametrize("settings", [{"mirostat": 1}, {"mirostat": 2}, {"xtc_probability": 1}, {"top_k": 1}])
def test_sampled_text_fits_with_every_sampler(engine, settings):
    # the only likely token, q, does not fit the grammar
    logits = np.zeros(engine.model.n_vocab, np.float32)
    logits[3 + ord("q")] = 20
    text = generate_text(engine, logits, temp=1, grammar="root ::= [0-9]{20}", **settings)
    assert re.fullmatch("[0-9]{20}", text)


def test_characters_may_be_sampled_byte_by_byte(engine):
    logits = np.zeros(engine.model.n_vocab, np.float32)
    text = generate_text(engine, logits, temp=1, grammar="root ::= [\u00e9\u2014]{9}")
    assert re.fullmatch("[\u00e9\u2014]{9}", text)


def test_grammar_that_no_token_can_continue_raises_usage_error(engine):
    banned = ((3 + ord("a"), -np.inf),)
    sampler = Sampler(engine.model, Sampling(grammar='root ::= "xa"', logit_bias=banned))
    assert sampler.sample(engine.context) == 3 + ord("x")
    with pytest.raises(UsageError, match="the grammar has come to a place that no token of this model"):
        sampler.sample(engine.context)
    sampler.close()


def test_each_text_starts_at_the_root_of_the_grammar(engine):
    sampler = Sampler(engine.model, Sampling(temp=1, grammar='root ::= "ab"'), seed=1)
    for n in range(3):
        sampler.start(n)
        assert engine.model.piece(sampler.sample(engine.context)) == b"ab"
        assert engine.model.ends_turn(sampler.sample(engine.context))
    sampler.close()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root = x", "expecting a rule's name and ::= in line 1, before `root = x`"),
        ('root ::= "a" b\nb ::= "x" )\n', "unexpected ) in line 2, before `)`"),
        ('# note\n\nroot ::= ("a"', "expecting ) in line 3, at its end"),
        ('root ::= ("a"\nb ::= "c"', 'expecting ) in line 2, before `b ::= "c"`'),
        ("root ::= x", "no rule defines x"),
        ("a ::= [a]", "it has no rule named root"),
        ('root ::= "a', 'unexpected text in line 1, before `"a`'),
        ('root ::= "\\q"', 'unknown escape \\q in line 1, before `"\\q"`'),
        ('root ::= "\\ud800"', '\\ud800 is no character in line 1, before `"\\ud800"`'),
        ("root ::= []", "an empty set of characters in line 1, before `[]`"),
        ("root ::= [z-a]", "the range z-a is empty in line 1, before `[z-a]`"),
        ('root ::= "a"{3,2}', "{3,2} is empty in line 1, before `{3,2}`"),
        (
            f"root ::= [a]{{1,{'9' * 5000}}}",
            f"a number of more than 10 digits in line 1, before `{{1,{'9' * 37}`",
        ),
        ("root ::= * [a]", "nothing stands before * in line 1, before `* [a]`"),
        ('root ::= "a"\n"b"', 'expecting a rule\'s name and ::= in line 2, before `"b"`'),
    ],
)
def test_a_grammar_that_does_not_parse_says_why(grammar, words):
    with pytest.raises(UsageError) as caught:
        rules_of(grammar)
    assert str(caught.value) == f"the grammar does not parse: {words}"


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "the grammar is empty"),
        (" \n", "the grammar is empty"),
        ("root ::= [\ud800]", "the grammar is not Unicode: character 10 is half of a pair"),
        (
            "root ::= [a]" + " " * MAX_CHARACTERS,
            "the grammar has 262,156 characters; at most 262,144 are taken",
        ),
    ],
)
def test_unusable_grammars_are_refused_with_one_line(grammar, words):
    with pytest.raises(UsageError) as caught:
        rules_of(grammar)
    assert str(caught.value) == words


JSON_GRAMMAR = r"""
# as in llama.cpp's examples
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "fits", "fails"),
    [
        (
            JSON_GRAMMAR,
            ['{"a": [1, -2.5e3, {"b\\n": "x\u00e9"}],\n  "c": null}', "[]", "{}"],
            ['{"a" 1}', "[1,]"],
        ),
        # a lexer that always takes the longest match would refuse texts of these grammars
        ('root ::= [a-z]* "abc"', ["abc", "xabc", "abcabc"], ["ab", "abcd"]),
        ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab", "abcd"]),
        ('root ::= x "b"\nx ::= "a" | "ab"', ["ab", "abb"], ["a", "abbb"]),
        # names of rules may differ in case only, or begin with a digit
        ('root ::= start Start 1-a\nstart ::= "a"\nStart ::= "b"\n1-a ::= "c"', ["abc"], ["aac", "abb"]),
        (
            'root ::= "\\u00e9" [\\u00e8-\\u00ea] . "\\x41" "\\U0001F600"',
            ["\u00e9\u00ea\nA\U0001f600"],
            ["\u00e9e\nA"],
        ),
        (r"root ::= [a\]x-] [-z] [^-\]]", ["]-a", "-z!", "x-["], ["y-a", "aza]", "az-"]),
        (r'root ::= [a\-c]+ "\-"', ["a-c-", "c-"], ["b-", "ac"]),
        (
            'root ::= "a"{0} ([b] root "c"){0,0} "d" [e] {0, 2}',
            ["d", "de", "dee"],
            ["ad", "bdcd", "deee"],
        ),
        (r"root ::= [\x2d-\x2f]", ["-", ".", "/"], ["0"]),
        (
            'root ::= "a"{2} [b]{1,} (("c" | "d")? "e"){0,2}',
            ["aab", "aabbcede", "aabe"],
            ["ab", "aabceceCe", "aa"],
        ),
        ('root ::= "a" |\n  "b"\nroot ::= "c"', ["c"], ["a"]),
        ('root ::= "a" (\n"b"\n| "c"\n) # what follows\n', ["ab", "ac"], ["a"]),
        ('root ::= sum\nsum ::= num | sum "+" num\nnum ::= [0-9]+ | "(" sum ")"', ["1+(22+3)"], ["1+", "(1"]),
        ('root ::= "/" [/] "\\\\"', ["//\\"], ["//"]),
        ('root ::= ""', [""], ["a"]),
    ],
)
def test_grammar_accepts_exactly_the_texts_that_fit(engine, grammar, fits, fails):
    matcher, vocabulary = Matcher(Vocabulary.of(engine.model), rules_of(grammar)), Vocabulary.of(engine.model)
    for text in (*fits, *fails):
        matcher.restart()
        accepted = all(map(matcher.accept, vocabulary.tokens_of(text.encode())))
        assert (accepted and matcher.accept(engine.model.eos)) == (text in fits), text


def test_a_token_may_be_named_by_its_number(engine):
    model = engine.model
    matcher = Matcher(Vocabulary.of(model), rules_of("root ::= <[1]> !<[300]> [a]"))
    assert not matcher.accept(3 + ord("a"))
    assert matcher.accept(1)
    assert not matcher.accept(300)
    assert matcher.accept(301)
    assert matcher.accept(3 + ord("a"))


@pytest.mark.parametrize("kind", ["control", "words"])
def test_a_token_may_be_named_by_its_text(tmp_path, kind):
    path = tmp_path / "thinking.gguf"
    tiny.write_vocab(path, **{kind: ("<think>", "</think>")})
    with closing(Model(path, vocab_only=True)) as model:
        grammar = "root ::= <think> thought </think> [a-z]+\nthought ::= !</think>{1,4}"
        matcher = Matcher(Vocabulary.of(model), rules_of(grammar))
        for text, fits in (
            ("<think>A b.</think>ok", True),
            ("<think></think>ok", False),
            ("<think>A b. C d. E</think>ok", False),
            ("A b.</think>ok", False),
        ):
            matcher.restart()
            tokens = [*model.tokenize(text, special=True).tolist(), model.eos]
            assert all(map(matcher.accept, tokens)) == fits, text
        for grammar in ("root ::= <thin>", "root ::= !<thin>+"):
            with pytest.raises(
                UsageError, match="^the grammar cannot be used: <thin> is not one token of this"
            ):
                Matcher(Vocabulary.of(model), rules_of(grammar))
        end = model.marker(model.eos)
        with pytest.raises(UsageError, match=f"{re.escape(end)} ends a reply in any case; leave it out"):
            Matcher(Vocabulary.of(model), rules_of(f'root ::= "a" {end}'))


ENDLESS = {
    "many optional parts": "root ::= " + "(" * 4 + '"a"?' + "){2000}" * 4,
    "deep": "root ::= " + "(" * 100_000 + "[a]" + ")" * 100_000,
    "a chain that is recursive": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1} [b]?\n" for i in range(9_000))
    + "r9000 ::= [a] root?",
    "itself": "root ::= root",
    "itself and more": 'root ::= root root | ""',
    "counts": "root ::= [a]{1000000000} [b]{1000000000,}",
    "options": "root ::= " + " | ".join(f'[a-z]+ "{n}"' for n in range(9_000)),
}
"""Small grammars on which a careless parser never ends, or runs out of memory or stack."""


@pytest.mark.parametrize("what", ENDLESS)
def test_difficult_grammars_need_bounded_time_and_memory(engine, what):
    model, rng = engine.model, np.random.default_rng(1)
    with bounded():
        matcher = Matcher(Vocabulary.of(model), rules_of(ENDLESS[what]))
        for _ in range(100):
            fits = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            token = int(rng.choice(fits))
            assert matcher.accept(token)
            if model.ends_turn(token):
                break


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"type": ["string", "null"], "maxLength": 2}, '"ab"', '"abc"'),
        ({"type": ["string", "null"], "enum": ["a", None]}, "null", '"b"'),
        ({"type": "array", "items": {}}, '[1, "a"]', "[1"),
    ],
)
def test_schema_keywords_next_to_types_are_enforced(engine, schema, fits, fails):
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    for text, is_whole in ((fits, True), (fails, False)):
        matcher = Matcher(Vocabulary.of(engine.model), enforced(whole).rules)
        tokens = engine.model.tokenize('{"x": ' + text + "}").tolist()
        assert all(map(matcher.accept, tokens)) == is_whole


@pytest.mark.parametrize(
    "value",
    ["plain", 'a "quoted" \\ word', "two\nlines\tand more", "caf\u00e9 \U0001f600", [1, {"a\\b": None}]],
)
def test_schema_text_is_json_without_unicode_escapes(engine, value):
    key = 'the "key"\n'
    schema = {"type": "object", "properties": {key: {"const": value}}, "required": [key]}
    logits = np.zeros(engine.model.n_vocab, np.float32)
    logits[259:] = -90
    text = generate_text(engine, logits, 900, json_schema=json.dumps(schema))
    assert json.loads(text) == {key: value}
    # models have learned to write characters themselves, not as \u escapes. Therefore the text must not have
    # such escapes
    assert "\\u" not in text


@pytest.mark.parametrize("char", ["\n", "\t", "\0", "\\", '"', "\x7f"])
def test_schema_strings_contain_no_invalid_json_characters(engine, char):
    logits = np.random.default_rng(2).normal(0, 1, engine.model.n_vocab).astype(np.float32)
    logits[3 + ord(char)] += 6
    # exclude the bytes from 0x80 on, because each of them is only a part of a character
    logits[3 + 0x80 :] = -90
    schema = {"type": "string", "minLength": 8, "maxLength": 9}
    text = generate_text(engine, logits, 200, temp=1, json_schema=json.dumps(schema))
    assert 8 <= len(json.loads(text)) <= 9


def test_definition_is_not_confused_with_a_property_of_its_name(engine):
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
                        {
                            "type": "array",
                            "items": {"$ref": "#/$defs/deep/pet"},
                            "minItems": 1,
                            "maxItems": 1,
                        },
                    ]
                }
            },
        },
    }
    logits = np.zeros(engine.model.n_vocab, np.float32)
    logits[259:] = -90
    are_lists = set()
    for first in "0[":
        logits[3 + ord("0")], logits[3 + ord("[")] = (5, 0) if first == "0" else (0, 2)
        value = json.loads(generate_text(engine, logits, 400, temp=1, json_schema=json.dumps(schema)))
        assert (value["pet"], value["other"]) == ("cat", "dog")
        are_lists.add(isinstance(value["list"], list))
    assert are_lists == {True, False}


def test_keywords_that_cannot_be_enforced_are_listed():
    schema = {
        **{"$schema": "x", "title": "t", "type": "object", "minProperties": 1, "additionalProperties": True},
        "properties": {
            "minimum": {"type": "integer", "maximum": 4, "default": {"not": 1}},
            "list": {"type": "array", "items": {"type": "number", "multipleOf": 2}, "uniqueItems": True},
            "one": {"type": "string", "format": "color", "pattern": r"\bfoo"},
        },
    }
    assert enforced(schema).not_held == ["format color", "minProperties", "pattern", "uniqueItems"]
    assert enforced(PERSON).not_held == []
    with pytest.raises(Unenforced, match="the JSON schema's format color cannot be enforced") as caught:
        enforced({"properties": {"a/b": {"anyOf": [{}, {"type": "string", "format": "color"}]}}}, strict=True)
    assert caught.value.where == "#/properties/a~1b/anyOf/1/format"


@pytest.mark.parametrize(("policy", "temp"), [("h2o", 0), ("streamingllm", 1.5), ("recall", 1.5)])
def test_an_object_fits_its_schema_though_its_tokens_are_evicted(smol, policy, temp):
    model = Model(smol)
    engine = Engine(model, policies.fit(policy, 64), Settings(n_threads=1, n_batch=32))
    settings = Sampling(temp=temp, json_schema=json.dumps(PERSON))
    writer = Writer(engine, Sampler(model, settings, seed=3))
    writer.read(model.tokenize("A person and four friends as JSON:\n", start=True))
    n_before, text = engine.n_evicted, ""
    evicted = []
    for piece in writer.write(400):
        text += piece
        evicted.append(engine.n_evicted)
    engine.close()
    model.close()
    check_person(text)
    # no token was evicted before the object; many were evicted while it was written
    assert n_before == 0
    assert len(set(evicted)) >= 3
    assert engine.policy.budget == 64


def test_generate_writes_json_that_fits_a_schema_under_a_budget(smol, tmp_path):
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    command = ("generate", "-p", "Who is it?", "-n", 400, "--seed", 5, "-t", 1, "-m", smol)
    under = ("--policy", "h2o", "--budget", 64, "-b", 32)
    done = run_kvtool(*command, *under, "--json-schema", tmp_path / "person.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["evicted"] > 20
    check_person(result["text"])
    # now the schema is given as text, with a keyword that is not enforced
    done = run_kvtool(*command, *under, "-j", json.dumps(PERSON | {"unevaluatedItems": False}))
    check_person(done.stdout)
    assert done.stderr == ("the schema's unevaluatedItems cannot be enforced; check the JSON for that\n")


@pytest.mark.parametrize(
    "typed",
    [
        ["--grammar", "root ::= x"],
        ["--json-schema", '{"type": 5}'],
        ["--json-schema", f'{{"minimum": {"9" * 5000}}}'],
    ],
)
def test_generate_refuses_invalid_grammars_and_schemas(chat_model, typed):
    done = run_kvtool(
        "generate", "-p", "a" * 400, "--policy", "h2o", "--budget", 64, "-m", chat_model, *typed
    )
    assert_one_line(done, 2, "kvtool: the ")


def test_true_is_a_schema_that_any_json_fits(tmp_path):
    file = tmp_path / "any.json"
    for text in ("true", " true\n"):
        file.write_text(text)
        for typed in (text, str(file)):
            given = GenerationOptions.from_values({"json_schema": typed}).json_schema
            assert enforced_text(given) == enforced({})
    with pytest.raises(UsageError, match=r"^the JSON schema must be an object \{...\} or true, got \[1\]$"):
        enforced_text("[1]")


def test_python_takes_a_schema_and_stop_strings(smollm2):
    model = load_model(smollm2)
    engine = Engine(model, load_policy("h2o", budget=64), Settings(n_threads=1))
    schema = {"type": "array", "items": {"enum": COLOURS}, "minItems": 3, "maxItems": 3}
    colours = json.loads("".join(kvtool_api.generate(engine, "Colours: ", json_schema=schema)))
    assert len(colours) == 3
    assert set(colours) <= set(COLOURS)
    engine.reset()
    for stop in (", ", [", ", "?"]):
        text = "".join(kvtool_api.generate(engine, "One, two,", 20, grammar='root ::= "a b, c"', stop=stop))
        assert text == "a b"
    with pytest.raises(UsageError, match="--grammar and --json-schema cannot be combined"):
        next(kvtool_api.generate(engine, "One", grammar="root ::= [a]", json_schema="{}"))
    engine.close()
    model.close()
