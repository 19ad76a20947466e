"""Tools in requests: which forms are accepted, and their place in the prompt."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kvtool.chats.template import Template
from kvtool.serve.api import anthropic, messages, responses
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.request_tools import Choice, check_choice
from kvtool.serve.store.history import History
from kvtool.serve.tools import formats
from kvtool.serve.tools.conversion import as_text, for_template, tools_text
from kvtool.serve.tools.formats import HERMES, Format, shown_tokens
from tests.serve.http_requests import check_messages, check_tools, message, refused


def tool(name, parameters=None, **more):
    function = {"name": name, "description": "It does.", "parameters": parameters, **more}
    return {"type": "function", "function": function}


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "hours": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["city"],
}
NOTE = {
    "type": "object",
    "properties": {
        "city": {"type": "boolean"},
        "from": {"type": ["string", "null"]},
        "unit": {"enum": ["K"]},
    },
    "required": ["city"],
}
TOOLS = check_tools([tool("weather", WEATHER), tool("make-note", NOTE), tool("now")])


def test_checked_tools_have_the_fields_that_templates_expect():
    tools = [
        tool("a", {"properties": {"x": True}}, strict=True, more=1),
        {"type": "function", "function": {"name": "b"}},
    ]
    checked = check_tools(tools)
    schema = {"type": "object", "properties": {"x": True}}
    assert checked[0]["function"] == {
        "name": "a",
        "description": "It does.",
        "parameters": schema,
        "strict": True,
    }
    assert checked[1]["function"] == {"name": "b", "parameters": {"type": "object", "properties": {}}}
    assert check_tools(None) == check_tools([]) == []
    # the order of a schema's keys is kept, because templates show the keys in this order
    (last,) = check_tools([tool("a", {"properties": {}, "type": "object"})])
    assert list(last["function"]["parameters"]) == ["properties", "type"]


TYPES = ("must be an object", "must be a list", "must be a string", "must be true or false")
"""Ends of error messages about a field of the wrong type."""


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        ({}, "tools", "must be a list"),
        ([1], "tools[0]", "must be an object"),
        ([tool("a"), {"type": "custom"}], "tools[1].type", "must be 'function', got 'custom'; other kinds"),
        ([{}], "tools[0].type", "must be 'function'; other kinds"),
        ([{"type": "function"}], "tools[0].function", "is missing"),
        ([tool("a"), tool("b c")], "tools[1].function.name", "must be 1 to 128 letters, digits, '_' or '-',"),
        ([tool("a" * 129)], "tools[0].function.name", "must be 1 to 128 letters"),
        ([tool("a\n")], "tools[0].function.name", "must be 1 to 128 letters"),
        ([tool(None)], "tools[0].function.name", "must be 1 to 128 letters, digits, '_' or '-'"),
        ([tool("a"), tool("b"), tool("a")], "tools[2].function.name", "must be unique; there are two tools"),
        ([tool("a", description=1)], "tools[0].function.description", "must be a string"),
        ([tool("a", strict="yes")], "tools[0].function.strict", "must be true or false"),
        ([tool("a", [])], "tools[0].function.parameters", "must be a JSON schema, which is an object"),
        ([tool("a", {"type": "array"})], "tools[0].function.parameters.type", "must be 'object', got"),
        ([tool("a", {"properties": []})], "tools[0].function.parameters.properties", "must be an object"),
        ([tool("a", {"properties": {"x": 1}})], "tools[0].function.parameters.properties.x", "must be a"),
        ([tool("a", {"required": "x"})], "tools[0].function.parameters.required", "must be a list of names"),
        ([tool("a", {"required": [1]})], "tools[0].function.parameters.required", "must be a list of names"),
    ],
)
def test_error_names_the_invalid_field_of_a_tool(value, param, words):
    with refused(param, words) as caught:
        check_tools(value)
    error = caught.value
    code = "invalid_type" if words in TYPES else None
    assert (error.status, error.kind, error.code) == (400, "invalid_request_error", code)
    assert "\n" not in error.message


def test_calls_and_results_of_all_clients_are_normalized():
    def calling(*calls):
        return {"role": "assistant", "content": None, "tool_calls": list(calls)}

    def call(arguments, **more):
        return {"function": {"name": "weather", "arguments": arguments}, **more}

    def checked(*turns):
        return check_messages([{"role": "user", "content": "?"}, *turns])[1:]

    def result(content, **more):
        return {"role": "tool", "content": content, **more}

    now = {"function": {"name": "now"}, "id": None}
    reply, *results = checked(
        calling(call({"city": "\u00c5rhus", "days": 2}), call('{"city": "Oslo"}', id=""), now),
        result("Rain."),
        result("Noon.", tool_call_id="call_3"),
        result("Snow.", tool_call_id=""),
    )
    assert reply["tool_calls"] == [
        {"id": f"call_{n + 1}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(
            [("weather", '{"city": "\u00c5rhus", "days": 2}'), ("weather", '{"city": "Oslo"}'), ("now", "{}")]
        )
    ]
    assert [each["tool_call_id"] for each in results] == ["call_1", "call_2", "call_3"]
    assert [each["content"] for each in results] == ["Rain.", "Snow.", "Noon."]
    # an id in the request is kept, and a later call without an id gets a new id
    chat = (calling(call("{}", id="x")), result("a", tool_call_id="x"), calling(call("{}")), result("b"))
    *_, later, last = checked(*chat)
    assert (later["tool_calls"][0]["id"], last["tool_call_id"]) == ("call_2", "call_2")
    # a result without an id belongs to the next call that waits
    _, second, third = checked(calling(call("{}", id="x"), now), result("a", tool_call_id="x"), result("b"))
    assert [(each["tool_call_id"], each["content"]) for each in (second, third)] == [
        ("x", "a"),
        ("call_2", "b"),
    ]


def test_results_are_sorted_by_the_order_of_their_calls():
    def sorted_contents(ids, *results):
        calls = [{"id": id, "function": {"name": "f"}} for id in ids]
        turns = [{"role": "tool", "tool_call_id": id, "content": content} for id, content in results]
        return [
            each["content"]
            for each in check_messages([{"role": "assistant", "tool_calls": calls}, *turns, *later])[1:]
        ]

    later = []
    assert sorted_contents("abc", ("c", "3"), ("a", "1"), ("b", "2")) == ["1", "2", "3"]
    # a result that belongs to no call keeps its place
    assert sorted_contents("ab", ("b", "2"), ("x", "?"), ("a", "1")) == ["1", "?", "2"]
    # some clients use the name of the function as the id
    assert sorted_contents("aba", ("a", "1"), ("b", "2"), ("a", "3")) == ["1", "2", "3"]
    items = [{"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"} for id in "ab"]
    items += [{"type": "function_call_output", "call_id": id, "output": id} for id in "ba"]
    chat = responses.as_chat({"input": items})
    assert [message["content"] for message in messages.check(chat.messages)] == ["", "a", "b"]
    # results after another message are not sorted together with the results before it
    later = [{"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    assert sorted_contents("ab", ("b", "2")) == ["2", "?", "1"]


class Name(str):
    """A text that counts how often it is compared with another text."""

    n_compared = 0

    def __eq__(self, other):
        Name.n_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_checking_names_and_ids_takes_linear_time(monkeypatch):
    monkeypatch.setattr(Name, "n_compared", 0)
    n = 1000
    check_tools([tool(Name(f"f{i}")) for i in range(n)])
    calls = [{"id": Name(f"c{i}"), "function": {"name": Name("f")}} for i in range(n)]
    results = [{"role": "tool", "tool_call_id": Name(f"c{i}"), "name": "f"} for i in range(n)]
    talk = [{"role": "assistant", "tool_calls": calls}, *results]
    messages._match_results(talk, [""] * len(talk))
    tools = [{"name": Name(f"f{i}"), "input_schema": {"type": "object"}} for i in range(n)]
    references = [{"type": "tool_reference", "tool_name": Name(f"f{i}")} for i in range(n)]
    content = [{"type": "tool_result", "tool_use_id": "x", "content": references}]
    anthropic.as_chat({"messages": [message("user", content)], "tools": tools}, is_counted=True)
    assert Name.n_compared < 50 * n


def test_calls_with_or_without_ids_are_the_same_chat():
    def digest(call, **result):
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        checked = check_messages([reply, {"role": "tool", "content": "Rain.", **result}])
        return History(None, [], checked).now

    whole = {"id": "1", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    short = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert digest(whole, tool_call_id="1") == digest(short)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0] is a result without an id, and no call waits"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id must be a string"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": [1]}}]}],
            "messages[0].tool_calls[0].function.arguments must be an object, or its JSON as a string, got a",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "a"}}]}],
            "messages[0].tool_calls[0].id must be a string, got a number",
        ),
    ],
    ids=str,
)
def test_error_names_the_invalid_field_of_a_call_or_result(messages, words):
    with pytest.raises(ApiError) as caught:
        check_messages(messages)
    assert caught.value.message.startswith(words)


def named(tool):
    return {"type": "function", "function": {"name": tool}}


def test_tool_choice_values_are_read():
    assert check_choice(None, TOOLS) == check_choice("auto", TOOLS) == Choice("auto")
    assert check_choice(None, []) == check_choice("auto", []) == check_choice("none", TOOLS) == Choice("none")
    assert check_choice("required", TOOLS) == Choice("required")
    assert check_choice(named("now"), TOOLS) == Choice("required", "now")


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        ("any", "tool_choice", "must be 'none', 'auto', 'required' or an object, got 'any'"),
        (1, "tool_choice", "must be 'none', 'auto', 'required' or an object"),
        ({"type": "allowed_tools"}, "tool_choice.type", "must be 'function', got 'allowed_tools'; other"),
        ({"type": "custom", "custom": {}}, "tool_choice.type", "must be 'function', got 'custom'"),
        ({"type": "function"}, "tool_choice.function.name", "must be the name of a tool"),
        (named("no"), "tool_choice.function.name", "must be the name of a tool in tools, got 'no'"),
    ],
)
def test_error_names_the_invalid_field_of_tool_choice(value, param, words):
    with refused(param, words):
        check_choice(value, TOOLS)


def test_required_call_without_tools_is_refused():
    for value, param in (("required", "tool_choice"), (named("now"), "tool_choice.function.name")):
        with refused(param):
            check_choice(value, [])


SHOWS = (
    "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_template_detects_whether_it_shows_tools_and_calls():
    fails = "{% if tools %}{{ raise_exception('no') }}{% endif %}"
    listed = "{{ tools | tojson }}" + PLAIN
    templates = [Template(source, "", "") for source in (SHOWS, PLAIN, listed, fails)]
    assert [template.has_tools for template in templates] == [True, False, True, False]
    assert [template.has_calls for template in templates] == [True, False, False, False]


def test_tojson_in_templates_does_not_escape_html():
    tools = check_tools([tool("a", {"type": "object", "properties": {"b": {"description": "it's <ü>"}}})])
    text = Template("{{ tools[0].function.parameters | tojson(ensure_ascii=False) }}", "", "").render(
        [], tools=tools
    )
    assert text == '{"type": "object", "properties": {"b": {"description": "it\'s <ü>"}}}'
    assert Template("{{ tools is none }}", "", "").render([], tools=[]) == "True"


CALLS = [
    {"id": "call_0123456789", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ü"}'}},
]
CHAT = check_messages(
    [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "noon"},
        {"role": "assistant", "content": "Noon.", "tool_calls": None},
    ]
)


def test_templates_get_arguments_as_objects_and_short_call_ids():
    before = json.dumps(CHAT)
    template = Template(SHOWS, "", "")
    rewritten = for_template(CHAT, template)
    assert json.dumps(CHAT) == before
    assert [message["content"] for message in rewritten] == ["?", "", "noon", "rain", "Noon."]
    calls = rewritten[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{}, {"city": "Ü"}]
    ids = [call["id"] for call in calls]
    assert ids == [rewritten[2]["tool_call_id"], rewritten[3]["tool_call_id"]]
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids)
    assert "tool_calls" not in rewritten[4]
    for text in ("{", "[1]", "two"):
        call = {"id": "a23456789", "function": {"name": "now", "arguments": text}}
        (message,) = for_template([{"role": "assistant", "content": "", "tool_calls": [call]}], template)
        assert message == {"role": "assistant", "content": "", "tool_calls": [call]}
    # a lone surrogate cannot be tokenized, so it is replaced
    call = {"id": "a23456789", "function": {"name": "now", "arguments": r'{"x": "\ud800"}'}}
    (message,) = for_template([{"role": "assistant", "content": "", "tool_calls": [call]}], template)
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": "\ufffd"}


def test_template_without_tools_gets_calls_and_results_as_text():
    rewritten = for_template(CHAT, Template(PLAIN, "", ""))
    assert [message["role"] for message in rewritten] == ["user", "assistant", "user", "assistant"]
    assert rewritten[1]["content"] == (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ü"}}\n</tool_call>'
    )
    assert rewritten[2]["content"] == (
        "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    )
    assert all("tool_calls" not in message for message in rewritten)
    # `kvtool chat --reread` has no tools, whatever the template
    assert as_text(CHAT) == rewritten


def test_template_that_omits_calls_gets_them_as_text_in_its_own_syntax():
    template = Template("{{ tools }} <|tool_call_start|>" + PLAIN, "", "")
    chat = [CHAT[0], {**CHAT[1], "content": "So:"}, *CHAT[2:]]
    rewritten = for_template(chat, template)
    text = '<|tool_call_start|>[now(), weather(city="Ü")]<|tool_call_end|>'
    assert rewritten[1] == {"role": "assistant", "content": f"So:\n{text}"}
    assert [message["role"] for message in rewritten[2:]] == ["tool", "tool", "assistant"]
    # In LFM2's syntax, arguments must be an object. Other arguments are written as JSON in a tag.
    calls = [{"id": "a", "function": {"name": "now", "arguments": "x"}}]
    (message,) = for_template([{"role": "assistant", "content": "", "tool_calls": calls}], template)
    assert message["content"] == '<tool_call>\n{"name": "now", "arguments": "x"}\n</tool_call>'


def test_template_with_one_call_per_reply_gets_one_reply_per_call():
    template = Template(SHOWS.replace("tool_call>", "x>") + "<|python_tag|>", "", "")
    chat = [CHAT[0], {**CHAT[1], "content": "So:", "reasoning_content": "Hm."}, *CHAT[2:4]]
    rewritten = for_template(
        [*chat, {"role": "tool", "tool_call_id": "other", "content": "?"}, CHAT[4]], template
    )
    names = [[call["function"]["name"] for call in message.get("tool_calls", [])] for message in rewritten]
    assert names == [[], ["now"], [], ["weather"], [], [], []]
    assert [message["content"] for message in rewritten] == ["?", "So:", "noon", "", "rain", "?", "Noon."]
    assert [message.get("reasoning_content") for message in rewritten[1:4:2]] == ["Hm.", ""]


def test_tools_text_lists_tools_and_an_example_call():
    text = tools_text(TOOLS)
    listed = re.search(r"<tools>\n(.*)\n</tools>", text, re.S)[1].splitlines()
    assert [json.loads(line) for line in listed] == [tool["function"] for tool in TOOLS]
    assert HERMES.written([("NAME", {"KEY": "VALUE"})]) in text


@pytest.mark.parametrize(
    ("source", "format"),
    [
        ("{{ tools }}", None),
        ("{{ messages }} <tool_call>", None),
        ("{{ tools }} <tool_call>\n<invoke name=", None),
        ("{{ tools }} '<tool_call>\n{\"name\": '", formats.HERMES),
        ("{{ tools }} <tool_call>\n<function=f>\n<parameter=x>", formats.XML),
        ("{{ tools }} <tool_call>{f}\n<arg_key>", formats.GLM),
        ("{{ tools }} [TOOL_CALLS] [", formats.MISTRAL),
        ("{{ tools }} [TOOL_CALLS] + name + [ARGS]", formats.MISTRAL_ARGS),
        ("{{ tools }} <|tool_call|>", formats.GRANITE),
        ("{{ tools }} <TOOLCALL>[", formats.NEMOTRON),
        ("{{ tools }} <function=example_function_name>{} <|python_tag|>", formats.FUNCTIONARY),
        ("{{ tools }} <|python_tag|>", formats.LLAMA),
        ('{{ tools }} {"name": function name, "parameters": dictionary', formats.LLAMA),
        ("List of tools: <|tool_list_start|>[{{ tools }}", formats.LFM2),
        ("List of tools: [{{ tools }}]", formats.LFM2),
        ("{{ tools }} <|tool_call_start|>[", formats.LFM2),
        ("{{ tools }} '<|tool_call>call:' + name", formats.GEMMA),
        ("{{ tools }} <seed:tool_call>\n<function=f>\n<parameter=x>", formats.SEED),
        ("{{ tools }} '<tool_calls>['", formats.APRIEL),
        ('{{ tools }} \'<tool_calls>\\n{"name"', None),
        ("{{ tools }} <|START_ACTION|>[", formats.COHERE),
        ("{{ tools }} '<minimax:tool_call>'\n<invoke name=", formats.MINIMAX),
    ],
)
def test_call_format_is_detected_from_the_template(source, format):
    template = Template(source, "", "")
    assert Format.native(template) is format
    assert Format.of(template) is (format or HERMES)


def test_shown_tokens_are_the_tag_tokens_of_the_format():
    tokens = {"<tool_call>": [7], "[TOOL_CALLS]": [8], "[ARGS]": [9]}
    model = SimpleNamespace(
        tokenize=lambda text, special: np.array(tokens.get(text, [1, 2]) if special else [1, 2])
    )
    assert shown_tokens(model, formats.MISTRAL_ARGS) == {7, 8, 9}
    assert shown_tokens(model, formats.LFM2) == {7}
