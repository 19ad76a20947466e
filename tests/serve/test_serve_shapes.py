"""Answers that must fit a schema or a grammar, or that must call a tool."""

from __future__ import annotations

import json
import re
from functools import partial
from string import ascii_letters

import jsonschema
import pytest

from kvtool.llama.sampling import Sampling
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields
from kvtool.serve.api.output_format import OutputFormat, check
from tests.serve.http_requests import refused
from tests.serve.slot_requests import dictated_slot
from tests.serve.test_serve_tools import tool


def with_required(**properties):
    """Return the schema of an object that must have these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


CITY = with_required(city={"type": "string"})
LOOKS = {"properties": {"a": {"items": {"pattern": "(?!a)b"}}}}
NEVER = {"type": "object", "required": ["a"], "properties": {"a": False}}
OF_SCHEMA = "response_format.json_schema"

form = partial(OutputFormat, "schema")


def of_schema(schema, strict=None):
    shape = {"name": "x", "schema": schema} | ({} if strict is None else {"strict": strict})
    return {"type": "json_schema", "json_schema": shape}


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "grammar": "", "json_schema": None}, None),
        ({"response_format": of_schema(CITY, strict=True)}, form(CITY, f"{OF_SCHEMA}.schema", strict=True)),
        ({"response_format": {"type": "json_object"}}, form({"type": "object"}, "response_format")),
        ({"json_schema": CITY}, form(CITY, "json_schema")),
        ({"grammar": "root ::= [a]"}, OutputFormat("grammar", "root ::= [a]", "grammar")),
    ],
)
def test_fields_of_output_formats_are_read(fields, shape):
    assert check(Fields(fields)) == shape


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": 5}, "response_format", "must be an object, got a number"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object or "),
        ({"response_format": of_schema([])}, f"{OF_SCHEMA}.schema", "must be an object, got a list"),
        ({"response_format": of_schema(CITY, strict="yes")}, f"{OF_SCHEMA}.strict", "must be true or false"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema", "must be an"),
        ({"json_schema": "[]"}, "json_schema", "must be an object, got a string"),
        ({"grammar": 5}, "grammar", "must be a string"),
        ({"json_schema": CITY, "grammar": "root ::= [a]"}, "grammar", "and json_schema each say what the"),
        (
            {"response_format": {"type": "json_object"}, "grammar": "root ::= [a]"},
            "grammar",
            "and response_format each say what the",
        ),
    ],
)
def test_error_names_the_invalid_format_field(fields, param, words):
    with refused(param, words):
        check(Fields(fields))


@pytest.mark.parametrize(
    ("shape", "param", "words"),
    [
        (OutputFormat("grammar", "root = x", "grammar"), "grammar", "does not parse: expecting a rule's"),
        (form(LOOKS, "x", strict=True), "x.properties.a.items.pattern", "pattern cannot be enforced"),
        (form(NEVER, "x"), "x", "cannot be enforced: Unsatisfiable schema: required property 'a' is"),
    ],
)
def test_error_names_the_place_that_cannot_be_enforced(shape, param, words):
    with pytest.raises(ApiError, match=re.escape(words)) as caught:
        shape.rules()
    assert caught.value.param == param


CHAT = (
    "{% if tools %}<tool_call> {{ tools }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def ask(model, tmp_path_factory):
    """ask(**fields): the last event of an answer that the model samples."""
    with dictated_slot(
        model, CHAT, tmp_path_factory.mktemp("chats"), sampling=Sampling(temp=1.0), n_max=900
    ) as answer:
        yield lambda seed=1, **more: answer(USER, seed=seed, **({"max_tokens": 900} | more))


FITS = {
    "escapes in a pattern": {"pattern": r"^[a-z]{2,4}-\d{3}$"},
    "a class of words": {"pattern": r"^[\w-]+$", "maxLength": 9},
    "a slash": {"pattern": r"^a\/\S$"},
    "a search": {"pattern": r"\S", "maxLength": 9},
    "any character": {"pattern": "^.{3,6}$"},
    "quotes": {"pattern": '^"a"$'},
    "a backslash": {"pattern": r"^a\\b$"},
    "a number": {"type": "number", "minimum": -3, "exclusiveMaximum": 12},
    "a multiple": {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": 7},
    "a closed object and an open one": {
        "allOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, "b": True},
                "additionalProperties": False,
            },
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "exactly one": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "names": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "null"},
    },
    "a format that is not known as such": {"type": "string", "format": "json-pointer", "maxLength": 9},
}


@pytest.mark.engine
@pytest.mark.parametrize("what", FITS)
def test_answer_fits_its_strict_schema(ask, what):
    schema = with_required(e={"type": "string", **FITS[what]})
    if "allOf" in FITS[what]:
        del schema["properties"]["e"]["type"]
    for seed in range(6):
        end = ask(seed, response_format=of_schema(schema, strict=True))
        assert "remarks" not in end["kvtool"]
        jsonschema.validate(json.loads(end["message"]["content"]), schema)


@pytest.mark.engine
def test_references_may_point_to_any_part_of_a_schema(ask):
    listed = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "a": {"anyOf": [{"type": "null"}, {"enum": [1, 2]}]}},
    }
    listed["properties"]["b"] = {"$ref": "#/properties/a/anyOf/1"}
    listed["required"] = ["b"]
    for seed in range(6):
        value = json.loads(ask(seed, response_format=of_schema(listed, strict=True))["message"]["content"])
        jsonschema.validate(value, listed)
        assert value["b"] in (1, 2)


@pytest.mark.engine
def test_unenforced_keyword_is_remarked_or_an_error_if_strict(ask):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "null"}, "uniqueItems": True}},
    }
    end = ask(response_format=of_schema(schema))
    place = "response_format.json_schema.schema.properties.a.uniqueItems"
    assert end["kvtool"]["remarks"] == [f"{place}: uniqueItems cannot be enforced"]
    json.loads(end["message"]["content"])
    with pytest.raises(ApiError, match="uniqueItems cannot be enforced") as caught:
        ask(response_format=of_schema(schema, strict=True))
    assert caught.value.param == place


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"grammar": 'root ::= "x" [0-9]{2}'}, r"x[0-9]{2}"),
        ({"json_schema": {"enum": ["one", 2]}}, r'"one"|2(\.0+)?'),
    ],
)
def test_answer_fits_format_fields_of_llama_server(ask, fields, fits):
    for seed in range(4):
        assert re.fullmatch(fits, ask(seed, **fields)["message"]["content"])


PATTERNS = [tool(f"tool_{letter}", with_required(x={"type": "integer"})) for letter in ascii_letters[:29]]
PATTERNS.append(tool("last", with_required(x={"type": "string", "pattern": r'^"\d{3}"$'})))


@pytest.mark.engine
def test_required_call_fits_one_of_many_tools(ask):
    names = set()
    for seed in range(12):
        end = ask(seed, tools=PATTERNS, tool_choice="required")
        (call,) = end["message"]["tool_calls"]
        assert end["message"]["content"] == ""
        name = call["function"]["name"]
        (schema,) = [
            pattern["function"]["parameters"] for pattern in PATTERNS if pattern["function"]["name"] == name
        ]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        names.add(name)
    assert len(names) > 3
    end = ask(tools=PATTERNS, tool_choice={"type": "function", "function": {"name": "last"}})
    (call,) = end["message"]["tool_calls"]
    assert re.fullmatch(r'"\d{3}"', json.loads(call["function"]["arguments"])["x"])


@pytest.mark.engine
def test_unenforceable_pattern_is_an_error_only_for_a_strict_tool(ask):
    bad = with_required(x={"type": "string", "pattern": r"(a)\1"})
    tools = [tool("first"), tool("second", bad, strict=True)]
    with pytest.raises(ApiError, match="the JSON schema's pattern cannot be enforced") as caught:
        ask(tools=tools, tool_choice="required")
    assert caught.value.param == "tools[1].function.parameters.properties.x.pattern"
    tools[1] = tool("second", bad)
    end = ask(tools=tools, tool_choice={"type": "function", "function": {"name": "second"}})
    (call,) = end["message"]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"])["x"], str)
    place = "tools[1].function.parameters.properties.x.pattern"
    assert end["kvtool"]["remarks"] == [f"{place}: pattern cannot be enforced"]


@pytest.mark.engine
@pytest.mark.parametrize("n", [1, 4, 9, 14, 20])
def test_call_cut_by_max_tokens_is_left_out(ask, n):
    tools = [tool("note", with_required(text={"type": "string", "minLength": 400}))]
    or_answer = {"tool_choice": "auto", "response_format": of_schema({"const": "x"})}
    for more in ({"tool_choice": "required"}, or_answer):
        for seed in range(3):
            end = ask(seed, tools=tools, max_tokens=n, **more)
            assert end["message"]["content"] in ("", '"', '"x', '"x"')
            assert end["finish"] == ("stop" if end["message"]["content"] == '"x"' else "length")
            assert "tool_calls" not in end["message"]


@pytest.mark.engine
def test_answer_with_a_schema_may_be_a_call_instead(ask):
    tools = [tool("weather", CITY)]
    answers, calls = 0, 0
    for seed in range(30):
        end = ask(seed, tools=tools, response_format=of_schema(with_required(n={"enum": [1, 2]})))
        if "tool_calls" in end["message"]:
            (call,) = end["message"]["tool_calls"]
            assert isinstance(json.loads(call["function"]["arguments"])["city"], str)
            assert (end["message"]["content"], end["finish"]) == ("", "tool_calls")
            calls += 1
        else:
            assert json.loads(end["message"]["content"])["n"] in (1, 2)
            answers += 1
    assert answers
    assert calls


_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKING = {
    "the header opens the thought": CHAT.replace(
        _HEADER, _HEADER.replace("{% endif %}", "<think>\n{% endif %}")
    ),
    "the model opens the thought": CHAT + "{# <think></think> #}",
    "the header closes the thought": CHAT.replace(
        _HEADER, _HEADER.replace("{% endif %}", "<think>\n\n</think>\n\n{% endif %}")
    ),
    "gpt-oss": CHAT.replace(_HEADER, "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
    + "{# <|channel|>analysis<|message|> <|channel|>final<|message|> #}",
    "Gemma 4": CHAT + "{# <|channel>thought\n<channel|> #}",
    "Mistral": CHAT + "{# [THINK][/THINK] #}",
}


@pytest.mark.engine
@pytest.mark.parametrize("kind", THINKING)
def test_thinking_model_returns_json_content_and_a_separate_thought(model, tmp_path, kind):
    n_thoughts = 0
    with dictated_slot(model, THINKING[kind], tmp_path, sampling=Sampling(temp=1.0)) as answer:
        for seed in range(8):
            shape = {"response_format": of_schema(CITY, strict=True), "thinking_budget": seed % 10 + 1}
            end = answer(USER, seed=seed, **shape, max_tokens=400)
            # a stream sends the same texts in pieces
            assert {name: answer.streamed.get(name, "") for name in ("content", "reasoning_content")} == {
                name: end["message"].get(name, "") for name in ("content", "reasoning_content")
            }
            jsonschema.validate(json.loads(end["message"]["content"]), CITY)
            assert end["finish"] == "stop"
            n_thoughts += bool(end["message"].get("reasoning_content"))
    assert n_thoughts == {"the header opens the thought": 8, "the header closes the thought": 0}.get(
        kind, n_thoughts or 1
    )


@pytest.mark.engine
def test_required_call_follows_the_thought(model, tmp_path):
    source = THINKING["the header opens the thought"]
    with dictated_slot(model, source, tmp_path, sampling=Sampling(temp=1.0)) as answer:
        for seed in range(8):
            more = {"tools": [tool("weather", CITY)], "tool_choice": "required", "thinking_budget": 6}
            end = answer(USER, seed=seed, **more, max_tokens=400)
            (call,) = end["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
            assert (end["message"]["content"], end["finish"]) == ("", "tool_calls")
            assert end["message"]["reasoning_content"]
