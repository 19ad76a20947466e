"""/v1/messages without an engine: accepted and refused fields, errors, the order of events."""

from __future__ import annotations

import time
from functools import partial
from threading import Semaphore

import pytest

from kvtool.serve.api import anthropic, messages
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.request_tools import check_tools
from kvtool.serve.http import app
from kvtool.serve.http.gate import Limits
from tests.blocking_policy import TIMEOUT_S
from tests.serve.http_requests import events_of, message
from tests.serve.in_process_server import send
from tests.serve.slot_requests import check_body

CACHED = {"cache_control": {"type": "ephemeral"}}
HI = [message("user", "Hi.")]
REQUEST = {"model": "m", "max_tokens": 5, "messages": HI}
BASH = {"type": "bash_20250124", "name": "bash"}


def text(words):
    return {"type": "text", "text": words, **CACHED}


def use(id, **arguments):
    return {"type": "tool_use", "id": id, "name": "look", "input": arguments, **CACHED}


def result(id, content, **more):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def test_messages_request_is_converted_to_a_chat():
    thoughts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
    ]
    talk = [
        message("user", [text("One, "), text("two.")]),
        {"role": "system", "content": "New rules."},
        message("assistant", [*thoughts, text("So:"), use("a", where="Ü"), use("b")]),
        message(
            "user", [result("b", [text("x"), text("y")]), result("a", "It is.", is_error=True), text("Go.")]
        ),
        message("assistant", [use("c")]),
        message("user", [result("c", None)]),
    ]
    tools = [
        {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}, **CACHED},
        {"type": "custom", "name": "go", "input_schema": {}},
        BASH,
    ]
    more = {"top_k": 5, "top_p": 0.5, "temperature": 1, "stream": True, "stop_sequences": ["x"]}
    accepted = {
        "metadata": {"user_id": "x"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "service_tier": "auto",
        "output_config": {"effort": "high"},
    }
    body = REQUEST | {"system": [text("A."), text("B.")], "messages": talk, "tools": tools} | more | accepted
    request = anthropic.as_chat(body | {"tool_choice": {"type": "any"}})
    talked, chat = messages.check(request.messages), request.fields
    assert talked == [
        message("system", "A.\n\nB."),
        message("user", "One, two."),
        message("system", "New rules."),
        message("assistant", "So:")
        | {"reasoning_content": "Hm.", "tool_calls": [call("a", '{"where": "Ü"}'), call("b", "{}")]},
        {"role": "tool", "tool_call_id": "a", "content": "It is."},
        {"role": "tool", "tool_call_id": "b", "content": "xy"},
        message("user", "Go."),
        message("assistant", "") | {"tool_calls": [call("c", "{}")]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ]
    assert [tool.function["name"] for tool in request.tools] == ["look", "go"]
    assert chat.pop("tools[2]") == tools[2]
    assert chat.pop("stop") == more.pop("stop_sequences")
    assert chat == {"model": "m", "max_tokens": 5, "tool_choice": "required", **more, **accepted}
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for field in ({"output_config": {"format": form}}, {"output_format": form}):
        assert anthropic.as_chat(REQUEST | field).output_format.value == form["schema"]


def call(id, arguments):
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_billing_header_is_dropped_only_from_the_system_prompt():
    header = "x-anthropic-billing-header: cc_version=2; cch=1;"
    for system, expected in (
        (f"{header}\n\nBe.", ["Be."]),
        (header, []),
        (f"Be.\n{header}", [f"Be.\n{header}"]),
    ):
        body = REQUEST | {"system": system, "messages": [message("user", header)]}
        chat = check_body(body, "messages").messages
        assert [message["content"] for message in chat] == [*expected, header]


IMAGE = {"type": "image", "source": {"type": "base64", "data": "x"}}
FIRST = "messages[0].content[0]"

LATER = {"name": "later", "description": "Waits.", "input_schema": {"type": "object"}, "defer_loading": True}
SEARCH = {"name": "search", "input_schema": {"type": "object"}}
REFERENCE = {"type": "tool_reference", "tool_name": "later"}


def test_tool_reference_is_replaced_by_the_tools_definition():
    talk = [*HI, message("assistant", [use("a")]), message("user", [result("a", [REFERENCE])])]
    chat = anthropic.as_chat(REQUEST | {"messages": talk, "tools": [SEARCH, LATER]})
    definition = '{"name": "later", "description": "Waits.", "parameters": {"type": "object"}}'
    assert messages.check(chat.messages)[-1]["content"] == (
        f"<functions>\n<function>{definition}</function>\n</functions>"
    )
    later = check_tools(chat.tools)[1]
    assert later["defer_loading"] is True
    with pytest.raises(ApiError, match=r"tool_name must be the name of a tool in tools, got 'later'"):
        anthropic.as_chat(REQUEST | {"messages": talk, "tools": [SEARCH]})


def test_image_in_a_result_is_replaced_by_a_text_and_listed_as_ignored():
    talk = [
        *HI,
        message("assistant", [use("a")]),
        message("user", [result("a", [text("Seen: "), IMAGE, {"type": "document", "source": {}}])]),
    ]
    request = check_body(REQUEST | {"messages": talk}, "messages")
    read = "Seen: [image: this model reads text only][document: this model reads text only]"
    assert request.messages[-1]["content"] == read
    assert request.ignored == [f"messages[2].content[0].content[{n}]" for n in (1, 2)]


def test_texts_of_documents_and_search_results_are_read():
    source = {"type": "text", "media_type": "text/plain", "data": "A list."}
    document = {"type": "document", "title": "Notes", "source": source}
    texts = [text("One."), text("Two.")]
    search_result = {"type": "search_result", "source": "http://a", "title": "A", "content": texts}
    talk = [
        message("user", [document, text("Why?")]),
        message("assistant", [use("a")]),
        message("user", [result("a", [search_result, {"type": "document", "source": source}])]),
    ]
    request = check_body(REQUEST | {"messages": talk}, "messages")
    assert request.messages[0]["content"] == "Notes\nA list.\nWhy?"
    assert request.messages[-1]["content"] == "http://a\nA\nOne.\nTwo.\nA list.\n"
    assert request.ignored == []


def test_blocks_of_hosted_tools_are_listed_as_ignored():
    hosted = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    ]
    talk = [*HI, message("assistant", [text("So: "), *hosted, text("It is.")])]
    request = check_body(REQUEST | {"messages": [*talk, *HI]}, "messages")
    assert request.messages[1] == message("assistant", "So: It is.")
    assert request.ignored == ["messages[1].content[1]", "messages[1].content[2]"]
    with pytest.raises(ApiError, match=r"content\[0\] is of type server_tool_use; only text, tool_result"):
        check_body(REQUEST | {"messages": [message("user", hosted)]}, "messages")


def test_deferred_tools_are_in_the_prompt_if_a_hosted_search_is_listed():
    hosted = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    (later,) = check_tools(anthropic.as_chat(REQUEST | {"tools": [hosted, LATER]}).tools)
    assert "defer_loading" not in later


def user(*content):
    return {"messages": [message("user", [*content])]}


def assistant(*content):
    return {"messages": [message("assistant", [*content])]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": None}, "messages is missing"),
        ({"messages": []}, "messages must have at least one message"),
        ({"messages": ["x"]}, "messages[0] must be an object, got a string"),
        ({"messages": [message("tool", "x")]}, "messages[0].role must be user or assistant, got tool"),
        ({"messages": [{"role": ["user"]}]}, "messages[0].role must be user or assistant"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        (user(5), f"{FIRST} is of type a number"),
        (user(IMAGE), f"{FIRST} is of type image; only text, tool_result, document and search_result are"),
        (user(IMAGE | {"type": "document"}), f"{FIRST} is a document without text; only documents"),
        (user({"type": "document", "source": {"type": "text"}}), f"{FIRST}.source.data is missing"),
        (user({"type": "text"}), f"{FIRST}.text is missing"),
        (user(use("a")), f"{FIRST} is of type tool_use"),
        (assistant(result("a", "x")), f"{FIRST} is of type tool_res"),
        (user(result(5, "x")), f"{FIRST}.tool_use_id must be a str"),
        (user(result("a", 5)), f"{FIRST}.content must be a string or"),
        (user(result("a", [use("b")])), f"{FIRST}.content[0] is of type tool_use"),
        (assistant(use("a") | {"input": "{}"}), f"{FIRST}.input must be an object, got a string"),
        ({"messages": [*HI, message("assistant", "So ")]}, "messages[1] must not end with white space"),
        ({"system": 5}, "system must be a string or a list of blocks"),
        ({"system": [IMAGE]}, "system[0] is of type image"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": -1}, "max_tokens must be in 0.."),
        ({"max_tokens": "5"}, "max_tokens must be a whole number"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"stream": 1}, "stream must be true or false"),
        ({"stop_sequences": 5}, "stop_sequences must be a string or a list"),
        ({"stop_sequences": ["x"] * 101}, "stop_sequences takes at most 100"),
        ({"thinking": "yes"}, "thinking must be an object"),
        ({"thinking": {"type": "yes"}}, "thinking.type must be one of enabled, disabled, adaptive"),
        ({"output_config": {"effort": "deep"}}, "output_config.effort must be one of none, minimal, low"),
        ({"thinking": {"type": []}}, "thinking.type must be one of"),
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [5]}, "tools[0] must be an object"),
        ({"tools": [{}]}, "tools[0].name must be 1 to 128 letters"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema must be a JSON schema"),
        ({"tools": [{"name": "a", "input_schema": {"type": "x"}}]}, "tools[0].input_schema.type must be"),
        ({"tool_choice": "any"}, "tool_choice must be an object"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type must be auto, any, tool or none"),
        ({"tool_choice": {"type": []}}, "tool_choice.type must be auto, any, tool or none"),
        ({"tool_choice": {"type": "any"}, "tools": [BASH]}, "tool_choice.type must not be any without a"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name must be the name of a tool"),
        ({"output_config": 5}, "output_config must be an object"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be json_schema"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema is missing"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported; remove it"),
        ({"container": "x"}, "container is not supported"),
    ],
    ids=str,
)
def test_invalid_messages_requests_get_one_line(changes, words):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("count_tokens") and ("max_tokens is" in words or "must not end" in words):
            continue
        status, body = sent(path, REQUEST | changes, count=lambda request: 5)
        assert status == 400
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].startswith(words)
        assert body["error"]["message"].isprintable()


def sent(path, body=None, method="POST", **options):
    """Return (status, body) of the answer to a request. The server has no engine, and its queue accepts no
    jobs.
    """
    answer = send(path, method, body=body, n_waiting=0, **options)
    if answer.status_code != 200:
        ids = [answer.headers[name] for name in ("request-id", "x-request-id")]
        assert ids == [answer.json()["request_id"]] * 2
    return answer.status_code, answer.json()


def test_errors_have_anthropics_format_and_status(capsys):
    count = "/v1/messages/count_tokens"

    evil = {"Host": "evil.example"}

    def too_long(request):
        more = {"n_prompt_tokens": 900, "n_ctx": 512}
        raise ApiError("the request has 900 tokens", code="context_length_exceeded", more=more)

    def broken(request):
        raise RuntimeError("a mistake")

    for status, kind, path, options in (
        (400, "invalid_request_error", count, {"count": too_long}),
        (401, "authentication_error", "/v1/messages", {"limits": Limits(("key",))}),
        (403, "permission_error", "/v1/messages", {"limits": Limits(names=frozenset()), "headers": evil}),
        (404, "not_found_error", "/v1/messages/batches", {}),
        (405, "invalid_request_error", "/v1/messages", {"method": "GET"}),
        (413, "request_too_large", "/v1/messages", {"limits": Limits(max_bytes=9)}),
        (429, "rate_limit_error", "/v1/messages", {}),
        (500, "api_error", count, {"count": broken}),
        (529, "overloaded_error", "/v1/messages", {"is_loaded": False}),
    ):
        actual, body = sent(path, REQUEST, **options)
        assert (actual, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["error"]["message"].isprintable()
    assert "a mistake" in capsys.readouterr().err
    _, body = sent(count, REQUEST, count=too_long)
    assert body["error"]["message"] == "prompt is too long: 900 tokens > 512 maximum"
    # counting tokens does not use the queue, which has no room here
    for name, value in (("x-api-key", "key"), ("Authorization", "Bearer key")):
        headers = {name: value, "anthropic-beta": "x"}
        counted = sent(count, REQUEST, headers=headers, limits=Limits(("key",)), count=lambda _: 5)
        assert counted == (200, {"input_tokens": 5})
    version = {"anthropic-version": "x"}
    assert sent("/v1/models", method="GET", headers=version, limits=Limits(("key",)))[0] == 401


def test_stream_sends_its_events_in_order(monkeypatch):
    pings, ping = Semaphore(0), anthropic.AnthropicBodies.ping

    def counted(bodies):
        pings.release()
        return ping(bodies)

    monkeypatch.setattr(app, "PING_S", 0.15)
    monkeypatch.setattr(anthropic.AnthropicBodies, "ping", counted)
    counts = {"n_prompt": 30, "n_cached": 10}
    arguments = {"function": {"arguments": '{"x": 1}'}}
    begun = {"id": "call_1", "function": {"name": "look", "arguments": ""}}
    deltas = [{"reasoning_content": "Hm."}, {"content": "So"}, {"content": ":"}]
    deltas += [{"tool_calls": [begun]}, {"tool_calls": [arguments]}, {"content": "!"}]

    def wait_for_pings(meanwhile=lambda: None):
        # two, because the first may have begun before this call
        until = time.monotonic() + TIMEOUT_S
        for _ in range(2):
            while not pings.acquire(timeout=0.01):
                assert time.monotonic() < until
                meanwhile()

    def engine(job, fails=False):
        wait_for_pings()
        job.prompt_counts = counts
        wait_for_pings()
        job.emit({"kind": "read"})
        job.emit({"kind": "piece", "deltas": deltas})
        # pieces without deltas send no event to the client, so the server must send pings in this time
        wait_for_pings(lambda: job.emit({"kind": "piece", "deltas": []}))
        if fails:
            job.emit({"kind": "error", "error": ApiError("stopped", status=503)})
        else:
            end = {"finish": "tool_calls", "stopped_by": "", "kvtool": {}, "read_s": 1, "write_s": 1}
            job.emit({"kind": "end", "message": {}, "n_written": 7, **end, **counts})

    def streamed(engine):
        body = REQUEST | {"stream": True, "system": [text("Be.")]}
        answer = send("/v1/messages", "POST", body=body, engine=engine)
        assert answer.status_code == 200
        return answer.text

    stream = streamed(engine)
    # before the first event there are only pings, which are comments in SSE
    assert stream.startswith(": ping\n\n")
    assert stream.index("event: ") == stream.index("event: message_start")
    events = events_of(stream)
    usage = {"input_tokens": 0, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 10}
    assert events[0]["message"]["usage"] == usage | {"output_tokens": 0}
    assert [events[n]["type"] for n in (1, -4)] == ["ping", "ping"]
    kinds = [event for event in events[1:] if event["type"] != "ping"]
    blocks = [
        ({"type": "thinking", "thinking": "", "signature": ""}, "thinking", ["Hm."]),
        ({"type": "text", "text": ""}, "text", ["So", ":"]),
        ({"type": "tool_use", "id": "call_1", "name": "look", "input": {}}, "partial_json", ['{"x": 1}']),
        ({"type": "text", "text": ""}, "text", ["!"]),
    ]
    for n, (block, name, pieces) in enumerate(blocks):
        assert kinds.pop(0) == {"type": "content_block_start", "index": n, "content_block": block}
        for piece in pieces:
            kind = {"partial_json": "input_json"}.get(name, name)
            delta = {"type": f"{kind}_delta", name: piece}
            assert kinds.pop(0) == {"type": "content_block_delta", "index": n, "delta": delta}
        if name == "thinking":
            assert kinds.pop(0)["delta"] == {"type": "signature_delta", "signature": ""}
        assert kinds.pop(0) == {"type": "content_block_stop", "index": n}
    assert kinds[0]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert kinds[0]["usage"] == usage | {"output_tokens": 7}
    assert [each["type"] for each in kinds] == ["message_delta", "message_stop"]
    last = events_of(streamed(partial(engine, fails=True)))[-1]
    assert last["type"] == "error"
    assert last["error"] == {"type": "overloaded_error", "message": "stopped"}


def test_error_of_an_unknown_address_names_the_addresses_of_chats():
    answer = send("/v1/complete", "POST", body={"input": "x"})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith("no such address: /v1/complete; chats go to /v1/chat/completions")
    assert message.endswith(", texts to /v1/completions")
