"""Clients notice if a killed server cuts an answer at any byte."""

from __future__ import annotations

import http.client
import io
import json
from types import SimpleNamespace

import pytest

from tests.serve.killed_server import CONNECTION_ERRORS, events, get_response

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
    return get_response(SimpleNamespace(getresponse=lambda: reply))


def test_answer_cut_at_any_byte_raises_gone():
    assert list(events(answer(STREAM))) == EVENTS
    assert json.loads(answer(WHOLE).read()) == EVENTS
    # a stream ends with a chunk of size 0: once this size has arrived, no event can be missing
    for cut in range(STREAM.rindex(b"0\r\n\r\n") + 1):
        with pytest.raises(CONNECTION_ERRORS):
            list(events(answer(STREAM[:cut])))
    for cut in range(len(WHOLE)):
        with pytest.raises(CONNECTION_ERRORS):
            answer(WHOLE[:cut]).read()
