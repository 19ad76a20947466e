"""JSON schemas are rewritten for llguidance: texts that fit the result also fit the schema."""

from __future__ import annotations

import itertools
import json

import jsonschema
import numpy as np
import pytest

from kvtool.errors import UsageError
from kvtool.llama.grammar.constraint import Matcher, Vocabulary
from kvtool.llama.grammar.patterns import parts_of
from kvtool.llama.grammar.rewriting import rewritten
from kvtool.llama.grammar.schema import Unenforced, enforced
from kvtool.llama.loaded.model import Model
from tests import tiny
from tests.llama.test_constraint import bounded

NAMES = ("a", "b")
PLAIN = [None, True, False, 0, 1, 2, 2.5, "", "a", "b", "ab", [], [1], ["a", None]]
VALUES = [
    *PLAIN,
    {},
    *({name: value} for name in NAMES for value in PLAIN[:10]),
    *({"a": one, "b": two} for one, two in itertools.product([None, 1, "a"], repeat=2)),
    {"c": 1},
]
"""Values of all kinds that the schemas below tell apart."""


def fits(value, schema):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


class Schemas:
    """Generator of random schemas."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def some(self, of, most=3):
        return [of[i] for i in self.rng.choice(len(of), self.rng.integers(1, most + 1), replace=False)]

    def plain(self):
        """Draw a schema that does not contain another schema."""
        return [
            lambda: {"type": str(self.rng.choice(["null", "boolean", "integer", "number", "string"]))},
            lambda: {"enum": self.some(PLAIN)},
            lambda: {"const": self.some(PLAIN, 1)[0]},
            lambda: {"type": "integer", "minimum": int(self.rng.integers(0, 3)), "maximum": 2},
            lambda: {"type": "string", "maxLength": int(self.rng.integers(0, 3))},
            lambda: {"type": "string", "pattern": str(self.rng.choice(["^a", "b$", "^a?b?$"]))},
            lambda: {"type": ["string", "null"], "minLength": 1, "maxLength": 2},
        ][self.rng.integers(7)]()

    def draw(self, depth=2):
        """Draw a schema of at most `depth` levels."""
        if depth == 0:
            return self.plain()
        inner = lambda: self.draw(depth - 1)  # noqa: E731
        names = self.some(NAMES, 2)
        choices = [
            self.plain,
            lambda: {
                "type": "object",
                "properties": {name: inner() for name in names},
                "required": names[:1],
            },
            lambda: {
                "type": "object",
                "properties": {name: inner() for name in names},
                "additionalProperties": False,
            },
            lambda: {"properties": {name: inner() for name in names}},
            lambda: {"required": names, "type": "object", "maxProperties": 2},
            lambda: {"type": "array", "items": inner(), "maxItems": 2},
            lambda: {"anyOf": [inner(), inner()]},
            lambda: {
                **{"type": "object", "properties": {"a": inner(), "b": inner(), "c": inner()}},
                **{"additionalProperties": False},
            },
            lambda: {"type": "object", "propertyNames": {"enum": names}, "additionalProperties": inner()},
            lambda: {"$ref": "#/$defs/x", "$defs": {"x": inner()}} if depth == 2 else inner(),
        ]
        return choices[self.rng.integers(len(choices))]()


@pytest.mark.parametrize(
    ("schema", "n"),
    [
        ({"const": 2**53 + 1}, 2**53 + 1),
        ({"properties": {"a": {"enum": ["x", {"b": [-(2**63)]}]}}}, -(2**63)),
    ],
)
def test_constant_integers_that_would_be_rounded_are_refused(schema, n):
    with pytest.raises(UsageError, match=f"^the JSON schema has the value {n}, and integers beyond"):
        enforced(schema)
    assert enforced({"const": 2**53, "enum": [-(2**53), 2**53, 1e300], "default": 2**60}).schema


def test_constant_integers_that_would_be_rounded_can_be_left_out(vocabulary):
    schema = {
        "type": "object",
        "properties": {"id": {"type": "integer", "const": 2**53 + 1}, "kind": {"const": "a"}},
        "required": ["id", "kind"],
    }
    actual = enforced(schema, drops_integers=True)
    assert [*actual.left_out] == [("const beyond 2^53", "#/properties/id/const")]
    assert is_text_of(vocabulary, actual.schema, '{"id": 7, "kind": "a"}')
    assert not is_text_of(vocabulary, actual.schema, '{"id": 7, "kind": "b"}')
    assert not is_text_of(vocabulary, actual.schema, "{}")


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        (r"^a\/b$", (r"^a\/b$",)),
        ("[[]", (r"[\[]",)),
        (r"^[^[\]]+$", (r"^[^\[\]]+$",)),
        ("[a&&b]", (r"[a\&\&b]",)),
        ("a&&b", ("a&&b",)),
        (r"\<a\>", (r"\x3ca\x3e",)),
        (r"^(?=.*\d)(?=.*[a-z)]).{4,8}$", (r"^(?:.*\d)", "^(?:.*[a-z)])", "^.{4,8}$")),
        (r"^(?=a)b|c", None),
        (r"^(?!x)a", None),
        (r"(a)\1", None),
        (r"\bfoo", None),
        ("(", None),
    ],
)
def test_patterns_are_rewritten_for_llguidance(pattern, parts):
    assert parts_of(pattern) == parts


@pytest.mark.parametrize("count", ["10001", "200000", "2,1000000", "20000,", "9" * 5000])
def test_repetitions_that_take_long_to_compile_are_refused(count):
    assert parts_of(f"^a{{{count}}}$") is None
    assert parts_of("^a{0,10000}$") == ("^a{0,10000}$",)


@pytest.mark.parametrize(
    ("format", "texts", "others"),
    [
        ("time", ("12:30:00Z", "12:30:00.5+01:00", "12:30:00.123456789Z"), ("12:30:00.1234567890Z", "noon")),
        ("date-time", ("2026-11-30T12:30:00.25Z",), ("2026-11-30T12:30:00.1234567890Z", "2026-11-30")),
        ("duration", ("P3D", "PT90M", "P1DT12H", "P2W"), ("PT1234567890S", "P")),
        (
            "uri-reference",
            ("", "https://[::1]/a", "a:b", "/a/b?c=(d)#e", "//me@host:80/p", "a%20b/c:d", "?q=1"),
            ("a b", "a%2", "1:b", "ü", "a#b#c", "[a]"),
        ),
        (
            "iri",
            ("https://exämple.com/ü?名=1", "urn:isbn:1", "https://[::1]/"),
            ("/ü", "a b:c", "https://ü%/"),
        ),
        ("iri-reference", ("/ü", "https://exämple.com/ü", "名/x"), ("a b", "a#b#c")),
        ("uri-template", ("", "http://ü/{a}", "/{+b,c}{?d.e*,f:3}"), ("{", "{a", "{a b}", "a b", "{}")),
        ("idn-hostname", ("bücher.example", "例え.jp", "a-b.co"), ("a b", "-a", "a-.b", "a..b")),
        ("idn-email", ("ü.b@bücher.de", "a@b.co"), ("ü", "ü@", "ü b@c.de")),
        ("uuid", ("6ba7b810-9dad-11d1-80b4-00c04fd430c8",), ("6ba7b810",)),
        (
            "uuid4",
            ("f47ac10b-58cc-4372-a567-0e02b2c3d479", "F47AC10B-58CC-4372-A567-0E02B2C3D479"),
            ("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "f47ac10b-58cc-4372-0567-0e02b2c3d479"),
        ),
        ("base64", ("", "aGVsbG8h", "aA==", "aGk="), ("a", "aA=")),
        ("password", ("", "any text"), ()),
    ],
)
def test_texts_fit_the_format_and_numbers_in_them_are_short(vocabulary, format, texts, others):
    rules = enforced({"type": "string", "format": format}, strict=True).rules
    for text in (*texts, *others):
        matcher = Matcher(vocabulary, rules)
        tokens = vocabulary.tokens_of(json.dumps(text, ensure_ascii=False).encode())
        assert (matcher.n_fitting(tokens) == len(tokens)) == (text in texts), text


@pytest.mark.parametrize(
    ("format", "numbers", "others"),
    [
        ("int32", ("-2147483648", "0", "2147483647"), ("-2147483649", "2147483648", "1.5")),
        ("uint8", ("0", "255"), ("-1", "256", "1.5")),
        ("int64", ("-2147483649", "9223372036854775807"), ("1.5",)),
        ("uint", ("0", "4294967296"), ("-1", "1.5")),
        ("double", ("-1.5", "1"), ()),
    ],
)
def test_numbers_fit_the_format(vocabulary, format, numbers, others):
    schema = {"type": ["number", "null"], "format": format}
    assert enforced(schema, strict=True).left_out == []
    for number in (*numbers, *others):
        assert is_text_of(vocabulary, schema, number) == (number in numbers), number
    assert is_text_of(vocabulary, schema, "null")


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"type": "integer", "format": "decimal"}, ["format decimal"]),
        (
            {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
            ["contentEncoding", "contentMediaType"],
        ),
        ({"type": "string", "contentSchema": {"type": "object"}}, ["contentSchema"]),
    ],
)
def test_formats_and_contents_that_cannot_be_enforced_are_listed(schema, names):
    assert enforced(schema).not_held == names
    with pytest.raises(Unenforced, match="^the JSON schema's .* cannot be enforced$"):
        enforced(schema, strict=True)


def test_format_and_pattern_must_both_fit(vocabulary):
    schema = {"type": "string", "format": "time", "pattern": "^12:.*Z$"}
    for text, is_fitting in (("12:30:00Z", True), ("13:30:00Z", False), ("12:30:00.1234567890Z", False)):
        matcher = Matcher(vocabulary, enforced(schema, strict=True).rules)
        tokens = vocabulary.tokens_of(json.dumps(text).encode())
        assert (matcher.n_fitting(tokens) == len(tokens)) == is_fitting, text


OPEN = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED = OPEN | {"additionalProperties": False}
LIMITS = {"minimum": -(2**63 - 1024), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    ("schema", "result"),
    [
        (OPEN, CLOSED),
        (OPEN | {"additionalProperties": True}, OPEN | {"additionalProperties": True}),
        (OPEN | {"required": ["b"]}, OPEN | {"required": ["b"]}),
        (OPEN | {"minProperties": 2}, OPEN | {"minProperties": 2}),
        ({"anyOf": [OPEN, OPEN]}, {"anyOf": [CLOSED, CLOSED]}),
        ({"anyOf": [OPEN], "properties": {"b": {}}}, {"anyOf": [OPEN], "properties": {"b": {}}}),
        ({"allOf": [OPEN, {"required": ["b"]}]}, {"allOf": [OPEN, {"required": ["b"]}]}),
        ({"items": OPEN, "prefixItems": [OPEN]}, {"items": CLOSED, "prefixItems": [CLOSED]}),
        ({"type": "integer"}, {"type": "integer"} | LIMITS),
        ({"type": "integer", "maximum": 5}, {"type": "integer"} | LIMITS | {"maximum": 5}),
        ({"type": "integer", "const": 5}, {"type": "integer", "const": 5}),
        (
            {"type": ["integer", "null"], "multipleOf": 5},
            {"type": ["integer", "null"], "multipleOf": 5} | LIMITS,
        ),
        ({"type": ["integer", "number"]}, {"type": ["integer", "number"]}),
        ({"type": "string", "maxLength": 2**40, "$schema": "my own"}, {"type": "string"}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
    ],
)
def test_objects_are_closed_and_integers_bounded_by_default(schema, result):
    # minProperties is left out of the rewritten schema, because llguidance counts only properties that the
    # schema does not name, and counts names that it writes twice
    actual, left_out = rewritten(schema)
    assert {key: value for key, value in actual.items()} == {
        key: value for key, value in result.items() if key not in {name.keyword for name in left_out}
    }


def test_definition_is_closed_only_if_all_its_references_stand_alone():
    alone = {"properties": {"x": {"$ref": "#/$defs/o"}}, "$defs": {"o": OPEN}}
    assert rewritten(alone)[0]["$defs"]["o"] == CLOSED
    with_more = {
        "properties": {
            "x": {"$ref": "#/$defs/o"},
            "y": {"allOf": [{"$ref": "#/$defs/o"}, {"required": ["b"]}]},
        }
    }
    assert rewritten(with_more | {"$defs": {"o": OPEN}})[0]["$defs"]["o"] == OPEN


@pytest.mark.parametrize(
    ("draft", "is_held"),
    [
        ("draft-04/schema#", False),
        ("draft-06/schema#", False),
        ("draft-07/schema#", True),
        ("draft/2020-12/schema", True),
    ],
)
def test_keywords_of_later_drafts_are_ignored(draft, is_held):
    schema = {
        "$schema": f"http://json-schema.org/{draft}",
        "if": {"const": 1},
        "then": False,
        "else": {"const": 2},
    }
    assert [item.keyword for item in rewritten(schema)[1]] == (["if"] if is_held else [])


@pytest.mark.parametrize(
    "keywords",
    [
        {"not": {"required": ["b"]}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
    ],
)
def test_keywords_that_are_left_out_may_need_unnamed_properties(vocabulary, keywords):
    (name, *_) = keywords
    schema = {"items": OPEN | keywords}
    assert enforced(schema).left_out == [(name, f"#/items/{name}")]
    assert is_text_of(vocabulary, schema, '[{"a": "x", "b": 1}]')
    with pytest.raises(Unenforced, match=f"^the JSON schema's {name} cannot be enforced"):
        enforced(schema, strict=True)


def test_condition_without_consequences_is_dropped():
    assert rewritten({"if": {"const": 1}, "then": True}) == ({}, [])


def test_one_of_is_read_as_any_of(vocabulary):
    schema = {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]}
    assert enforced(schema, strict=True).left_out == []
    assert all(is_text_of(vocabulary, schema, number) for number in ("2", "4", "9"))
    assert not is_text_of(vocabulary, schema, '"a"')


@pytest.mark.parametrize("more", [{}, {"minProperties": 1}])
def test_required_that_is_no_list_is_refused(more):
    with pytest.raises(Unenforced, match="Expected array for 'required'"):
        enforced({"type": "object", "properties": {"a": {}}, "required": True} | more)


def test_invalid_pattern_of_names_is_left_out():
    schema = {"type": "object", "propertyNames": {"pattern": 5}, "additionalProperties": {"type": "null"}}
    assert enforced(schema).not_held == ["propertyNames"]


def test_names_of_an_invalid_list_forbid_all_properties(vocabulary):
    schema = {"type": "object", "propertyNames": {"enum": 5}}
    assert is_text_of(vocabulary, schema, "{}")
    assert not is_text_of(vocabulary, schema, '{"a": 1}')


@pytest.mark.parametrize(
    "parts",
    [
        {"allOf": [OPEN]},
        {"anyOf": [{"$ref": "#/$defs/o"}, {"type": "object"}]},
        {"$ref": "#/$defs/o"},
        {"oneOf": [{"allOf": [OPEN]}]},
    ],
)
def test_counts_of_properties_are_left_out_if_a_part_has_optional_ones(vocabulary, parts):
    schema = {"type": "object", "maxProperties": 0, "$defs": {"o": OPEN}} | parts
    assert enforced(schema).left_out == [("maxProperties", "#/maxProperties")]
    assert is_text_of(vocabulary, schema, '{"a": "x"}')
    count = {"allOf": [{"minProperties": 1}], **OPEN}
    assert enforced(count).left_out == [("minProperties", "#/allOf/0/minProperties")]


def test_counts_of_properties_are_enforced_if_the_parts_have_no_properties(vocabulary):
    schema = {"type": "object", "maxProperties": 1, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert enforced(schema, strict=True)
    assert is_text_of(vocabulary, schema, '{"b": 1}')
    assert not is_text_of(vocabulary, schema, '{"b": 1, "c": 1}')


@pytest.mark.parametrize(
    ("count", "required", "is_left_out"),
    [
        ({"minProperties": 1}, [], False),
        ({"minProperties": 2}, [], True),
        ({"minProperties": 2}, ["a", "b"], False),
        ({"maxProperties": 2}, [], False),
    ],
)
def test_counts_that_a_repeated_name_could_meet_are_left_out(count, required, is_left_out):
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, "required": required} | count
    assert enforced(schema).not_held == (["minProperties"] if is_left_out else [])


def test_names_without_a_definition_are_left_out():
    schema = {"type": "object", "propertyNames": {"$ref": "#/$defs/none"}}
    assert enforced(schema).not_held == ["propertyNames"]


def test_escapes_in_references_are_read(vocabulary):
    schema = {
        "allOf": [{"$ref": "#/$defs/the%20names"}, {"required": ["b"]}],
        "$defs": {"the names": OPEN},
    }
    assert is_text_of(vocabulary, schema, '{"a": "x", "b": 1}')
    assert not is_text_of(vocabulary, schema, '{"a": 1, "b": 1}')


@pytest.mark.parametrize(
    "names", [{"enum": ["x", "y"]}, {"$ref": "#/$defs/k"}, {"$ref": "#/$defs/the%20names"}]
)
def test_names_of_properties_are_listed(vocabulary, names):
    schema = {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "integer"},
        "$defs": {"k": {"enum": ["x", "y"]}, "the names": {"enum": ["x", "y"]}},
    }
    assert enforced(schema, strict=True)
    assert is_text_of(vocabulary, schema, '{"x": 1, "y": 2}')
    assert not is_text_of(vocabulary, schema, '{"z": 1}')


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("schemas") / "tiny.gguf"
    tiny.write_vocab(path)
    model = Model(path, vocab_only=True)
    yield Vocabulary.of(model)
    model.close()


def draw_text(vocabulary, schema, rng, n=300):
    """Return a random text that fits an Enforced schema, or None if it has not ended after n tokens."""
    matcher, tokens = Matcher(vocabulary, schema.rules), []
    ends, close = np.zeros((2, len(vocabulary.pieces)), bool)
    ends[[*vocabulary.ends]] = True
    close[:] = [bool(piece) and not piece.strip(b'"}]') for piece in vocabulary.pieces]
    while len(tokens) < n:
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        liked = allowed[(ends | close if rng.random() < 0.6 else ends)[allowed]]
        token = int(rng.choice(liked if len(liked) else allowed))
        if token in vocabulary.ends:
            return vocabulary.bytes_of(tokens)
        assert matcher.accept(token)
        tokens.append(token)
    return None


def test_texts_of_random_schemas_are_valid(vocabulary, share_of):
    schemas, rng = Schemas(3), np.random.default_rng(3)
    n_texts, n_left_out, refusals, n_schema = 0, 0, [], share_of(100, 250)
    for _ in range(n_schema):
        schema = schemas.draw()
        try:
            constraint = enforced(schema)
        except UsageError as error:
            refusals.append(str(error))
            continue
        n_left_out += bool(constraint.not_held)
        for _ in range(0 if constraint.not_held else 3):
            if text := draw_text(vocabulary, constraint, rng):
                n_texts += 1
                assert fits(json.loads(text), schema), (schema, text)
    assert n_texts > 2 * n_schema
    # few schemas are refused, and only because no value fits them
    assert len(refusals) < 0.16 * n_schema
    assert all("nsatisfiable" in message or "empty" in message for message in refusals)
    assert n_left_out < 0.16 * n_schema


def is_text_of(vocabulary, schema, text):
    """Return True if a JSON text fits the enforced schema."""
    matcher = Matcher(vocabulary, enforced(schema).rules)
    tokens = [*vocabulary.tokens_of(text.encode()), min(vocabulary.ends)]
    return all(map(matcher.accept, tokens))


def test_indentation_has_few_spaces_or_tabs(vocabulary):
    schema = {"type": "array"}
    for space in (" ", "\n", "\n" + 16 * " ", "\n\t\t\t\t"):
        assert is_text_of(vocabulary, schema, f"[{space}1,{space}2{space}]")
    for space in ("  ", "\t", "\n\n", "\n" + 17 * " ", "\n\t\t\t\t\t", "\n \t"):
        assert not is_text_of(vocabulary, schema, f"[{space}1,{space}2{space}]")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": ["string", "null", "integer"]},
        {"type": "integer", "minimum": -(2**63)},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "exclusiveMinimum": -1e300, "exclusiveMaximum": 1e300},
    ],
)
def test_integers_of_64_bits_are_written_and_no_longer_ones(vocabulary, schema):
    for number in (2**63 - 1, 1849201134567890123, 0, -(2**63 - 1024)):
        assert is_text_of(vocabulary, schema, str(number)), number
    for number in (2**63, 10**19, -(2**63)):
        assert not is_text_of(vocabulary, schema, str(number)), number


def test_one_bound_of_an_integer_is_completed(vocabulary):
    for bound in ({"minimum": 0}, {"exclusiveMinimum": -1}, {"multipleOf": 2}):
        schema = {"type": "integer"} | bound
        assert is_text_of(vocabulary, schema, str(10**18))
        assert not is_text_of(vocabulary, schema, str(10**19))


@pytest.mark.parametrize(
    ("bounds", "left_out"),
    [
        ({"minimum": -(2**53) + 1, "maximum": 2**53 - 1}, []),
        ({"minimum": 0, "maximum": 2**53}, ["maximum"]),
        ({"exclusiveMinimum": -(2**53), "exclusiveMaximum": 9}, ["exclusiveMinimum"]),
        ({"minimum": 0, "maximum": 2**63 - 1}, []),
        ({"minimum": 0, "maximum": 2**64 - 1}, []),
        ({"minimum": -(2**63), "exclusiveMaximum": 2**63}, []),
        ({"exclusiveMaximum": 2**63 - 1}, ["exclusiveMaximum"]),
        ({"minimum": 2**63}, ["minimum"]),
        ({"maximum": -(10**400)}, ["maximum"]),
    ],
)
def test_bounds_that_would_be_rounded_are_left_out(bounds, left_out):
    assert enforced({"type": "integer"} | bounds).not_held == left_out


def test_bounds_of_numbers_beyond_64_bits_are_not_refused(vocabulary):
    for bounds in ({"minimum": -(2**63)}, {"minimum": 0, "maximum": 1e300}, {"exclusiveMaximum": 2**63}):
        assert is_text_of(vocabulary, {"type": "number"} | bounds, "2.5")


def _chain(n, link):
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(n)} | {f"d{n}": {"type": "null"}},
    }


ENDLESS = {
    "references one after another": _chain(20_000, lambda to: {"$ref": to}),
    "properties one in another": _chain(12_000, lambda to: {"properties": {"a": {"$ref": to}}}),
    "parts one in another": _chain(8_000, lambda to: {"allOf": [{"$ref": to}, {"maxLength": 9}]}),
    "options one in another": _chain(
        60, lambda to: {"oneOf": [{"$ref": to}, {"items": {"$ref": to}}, {"not": {"$ref": to}}]}
    ),
    "nested": json.loads('{"items":' * 150 + "{}" + "}" * 150),
    "many properties": {"properties": {f"p{i}": {} for i in range(6000)}},
    "many required": {"type": "object", "required": [f"p{i}" for i in range(30_000)]},
    "many patterns": {"patternProperties": {f"^a{i}b.*c": {} for i in range(200)}},
    "many options": {"oneOf": [{"required": [f"a{i}"]} for i in range(600)]},
    "many values": {"enum": [f"value {i}" for i in range(40_000)]},
    "many other values": {"type": "string", "not": {"enum": [f"value {i}" for i in range(3000)]}},
    "a product": {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]
    },
    "conditions": {
        "allOf": [{"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}} for i in range(30)]
    },
    "a great length": {"type": "string", "minLength": 10**9},
    "a great number": {"type": "array", "minItems": 10**9},
    "a repeated pattern": {"type": "string", "pattern": "^" + "(" * 4 + "a?" + "){1000}" * 4 + "$"},
    "a pattern of many": {"type": "string", "pattern": "|".join(f"(a{i}.*b)+c{{{i}}}" for i in range(2000))},
    "a pattern that looks back": {"type": "string", "pattern": ".*a.{1000}"},
    "patterns at once": {"type": "string", "allOf": [{"pattern": f"a.*b{{{i}}}"} for i in range(1, 14)]},
    "a place of many digits": {"oneOf": [{"type": "string"}, {"$ref": f"#/oneOf/{'1' * 5000}"}]},
    "a number of many digits": {"not": {"maxLength": 10**4300 - 1}},
    "great text": {"const": "a" * 2**21},
}
"""Small schemas on which a careless compiler never ends, or runs out of memory or stack."""


@pytest.mark.parametrize("what", ENDLESS)
def test_difficult_schemas_need_bounded_time_and_memory(vocabulary, what):
    with bounded():
        draw_text(vocabulary, enforced(ENDLESS[what]), np.random.default_rng(1), 60)
