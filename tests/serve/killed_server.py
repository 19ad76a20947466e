"""Errors and answers of a server that may be killed while a client talks to it.

http.client returns some truncated answers without an error. The functions here raise HTTPException instead.
"""

from __future__ import annotations

import http.client
import json

CONNECTION_ERRORS = (OSError, http.client.HTTPException)
"""Errors that a client gets if its server is killed during a request or an answer.

ValueError is not one of these errors, because JSON is parsed only after all of it has arrived.
"""


def get_response(connection):
    """Return the next answer on an http.client.HTTPConnection. Raises HTTPException if headers are missing.

    `read` notices if the body is cut, because every answer of kvtool has a Content-Length or is chunked.
    """
    answer = connection.getresponse()
    if answer.length is None and not answer.chunked:
        raise http.client.IncompleteRead(b"")
    return answer


def events(answer):
    """Yield the JSON object of each event in the stream of this HTTPResponse.

    Raises HTTPException if the connection ends before the stream is complete. (`for line in answer` would end
    without an error, perhaps after a part of a line.)
    """
    buffer = b""
    while part := answer.read1():
        *lines, buffer = (buffer + part).split(b"\n")
        yield from (json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))
