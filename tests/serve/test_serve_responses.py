"""/v1/responses without an engine: events that keep a stream alive, and empty answers."""

from __future__ import annotations

from threading import Semaphore

import httpx2 as httpx
import pytest

from kvtool.serve.api.responses import ResponseBodies
from kvtool.serve.http import app
from tests.blocking_policy import TIMEOUT_S
from tests.serve.client_packages import openai
from tests.serve.http_requests import events_of
from tests.serve.in_process_server import send

END = {"kind": "end", "finish": "stop", "n_written": 1, "n_thought": 0, "write_s": 1, "kvtool": {}}
END |= {"n_prompt": 9, "n_cached": 0, "read_s": 1}


def test_stream_repeats_in_progress_until_the_next_event(monkeypatch):
    pings, ping = Semaphore(0), ResponseBodies.ping

    def counted(bodies):
        pings.release()
        return ping(bodies)

    def wait_for_pings():
        # two, because the first may have begun before this call
        for _ in range(2):
            assert pings.acquire(timeout=TIMEOUT_S)

    def engine(job):
        wait_for_pings()
        job.emit({"kind": "read"})
        job.emit({"kind": "piece", "deltas": [{"content": "So"}]})
        while pings.acquire(blocking=False):
            pass
        # the text of a call is held back for as long
        wait_for_pings()
        job.emit({"message": {"content": "So"}, **END})

    monkeypatch.setattr(app, "PING_S", 0.1)
    monkeypatch.setattr(ResponseBodies, "ping", counted)
    text = send("/v1/responses", "POST", body={"input": "Hi.", "stream": True}, engine=engine).text
    assert ": ping" not in text
    events = events_of(text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert "response.in_progress" in kinds[kinds.index("response.output_text.delta") :]

    # the official client accepts the repeated events
    def answer(request):
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    link = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=link)
    with client, client.responses.stream(model="x", input="Hi.") as stream:
        assert stream.get_final_response().output_text == "So"


@pytest.mark.parametrize("thought", ["", "Hm."])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_empty_answer_has_the_same_items_whole_and_as_a_stream(thought, finish):
    def engine(job):
        fields = {"reasoning_content": thought} if thought else {}
        job.emit({"kind": "piece", "deltas": [fields], "logprobs": []})
        job.emit({**END, "message": {"content": "", **fields}, "finish": finish})

    def items(response):
        return [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]

    whole = send("/v1/responses", "POST", body={"input": "Hi."}, engine=engine).json()
    stream = send("/v1/responses", "POST", body={"input": "Hi.", "stream": True}, engine=engine)
    events = events_of(stream.text)
    streamed = events[-1]["response"]
    assert items(streamed) == items(whole)
    assert items(whole)[-1]["content"][0]["text"] == ""
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == streamed["output"]
