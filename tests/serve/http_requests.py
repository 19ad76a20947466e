"""Requests to a running server, and their answers."""

from __future__ import annotations

import http.client
import json
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvtool.serve.api import messages, request_tools
from kvtool.serve.api.errors import ApiError
from tests.blocking_policy import TIMEOUT_S
from tests.serve.killed_server import events, get_response


def message(role, content):
    return {"role": role, "content": content}


def check_messages(body):
    """Check the messages of a request to /v1/chat/completions."""
    return messages.check(messages.listed(body))


def check_tools(body):
    """Check the tools of a request to /v1/chat/completions."""
    return request_tools.check_tools(request_tools.listed(body))


@contextmanager
def refused(param, words=""):
    """Check that the block raises an ApiError about this field, whose message begins with field and words."""
    with pytest.raises(ApiError) as caught:
        yield caught
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param} {words}")


@contextmanager
def open_connection(url):
    """Yield an HTTPConnection to the server at this address. It is closed at the end of the block."""
    address = urlsplit(url)
    with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=TIMEOUT_S)) as connection:
        yield connection


def request(url, body, headers=(), n_events=None):
    """Post a chat request. Return (status, JSON of the answer). For a stream, return (status, text).

    n_events: disconnect after this number of events of a stream, and return (None, None).
    Raises OSError or HTTPException if the connection ends before the answer is complete.
    """
    with open_connection(url) as connection:
        sent_headers = {"Content-Type": "application/json", **dict(headers)}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), sent_headers)
        answer = get_response(connection)
        if not body.get("stream") or answer.status != 200:
            return answer.status, json.loads(answer.read())
        text = ""
        for n, event in enumerate(events(answer), 1):
            assert "error" not in event, event
            text += "".join(choice["delta"].get("content", "") for choice in event["choices"])
            if n == n_events:
                return None, None
        return answer.status, text


@dataclass(frozen=True)
class Answer:
    """The answer to a chat.

    reply: the assistant's message.
    n_prompt: number of the prompt's tokens.
    n_cached: number of the prompt's tokens that were cached.
    n_all: number of tokens of the prompt and the reply.
    stats: kvtool's own part of the answer.
    """

    reply: dict[str, Any]
    n_prompt: int
    n_cached: int
    n_all: int
    stats: dict[str, Any]

    @property
    def text(self):
        return self.reply["content"]

    @property
    def n_read(self):
        """Number of the prompt's tokens that were not cached."""
        return self.n_prompt - self.n_cached


def ask(url, messages, headers=(), **more):
    """Return the Answer to these messages. more: further fields of the request."""
    status, answer = request(url, {"messages": messages, "max_tokens": 12, **more}, headers)
    assert status == 200, answer
    usage = answer["usage"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    reply = answer["choices"][0]["message"]
    return Answer(reply, usage["prompt_tokens"], n_cached, usage["total_tokens"], answer["kvtool"])


def pieces_of(text):
    """Return the JSON objects in the text of a stream."""
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def events_of(text):
    """Return the JSON objects in the text of a stream. Check that the type of each is its event's name."""
    pairs = [event.split("\n") for event in text.split("\n\n")[:-1] if not event.startswith(":")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    return events
