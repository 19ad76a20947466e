"""A tool call is returned only if its arguments fit the tool's schema."""

from __future__ import annotations

import itertools
import json

import jsonschema
import pytest

from kvtool.serve.tools.fitting import fits
from tests.serve.http_requests import message
from tests.serve.slot_requests import dictated_slot
from tests.serve.test_serve_tools import tool

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number", "exclusiveMinimum": 0}},
    "required": ["x"],
}
SCHEMAS = {
    "a choice": {"properties": {"level": {"enum": ["DEBUG", "INFO"]}, "n": {"enum": [1, 2.5]}}},
    "nothing": {"properties": {}, "additionalProperties": False},
    "unnamed properties": {"properties": {"x": {"type": "string", "maxLength": 3}}, "required": ["y", "x"]},
    "typed properties": {"properties": {"x": {}}, "additionalProperties": {"type": "integer"}},
    "inner objects": {
        "properties": {
            "level": {"anyOf": [POINT, {"type": "null"}]},
            "x": {"items": {"$ref": "#/$defs/point"}},
        },
        "$defs": {"point": POINT},
    },
    "parts": {
        "properties": {"x": {"type": "integer"}},
        "allOf": [{"$ref": "#/$defs/more"}, {"properties": {"level": {"type": "string"}}, "required": ["y"]}],
        "$defs": {"more": {"properties": {"n": {"type": "number"}}}},
    },
    "a pattern": {"properties": {"level": {"type": "string", "pattern": "^[a-z]+$"}}},
    "a loop": {"properties": {"x": {"$ref": "#"}}, "required": ["y"]},
}
VALUES = [
    {},
    {"level": "DEBUG"},
    {"level": "verbose"},
    {"n": 1.0},
    {"n": 2.5},
    {"n": 3},
    {"y": 1, "x": "abc"},
    {"y": 1, "x": "abcd"},
    {"z": 5, "y": 1, "x": "\x7f"},
    {"y": 1e-7, "x": 2, "level": "a", "n": 1e300},
    {"y": 1e-7, "x": 2.0, "level": "a", "n": "b"},
    {"level": {"y": 1e-7, "x": 2}},
    {"level": {"y": -1e-7, "x": 2}},
    {"level": None, "x": [{"y": 1, "x": 2}, {"x": 1}]},
    {"x": [{"y": 1, "x": 2}, {"y": 1}]},
    {"x": {"x": {"y": 1}, "y": 2}, "y": 3},
    {"x": {"x": {}, "y": 2}, "y": 3},
    {"type": "object", "properties": {}},
]


@pytest.mark.parametrize("what", SCHEMAS)
def test_arguments_fit_in_any_order_as_json_schema_defines_it(what):
    schema = {"type": "object", **SCHEMAS[what]}
    results = set()
    for value in VALUES:
        expected = jsonschema.Draft202012Validator(schema).is_valid(value)
        for names in itertools.permutations(value):
            arguments = json.dumps({name: value[name] for name in names})
            assert fits(arguments, schema) == expected, arguments
        results.add(expected)
    assert results == {True, False}


def test_only_keywords_that_can_be_enforced_are_checked():
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    assert fits('{"x": [1, 1]}', schema)
    assert not fits('{"x": 1}', schema)
    # this schema cannot be enforced
    assert fits('{"x": 1}', {"type": "object", "properties": {"x": {"type": "no type"}}})


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer"}, 10**20),
        ({"type": "integer", "minimum": 0}, 10**20),
        ({"type": "integer"}, -(2**63)),
        ({"type": "string", "format": "uri-reference"}, "https://[::1]/a?b"),
        ({"type": "string", "format": "date-time"}, "2026-11-30T12:30:00.123456789012Z"),
        ({"type": "string", "format": "email"}, '"x y"@b.co'),
        ({"type": "string", "format": "relative-json-pointer"}, "0-1/a"),
        ({"type": "string", "format": "byte"}, "aGk="),
    ],
)
def test_values_that_are_narrowed_only_for_writing_fit(schema, value):
    parameters = {"type": "object", "properties": {"x": schema}}
    assert fits(json.dumps({"x": value}), parameters)
    assert not fits('{"x": null}', parameters)


def test_difficult_arguments_fit():
    assert fits('{"x": "\\ud800"}', {"type": "object", "properties": {"x": {"type": "string"}}})
    assert fits(json.dumps({"x": "a" * 100_000}), {"type": "object"})


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SET_LEVEL = {"type": "object", "properties": {"level": {"enum": ["DEBUG", "INFO"]}}, "required": ["level"]}


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_reply_with_a_call_that_does_not_fit_is_a_text(model, tmp_path, api):
    function = tool("set_level", SET_LEVEL)["function"]
    tools = {
        "chat": [{"type": "function", "function": {**function, "strict": True}}],
        "messages": [{"name": "set_level", "input_schema": SET_LEVEL}],
        "responses": [{"type": "function", **function, "strict": True}],
    }[api]
    with dictated_slot(model, CHATML, tmp_path) as ask:
        for level, fits_schema in (("VERBOSE", False), ("INFO", True)):
            call = json.dumps({"name": "set_level", "arguments": {"level": level}})
            for text in (call, f"```json\n{call}\n```"):
                end = ask([message("user", "Set it.")], text, api, tools=tools)
                calls = [each["function"] for each in end["message"].get("tool_calls", [])]
                if fits_schema:
                    assert calls == [{"name": "set_level", "arguments": json.dumps({"level": level})}]
                    assert end["finish"] == "tool_calls"
                else:
                    assert (calls, end["message"]["content"], ask.streamed) == ([], text, {"content": text})
                    assert end["finish"] == "stop"
