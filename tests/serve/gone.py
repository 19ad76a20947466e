"""Errors and answers of a server that may be killed while a client talks to it.

http.client returns some truncated answers without an error; the functions here raise HTTPException.
"""

from __future__ import annotations

import http.client
import json

GONE = (OSError, http.client.HTTPException)
"""Errors of a client whose server is killed at any point of a request or an answer.

ValueError is not among them, since JSON is parsed only once it is complete.
"""


def response(link):
    """Return the next answer on this http.client.HTTPConnection. Raises HTTPException if its head is cut.

    Every answer of kvtool has a Content-Length or is chunked, so `read` notices a cut too.
    """
    answer = link.getresponse()
    if answer.length is None and not answer.chunked:
        raise http.client.IncompleteRead(b"")
    return answer


def events(answer):
    """Yield the JSON object of each event in the stream of this HTTPResponse.

    Raises HTTPException if the connection ends before the stream does. `for line in answer` would end
    quietly, perhaps with a part of a line.
    """
    rest = b""
    while part := answer.read1():
        *lines, rest = (rest + part).split(b"\n")
        yield from (json.loads(line[6:]) for line in lines if line.startswith(b"data: {"))
