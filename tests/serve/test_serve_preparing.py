"""Prompts are rendered and tokenized before their requests wait for the lock, in threads for this purpose."""

from __future__ import annotations

import asyncio
import threading

import httpx2 as httpx
import pytest

from kvtool.llama.loaded.model import Model
from kvtool.serve.http import app
from kvtool.serve.queue import Job, JobQueue
from tests.blocking_policy import TIMEOUT_S, until
from tests.serve.http_requests import message
from tests.serve.in_process_server import serve_in_process

LONG = "a long text"
"""The tokenizer of the tests blocks while it reads this text."""


@pytest.fixture
def server(talker, tmp_path):
    with serve_in_process(talker, tmp_path, policy="h2o", budget="1024") as server:
        yield server


@pytest.fixture
def blocked(monkeypatch):
    """Make the tokenizer block at LONG. Yield two events: a thread has reached LONG, and it may go on."""
    reached, goes_on, tokenize = threading.Event(), threading.Event(), Model.tokenize

    def blocking(model, text, **how):
        if LONG in text:
            reached.set()
            assert goes_on.wait(TIMEOUT_S)
        return tokenize(model, text, **how)

    monkeypatch.setattr(Model, "tokenize", blocking)
    yield reached, goes_on
    goes_on.set()


def bodies(text):
    """Return paths and bodies of requests with this text."""
    yield "/v1/chat/completions", {"messages": [message("user", text)], "max_tokens": 3}
    yield "/v1/completions", {"prompt": text, "max_tokens": 3}


def client_of(server):
    """Return a client whose requests need no network."""
    transport = httpx.ASGITransport(server._app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)


@pytest.mark.parametrize("n", [0, 1], ids=["a chat", "a text"])
def test_other_requests_are_answered_while_a_prompt_is_tokenized(server, blocked, n):
    reached, goes_on = blocked
    (path, long), (_, short) = [[*bodies(text)][n] for text in (LONG, "Hi.")]

    async def both():
        async with client_of(server) as client:
            first = asyncio.ensure_future(client.post(path, json=long))
            await asyncio.to_thread(reached.wait, TIMEOUT_S)
            for _ in range(3):
                second = await asyncio.wait_for(client.post(path, json=short), TIMEOUT_S / 2)
                assert second.status_code == 200
            assert (first.done(), len(server.site.jobs)) == (False, 1)
            goes_on.set()
            assert (await first).status_code == 200

    server.run(both())


def test_request_whose_client_leaves_while_its_prompt_is_tokenized_never_gets_a_slot(
    server, blocked, monkeypatch
):
    reached, goes_on = blocked
    answered, ended, prepare = [], threading.Event(), app._prepare
    slot = server.pool.slots[0]
    answer = slot.answer
    monkeypatch.setattr(slot, "answer", lambda job: answered.append(job) or answer(job))
    monkeypatch.setattr(app, "_prepare", lambda *values: prepare(*values) or ended.set())

    async def leaves():
        (path, body), _ = bodies(LONG)
        async with client_of(server) as client:
            request = asyncio.ensure_future(client.post(path, json=body))
            await asyncio.to_thread(reached.wait, TIMEOUT_S)
            request.cancel()
            await asyncio.wait([request])

    server.run(leaves())
    assert len(server.site.jobs) == 0
    goes_on.set()
    assert ended.wait(TIMEOUT_S)
    server.chat([message("user", "Hi.")])
    assert len(answered) == 1


@pytest.mark.parametrize("policy", ["recall", "h2o"])
def test_prompts_are_tokenized_only_in_the_threads_for_this_purpose(talker, tmp_path, policy, monkeypatch):
    threads, tokenize = [], Model.tokenize

    def noted(model, text, **how):
        if LONG in text:
            threads.append(threading.current_thread().name)
        return tokenize(model, text, **how)

    monkeypatch.setattr(Model, "tokenize", noted)
    with serve_in_process(talker, tmp_path, policy=policy, budget="1024") as server:
        chat, other = ([message("user", f"{LONG} {n}")] for n in range(2))
        for _ in range(3):
            reply, _ = server.chat(chat)
            server.chat(other)
            chat += [reply, message("user", LONG)]
        _, usage = server.chat(chat)
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2
        # the client edits an earlier message, and repeats the request
        for _ in range(2):
            server.chat([*chat[:-1], message("user", f"{LONG}?")])
        for path, body in bodies(LONG):
            assert server.ask(path, body).status_code == 200
    assert threads
    assert all(name.startswith("tokenizer") for name in threads), threads


def test_error_in_a_prompt_ends_the_request(server):
    message_of_nothing = {"prompt": "", "max_tokens": 3}
    for stream in (True, False):
        answer = server.ask("/v1/completions", {**message_of_nothing, "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "prompt must have at least one token"
    until(lambda: not server.site.jobs.running)
    assert len(server.site.jobs) == 0


def test_bug_in_a_prompt_ends_only_its_request(server, monkeypatch, capfd):
    tokenize = Model.tokenize
    monkeypatch.setattr(Model, "tokenize", lambda *values, **how: 1 / 0)
    answer = server.ask("/v1/completions", {"prompt": "Hi.", "max_tokens": 3})
    assert answer.status_code == 500
    monkeypatch.setattr(Model, "tokenize", tokenize)
    assert server.ask("/v1/completions", {"prompt": "Hi.", "max_tokens": 3}).status_code == 200
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_queue_leaves_out_jobs_that_are_not_prepared():
    async def check():
        waiting = JobQueue(5)
        jobs = [Job(None, client) for client in "aaab"]
        for job, is_prepared in zip(jobs, (False, False, True, True), strict=True):
            waiting.put(job, is_prepared=is_prepared)
        assert len(waiting) == 4
        assert [waiting.get(), waiting.get()] == [jobs[2], jobs[3]]
        jobs[0].cancel()
        for job in jobs[:2]:
            waiting.prepared(job)
        assert waiting.get() is jobs[1]
        assert len(waiting) == 0

    asyncio.run(check())
