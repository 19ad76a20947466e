"""kvtool serve, asked by the official client of the OpenAI API over loopback."""

from __future__ import annotations

import json
import os
import re
import sys

import httpx2 as httpx
import pytest

from kvtool.serve.store.chats import SUFFIX
from tests import fork_server
from tests.blocking_policy import TIMEOUT_S, until
from tests.serve.client_packages import openai
from tests.serve.http_requests import message
from tests.serve.subprocess_server import ONE_THREAD, start_server
from tests.serve.test_serve_tools import tool

pytestmark = pytest.mark.engine

GREEDY = ("-n", "3", "--temp", "0", "-t", "1", "--budget", "256")

H2O = ("--policy", "h2o", "--budget", "256", "--temp", "0")
"""Options of most tests here.

tests/serve/test_serve_back.py tests recall, with which a server can rewind its cache to any token of a chat.
"""

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


@pytest.fixture(scope="module")
def server(talker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    with start_server(talker, *H2O, "--sessions", str(folder), "--metrics") as server:
        server.folder = folder
        yield server


@pytest.fixture(scope="module")
def real_server(smol_whole):
    """A server whose model has real tokens and a real template. The model of `server` writes letters."""
    with start_server(smol_whole, *H2O) as server:
        yield server


@pytest.fixture(scope="module")
def real_client(real_server):
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, messages, **more):
    return client.chat.completions.create(messages=messages, **{"model": "any", "max_tokens": 6} | more)


def test_chat_answer_has_text_usage_and_stats(client):
    answer = ask(client, [SYSTEM, message("user", "Name a colour.")])
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 6
    assert usage.total_tokens == usage.prompt_tokens + 6
    extra = answer.model_extra
    assert extra["timings"]["predicted_n"] == 6
    assert extra["kvtool"]["policy"] == "h2o"
    assert extra["kvtool"]["tokens"] == usage.total_tokens
    assert extra["kvtool"]["budget"] == 256


def test_stream_has_the_text_and_usage_of_the_whole_answer(client):
    messages = [SYSTEM, message("user", "Name an animal.")]
    whole = ask(client, messages, stop=["zebra"])
    pieces, usage = [], None
    for piece in ask(client, messages, stream=True, stream_options={"include_usage": True}):
        if piece.choices:
            pieces.append(piece.choices[0])
        usage = piece.usage or usage
    assert pieces[0].delta.role == "assistant"
    assert len([each for each in pieces if each.delta.content]) > 3
    assert "".join(each.delta.content or "" for each in pieces) == whole.choices[0].message.content
    assert pieces[-1].finish_reason == "length"
    assert (usage.completion_tokens, usage.total_tokens) == (6, whole.usage.total_tokens)


def test_same_chat_under_another_session_name_continues_from_the_cache(client):
    messages = [SYSTEM, message("user", "What is a river?")]
    answer = ask(client, messages, extra_headers={"X-Session-Id": "one"})
    messages += [message("assistant", answer.choices[0].message.content), message("user", "Is it wet?")]
    for options in (
        {"extra_headers": {"X-Session-Id": "two"}},
        {"prompt_cache_key": "two"},
        {"extra_headers": {"X-Session-Id": "one"}},
    ):
        second_answer = ask(client, messages, **options)
        assert second_answer.usage.prompt_tokens_details.cached_tokens == answer.usage.total_tokens


def test_long_chat_stays_within_its_cells_and_reports_forgotten_tokens(real_client):
    messages, cells, forgotten = [SYSTEM], set(), []
    for i in range(6):
        messages.append(message("user", f"{i}: " + "The river is long and the boat is slow. " * 6))
        answer = ask(real_client, messages)
        messages.append(message("assistant", answer.choices[0].message.content))
        stats = answer.model_extra["kvtool"]
        cells.add(stats["cache_bytes"])
        forgotten.append(stats["forgotten"])
        assert stats["held"] <= 256
    assert len(cells) == 1
    assert 0 == forgotten[0] < forgotten[-1]
    assert answer.usage.total_tokens > 256 + 128


def test_seed_logprobs_and_logit_bias_work(real_server, real_client):
    messages = [message("user", "Say something.")]
    one, two = (
        ask(real_client, messages, temperature=1.5, seed=7).choices[0].message.content for _ in range(2)
    )
    other = ask(real_client, messages, temperature=1.5, seed=8).choices[0].message.content
    assert one == two != other
    whole = ask(real_client, messages).choices[0].message.content
    listed = ask(real_client, messages, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(listed) == 6
    assert all(len(each.top_logprobs) == 3 and each.logprob <= 0 for each in listed)
    assert "".join(each.token for each in listed).startswith(whole[:10])
    body = {"content": listed[0].token}
    first = httpx.post(f"{real_server.url}/tokenize", json=body, timeout=TIMEOUT_S).json()["tokens"][0]
    other = ask(real_client, messages, logit_bias={str(first): -100}, logprobs=True)
    assert other.choices[0].logprobs.content[0].token != listed[0].token


def test_completions_equal_generate_raw(real_client, smol_whole):
    prompt = "The capital of France is"
    answer = real_client.completions.create(model="any", prompt=prompt, max_tokens=3, logprobs=1)
    done = fork_server.run(
        [sys.executable, "-m", "kvtool", "generate", "--raw", "-m", str(smol_whole), "-p", prompt, *GREEDY],
        check=True,
    )
    assert answer.choices[0].text.strip() == done.stdout.strip() != ""
    assert len(answer.choices[0].logprobs.tokens) == 3
    assert answer.usage.prompt_tokens > 3
    pieces = real_client.completions.create(model="any", prompt=prompt, max_tokens=3, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def test_disconnected_client_stops_its_answer(server, client):
    # the second prompt is long, so the client may disconnect while the server reads it
    for text in ("Tell me a long story.", "It is a long story. " * 2000):
        with pytest.raises(openai.APITimeoutError):
            # the model would need hours to write 10**6 tokens
            ask(client.with_options(timeout=0.5), [message("user", text)], max_tokens=10**6)
    assert ask(client.with_options(timeout=TIMEOUT_S), [message("user", "Hello.")])
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        until(lambda: "kvtool_requests_running 0\n" in http.get("/metrics").text)
        abandoned = re.search(r"^kvtool_requests_abandoned_total (\d+)$", http.get("/metrics").text, re.M)
        assert int(abandoned[1]) >= 2


def test_models_props_tokenize_and_metrics_answer(server, client):
    assert [model.id for model in client.models.list()] == ["talker"]
    assert client.models.retrieve("talker").id == "talker"
    ask(client, [message("user", "Hello.")])
    with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/props").json()["budget"] == 256
        tokens = http.post("/tokenize", json={"content": "a river"}).json()["tokens"]
        text = {"content": "a river", "prompt": "a river"}
        assert http.post("/detokenize", json={"tokens": tokens}).json() == text
        # lm-evaluation-harness uses vLLM's field names
        body = {"prompt": "a river", "add_special_tokens": False}
        assert http.post("/tokenize", json=body).json()["tokens"] == tokens
        assert http.get("/tokenizer_info").json()["eos_token"]
        assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
        # the error message does not repeat control characters
        assert "no such address: /no [2J; " in http.get("/no%1b[2J").json()["error"]["message"]
        assert http.post("/chat/completions", json={}).status_code == 404
        assert http.get("/v1/chat/completions").status_code == 405
        # DNS rebinding: an attacker's host name resolves to this machine
        for host in ("evil.example", "localhost.evil.example", "[bad"):
            assert http.get("/props", headers={"Host": host}).status_code == 403
        assert http.get("/props", headers={"Host": "localhost:1"}).status_code == 200
        assert http.get("/props", headers={"Origin": "https://evil.example"}).status_code == 403
        metrics = http.get("/metrics").text
        assert re.search(r"^kvtool_requests_answered_total \d+$", metrics, re.M)
        n_bytes = sum(path.stat().st_size for path in server.folder.iterdir())
        assert int(re.search(r"^kvtool_stored_bytes (\d+)$", metrics, re.M)[1]) == n_bytes


def test_server_gives_the_same_replies_as_kvtool_chat(talker, connect):
    turns = [f"{i}: " + "The river is long and the boat is slow. " * 5 + "What is slow?" for i in range(6)]
    # with recall, `kvtool chat` pins the system prompt, but the server does not
    options = ("--policy", "h2o", "--budget", "128", "--temp", "0")
    system = ("--system", SYSTEM["content"], "-n", "10", "-t", "1")
    command = [sys.executable, "-m", "kvtool", "chat", "-m", str(talker), *options, *system]
    done = fork_server.run(command, input="\n".join(turns), check=True, env=os.environ | ONE_THREAD)
    messages, replies = [SYSTEM], []
    with start_server(talker, *options) as server:
        client = connect(f"{server.url}/v1")
        for turn in turns:
            messages.append(message("user", turn))
            answer = ask(client, messages, max_tokens=10)
            replies.append(answer.choices[0].message.content)
            messages.append(message("assistant", replies[-1]))
    assert answer.usage.total_tokens > 3 * 128
    assert "".join(f"{reply}\n" for reply in replies) == done.stdout


def test_responses_api_gives_the_same_answers_as_chat_completions(client):
    whole = client.responses.create(
        model="any", instructions=SYSTEM["content"], input="Name an animal.", max_output_tokens=20
    )
    same = ask(client, [SYSTEM, message("user", "Name an animal.")], max_tokens=20)
    assert whole.output_text == same.choices[0].message.content
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        same.usage.prompt_tokens,
        same.usage.completion_tokens,
    )
    items = [
        message("user", "Name an animal."),
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": whole.output_text}],
        },
        message("user", "And another."),
    ]
    kinds, text = [], ""
    for event in client.responses.create(
        model="any", instructions=SYSTEM["content"], input=items, max_output_tokens=5, stream=True
    ):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    assert event.response.output_text == text
    assert event.response.usage.input_tokens_details.cached_tokens == same.usage.total_tokens


def test_tool_is_called_and_its_result_is_read(real_client):
    messages = [SYSTEM, message("user", "How is the weather in Oslo?")]
    city = {"type": "string", "maxLength": 12}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tools = [tool("weather", parameters | {"additionalProperties": False})]
    more = {"tools": tools, "tool_choice": "required", "max_tokens": 80}
    answer = ask(real_client, messages, **more)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert list(json.loads(call.function.arguments)) == ["city"]
    assert choice.message.content is None
    # a stream sends the same call in pieces
    name, arguments = "", ""
    for piece in ask(real_client, messages, **more, stream=True):
        for part in piece.choices[0].delta.tool_calls or []:
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, arguments) == ("weather", call.function.arguments)
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Rain, 7 degrees."},
    ]
    after = ask(real_client, messages, tools=tools)
    assert after.choices[0].message.content
    assert after.usage.prompt_tokens_details.cached_tokens == answer.usage.total_tokens


def test_long_system_prompt_is_read_once(smol_whole, tmp_path, connect):
    system = message("system", "You know the river. " * 90)
    with start_server(smol_whole, *H2O, "--budget", "512", "-b", "64", "--sessions", str(tmp_path)) as server:
        client = connect(f"{server.url}/v1")
        ask(client, [message("user", "My secret is a lighthouse.")])
        first = ask(client, [system, message("user", "What is deep?")])
        second = ask(client, [system, message("user", "What is wide?")])
        second_answer = ask(client, [system, message("user", "What is deep?")])
        uncached_answer = ask(client, [system, message("user", "And?")], extra_body={"cache_prompt": False})
    assert uncached_answer.usage.prompt_tokens_details.cached_tokens == 0
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens % 64 == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 300
    # reading and storing the second chat has not changed the answer
    assert second_answer.choices[0].message.content == first.choices[0].message.content
    # The file of the system prompt must not contain text of the first chat, which was in the cache before.
    # The test looks for a word, because digits could occur by chance in the file's hashes.
    start = next(path for path in tmp_path.glob(f"*{SUFFIX}") if _n_messages(path) == 1)
    assert b"lighthouse" not in start.read_bytes()


def _n_messages(path):
    return len(json.loads(path.read_bytes().split(b"\n")[1])["messages"])


def test_servers_system_prompt_is_used_for_chats_without_one(talker, connect):
    with start_server(talker, *H2O, "--explain", "--system", SYSTEM["content"]) as server:
        client = connect(f"{server.url}/v1")
        question = message("user", "Name an animal.")
        default = ask(client, [question])
        assert ask(client, [SYSTEM, question]).usage == default.usage
        pirate = ask(client, [message("system", "Be brief, and speak as a pirate does."), question])
        assert pirate.usage.prompt_tokens > default.usage.prompt_tokens
        more = ask(client, [question, message("assistant", default.choices[0].message.content), question])
        assert more.usage.prompt_tokens_details.cached_tokens == default.usage.total_tokens
    assert any(line.startswith("budget      256 cells per row = ") for line in server.lines)
