"""Requests of real programs, replayed against kvtool serve.

tests/data/clients.jsonl has the requests of one chat per program, logged by a proxy. Prompts and descriptions
were shortened, and most tools and headers were removed. Fields are unchanged, and so are the shapes of
messages and schemas. Some requests got a `tool_choice` and a token limit: the model must answer them with a
call. "REPLY n", "CALL n", "ARGUMENTS n" and "INPUT n" are placeholders. Each is replaced by a part of the
server's answer to request n (from 0) of the same program. The field `follows` is the number of an earlier
request: the line continues the chat of this request.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from kvtool.serve.store.history import History
from tests.blocking_policy import TIMEOUT_S
from tests.serve.http_requests import check_messages, events_of, message
from tests.serve.subprocess_server import start_server

pytestmark = pytest.mark.engine


def recorded(name):
    """Return the requests in a file of tests/data, as a list for each program that sent them."""
    text = (Path(__file__).parents[1] / "data" / name).read_text()
    lines = map(json.loads, text.splitlines())
    return {client: list(its) for client, its in groupby(lines, lambda line: line["client"])}


LOGS = recorded("clients.jsonl")


@pytest.fixture(scope="module")
def server(smol):
    with start_server(smol, "--budget", "1024", "--temp", "0", "-n", "4") as server:
        yield server


@pytest.mark.parametrize("client", LOGS)
def test_recorded_clients_are_answered_and_only_new_tokens_are_read(server, client):
    answers = []
    for line in LOGS[client]:
        body = filled(line["body"], answers)
        sent = httpx.post(
            f"{server.url}{line['path']}", json=body, headers=line["headers"], timeout=TIMEOUT_S
        )
        assert sent.status_code == 200, sent.text
        read = {"/v1/responses": read_response, "/v1/messages?beta=true": read_message}.get(
            line["path"], read_chat
        )
        answers.append(read(sent.text, body))
        if line["follows"] is not None:
            assert answers[-1].n_cached == answers[line["follows"]].n_all
        is_forced = isinstance(body.get("tool_choice"), dict)
        assert bool(answers[-1].call) == is_forced


def test_functions_of_namespaces_are_called_by_their_own_names(server):
    goal = {"type": "function", "name": "goal", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "namespace", "name": "team", "tools": [goal]}, goal, {"type": "web_search"}]
    body = {"input": "What is the goal?", "tools": tools, "max_output_tokens": 90}
    for names in ({"name": "goal"}, {"name": "goal", "namespace": "team"}):
        choice = {"type": "function", **names}
        sent = httpx.post(
            f"{server.url}/v1/responses", json=body | {"tool_choice": choice}, timeout=TIMEOUT_S
        )
        (call,) = sent.json()["output"]
        assert {name: call[name] for name in ("name", "namespace") if name in call} == names
    hosted_body = body | {"tool_choice": {"type": "web_search"}}
    assert httpx.post(f"{server.url}/v1/responses", json=hosted_body, timeout=TIMEOUT_S).status_code == 400


def test_first_system_messages_are_merged():
    checked = check_messages(
        [message("developer", "One."), message("system", "Two."), message("user", "Three.")]
    )
    assert checked == [message("system", "One.\n\nTwo."), message("user", "Three.")]
    later = [message("user", "One."), message("system", "Two."), message("system", "Three.")]
    assert check_messages(later) == later


def test_chats_with_different_names_share_only_their_system_prompt():
    def digests(name, first="system"):
        return History(name, [], [message(first, "One."), message("user", "Two.")]).digests

    assert digests("a")[1] == digests("b")[1] == digests(None)[1]
    assert len({digests(name)[2] for name in ("a", "b", None)}) == 3
    assert digests("a", "user")[1] != digests("b", "user")[1]


def filled(value, answers):
    """Return the value with its placeholders replaced."""
    if isinstance(value, dict):
        return {name: filled(each, answers) for name, each in value.items()}
    if isinstance(value, list):
        return [filled(each, answers) for each in value]
    what, _, number = value.partition(" ") if isinstance(value, str) else ("", "", "")
    if what == "REPLY":
        return answers[int(number)].text
    if what in ("CALL", "ARGUMENTS", "INPUT"):
        id, arguments = answers[int(number)].call
        if what == "INPUT":
            return json.loads(arguments)
        # programs also parse the arguments and serialize them again
        return id if what == "CALL" else json.dumps(json.loads(arguments), separators=(",", ":"))
    if what in ("THOUGHT", "STRIPPED"):
        thought = answers[int(number)].thought
        return thought if what == "THOUGHT" else thought.strip()
    return answers[int(number)].signature if what == "SIGNATURE" else value


def read_chat(sent, body):
    """Check the form of an answer of /v1/chat/completions, and return its content."""
    if body["stream"]:
        lines = [line.removeprefix("data: ") for line in sent.split("\n\n") if not line.startswith(":")]
        assert lines[-2:] == ["[DONE]", ""]
        pieces = [json.loads(line) for line in lines[:-2]]
        usages = [piece for piece in pieces if not piece["choices"]]
        assert usages == pieces[-1:] * bool(body.get("stream_options", {}).get("include_usage"))
        choices = [piece["choices"][0] for piece in pieces if piece["choices"]]
        assert [bool(choice["finish_reason"]) for choice in choices] == [False] * (len(choices) - 1) + [True]
        assert choices[0]["delta"]["role"] == "assistant"
        deltas = [choice["delta"] for choice in choices]
        usage = usages[0]["usage"] if usages else None
    else:
        whole = json.loads(sent)
        assert whole["choices"][0]["finish_reason"]
        deltas, usage = [whole["choices"][0]["message"]], whole["usage"]
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    arguments = "".join(part["function"]["arguments"] for part in parts)
    return SimpleNamespace(
        thought="".join(delta.get("reasoning_content") or "" for delta in deltas),
        text="".join(delta.get("content") or "" for delta in deltas),
        call=(parts[0]["id"], arguments) if parts else None,
        n_cached=usage and usage["prompt_tokens_details"]["cached_tokens"],
        n_prompt=usage and usage["prompt_tokens"],
        n_all=usage and usage["total_tokens"],
    )


def read_response(sent, body):
    """Check the form of an answer of /v1/responses, and return its content."""
    events = events_of(sent)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    whole = events[-1]["response"]
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    texts = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
    usage = whole["usage"]
    return SimpleNamespace(
        text="".join(texts),
        call=(calls[0]["call_id"], calls[0]["arguments"]) if calls else None,
        n_cached=usage["input_tokens_details"]["cached_tokens"],
        n_all=usage["total_tokens"],
    )


def read_message(sent, body):
    """Check the form of an answer of /v1/messages, and return its content."""
    events = events_of(sent)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    usage = events[-2]["usage"]
    return SimpleNamespace(
        thought="".join(delta.get("thinking", "") for delta in deltas),
        signature="".join(delta.get("signature", "") for delta in deltas),
        text="".join(delta.get("text", "") for delta in deltas),
        call=(calls[0], "".join(delta.get("partial_json", "") for delta in deltas)) if calls else None,
        n_cached=usage["cache_read_input_tokens"],
        n_prompt=sum(usage.values()) - usage["output_tokens"],
        n_all=sum(usage.values()),
    )
