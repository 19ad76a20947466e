"""The current openai and anthropic packages accept every answer, even if they validate its fields strictly.

Two cases are left out, because OpenAI's own server violates the types there. In a streamed text, pieces have
no finish reason. In an echoed prompt, the first token has no log-probability.
"""

from __future__ import annotations

import httpx2 as httpx
import pytest

from kvtool.serve.http import app
from tests import tiny
from tests.serve.client_packages import anthropic, openai
from tests.serve.http_requests import message
from tests.serve.in_process_server import serve_in_process

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": CITY, "strict": False}
NAMED = {"type": "function", **FUNCTION}
CHAT = {"model": "m", "messages": [message("user", "Hi.")], "max_tokens": 5}
CALLS = CHAT | {
    "max_tokens": 60,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
}
TEXT = {"model": "m", "prompt": "What?", "max_tokens": 5}
RESPONSE = {"model": "m", "input": "Hi.", "max_output_tokens": 5}
RESPONSE_CALLS = RESPONSE | {"max_output_tokens": 60, "tools": [NAMED], "tool_choice": "required"}
ALL = {
    "instructions": "Be brief.",
    "temperature": 0.5,
    "top_p": 0.9,
    "metadata": {"a": "b"},
    "tools": [NAMED],
    "parallel_tool_calls": False,
    "store": False,
    "truncation": "auto",
    "user": "x",
    "text": {"format": {"type": "json_schema", "name": "city", "schema": CITY}},
    "tool_choice": "none",
}
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": CITY}
MESSAGE_CALLS = CHAT | {"max_tokens": 60, "tools": [TOOL], "tool_choice": {"type": "any"}}
TOP = {"logprobs": True, "top_logprobs": 2}
STREAM = {"stream": True}

OPENAI = {
    "chat": ("chat.completions.create", CHAT),
    "chat, log-probabilities": ("chat.completions.create", CHAT | TOP),
    "chat, a call": ("chat.completions.create", CALLS),
    "chat, streamed": (
        "chat.completions.create",
        CHAT | STREAM | {"stream_options": {"include_usage": True}},
    ),
    "chat, streamed log-probabilities": ("chat.completions.create", CHAT | STREAM | TOP),
    "chat, a streamed call": ("chat.completions.create", CALLS | STREAM),
    "text": ("completions.create", TEXT),
    "text, log-probabilities": ("completions.create", TEXT | {"logprobs": 2}),
    "text, echoed": ("completions.create", TEXT | {"echo": True}),
    "response": ("responses.create", RESPONSE),
    "response, all fields": ("responses.create", RESPONSE | ALL),
    "response, log-probabilities": ("responses.create", RESPONSE | {"top_logprobs": 2}),
    "response, a call": ("responses.create", RESPONSE_CALLS),
    "response, streamed": ("responses.create", RESPONSE | STREAM | ALL),
    "response, streamed log-probabilities": ("responses.create", RESPONSE | STREAM | {"top_logprobs": 2}),
    "response, a streamed call": ("responses.create", RESPONSE_CALLS | STREAM),
    "response, counted": ("responses.input_tokens.count", {"model": "m", "input": "Hi.", "tools": [NAMED]}),
    "models": ("models.list", {}),
    "model": ("models.retrieve", {"model": "m"}),
}
ANTHROPIC = {
    "message": ("messages.create", CHAT),
    "message, a call": ("messages.create", MESSAGE_CALLS),
    "message, streamed": ("messages.create", CHAT | STREAM),
    "message, a streamed call": ("messages.create", MESSAGE_CALLS | STREAM),
    "message, counted": ("messages.count_tokens", {"model": "m", "messages": CHAT["messages"]}),
    "models": ("models.list", {}),
    "model": ("models.retrieve", {"model_id": "m"}),
    "beta message": ("beta.messages.create", CHAT),
    "beta message, streamed": ("beta.messages.create", CHAT | STREAM),
    "beta models": ("beta.models.list", {}),
    "beta model": ("beta.models.retrieve", {"model_id": "m"}),
}


@pytest.fixture(scope="module")
def server(talker):
    with serve_in_process(talker, policy="h2o", budget="1024") as server:
        yield server


def parsed_answer(server, package, call, fields):
    """Return the answer from a package's client. If it is a stream, return the list of its events."""
    kind = {openai: openai.AsyncOpenAI, anthropic: anthropic.AsyncAnthropic}[package]
    url = "http://localhost" + ("/v1" if package is openai else "")

    async def get_answer():
        transport = httpx.ASGITransport(app.make(server.site))
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            method = kind(
                base_url=url, api_key="x", http_client=client, max_retries=0, _strict_response_validation=True
            )
            for name in call.split("."):
                method = getattr(method, name)
            answer = method(**fields)
            if hasattr(answer, "__await__"):
                answer = await answer
            return [each async for each in answer] if hasattr(answer, "__aiter__") else answer

    return server.run(get_answer())


@pytest.mark.parametrize("case", OPENAI)
def test_openai_client_accepts_the_answer(server, case):
    assert parsed_answer(server, openai, *OPENAI[case])


@pytest.mark.parametrize("case", ANTHROPIC)
def test_anthropic_client_accepts_the_answer(server, case):
    assert parsed_answer(server, anthropic, *ANTHROPIC[case])


LONG = CITY | {"properties": {"city": {"type": "string", "minLength": 99}}}
"""Parameters whose JSON is longer than the answers to CALLS, RESPONSE_CALLS and MESSAGE_CALLS."""


def test_clients_get_no_call_if_a_limit_cuts_it(server):
    fields = CALLS | {"tools": [{"type": "function", "function": FUNCTION | {"parameters": LONG}}]}
    (choice,) = parsed_answer(server, openai, "chat.completions.create", fields).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    fields = RESPONSE_CALLS | {"tools": [NAMED | {"parameters": LONG}]}
    response = parsed_answer(server, openai, "responses.create", fields)
    assert [item.type for item in response.output] == ["message"]
    assert response.incomplete_details.reason == "max_output_tokens"
    fields = MESSAGE_CALLS | {"tools": [TOOL | {"input_schema": LONG}]}
    answer = parsed_answer(server, anthropic, "messages.create", fields)
    assert (answer.content, answer.stop_reason) == ([], "max_tokens")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    path = tmp_path_factory.mktemp("thinker") / "thinker.gguf"
    source = tiny.CHAT_TEMPLATE.replace("[a]", "[a]<think>")
    tiny.write_llama(path, letters=True, chat_template=source, n_ctx_train=4096)
    with serve_in_process(path, policy="h2o", budget="1024") as server:
        yield server


BRIEFLY = {"extra_body": {"thinking_budget": 3}}
THOUGHT = RESPONSE | BRIEFLY | {"max_output_tokens": 40}


@pytest.mark.parametrize("n_most", [40, 2], ids=["answered", "cut in the thought"])
def test_openai_client_gets_a_thought_as_an_item_before_the_message(thinker, n_most):
    fields = THOUGHT | {"max_output_tokens": n_most}
    whole = parsed_answer(thinker, openai, "responses.create", fields)
    thought = whole.output[0]
    assert (thought.type, len(whole.output)) == ("reasoning", 2)
    events = parsed_answer(thinker, openai, "responses.create", fields | STREAM)
    (text,) = thought.content
    assert (
        "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == text.text
    )
    done = [event.item for event in events if event.type == "response.output_item.done"]
    # a stream that ends within its thought has an empty message, as the whole answer does
    assert [each.type for each in done] == ["reasoning", "message"]
    assert done == events[-1].response.output
    assert done[0].content == thought.content
    assert [event.sequence_number for event in events] == [*range(len(events))]
    # the client sends the messages back unchanged, so the cache has them
    turns = [
        message("user", "Hi."),
        thought.model_dump(),
        message("assistant", whole.output_text),
        message("user", "?"),
    ]
    second_response = parsed_answer(thinker, openai, "responses.create", THOUGHT | {"input": turns})
    assert second_response.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens


def test_anthropic_client_gets_a_thought_as_a_block(thinker):
    fields = CHAT | {"max_tokens": 40, "extra_body": {"thinking_budget": 3, "grammar": 'root ::= "Yes."'}}
    answer = parsed_answer(thinker, anthropic, "messages.create", fields)
    thought, text = answer.content
    assert (thought.type, thought.signature, text.type, text.text) == ("thinking", "", "text", "Yes.")
    assert answer.stop_reason == "end_turn"
    assert parsed_answer(thinker, anthropic, "messages.create", fields | STREAM)
    assert parsed_answer(thinker, openai, "chat.completions.create", fields | STREAM)


@pytest.mark.parametrize("n_most", [40, 2], ids=["answered", "cut in the thought"])
@pytest.mark.parametrize("more", [{}, STREAM], ids=["whole", "streamed"])
def test_usage_counts_thought_tokens(thinker, n_most, more):
    n_thought = min(n_most, 3)
    fields = CHAT | BRIEFLY | {"max_tokens": n_most} | more
    fields |= {"stream_options": {"include_usage": True}} if more else {}
    chat = parsed_answer(thinker, openai, "chat.completions.create", fields)
    usage = (chat[-1] if more else chat).usage
    assert usage.completion_tokens_details.reasoning_tokens == n_thought
    fields = THOUGHT | {"max_output_tokens": n_most} | more
    response = parsed_answer(thinker, openai, "responses.create", fields)
    usage = (response[-1].response if more else response).usage
    assert usage.output_tokens_details.reasoning_tokens == n_thought
    without = parsed_answer(thinker, openai, "completions.create", TEXT)
    assert without.usage.completion_tokens_details.reasoning_tokens == 0
