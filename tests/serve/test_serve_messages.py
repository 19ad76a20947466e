"""kvtool serve, asked by the official client of the Anthropic API over loopback."""

from __future__ import annotations

import json

import pytest

from tests.serve.client_packages import anthropic, openai
from tests.serve.http_requests import message
from tests.serve.subprocess_server import start_server

SYSTEM = [{"type": "text", "text": "You are helpful."}, {"type": "text", "text": "Be brief."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
TOOLS = [
    {"name": "weather", "description": "Tells the weather.", "input_schema": WEATHER},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
]


@pytest.fixture(scope="module")
def server(smol):
    with start_server(smol, "--policy", "h2o", "--budget", "1024", "--temp", "0") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with of(server) as client:
        yield client


def of(server, key="none"):
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def ask(client, messages, **more):
    fields = {"model": "claude-opus-4-8", "max_tokens": 6, "system": SYSTEM, "messages": messages}
    return client.messages.create(**fields | more)


def n_prompt(usage):
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_messages_answer_has_text_usage_and_stats(client):
    question = [message("user", "Name a colour.")]
    answer = ask(client, question)
    assert [block.type for block in answer.content] == ["text"]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "smollm2-135m", "max_tokens")
    usage = answer.usage
    assert usage.output_tokens == 6
    assert usage.cache_read_input_tokens == usage.cache_creation_input_tokens == 0
    counted = client.messages.count_tokens(model="any", system=SYSTEM, messages=question)
    assert counted.input_tokens == usage.input_tokens > 10
    stats = answer.model_extra["kvtool"]
    assert (stats["tokens"], stats["budget"]) == (usage.input_tokens + 6, 1024)
    # if a client marks a prefix for caching, cache_creation_input_tokens includes the tokens that were read
    marked = [{**SYSTEM[0], "cache_control": {"type": "ephemeral"}}, SYSTEM[1]]
    second_usage = ask(client, [message("user", "Name a river.")], system=marked).usage
    assert second_usage.input_tokens == 0
    assert second_usage.cache_creation_input_tokens > 10


def test_stream_has_the_text_and_usage_of_the_whole_answer(client):
    messages = [message("user", "Name an animal.")]
    whole = ask(client, messages)
    with client.messages.stream(model="x", max_tokens=6, system=SYSTEM, messages=messages) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 3
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 6)


def test_deferred_tool_can_be_called_and_is_shown_at_its_reference(client):
    talk = [message("user", "How is the weather in Oslo?")]
    search = {"name": "search", "input_schema": {"type": "object"}}
    first = ask(client, talk, tools=[search], tool_choice={"type": "any"}, max_tokens=80)
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": [reference]}
    talk += [message("assistant", first.content), message("user", [result])]
    tools = [search, TOOLS[0] | {"defer_loading": True}]
    answer = ask(client, talk, tools=tools, tool_choice={"type": "tool", "name": "weather"}, max_tokens=80)
    n_before = n_prompt(first.usage) + first.usage.output_tokens
    assert answer.usage.cache_read_input_tokens == n_before
    # the prompt now also has the tool's definition
    assert n_prompt(answer.usage) > n_before + 60
    (call,) = answer.content
    assert (call.type, call.name) == ("tool_use", "weather")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=str)
def test_tool_is_called_and_its_result_is_read(client, choice):
    messages = [message("user", "How is the weather in Oslo?")]
    more = {"tools": TOOLS, "tool_choice": choice | {"disable_parallel_tool_use": True}, "max_tokens": 80}
    answer = ask(client, messages, **more)
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert list(call.input) == ["city"]
    with client.messages.stream(model="x", system=SYSTEM, messages=messages, **more) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "is_error": True}
    for content in ("Rain.", [{"type": "text", "text": "Rain."}]):
        user = [result | {"content": content}, {"type": "text", "text": "So?"}]
        longer = [*messages, message("assistant", answer.content), message("user", user)]
        after = ask(client, longer, tools=TOOLS, tool_choice={"type": "auto"})
        assert after.content[0].text
        assert after.usage.cache_read_input_tokens == n_prompt(answer.usage) + answer.usage.output_tokens
    counted = client.messages.count_tokens(model="x", system=SYSTEM, messages=messages, tools=TOOLS)
    assert counted.input_tokens == n_prompt(answer.usage)
    unseen = ask(client, messages, tools=TOOLS, tool_choice={"type": "none"})
    assert n_prompt(unseen.usage) == n_prompt(ask(client, messages).usage)


@pytest.fixture
def openai_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def test_chat_continues_from_the_cache_through_another_api(client, openai_client):
    create = openai_client.chat.completions.create
    question = message("user", "Is it wet?")
    chat = [message("system", "You are helpful.\n\nBe brief."), question]
    first = create(model="x", messages=chat, tools=[FUNCTION], tool_choice="required", max_tokens=80)
    (call,) = first.choices[0].message.tool_calls
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather"}
    use["input"] = json.loads(call.function.arguments)
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain."}
    messages = [question, message("assistant", [thought, use]), message("user", [result])]
    second = ask(client, messages, tools=[{"name": "weather", "input_schema": WEATHER}])
    assert second.usage.cache_read_input_tokens == first.usage.total_tokens
    chat += [
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
        message("assistant", second.content[0].text),
        message("user", "Why?"),
    ]
    third = create(model="x", messages=chat, tools=[FUNCTION], max_tokens=4)
    n_cached = third.usage.prompt_tokens_details.cached_tokens
    assert n_cached == n_prompt(second.usage) + second.usage.output_tokens


BLOCK = '```json\n{"name": "weather", "arguments": {"city": "Oslo"}}\n```'


def dictated(text):
    return {"grammar": f"root ::= {json.dumps(text, ensure_ascii=False)}"}


def test_call_in_a_code_block_is_a_call_in_each_api(client, openai_client):
    """The cache keeps the model's own tokens, whatever a client sends back."""
    create = openai_client.chat.completions.create
    messages, text = [message("user", "What is it like in Oslo?")], dictated(f"I ask.\n\n{BLOCK}")
    more = {"model": "x", "max_tokens": 80, "extra_body": text}
    first = create(messages=messages, tools=[FUNCTION], **more)
    reply, (call,) = first.choices[0].message, first.choices[0].message.tool_calls
    assert (first.choices[0].finish_reason, reply.content) == ("tool_calls", "I ask.")
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    messages += [reply.model_dump(exclude_none=True), result]
    after = create(model="x", messages=messages, tools=[FUNCTION], max_tokens=4)
    assert after.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens
    assert after.choices[0].message.content
    # a stream has the same text and the same call
    messages = [message("user", "And in Bergen?")]
    pieces = list(create(messages=messages, tools=[FUNCTION], stream=True, **more))
    deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I ask."
    parts = [part.function for delta in deltas for part in delta.tool_calls or ()]
    assert "".join(part.arguments or "" for part in parts) == '{"city": "Oslo"}'
    # the Messages API returns the same text and call, and the next request continues from the cache
    with client.messages.stream(messages=messages, tools=TOOLS, **more) as stream:
        answer = stream.get_final_message()
    said_first, use = answer.content
    assert (answer.stop_reason, said_first.text) == ("tool_use", "I ask.")
    assert (use.name, use.input) == ("weather", {"city": "Oslo"})
    messages += [message("assistant", answer.content)]
    messages += [message("user", [{"type": "tool_result", "tool_use_id": use.id, "content": "Sun."}])]
    after = client.messages.create(model="x", messages=messages, tools=TOOLS, max_tokens=4)
    assert after.usage.cache_read_input_tokens == n_prompt(answer.usage) + answer.usage.output_tokens
    # this reply consists only of a call
    tool = {"type": "function", **FUNCTION["function"]}
    bare = dictated('{"name": "weather", "arguments": {"city": "Oslo"}}')
    options = {"model": "x", "input": "And there?", "extra_body": bare}
    (item,) = openai_client.responses.create(tools=[tool], **options).output
    assert (item.type, item.name) == ("function_call", "weather")
    assert json.loads(item.arguments) == {"city": "Oslo"}
    # the same reply is text if no tool may be called
    for more in ({"tool_choice": "none", "tools": [tool]}, {}):
        whole = json.loads(openai_client.responses.create(**options, **more).output_text)
        assert whole == {"name": "weather", "arguments": {"city": "Oslo"}}


def test_answer_ends_before_a_stop_sequence(client):
    messages = [message("user", "Stop.")]
    whole = ask(client, messages, max_tokens=24).content[0].text
    stop = whole[8:12]
    more = {"stop_sequences": ["@@@", stop], "extra_body": {"top_k": 1, "top_p": 1, "temperature": 1}}
    answer = ask(client, messages, max_tokens=24, **more)
    assert answer.content[0].text == whole[: whole.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
