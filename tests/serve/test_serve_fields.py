"""Request fields of other servers: supported, refused by name, or accepted because they change nothing."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from kvtool.llama.sampling import MAX_LOOK_BACK
from kvtool.serve.api import requests
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import HARMLESS, INERT, NEUTRAL
from kvtool.serve.api.requests import Defaults
from kvtool.serve.tools.formats import HERMES
from tests.serve.http_requests import message, pieces_of, refused
from tests.serve.in_process_server import serve_in_process
from tests.serve.slot_requests import check_body
from tests.serve.test_serve_tools import tool

HI = [message("user", "Hi.")]


def chat(defaults=None, **fields):
    return check_body({"messages": HI, **fields}, defaults=defaults)


@pytest.mark.parametrize(
    "fields",
    [
        # LM Studio's example
        {"max_tokens": -1, "stream": False, "temperature": 0.7},
        {"n_predict": -1, "repetition_penalty": 1.0, "modalities": ["text"], "add_generation_prompt": True},
        {"thinking_budget": -1, "timings_per_token": True},
        {"function_call": "none", "functions": [], "top_logprobs": 0, "logprobs": False, "n": 1},
        {"repeat_last_n": -1, "dry_penalty_last_n": -1, "top_k": -1, "min_p": 0, "typical_p": 1, "seed": -1},
        # vLLM's defaults
        {"best_of": 1, "min_tokens": 0, "bad_words": [], "guided_json": None, "structured_outputs": {}},
        {"stop_token_ids": [], "allowed_token_ids": None, "ignore_eos": False},
        # fields of OpenRouter and OpenAI
        {"usage": {"include": True}, "store": False, "metadata": {"a": "b"}},
        {"cache_prompt": True, "service_tier": "default", "logit_bias": {}},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_fields_that_change_nothing_are_accepted(fields):
    request = chat(**fields)
    assert request.ignored == []
    # apart from the temperature, these fields do not change the request
    plain = chat(temperature=fields.get("temperature"))
    assert request.sampling.stop == plain.sampling.stop
    assert (request.stop_tokens, request.ignores_end) == ((), False)


def test_order_of_samplers_is_ignored_and_listed():
    # SillyTavern sends both with each request
    order = {"samplers": ["top_k", "temperature"], "sampler_priority": ["dry", "top_k"]}
    assert chat(**order).ignored == [*order]
    assert requests.check_text({"prompt": "x", **order}, Defaults()).ignored == [*order]


@pytest.mark.parametrize("field", NEUTRAL)
def test_unsupported_field_is_refused_by_name_unless_its_value_is_neutral(field):
    neutral, hint = NEUTRAL[field]
    for value in (None, *neutral):
        assert chat(**{field: value}).ignored == []
    with pytest.raises(ApiError) as caught:
        chat(**{field: "something"})
    assert caught.value.message == f"{field} is not supported; {hint}"
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


def test_each_field_is_in_one_table():
    supported = {"max_tokens", "n_predict", "stop", "seed", "n", "logprobs", "tools", "stream", "grammar"}
    assert len(NEUTRAL.keys() | HARMLESS | INERT.keys()) == len(NEUTRAL) + len(HARMLESS) + len(INERT)
    assert not (NEUTRAL.keys() | HARMLESS | INERT.keys()) & supported


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_max_tokens_minus_1_is_no_limit_and_null_is_the_default(name):
    assert chat(**{name: 3}).n_max == 3
    assert chat(**{name: -1}).n_max is None
    assert chat(Defaults(n_max=7), **{name: None}).n_max == 7
    assert chat(Defaults(n_max=None)).n_max is None
    with pytest.raises(ApiError, match=rf"{name} must be in -1\.\.2147483647, got -2"):
        chat(**{name: -2})


def test_field_names_of_other_servers_are_understood():
    assert chat(repetition_penalty=1.3).sampling.repeat_penalty == 1.3
    # llama-server's field, repeat_penalty, has priority
    both = chat(repetition_penalty=1.0, repeat_penalty=1.2)
    assert both.sampling.repeat_penalty == 1.2
    both = chat(repeat_last_n=-1, dry_penalty_last_n=-1).sampling
    assert (both.repeat_last_n, both.dry_penalty_last_n) == (MAX_LOOK_BACK, MAX_LOOK_BACK)
    assert chat(dry_sequence_breakers=["\n", "none"]).sampling.dry_sequence_breaker == ("\n",)
    assert chat(ignore_eos=True).ignores_end
    assert requests.check_text({"prompt": "x", "logprobs": False}, Defaults()).logprobs is None


ROLES = "system, developer, user, assistant, tool"
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
FIRST = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 1.5}, "max_tokens", "must be a whole number, got 1.5"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "must be in 0..2147483647, got -1"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]", "must be a whole number, got a string"),
        ({"stop_token_ids": [None]}, "stop_token_ids[0]", "must be a whole number, got null"),
        ({"stop": ["a", 5]}, "stop[1]", "must be a string, got a number"),
        ({"messages": None}, "messages", "is missing"),
        ({"messages": []}, "messages", "must have at least one message"),
        ({"messages": [message("king", "x")]}, "messages[0].role", f"must be one of {ROLES}, got king"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [message("user", IMAGE)]}, FIRST, "is of type image_url; kvtool reads texts only"),
        ({"n": 2}, "n", "must be 1: kvtool writes one answer a request"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs to be true"),
        ({"kvtool": 5}, "kvtool", "must be an object, got a number"),
        ({"kvtool": {"shore": 5}}, "kvtool.shore", "is not supported; remove it"),
        ({"kvtool": {"share": "x"}}, "kvtool.share", "must be a whole number, got a string"),
        ({"top_p": 2}, "top_p", "must be in 0..1, got 2"),
        ({"temperature": -1}, "temperature", "must be in 0..10000, got -1; 0 picks the most likely token"),
        ({"mirostat": 3}, "mirostat", "must be in 0..2, got 3"),
        ({"mirostat_tau": -1}, "mirostat_tau", "must be in 0..10000, got -1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be in 0.001..1000, got 0; 1 is off"),
        ({"logit_bias": {"x": 1}}, "logit_bias", 'must have pairs of a token and a number, got ["x", 1]'),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias", "must have pairs of a token and a number, got [1.5, 1]"),
        ({"logit_bias": [[True]]}, "logit_bias", "must have pairs of a token and a number, got [true]"),
        ({"logit_bias": {"5": 1e6}}, "logit_bias", "of token 5 must be in -10000..10000 or -inf, got 1e+06"),
    ],
    ids=str,
)
def test_error_names_the_invalid_field(fields, param, words):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.param, caught.value.message) == (param, f"{param} {words}")


def test_previous_response_id_is_refused_with_advice():
    with pytest.raises(ApiError, match="previous_response_id is not supported; send the whole chat instead"):
        check_body({"input": "x", "previous_response_id": "resp_1"}, "responses")


def test_reference_to_an_item_is_refused_with_advice():
    """Vercel's AI SDK refers to earlier replies unless it is told that they are not stored."""
    items = [message("user", "x"), {"type": "item_reference", "id": "msg_1"}]
    with pytest.raises(ApiError, match=r"kvtool stores no answers; send the whole chat \(.*store: false"):
        check_body({"input": items}, "responses")


def test_error_about_an_unknown_item_names_the_types_that_are_read():
    with pytest.raises(ApiError) as caught:
        check_body({"input": [{"type": "x"}]}, "responses")
    start, end = "input[0].type must be ", ", got x"
    assert caught.value.message.startswith(start)
    assert caught.value.message.endswith(end)
    kinds = caught.value.message[len(start) : -len(end)].replace(" or ", ", ").split(", ")
    assert len(kinds) == 6
    # for these types, the error is about another field
    for kind in kinds:
        with pytest.raises(ApiError) as caught:
            check_body({"input": [{"type": kind}]}, "responses")
        assert caught.value.param != "input[0].type"


def test_required_call_has_priority_over_a_schema():
    tools = [{"type": "function", "function": {"name": "f"}}]
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert chat(tools=tools, response_format=schema).output_format
    assert chat(tools=tools, response_format=schema, tool_choice="required").output_format is None
    assert chat(tools=tools, grammar="root ::= x", tool_choice="required").output_format


def test_unknown_fields_are_listed_as_ignored():
    assert chat(frobnicate=1, verbosity="low", user="x").ignored == ["frobnicate", "verbosity"]
    # these fields of other servers change nothing here, so they need no entry in a table
    assert chat(use_beam_search=False, ban_eos_token=True).ignored == ["use_beam_search", "ban_eos_token"]
    response = check_body({"input": "x", "frobnicate": 1, "text": {"verbosity": "low"}}, "responses")
    assert response.ignored == ["frobnicate", "text.verbosity"]
    # it limits only the calls of tools that run on OpenAI's servers
    assert check_body({"input": "x", "max_tool_calls": 5}, "responses").ignored == ["max_tool_calls"]
    assert len(chat(**{f"f{n}": n for n in range(99)}).ignored) == requests.MAX_IGNORED


def test_fields_without_effect_are_listed_if_they_ask_for_something():
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    asks = {"service_tier": "flex", "store": True, "truncation": "auto", "context_management": edits}
    assert asks.keys() == INERT.keys()
    assert chat(**asks).ignored == list(asks)
    asks = {"context_management": edits, "inference_geo": "eu"}
    assert check_body({"messages": HI, "max_tokens": 5, **asks}, "messages").ignored == list(asks)


def test_return_progress_is_listed_as_ignored_by_apis_without_progress():
    asks = {"stream": True, "return_progress": True}
    for body, api in (({"input": "x"}, "responses"), ({"messages": HI, "max_tokens": 5}, "messages")):
        request = check_body(body | asks, api)
        assert (request.with_progress, request.ignored) == (False, ["return_progress"])
    request = chat(**asks)
    assert (request.with_progress, request.ignored) == (True, [])


def test_hosted_tools_are_listed_as_ignored():
    function = {"type": "function", "name": "f"}
    hosted = [{"type": kind} for kind in ("web_search", "local_shell", "custom")]
    tools = [hosted[0], function, hosted[1], {"type": "namespace", "name": "n", "tools": [hosted[2]]}]
    request = check_body({"input": "x", "tools": tools}, "responses")
    assert [tool["function"]["name"] for tool in request.tools] == ["f"]
    assert request.ignored == ["tools[0]", "tools[2]", "tools[3].tools[0]"]
    tools = [{"name": "f", "input_schema": {"type": "object"}}, {"type": "bash_20250124", "name": "bash"}]
    request = check_body({"messages": HI, "max_tokens": 5, "tools": tools}, "messages")
    assert [tool["function"]["name"] for tool in request.tools] == ["f"]
    assert request.ignored == ["tools[1]"]


def test_custom_tools_of_a_chat_are_refused():
    custom = {"type": "custom", "custom": {"name": "patch"}}
    with pytest.raises(ApiError, match="must be 'function', got 'custom'") as caught:
        chat(tools=[tool("f"), custom])
    assert caught.value.param == "tools[1].type"
    reply = {"role": "assistant", "tool_calls": [{"id": "1", **custom}]}
    with pytest.raises(ApiError, match=r"^messages\[1\].tool_calls\[0\].function is missing"):
        chat(messages=[*HI, reply])


def test_items_of_hosted_tools_are_listed_as_ignored():
    kinds = ("web_search_call", "computer_call_output", "mcp_list_tools", "local_shell_call")
    items = [{"type": kind, "id": "x"} for kind in kinds]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    input_items = [message("user", "x"), items[0], thought, *items[1:3], message("assistant", "y"), items[3]]
    request = check_body({"input": [*input_items, message("user", "z")]}, "responses")
    reply = message("assistant", "y") | {"reasoning_content": "Hm."}
    assert request.messages == [message("user", "x"), reply, message("user", "z")]
    assert request.ignored == ["input[1]", "input[3]", "input[4]", "input[6]"]


def test_call_of_a_custom_tool_is_shown_with_its_text_as_input():
    call = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "+a\n"}
    result = {"type": "custom_tool_call_output", "call_id": "1"}
    for output in ("done", [{"type": "input_text", "text": "done"}]):
        items = [message("user", "x"), call, result | {"output": output}]
        _, reply, answer = check_body({"input": items}, "responses").messages
        function = {"name": "patch", "arguments": '{"input": "+a\\n"}'}
        assert reply["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
        assert (answer["tool_call_id"], answer["content"]) == ("1", "done")


def test_image_in_the_output_of_a_tool_is_replaced_by_a_text_and_listed_as_ignored():
    parts = [{"type": "input_text", "text": "Seen: "}, {"type": "input_image", "image_url": "x"}]
    for kind in ("function_call", "custom_tool_call"):
        call = {"type": kind, "call_id": "1", "name": "look", "input": "x", "arguments": "{}"}
        output = {"type": f"{kind}_output", "call_id": "1", "output": parts}
        request = check_body({"input": [message("user", "x"), call, output]}, "responses")
        assert request.messages[-1]["content"] == "Seen: [image: this model reads text only]"
        assert request.ignored == ["input[2].output[1]"]
    assert parts[1]["type"] == "input_image"


@pytest.mark.parametrize("n", [0, 2, None])
def test_responses_return_logprobs_if_top_logprobs_or_include_ask(n):
    def request(**more):
        return check_body({"input": "x", "top_logprobs": n, **more}, "responses")

    assert request().logprobs == (n or None)
    assert request(include=["message.output_text.logprobs"]).logprobs == (n or 0)


CALL = {"type": "function_call", "call_id": "1"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": 5}}
BAD_NAME = {"type": "function", "name": "a b"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"instructions": None, "input": []}, "input"),
        ({"input": [message("user", [{"type": "input_image", "image_url": "x"}])]}, "input[0].content[0]"),
        ({"input": [message("king", "x")]}, "input[0].role"),
        ({"input": [message("user", "x"), CALL]}, "input[1].name"),
        ({"input": [message("assistant", "x"), CALL | {"name": "f", "arguments": 5}]}, "input[1].arguments"),
        ({"input": [OUTPUT | {"call_id": 5}]}, "input[0].call_id"),
        ({"input": [OUTPUT | {"output": {"a": 1}}]}, "input[0].output"),
        ({"input": [message("user", "x"), {"type": "item_reference", "id": "x"}]}, "input[1]"),
        ({"input": [{"type": "web_search_call"}, {"type": "websearch"}]}, "input[1].type"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "call_id": "1"}]}, "input[0].input"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}, BAD_NAME]}, "tools[1].name"),
        ({"tools": [FUNCTION]}, "tools[0].parameters.properties"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [BAD_NAME]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ],
    ids=str,
)
def test_errors_of_responses_name_fields_of_that_api(fields, param):
    with refused(param):
        check_body({"instructions": "Be brief.", "input": "x", **fields}, "responses")


def test_errors_name_the_message_and_the_tool_as_the_client_numbers_them():
    system, bad = Defaults(system="Be brief."), message("user", 5)
    # the server's system prompt, and system messages that are joined, do not change the numbers
    for defaults, talk, param in (
        (system, [*HI, bad], "messages[1].content"),
        (None, [message("system", "One."), message("system", "Two."), bad], "messages[2].content"),
    ):
        with refused(param):
            chat(defaults, messages=talk)
    tools = [{"type": "bash_20250124", "name": "bash"}, {"name": "f", "input_schema": {"type": "object"}}]
    request = check_body({"messages": HI, "max_tokens": 5, "tools": tools}, "messages")
    assert request.schema_places == ["tools[1].input_schema"]
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [{"name": "f"}]}]
    assert check_body({"input": "x", "tools": tools}, "responses").schema_places == [
        "tools[1].tools[0].parameters"
    ]
    assert chat(tools=[tool("f")]).schema_places == ["tools[0].function.parameters"]


@pytest.fixture(scope="module")
def server(talker):
    with serve_in_process(talker, policy="h2o", budget="256") as server:
        yield server


def test_stop_token_ids_are_applied(server):
    def ask(**more):
        more = {"messages": HI, "max_tokens": 6, "logprobs": True, "top_logprobs": 5, **more}
        answer = server.ask("/v1/chat/completions", more)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        return body["choices"][0], body

    plain, _ = ask()
    tokens = [token["id"] for token in plain["logprobs"]["content"]]
    assert (plain["finish_reason"], len(tokens)) == ("length", 6)
    third = tokens[2]
    n = tokens.index(third)
    cut, whole = ask(stop_token_ids=[third])
    assert (cut["finish_reason"], whole["usage"]["completion_tokens"]) == ("stop", n)
    assert plain["message"]["content"].startswith(cut["message"]["content"])
    assert len(cut["message"]["content"]) < len(plain["message"]["content"])
    for name, value in {"stop_token_ids": [10**9], "logit_bias": {str(10**9): 1}}.items():
        response = server.ask("/v1/chat/completions", {"messages": HI, name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_says_if_the_context_or_the_token_limit_cut_it(talker, stream):
    remarks = ["the answer was cut: the context of 96 tokens is full"]
    with serve_in_process(talker, policy="full", n_ctx=96) as server:

        def ask(path, **body):
            answer = server.ask(path, {"ignore_eos": True, "stream": stream, **body})
            assert answer.status_code == 200, answer.text
            return pieces_of(answer.text) if stream else [answer.json()]

        for n_max, reason, noted in (
            (5, "max_tokens", None),
            (500, "model_context_window_exceeded", remarks),
        ):
            *_, end = (
                each for each in ask("/v1/messages", messages=HI, max_tokens=n_max) if "kvtool" in each
            )
            assert (end.get("delta") or end)["stop_reason"] == reason
            assert end["kvtool"].get("remarks") == noted
            end = ask("/v1/responses", input="Hi.", max_output_tokens=n_max)[-1]
            end = end.get("response") or end
            assert end["incomplete_details"] == {"reason": "max_output_tokens"}
            assert end["kvtool"].get("remarks") == noted
            for path, prompt in (
                ("/v1/chat/completions", {"messages": HI}),
                ("/v1/completions", {"prompt": "a"}),
            ):
                end = ask(path, max_tokens=n_max, **prompt)[-1]
                assert end["choices"][0]["finish_reason"] == "length"
                assert end["kvtool"].get("remarks") == noted


def test_empty_prompt_is_refused(server):
    for prompt in ("", []):
        error = server.ask("/v1/completions", {"prompt": prompt}).json()["error"]
        assert (error["param"], error["message"]) == ("prompt", "prompt must have at least one token")
    error = server.ask("/tokenize", {"add_special": True}).json()["error"]
    assert (error["param"], error["message"]) == ("content", "content is missing")
    assert server.ask("/tokenize", {"content": ""}).json() == {"tokens": []}


def test_tokenize_can_read_markers_as_text(server):
    body = {"content": "a</s>"}
    assert len(server.ask("/tokenize", body).json()["tokens"]) == 2
    tokens = server.ask("/tokenize", {"content": "\u00e9"}).json()["tokens"]
    assert len(tokens) == 2
    assert server.ask("/detokenize", {"tokens": tokens}).json()["content"] == "\u00e9"
    assert server.ask("/detokenize", {"tokens": tokens[:1]}).json()["content"] == "\ufffd"
    assert len(server.ask("/tokenize", body | {"parse_special": False}).json()["tokens"]) > 3


def test_creation_time_of_a_model_is_that_of_its_file(server, talker):
    created = int(talker.stat().st_mtime)
    model = server.ask("/v1/models", method="GET").json()["data"][0]
    assert model["created"] == created
    assert datetime.fromisoformat(model["created_at"].replace("Z", "+00:00")).timestamp() == created


def test_ignore_eos_continues_after_the_end_token(server):
    (end,) = server.pool.slots[0].model.ends
    more = {"messages": HI, "max_tokens": 4, "logit_bias": {str(end): 1000}}
    ends = server.ask("/v1/chat/completions", more).json()
    assert (ends["usage"]["completion_tokens"], ends["choices"][0]["finish_reason"]) == (0, "stop")
    goes_on = server.ask("/v1/chat/completions", more | {"ignore_eos": True}).json()
    assert (goes_on["usage"]["completion_tokens"], goes_on["choices"][0]["finish_reason"]) == (4, "length")


def test_max_tokens_minus_1_exceeds_the_servers_limit(server):
    def n_written(**more):
        answer = server.ask("/v1/chat/completions", {"messages": HI, **more}).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    text = server.chat(HI, max_tokens=12)[0]["content"]
    server.site.defaults = Defaults(server.site.defaults.sampling, n_max=3)
    try:
        assert n_written() == n_written(max_tokens=None) == (3, "length")
        n, finish = n_written(max_tokens=-1, stop=text[-8:])
        assert (n > 3, finish) == (True, "stop")
    finally:
        server.site.defaults = Defaults(server.site.defaults.sampling)


def test_responses_have_logprobs(server):
    body = {"input": "Hi.", "max_output_tokens": 4, "top_logprobs": 2}
    whole = server.ask("/v1/responses", body).json()
    (part,) = whole["output"][0]["content"]
    assert [len(token["top_logprobs"]) for token in part["logprobs"]] == [2] * 4
    events = pieces_of(server.ask("/v1/responses", body | {"stream": True}).text)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [token for event in deltas for token in event["logprobs"]] == part["logprobs"]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == part["logprobs"]


def test_logprobs_have_no_tokens_of_the_stop_string(server):
    body = {"prompt": "Hi.", "max_tokens": 16, "seed": 1, "temperature": 1, "logprobs": 0}
    tokens = server.ask("/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"]
    body |= {"stop": "".join(tokens[6:9])}
    (choice,) = server.ask("/v1/completions", body).json()["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("".join(tokens[:6]), tokens[:6])
    events = pieces_of(server.ask("/v1/completions", body | {"stream": True}).text)
    records = [each["choices"][0]["logprobs"] for each in events if each.get("choices")]
    assert [token for record in records if record for token in record["tokens"]] == tokens[:6]


def test_parallel_tool_calls_false_ends_the_reply_after_one_call(talker):
    with serve_in_process(talker, policy="full") as server:
        two = HERMES.written([("now", {}), ("now", {})])
        body = {"max_tokens": 300, "grammar": f"root ::= {json.dumps(two)}"}
        function = {"name": "now", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]

        def called(**more):
            fields = body | {"messages": HI, "tools": tools, **more}
            answer = server.ask("/v1/chat/completions", fields).json()
            (choice,) = answer["choices"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            assert "ignored" not in answer["kvtool"]
            return choice["message"], answer["usage"]

        for more in ({}, {"parallel_tool_calls": True}):
            assert len(called(**more)[0]["tool_calls"]) == 2
        reply, usage = called(parallel_tool_calls=False)
        (call,) = reply["tool_calls"]
        assert usage["completion_tokens"] < called()[1]["completion_tokens"]
        # the next request continues after the call
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Noon."}
        after = server.chat([*HI, reply, result], tools=tools)[1]
        assert after["prompt_tokens_details"]["cached_tokens"] >= usage["total_tokens"] - 1
        more = {"input": "Hi.", "tools": [{"type": "function", **function}], "parallel_tool_calls": False}
        stream = server.ask("/v1/responses", body | more | {"stream": True}).text
        response = pieces_of(stream)[-1]["response"]
        assert [item["type"] for item in response["output"]] == ["function_call"]
        assert response["parallel_tool_calls"] is False
        body |= {"messages": HI, "tools": [{"name": "now", "input_schema": {"type": "object"}}]}
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        answer = server.ask("/v1/messages", body | {"tool_choice": choice}).json()
        assert [block["type"] for block in answer["content"]] == ["tool_use"]
        assert answer["stop_reason"] == "tool_use"
        choice = {"type": "any", "disable_parallel_tool_use": 1}
        refused_response = server.ask("/v1/messages", body | {"tool_choice": choice})
        assert "tool_choice.disable_parallel_tool_use must be true or false" in refused_response.text


def test_stream_reports_prompt_progress_on_request(talker):
    long = "The river is long. " * 20
    with serve_in_process(talker, policy="h2o", budget="256", n_batch=32) as server:
        for path, prompt in (
            ("/v1/chat/completions", {"messages": [message("user", long)]}),
            ("/v1/completions", {"prompt": long}),
        ):
            body = prompt | {"max_tokens": 2, "stream": True, "return_progress": True}
            pieces = pieces_of(server.ask(path, body).text)
            progress = [piece["prompt_progress"] for piece in pieces if "prompt_progress" in piece]
            n = pieces[-1]["timings"]["prompt_n"]
            assert {(step["total"], step["cache"]) for step in progress} == {(n, 0)}
            done = [step["processed"] for step in progress]
            assert done == sorted(done)
            assert (done[0], len(done)) == (0, -(-n // 32))
            assert n - 32 <= done[-1] < n
            assert pieces_of(server.ask(path, body | {"return_progress": False}).text)[-1].keys() == (
                pieces[-1].keys()
            )
        unasked = server.ask(path, body | {"return_progress": None}).text
        assert "prompt_progress" not in unasked
        # cached tokens are included in `processed`
        messages = [*HI, server.chat(HI)[0], message("user", long)]
        body = {"messages": messages, "max_tokens": 2, "stream": True, "return_progress": True}
        _, first, *_ = pieces_of(server.ask("/v1/chat/completions", body).text)
        assert first["prompt_progress"]["processed"] == first["prompt_progress"]["cache"] > 0


def test_answer_lists_ignored_fields(server):
    for path, more in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": HI}),
    ):
        body = {"max_tokens": 2, "frobnicate": 1, **more}
        assert server.ask(path, body).json()["kvtool"]["ignored"][-1] == "frobnicate"
