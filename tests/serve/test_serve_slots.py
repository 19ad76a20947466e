"""Concurrent requests: which request computes next, and that no request affects the answers of others."""

from __future__ import annotations

import itertools
import json
import re
import threading
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from kvtool import policies
from kvtool.chats.prompt import template_of
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import LibraryError, OutOfMemory
from kvtool.llama.cache.context import Context
from kvtool.llama.cache.joint import JointContext
from kvtool.llama.loaded.model import Model
from kvtool.serve import batching, pool, rendering, slot
from kvtool.serve.api import requests
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.requests import Defaults
from kvtool.serve.batching import ComputeLock, StepBatcher
from kvtool.serve.pool import SlotPool
from kvtool.serve.queue import JobQueue
from kvtool.serve.rendering import Renderings
from kvtool.serve.store.chats import ChatStore
from kvtool.serve.store.resumer import Resumer
from tests.blocking_policy import TIMEOUT_S, until
from tests.serve.http_requests import ask, message, open_connection
from tests.serve.slot_requests import slot_of
from tests.serve.subprocess_server import start_server

RECALL = ["search=all"]
"""With this option, recall's replies do not depend on how a prompt was divided into steps."""

NUMBER = itertools.count()


class FakeJob:
    """A stand-in for the job that the HTTP side puts into the queue for a request.

    on_event: function that the computing slot calls with the kind of each event.
    """

    def __init__(self, messages, n_max=40, on_event=lambda kind: None, **more):
        body = {
            "messages": messages,
            "max_tokens": n_max,
            "temperature": 0,
            "logit_bias": {"2": -100},
            **more,
        }
        self.request = requests.check_chat(requests.as_chat(body), Defaults())
        self.client = str(next(NUMBER))
        self.prompt, self.prompt_counts, self.end, self.is_cancelled = None, None, None, False
        self.events, self._on_event, self._is_over = [], on_event, threading.Event()

    def emit(self, event):
        self.events.append(event)
        self._on_event(event["kind"])
        if event["kind"] in ("end", "error"):
            self._is_over.set()

    def cancel(self):
        self.is_cancelled = True

    @property
    def is_over(self):
        return self._is_over.is_set()

    @property
    def last(self):
        assert self._is_over.wait(TIMEOUT_S)
        return self.events[-1]

    @property
    def text(self):
        assert self.last["kind"] == "end", self.last
        return self.last["message"]["content"]


class Serving:
    """Queue and slots of `kvtool serve`, without HTTP. limit: number of engines for which there is memory."""

    def __init__(self, stack, model, policy, folder, n=2, limit=2, queue=64, n_batch=32):
        self.lock, self.jobs, self.lines, self.loads = ComputeLock(), JobQueue(queue), [], []
        fitted = policies.fit(policy, 300 if policy == "full" else 64, None, RECALL * (policy == "recall"))
        chats = ChatStore(folder, 10**9, {})
        renderings = Renderings(model, template_of(model))
        load = chats.load
        chats.load = lambda snapshot: self.loads.append(snapshot) or load(snapshot)

        def slot():
            if len(self.slots_made) == limit:
                raise OutOfMemory("there is none")
            settings = Settings(n_batch=n_batch, n_threads=1, archive_type="f16")
            engine = stack.enter_context(closing(Engine(model, fitted, settings)))
            return slot_of(engine, renderings, chats, self.batcher)

        self.batcher = stack.enter_context(closing(StepBatcher(self.lock, n, self.lines.append)))
        self.slots_made = []
        self.pool = SlotPool(self.lock, slot(), slot, n, self.lines.append)
        self.slots_made = self.pool.slots

    def put(self, *arguments, **more):
        job = FakeJob(*arguments, **more)
        self.jobs.put(job)
        return job

    def wait_for_another(self):
        """Return when another slot waits for the lock or a joint step. The slot that computes calls this."""
        until(lambda: self.lock._waiting or self.lock._resumed or self.batcher._waiting)


@contextmanager
def served(path, policy, folder, **options):
    with ExitStack() as stack:
        model = stack.enter_context(closing(Model(path)))
        server = Serving(stack, model, policy, folder, **options)
        thread = threading.Thread(target=server.pool.run, args=(server.jobs,))
        thread.start()
        try:
            yield server
        finally:
            server.jobs.close()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@pytest.fixture
def one_step(monkeypatch):
    """Limit a slot's turn to one step."""
    monkeypatch.setattr(batching, "SLICE_STEPS", 1)


def question(i, n=3):
    return [message("user", f"{i}: What is a stone? " + "It is long. " * n)]


def test_longest_waiting_thread_gets_the_compute_lock_next():
    lock, order, ended = ComputeLock(), [], []

    def work(name):
        lock.acquire()
        for _ in range(2):
            order.append(name)
            # a slow thread would miss its turn, so wait until all other threads are in the queue
            until(lambda: len(lock._waiting) == 2 - len(ended))
            for _ in range(batching.SLICE_STEPS + 1):
                lock.step()
        ended.append(name)
        lock.release()

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    lock.acquire()
    for n, thread in enumerate(threads):
        thread.start()
        until(lambda n=n: len(lock._waiting) == n + 1)
    lock.release()
    for thread in threads:
        thread.join()
    assert order == list("abcabc")


def passes_lock(lock, n_left):
    """Call `step(n_left)` as the lock's holder. Return True if a waiting thread gets the lock."""
    thread = threading.Thread(target=lock.acquire, daemon=True)
    thread.start()
    until(lambda: lock._waiting)
    # `step` may never return: it may pass the lock to the other thread, which never releases it. Therefore
    # call `step` in a thread.
    step = threading.Thread(target=lock.step, args=(n_left,), daemon=True)
    step.start()
    until(lambda: not (step.is_alive() and thread.is_alive()))
    return not thread.is_alive()


@pytest.mark.parametrize("first_s", [-1, TIMEOUT_S])
def test_turn_of_a_slot_ends_when_its_time_is_over(monkeypatch, first_s):
    """FIRST_SLICE_S limits the first turn of a short prompt. SLICE_S limits all other turns."""
    monkeypatch.setattr(batching, "FIRST_SLICE_S", first_s)
    monkeypatch.setattr(batching, "SLICE_S", -1 if first_s > 0 else TIMEOUT_S)

    def ends(n_left, is_first=True):
        lock = ComputeLock()
        lock.acquire(is_first=is_first)
        return passes_lock(lock, n_left)

    is_long = first_s > 0
    assert ends(batching.N_SHORT) is not is_long
    assert ends(1) is not is_long
    # long prompts, replies and later turns have the usual limit
    assert ends(batching.N_SHORT + 1) is is_long
    assert ends(0) is is_long
    assert ends(1, is_first=False) is is_long


@pytest.mark.parametrize("policy", ["h2o", "recall", "snapkv", "full"])
def test_concurrent_answers_equal_those_of_single_chats(talker, tmp_path, one_step, policy):
    steps, single_texts, jobs = [], [], []
    with served(talker, policy, tmp_path / "alone") as server:
        for i in range(2):
            single_texts.append(server.put(question(i)).text)
    with served(talker, policy, tmp_path / "beside") as server:

        def on_event(kind, i=0):
            steps.append(i)
            if len(jobs) == 1:
                jobs.append(FakeJob(question(1), on_event=partial(on_event, i=1)))
                server.jobs.put(jobs[1])
            # the other slot would miss its turn if its thread were slow, so wait until it is in the queue
            if not jobs[1 - i].is_over:
                server.wait_for_another()

        jobs.append(FakeJob(question(0), on_event=on_event))
        server.jobs.put(jobs[0])
        assert jobs[0].last
        assert [job.text for job in jobs] == single_texts
        assert len(server.pool.slots) == 2
    # the two answers are computed in turns
    assert len([1 for one, after in itertools.pairwise(steps) if one != after]) > 30


def test_alternating_chats_stay_in_their_slots(talker, tmp_path, one_step):
    """Each chat stays in its slot: no stored chat is loaded, and nothing is read again."""
    for policy in ("h2o", "recall"):
        with served(talker, policy, tmp_path / policy) as server:
            jobs = list(ask_both(server, question(0), question(1)))
            chats = [question(0), question(1)]
            for _ in range(2):
                for i in (1, 0):
                    n = jobs[i].last["kvtool"]["tokens"]
                    chats[i] += [message("assistant", jobs[i].text), *question(i)]
                    jobs[i] = server.put(chats[i])
                    assert n <= jobs[i].last["n_cached"] < n + 16
            assert not server.loads


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_short_prompt_is_read_before_a_long_one_that_came_first(
    talker, tmp_path, one_step, monkeypatch, policy
):
    """A short prompt is read before a long prompt that came first."""
    # every step takes longer than this target, so the long prompt is read in steps of the smallest size
    monkeypatch.setattr(pool, "STEP_S", 1e-9)
    with served(talker, policy, tmp_path, n_batch=256) as server:
        other_jobs, events = [], []

        def on_event(kind):
            events.append(f"first: {kind}")
            if not other_jobs:
                other_jobs.append(
                    server.put(question(1, 0), on_event=lambda kind: events.append(f"second: {kind}"))
                )
            if not other_jobs[0].is_over:
                server.wait_for_another()

        first = server.put(question(0, 12), on_event=on_event)
        assert 128 < first.last["n_prompt"] < 240
        assert other_jobs[0].text
        assert events.index("second: read") < events.index("first: read")
        assert all(slot.engine.chunk_size for slot in server.pool.slots)


def ask_both(server, one, other, n_max=40):
    """Ask `other` while the server answers `one`. Return both jobs after the end of `one`."""
    second = []

    def on_event(kind):
        if not second:
            second.append(server.put(other))
            server.wait_for_another()

    first = server.put(one, n_max, on_event)
    assert first.last
    return first, second[0]


def test_sequential_requests_use_one_engine(talker, tmp_path, one_step):
    def is_read_again(chat):
        """Disconnect while a prompt is read, and ask again.

        Return True if the prompt was read from its start.
        """
        again = []

        def on_event(kind):
            if job.events[-1].get("n_read") and not again:
                job.cancel()
                again.append(server.put(chat))
                server.wait_for_another()

        job = FakeJob(chat, on_event=on_event)
        server.jobs.put(job)
        until(lambda: again)
        return again[0].last["n_cached"] < 32

    with served(talker, "recall", tmp_path) as server:
        for i in range(3):
            assert server.put(question(i)).text
        assert not is_read_again(question(9, 20))
        assert len(server.pool.slots) == 1
        # Two requests at once make the server open a second engine. A repeated request must still find the
        # engine that has read its prompt.
        assert ask_both(server, question(0), question(1))[1].text
        assert len(server.pool.slots) == 2
        assert not is_read_again(question(8, 20))


@pytest.mark.parametrize("policy", ["h2o", "recall"])
def test_two_requests_of_one_chat_both_continue_it(talker, tmp_path, one_step, policy):
    with served(talker, policy, tmp_path) as server:
        start = server.put(question(0))
        chat, n = [*question(0), message("assistant", start.text)], start.last["kvtool"]["tokens"]
        jobs = ask_both(server, [*chat, *question(1)], [*chat, *question(2)])
        for job in jobs:
            assert n <= job.last["n_cached"] < n + 16
        # both chats were stored, whichever ended first
        for i, job in enumerate(jobs, 1):
            n = job.last["kvtool"]["tokens"]
            next_one = server.put([*chat, *question(i), message("assistant", job.text), *question(3)])
            assert n <= next_one.last["n_cached"] < n + 16
        # a chat is also stored if two requests ask the same question at the same time
        both = ask_both(server, *[[*chat, *question(4)]] * 2)
        assert both[0].text == both[1].text
        for _ in range(3):
            after = server.put([*chat, *question(4), message("assistant", both[0].text), *question(5)])
            assert after.last["n_cached"] >= both[0].last["kvtool"]["tokens"]
        # While the first request continues a chat, the second request repeats the chat's first question. The
        # server stores this shorter chat again, and must also keep the longer chat.
        start = server.put(question(6))
        chat = [*question(6), message("assistant", start.text), *question(7)]
        first, second = ask_both(server, chat, question(6), n_max=200)
        assert second.text == start.text
        after = server.put([*chat, message("assistant", first.text), *question(8)])
        assert after.last["n_cached"] >= first.last["kvtool"]["tokens"]


def has_two_free_slots(server):
    """Answer two requests at once, so that the server has two slots. Return when both are free."""
    assert all(job.text for job in ask_both(server, question(0), question(1)))
    until(lambda: len(server.pool._free) == 2)
    return True


def test_chat_is_tokenized_once_for_all_free_slots(talker, tmp_path, one_step, monkeypatch):
    n_call, tokens = 0, rendering.prefix_tokens

    def counted(*arguments):
        nonlocal n_call
        n_call += 1
        return tokens(*arguments)

    with served(talker, "h2o", tmp_path) as server:
        assert has_two_free_slots(server)
        monkeypatch.setattr(rendering, "prefix_tokens", counted)
        assert server.put(question(2)).text
        assert n_call == 1


def test_error_while_choosing_a_slot_does_not_end_the_server(talker, tmp_path, one_step, monkeypatch, capfd):
    with served(talker, "h2o", tmp_path) as server:
        assert has_two_free_slots(server)
        monkeypatch.setattr(Resumer, "n_shared", lambda *arguments: 1 / 0)
        assert server.put(question(2)).text
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_requests_wait_if_memory_is_too_small_for_more_slots(talker, tmp_path):
    with served(talker, "h2o", tmp_path, n=3, limit=1) as server:
        other_jobs = []

        def on_event(kind):
            if not other_jobs:
                other_jobs.extend(server.put(question(i)) for i in (1, 2))
                server.wait_for_another()

        first = server.put(question(0), on_event=on_event)
        assert first.text
        assert all(job.text for job in other_jobs)
        assert server.pool.n_max == len(server.pool.slots) == 1
        # the queue then counts only one request as not waiting
        until(lambda: server.jobs.n_slots == 1)
    (line,) = server.lines
    assert line.startswith("only 1 at once: there is none; choose a smaller --budget")


@pytest.mark.parametrize("error", [LibraryError("a device is gone"), ZeroDivisionError()])
def test_failing_slot_does_not_affect_other_slots(talker, tmp_path, one_step, monkeypatch, error):
    with served(talker, "h2o", tmp_path) as server:
        expected = server.put(question(0)).text
        bad = []

        def on_event(kind):
            if not bad:
                # this answer may have 400 tokens, and the other only 40, so this one ends later
                bad.append(server.put(question(1), 400, fail))
            if kind == "piece" and len(bad[0].events) < 2:
                server.wait_for_another()

        def fail(kind):
            if kind == "piece":
                monkeypatch.setattr(server.pool.slots[1].engine.context, "decode", broken)

        def broken(*arguments):
            raise error

        assert server.put(question(0), on_event=on_event, n_max=40).text == expected
        assert bad[0].last["kind"] == "error"
        assert bad[0].last["error"].status == 500
        monkeypatch.undo()
        assert server.put(question(1)).text


def test_unexpected_error_in_a_joint_step_ends_all_its_answers(talker, tmp_path, one_step, monkeypatch):
    decode = JointContext.decode

    def broken(joint, parts):
        decode(joint, parts)
        raise MemoryError

    with served(talker, "h2o", tmp_path) as server:
        expected = [server.put(question(i)).text for i in range(2)]
        monkeypatch.setattr(JointContext, "decode", broken)
        for job in ask_both(server, question(2), question(3)):
            assert job.last["kind"] == "error"
            assert job.last["error"].status == 500
        monkeypatch.undo()
        # later requests are answered, one by one and at once
        assert [server.put(question(i)).text for i in range(2)] == expected
        assert all(job.text for job in ask_both(server, question(2), question(3)))


def test_full_queue_refuses_requests_until_one_is_cancelled(talker, tmp_path, one_step):
    with served(talker, "h2o", tmp_path, queue=2) as server:
        long = [server.put(question(i), n_max=10**6) for i in range(2)]
        until(lambda: all(job.events and job.events[-1]["kind"] == "piece" for job in long))
        third = [server.put(question(i)) for i in (2, 3)]
        with pytest.raises(ApiError, match=r"the queue is full \(2 waiting\)") as caught:
            server.put(question(4))
        assert caught.value.status == 429
        assert [len(server.jobs.running), len(server.jobs)] == [2, 2]
        long[0].cancel()
        assert all(job.text for job in third)
        assert not long[1].is_cancelled
        # a job leaves the list of running jobs only after its last event
        until(lambda: server.jobs.running == long[1:])
        assert len(server.jobs) == 0
        long[1].cancel()


def running(url):
    """Return the number of requests that are being answered."""
    metrics = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    return int(re.search(r"^kvtool_requests_running (\d+)", metrics, re.MULTILINE)[1])


def test_times_of_an_answer_leave_out_the_turns_of_other_requests(talker, tmp_path, monkeypatch, one_step):
    ticks, decode = [], Context.decode

    def tick(context, tokens, *values):
        # a step of one token may be joint: it takes no time here
        if len(tokens) > 1:
            ticks.append(1)
        return decode(context, tokens, *values)

    # a clock that shows the number of steps that have read a prompt
    monkeypatch.setattr(slot, "time", SimpleNamespace(perf_counter=lambda: len(ticks)))
    monkeypatch.setattr(Context, "decode", tick)
    with served(talker, "full", tmp_path) as server:
        waits = iter([server.wait_for_another])
        first = server.put(question(0, 10), 4, lambda kind: next(waits, bool)())
        second = server.put(question(1, 10), 4)
        ends = [first.last, second.last]
    assert min(end["read_s"] for end in ends) > 2
    # no step belongs to two requests
    assert sum(end["read_s"] for end in ends) == len(ticks)
    assert [end["write_s"] for end in ends] == [0, 0]


@pytest.mark.parametrize("policy", ["h2o", "recall"])
def test_short_request_is_answered_during_a_long_answer_or_prompt(talker, policy):
    short = {"messages": question(0), "max_tokens": 8, "temperature": 0}
    # Answering `long` would take days. Reading `prompt` takes many times as long as the short request.
    long = {"messages": question(1), "max_tokens": 10**9, "logit_bias": {"2": -100}}
    prompt = {"messages": question(2, 30_000)}
    with start_server(talker, "--policy", policy, "--budget", "64", "--metrics") as server:
        expected = ask(server.url, **short).text
        for body in (long, prompt):
            with open_connection(server.url) as link:
                link.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}))
                until(lambda: running(server.url) == 1)
                if body is long:
                    answer = link.getresponse()
                    assert answer.readline()
                assert ask(server.url, **short).text == expected
                # just after it has answered the short request, the server may still count it
                until(lambda: running(server.url) < 2)
                assert running(server.url) == 1
                if body is long:
                    assert len([answer.readline() for _ in range(99)]) == 99
            until(lambda: running(server.url) == 0)
        props = httpx.get(f"{server.url}/props", timeout=TIMEOUT_S).json()
        assert props["total_slots"] == 2
        assert props["cache_bytes"] == 2 * ask(server.url, **short).stats["cache_bytes"]


def test_archive_is_limited_to_its_share_of_memory(talker):
    with closing(Model(talker)) as model:
        fitted = policies.fit("recall", 64, None, RECALL)
        for n_slab, n, expected in ((8, 2, 2), (8, 9, 4), (3, 2, 1)):
            with closing(Engine(model, fitted, Settings(archive=1))) as engine:
                n_bytes = n_slab * engine.context.archive.slab_bytes
            with closing(Engine(model, fitted, Settings(archive_bytes=n_bytes))) as engine:
                archive = engine.context.archive
                assert archive.share(n) == expected
                assert 0 <= n_bytes - expected * archive.max_bytes < 2 * archive.slab_bytes
