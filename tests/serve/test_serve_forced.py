"""Grammars that make a model call a tool in the model's format, with arguments that fit the tool's schema."""

from __future__ import annotations

import jsonschema
import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import UsageError
from kvtool.llama.grammar.constraint import Matcher, Vocabulary
from kvtool.llama.grammar.rules import Rules
from kvtool.llama.grammar.schema import enforced
from kvtool.llama.sampler import Sampler
from kvtool.llama.sampling import Sampling
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.request_tools import Choice
from kvtool.serve.tools.forced import CallRules
from kvtool.serve.tools.formats import GEMMA, HARMONY, HERMES, LLAMA
from tests.engine.exact_engines import open_engine
from tests.serve.http_requests import check_tools
from tests.serve.test_serve_calls import each_format, parsed
from tests.serve.test_serve_tools import TOOLS, tool
from tests.serve.written_calls import NOW, TRICKY, ZURICH


@pytest.fixture(scope="module")
def engine(tiny_model):
    with open_engine(tiny_model(), policies.fit("local", 64)) as engine:
        engine.read(engine.model.tokenize("Hello"))
        yield engine


def call_rules(engine, format):
    places = [f"tools[{n}].function.parameters" for n in range(20)]
    return CallRules(Vocabulary.of(engine.model), format, "", places)


def forced(engine, format, tools, choice=None):
    """Return the rules that force a call. choice: a `Choice` that names a tool, or None for any tool."""
    return call_rules(engine, format).required_call(tools, choice and choice.name)


def generate_text(engine, rules, next_logits, n=900, is_enough=lambda text: False):
    """Return a text sampled under rules.

    next_logits: function of the bytes of the text so far. Returns 256 logits, one for each next byte.
    is_enough: function of the bytes of the text so far. The text ends where it returns True.
    """
    sampler = Sampler(engine.model, Sampling(temp=1), seed=1, rules=rules)
    text = b""
    while len(text) < n and not is_enough(text):
        logits = np.full(engine.model.n_vocab, -90, np.float32)
        logits[engine.model.eos] = -50
        logits[3:259] = next_logits(text)
        engine.context.logits()[-1] = logits
        token = sampler.sample(engine.context)
        if engine.model.ends_turn(token):
            break
        # if the grammar leaves only one continuation, the sampler may choose a token of several bytes
        text += engine.model.piece(token)
    sampler.close()
    return text.decode(errors="replace")


def dictates(text):
    """Return a `next_logits` that strongly prefers the text `text`, and then an end of the turn."""

    dictated = text.encode()

    def next_logits(so_far):
        logits = np.full(256, -90 if so_far == dictated else 0, np.float32)
        if dictated.startswith(so_far) and so_far != dictated:
            logits[dictated[len(so_far)]] = 60
        return logits

    return next_logits


def wanders(seed, *ends):
    """Return `next_logits` for `generate_text`. Random logits, higher for bytes of the texts `ends`."""
    # one array for all bytes of a text, because drawing one row at a time takes long
    rows = iter(np.random.default_rng(seed).normal(0, 2, (1000, 256)).astype(np.float32))

    def next_logits(so_far):
        logits = next(rows)
        logits[0x7F:] = -90
        for end in map(str.encode, ends):
            n = next((n for n in range(len(end) - 1, 0, -1) if so_far.endswith(end[:n])), 0)
            logits[end[n]] += 12 if n else 4
        return logits

    return next_logits


@each_format
def test_forced_reply_is_one_call_that_fits_its_schema(engine, format):
    names = set()
    for seed in range(8):
        rules = forced(engine, format, TOOLS)
        parameters = format.parameters
        ends = (parameters.tag or parameters.quote,) if parameters and not parameters.quotes else ('"',)
        text = generate_text(engine, rules, wanders(seed, *ends, '"'))
        ((name, arguments),) = parsed(format, text)
        schema = next(tool for tool in TOOLS if tool["function"]["name"] == name)["function"]["parameters"]
        jsonschema.validate(arguments, schema | {"additionalProperties": False})
        names.add(name)
    assert len(names) >= 2


@each_format
def test_calls_in_the_models_format_fit_the_grammar(engine, format):
    rules = forced(engine, format, TOOLS)
    note = ("make-note", {"city": False, "from": 'a <b> "c"\nü', "unit": "K"})
    nothing = ("make-note", {"city": True, "from": None})
    for call in (ZURICH, TRICKY, NOW, note, nothing, ("make-note", {"city": True})):
        text = format.written([call])
        assert generate_text(engine, rules, dictates(text)) == text
        assert parsed(format, text) == [call]


@each_format
def test_calls_that_violate_a_schema_or_choice_do_not_fit_the_grammar(engine, format):
    rules = forced(engine, format, TOOLS)
    wrong = [
        ("weather", {"city": "Zurich", "unit": "K"}),
        ("weather", {"unit": "C"}),
        ("weather", {"city": "Zurich", "days": "x", "unit": "C"}),
        ("weather", {"city": "Zurich", "unit": "C", "hours": [1, 2, 3, 4]}),
        ("make-note", {"city": True, "unit": "C"}),
        ("no", {}),
        ("now", {"x": 1}),
    ]
    for call in wrong:
        text = format.written([call])
        assert not generate_text(engine, rules, dictates(text), len(text.encode())).startswith(text), call
    # if the choice names a tool, calls of different tools are not allowed
    rules = forced(engine, format, TOOLS, Choice("required", "make-note"))
    text = format.written([NOW])
    assert not generate_text(engine, rules, dictates(text), len(text)).startswith(text)
    text = format.written([("make-note", {"city": True})])
    assert generate_text(engine, rules, dictates(text)) == text


AWKWARD = {
    "a pattern": ({"x": {"type": "string", "pattern": "^ab$"}}, {"x": "ab"}),
    "a length": ({"x": {"type": "string", "minLength": 2, "maxLength": 2}}, {"x": "ab"}),
    "a union": (
        {"x": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}},
        {"x": ["a"]},
    ),
    "texts and numbers": ({"x": {"enum": ["a", 1]}}, {"x": 1}),
    "a constant": ({"x": {"const": "a"}}, {"x": "a"}),
    "several types with more": (
        {"x": {"type": ["array", "null"], "items": {"type": "integer"}}},
        {"x": None},
    ),
    "no type": ({"x": {"description": "anything"}}, {"x": [1]}),
    "nothing": ({"x": {}}, {"x": None}),
    "true": ({"x": True}, {"x": {"a": 1}}),
    "a list of anything": ({"x": {"type": "array", "items": {}}}, {"x": [1, "a"]}),
    "a type and an enum": ({"x": {"type": ["string", "null"], "enum": ["a", None]}}, {"x": None}),
    "a choice of odd characters": ({"x": {"enum": ['\u2028\x0b"[{', "\\\n\t"]}}, {"x": '\u2028\x0b"[{'}),
    "a definition": ({"x": {"$ref": "#/$defs/colour"}}, {"x": "red"}),
    "a list of a definition": ({"x": {"type": "array", "items": {"$ref": "#/$defs/colour"}}}, {"x": ["red"]}),
    "great lengths": ({"x": {"type": "string", "maxLength": 10**12}}, {"x": "a" * 30}),
    "a name": ({"x y": {"type": "string"}}, {"x y": "b"}),
    "the end in a choice": ({"x": {"enum": ["</parameter></arg_value>"]}}, {"x": "</parameter></arg_value>"}),
    "names of rules": (
        {
            "root": {"type": "string"},
            "string": {"type": "integer"},
            **{name: {} for name in ("x-kv", "x", "9", "call", "value", "first0", "0")},
        },
        {"string": 1},
    ),
    "no such definition": ({"x": {"$ref": "#/$defs/no"}}, {"x": 1}),
    "an unknown type": ({"x": {"type": "text"}}, {"x": 1}),
}
"""Properties of schemas that are difficult to enforce, and arguments that fit them."""

CANNOT_BE_HELD = ["no such definition", "an unknown type"]
GEMMA_HAS_PLACE = {
    "several types with more",
    "a type and an enum",
    "a choice of odd characters",
    "a definition",
}
HAS_PLACE = GEMMA_HAS_PLACE | {
    "no type",
    "nothing",
    "true",
    "a list of anything",
    "a list of a definition",
    "names of rules",
}
"""Names of schemas in AWKWARD for which every format except Gemma's can express arguments.

Gemma's format can do so for GEMMA_HAS_PLACE. For the other schemas, calls may be in Hermes' format instead.
"""


def schema_of(what):
    colour = {"type": "string", "enum": ["red"]}
    return {"type": "object", "properties": AWKWARD[what][0], "$defs": {"colour": colour}}


@pytest.mark.share(2, "format")
@each_format
@pytest.mark.parametrize("what", AWKWARD)
def test_difficult_schemas_are_forced_in_the_models_or_hermes_format(engine, format, what):
    tools = check_tools([tool("f", schema_of(what), strict=what not in CANNOT_BE_HELD)])
    rules = forced(engine, format, tools)
    call = ("f", AWKWARD[what][1])
    has_place = what in HAS_PLACE and (format is not GEMMA or what in GEMMA_HAS_PLACE)
    texts = {each.written([call]) for each in ((format,) if has_place else (format, HERMES))}
    assert texts & {generate_text(engine, rules, dictates(text)) for text in texts}
    for text in texts:
        if generate_text(engine, rules, dictates(text)) == text:
            assert parsed(format, text, tools) == [call]


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("a pattern", "b"),
        ("a length", "abc"),
        ("a union", [1]),
        ("a constant", "b"),
        ("several types with more", ["a"]),
        ("a type and an enum", "b"),
        ("a definition", "blue"),
        ("a list of a definition", ["blue"]),
    ],
)
@pytest.mark.share(4, "format")
@each_format
def test_difficult_schemas_exclude_invalid_values(engine, format, what, value):
    rules = forced(engine, format, check_tools([tool("f", schema_of(what))]))
    for each in (format, HERMES):
        text = each.written([("f", {"x": value})])
        assert not generate_text(engine, rules, dictates(text), len(text)).startswith(text)


@each_format
@pytest.mark.parametrize("what", CANNOT_BE_HELD)
def test_strict_tool_with_an_unenforceable_schema_is_an_error(engine, format, what):
    tools = check_tools([tool("a"), tool("f", schema_of(what), strict=True)])
    with pytest.raises(ApiError, match="the JSON schema cannot be enforced") as caught:
        forced(engine, format, tools)
    assert caught.value.param == "tools[1].function.parameters"
    assert forced(engine, format, tools, Choice("required", "a"))


def test_great_constant_is_left_out_only_for_a_tool_that_is_not_strict(engine):
    schema = {"type": "object", "properties": {"x": {"const": 2**53 + 1}}, "required": ["x"]}
    rules = call_rules(engine, HERMES)
    rules.required_call(check_tools([tool("f", schema)]))
    assert rules.remarks == [
        "tools[0].function.parameters.properties.x.const: const beyond 2^53 cannot be enforced"
    ]
    with pytest.raises(ApiError, match="would be rounded; use a string"):
        rules.required_call(check_tools([tool("f", schema, strict=True)]))


@each_format
def test_too_deep_schema_is_an_error_only_for_a_strict_tool(engine, format):
    schema = {"type": "integer"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    schema = {"properties": {"x": schema}}
    shown_format = format if format.parameters is None else HERMES
    call = shown_format.written([("f", {})])
    assert (
        generate_text(engine, forced(engine, format, check_tools([tool("f", schema)])), dictates(call))
        == call
    )
    with pytest.raises(ApiError, match="nested too deeply"):
        forced(engine, format, check_tools([tool("f", schema, strict=True)]))


@each_format
def test_call_or_answer_grammar_accepts_both(engine, format):
    answer = enforced({"type": "object", "properties": {"city": {"enum": ["Nice"]}}}).rules
    rules = call_rules(engine, format).call_or(TOOLS, answer)
    for call in (ZURICH, TRICKY, NOW):
        text = format.written([call])
        text = f"<|python_tag|>{text}" if format is LLAMA else text
        assert generate_text(engine, rules, dictates(text)) == text
        assert parsed(format, text) == [call]
    for text in ('{"city": "Nice"}', "{}"):
        assert generate_text(engine, rules, dictates(text)) == text


def begun(engine, format, tools=TOOLS, *, one_call=False):
    """Return the rules of calls that the model begins."""
    return call_rules(engine, format).begun_call(tools, one_call=one_call)


def begins(text, then):
    """Return a `next_logits` that strongly prefers a text, and then is another `next_logits`."""
    first = dictates(text)

    def next_logits(so_far):
        is_begun = len(so_far) >= len(text.encode())
        return then(so_far[len(text.encode()) :]) if is_begun else first(so_far)

    return next_logits


def with_tag(format, text):
    return f"<|python_tag|>{text}" if format is LLAMA else text


@each_format
def test_begun_call_fits_its_schema_and_other_text_is_free(engine, format):
    rules = begun(engine, format)
    for text in ("No call.", 'A tag <tool> {"city": 1} [x], to=f', "<think>\n</think>"):
        assert generate_text(engine, rules, dictates(text)) == text
    calls = [TRICKY] if format is HARMONY else [TRICKY, NOW]
    text = f"I look.\n{with_tag(format, format.written(calls))}"
    assert generate_text(engine, rules, dictates(text)) == text
    (opening,) = rules.triggers
    parameters, names = format.parameters, set()
    ends = (parameters.tag or parameters.quote,) if parameters and not parameters.quotes else ('"',)
    close = (format.close or ">").encode()

    def is_called(text):
        # after the first call, the text is free
        return text.endswith(close) and bool(calls_in(format, text.decode(errors="replace")))

    for seed in range(6):
        wandering = wanders(seed, *ends, '"', close.decode())
        text = generate_text(engine, rules, begins(f"So: {opening}", wandering), is_enough=is_called)
        (first, *_), (name, arguments), *_ = parsed(format, text)
        assert (first, text[:4]) == ("S", "So: ")
        schema = next(tool for tool in TOOLS if tool["function"]["name"] == name)["function"]["parameters"]
        jsonschema.validate(arguments, schema | {"additionalProperties": False})
        names.add(name)
    assert len(names) >= 2


@each_format
def test_text_after_a_begun_call_is_free(engine, format):
    if format is not HARMONY:
        text = f"{with_tag(format, format.written([ZURICH]))} Done, {{}} and no more."
        assert generate_text(engine, begun(engine, format), dictates(text)) == text


def calls_in(format, text):
    """Return the calls (name, arguments) in a text."""
    return [part for part in parsed(format, text) if isinstance(part, tuple)]


@each_format
def test_list_of_calls_has_one_call_if_only_one_is_allowed(engine, format):
    if format.close:
        text = format.written([NOW, NOW])
        for rules, n in ((begun(engine, format), 2), (begun(engine, format, one_call=True), 1)):
            assert calls_in(format, generate_text(engine, rules, dictates(text))) == [NOW] * n


def test_call_of_a_strict_tool_is_enforced_as_far_as_possible(engine):
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string", "pattern": "(?!a)b"}},
        "required": ["x"],
    }
    rules = begun(engine, HERMES, check_tools([tool("f", schema, strict=True)]))
    call = HERMES.written([("f", {"x": "no"})])
    assert generate_text(engine, rules, dictates(call)) == call
    # after the brace that opens the arguments, only "x" may follow
    text = generate_text(engine, rules, begins(call.partition('"x"')[0], dictates('"y": 1}')), n=len(call))
    assert text.partition('"arguments": {')[2].lstrip().startswith('"x"')


def test_text_is_free_if_its_rules_do_not_apply(engine):
    tokens = Vocabulary.of(engine.model).tokens_of(b"<a>")
    # the grammar does not begin with the trigger, or llguidance rejects it
    for start in ('"<b>"', "nonsense("):
        sampler = Sampler(engine.model, Sampling(), rules=Rules(start, triggers=("<a>",)))
        constraint = sampler.constraint
        assert constraint.n_fitting([*tokens, *tokens]) == len(tokens)
        for token in (*tokens, *tokens):
            assert constraint.mask() is None
            assert constraint.accept(token)
        assert constraint.n_fitting([*tokens, *tokens]) == (
            len(tokens) if start[0] == '"' else 2 * len(tokens)
        )
        sampler.close()


@pytest.mark.parametrize("method", ["mask", "accept", "n_fitting"])
def test_text_is_free_from_where_its_rules_are_too_complex(engine, monkeypatch, method):
    sampler = Sampler(engine.model, Sampling(), rules=Rules('"<a>" "b"', triggers=("<a>",)))
    constraint = sampler.constraint
    for token in Vocabulary.of(engine.model).tokens_of(b"<a>"):
        assert constraint.accept(token)
    x = 3 + ord("x")
    assert constraint.mask() is not None
    assert (constraint.n_fitting([x]), constraint.accept(x)) == (0, False)

    def fails(*args):
        raise UsageError("too complex")

    monkeypatch.setattr(Matcher, method, fails)
    if method == "n_fitting":
        assert constraint.n_fitting([3 + ord("b")]) == 0
    else:
        assert method == "accept" or constraint.mask() is None
        assert constraint.accept(x)
        assert constraint.mask() is None
    sampler.close()
