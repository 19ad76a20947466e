"""Clients notice if a killed server cuts an answer at any byte. `until_killed` hides only such errors."""

from __future__ import annotations

import http.client
import io
import json
from types import SimpleNamespace

import pytest

from tests.serve.gone import GONE, events, response
from tests.serve.serving import Server

EVENTS = [{"n": 0, "text": "one"}, {"n": 1, "text": "two\n"}]
HEAD = b"HTTP/1.1 200 OK\r\n"
LINES = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in EVENTS) + b"data: [DONE]\n\n"
PARTS = [LINES[:7], LINES[7:31], LINES[31:]]
"""Chunks whose ends are in the middle of lines."""

STREAM = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
STREAM += b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in PARTS) + b"0\r\n\r\n"
BODY = json.dumps(EVENTS).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


def answer(data):
    """Return the answer of a server that has sent these bytes and closed the connection."""
    reply = http.client.HTTPResponse(SimpleNamespace(makefile=lambda mode: io.BytesIO(data)))
    reply.begin()
    return response(SimpleNamespace(getresponse=lambda: reply))


def server():
    return Server(SimpleNamespace(kill=lambda: None), "http://localhost", [])


@pytest.mark.parametrize("cut", range(len(STREAM)))
def test_stream_cut_at_any_byte_raises_gone(cut):
    # a stream ends with a chunk of size 0: once this size has arrived, no event can be missing
    if cut > STREAM.rindex(b"0\r\n\r\n"):
        assert list(events(answer(STREAM[:cut]))) == EVENTS
        return
    with pytest.raises(GONE):
        list(events(answer(STREAM[:cut])))


def test_complete_answers_are_read():
    assert list(events(answer(STREAM))) == EVENTS
    assert json.loads(answer(WHOLE).read()) == EVENTS


@pytest.mark.parametrize("cut", range(len(WHOLE)))
def test_answer_cut_at_any_byte_raises_gone(cut):
    with pytest.raises(GONE):
        answer(WHOLE[:cut]).read()


@pytest.mark.parametrize("error", [http.client.IncompleteRead(b""), ConnectionResetError(), TimeoutError()])
def test_until_killed_ignores_broken_connections_only_after_a_kill(error):
    killed, alive = server(), server()
    with killed.until_killed():
        killed.kill()
        raise error
    with pytest.raises(type(error)), alive.until_killed():
        raise error


def test_until_killed_raises_errors_other_than_gone():
    killed = server()
    killed.kill()
    for error in (AssertionError, ValueError, KeyError):
        with pytest.raises(error), killed.until_killed():
            raise error
