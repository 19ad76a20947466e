"""Kill a server just before a call that changes its folder of chats. Test each such call in a separate run.

    python -m tests.serve.killed_turns MODEL FOLDER STEP h2o recall

STEP: 1 tests every call, 4 tests every fourth call. In each run, a child process takes the same turns, and
exits just before the tested call. Another child then continues the newest turns. Turns that were finished
before the call must be in the cache as a whole, and the next reply must be the same as if the server had not
been killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from kvtool import policies
from kvtool.chats.prompt import template_of
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import SessionError
from kvtool.llama.loaded.model import Model
from kvtool.serve.api import requests
from kvtool.serve.api.requests import Defaults
from kvtool.serve.rendering import Renderings
from kvtool.serve.store.chats import ChatStore
from tests.serve.http_requests import message
from tests.serve.slot_requests import slot_of

CALLS = ("replace", "link", "unlink", "fsync")
KILLED = 9
NEVER = 10**9


class SlotServer:
    """The part of `kvtool serve` that answers requests, without HTTP."""

    def __init__(self, model, policy, folder):
        # The steps into which a prompt is divided depend on the stored chats. With search=all, the
        # replies with recall do not depend on these steps.
        params = ["search=all"] if policy == "recall" else []
        settings = Settings(n_batch=64, n_threads=1, archive_type="f16")
        engine = Engine(model, policies.fit(policy, 64, 16, params), settings)
        # 600,000 bytes are too few for all chats, so some chats are deleted
        chats = ChatStore(folder, 600_000, {})
        self.slot = slot_of(engine, Renderings(model, template_of(model)), chats)

    def ask(self, messages):
        """Return (reply, number of cached tokens, number of tokens that the chat has now)."""
        events = []
        self._answer(messages, lambda job, event: events.append(event))
        end = events[-1]
        assert "unsaved" not in end["kvtool"], end["kvtool"]["unsaved"]
        return end["message"]["content"], end["n_cached"], end["kvtool"]["tokens"]

    def leave(self, messages, n_min):
        """Ask, and disconnect when n_min tokens of the prompt have been read."""

        def emit(job, event):
            assert event["n_all"] > n_min
            job.is_cancelled = event["n_read"] >= n_min

        self._answer(messages, emit)

    def _answer(self, messages, emit):
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        request = requests.check_chat(requests.as_chat(body), Defaults())
        job = SimpleNamespace(request=request, prompt=None, is_cancelled=False)
        job.emit = partial(emit, job)
        self.slot.answer(job)


def turns(server):
    """Take three turns in each of two chats. In the first chat, repeat the last question, then replace it.

    Yield (messages, number of tokens) of the chat after each answer.
    """
    first, second = [message("system", "Be brief.")], []
    for i in range(3):
        for chat in (first, second):
            chat.append(message("user", f"{i}: What is a stone? " + "It is long. " * 6 * i))
            reply, _, n = server.ask(chat)
            chat.append(message("assistant", reply))
            yield chat, n
    repeated = first[:-1]
    for messages in (repeated, [*first[:-2], message("user", "What is a river?")]):
        reply, _, n = server.ask(messages)
        yield [*messages, message("assistant", reply)], n


def in_child(work):
    """Run work(write) in a child process. Return (its exit code, the objects that it wrote)."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        code = 1
        try:
            work(lambda value: os.write(write, json.dumps(value).encode() + b"\n"))
            code = 0
        finally:
            # the child must not run the parent's code after this function
            if code:
                sys.excepthook(*sys.exc_info())
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as lines:
        values = [json.loads(line) for line in lines]
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), values


def die_at_call(n_call):
    """Make this process exit at its n_call-th call of any function in CALLS.

    Return a list. Its only item is the number of calls that are left.
    """
    n_left = [n_call]

    def dying(call):
        def counted(*args, **kwargs):
            n_left[0] -= 1
            if not n_left[0]:
                os._exit(KILLED)
            return call(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    return n_left


def live(model, policy, folder, n_call, n_turn=None):
    """Take turns until the n_call-th call that changes the folder. Return (exit code, finished turns).

    If all turns together make fewer than n_call calls, the number of calls follows the last turn.
    n_turn: maximum number of turns.
    """

    def work(write):
        n_left = die_at_call(n_call)
        for messages, n in islice(turns(SlotServer(model, policy, folder)), n_turn):
            write({"messages": messages, "n": n})
        write(n_call - n_left[0])

    return in_child(work)


def go_on(model, policy, folder, finished):
    """Continue each finished turn. Return [next reply, number of tokens that were cached] for each turn.

    Raises AssertionError if a stored chat is damaged.
    """

    def work(write):
        server = SlotServer(model, policy, folder)
        chats = server.slot.chats
        load = chats.load

        def whole(snapshot):
            try:
                return load(snapshot)
            except SessionError as error:
                raise AssertionError(f"damaged: {error}") from None

        chats.load = whole
        for turn in finished:
            reply, n_cached, _ = server.ask([*turn["messages"], message("user", "And then?")])
            write([reply, n_cached])

    code, answers = in_child(work)
    assert code == 0, "the server that goes on has failed"
    return answers


def whole_run(live, folder):
    """Return (results, number of calls) of a run that is not killed. live: see `kill_at_each_call`."""
    # the first process may also write compiled kernels, so its calls are not counted
    live(folder / "first", NEVER)
    code, results = live(folder / "whole", NEVER)
    assert code == 0
    n_call = results.pop()
    return results, n_call


def kill_at_each_call(live, folder, step, whole, n_call, check):
    """Kill a run at every `step`-th of its n_call calls, each in a new folder. Return n_call.

    live(folder, n): run until the n-th call. Return (exit code, list of results).
    whole: results of a whole run.
    check(folder, results): check the folder of a run that was killed after these results.
    """
    for n in range(1, n_call + 1, step):
        place = folder / f"killed-{n}"
        code, results = live(place, n)
        try:
            assert code == KILLED
            assert results == whole[: len(results)]
            check(place, results)
        except AssertionError as error:
            raise AssertionError(f"call {n}: {error}") from error
        shutil.rmtree(place)
    return n_call


def run(model_path, folder, policy, step=1):
    """Kill a server at every `step`-th call, each in a new run. Return the number of calls of a whole run."""
    model = Model(model_path)
    start = partial(live, model, policy)
    finished, n_call = whole_run(start, folder)
    expected = []
    for i, turn in enumerate(finished):
        # Get the expected reply from a server that has not read later turns: after rewinding from a later
        # turn, the cache may hold other tokens, and the reply may differ.
        place = folder / f"turn-{i}"
        start(place, NEVER, i + 1)
        expected += go_on(model, policy, place, [turn])

    def check(place, turns):
        # Check the two newest finished turns: older ones may have been deleted to free space. Also check the
        # turn that was being stored, which may be incomplete.
        first, end = max(len(turns) - 2, 0), len(turns) + 1
        answers = go_on(model, policy, place, finished[first:end])
        for i, (reply, n_cached) in enumerate(answers, first):
            turn, (expected_reply, _) = finished[i], expected[i]
            # n_cached exceeds the turn's tokens if the new question begins with the same tokens as an earlier
            # question in the cache, and the cache can be rewound to the end of these tokens
            if n_cached < turn["n"]:
                assert i == len(turns), f"{n_cached} of {turn['n']} tokens were stored"
            else:
                assert reply == expected_reply, f"{reply!r} instead of {expected_reply!r}"
        names = {path.name for path in place.iterdir()}
        # no unfinished file may be left; FILE.archive.next may be left only if there is no FILE.archive
        unfinished = [name for name in names if name.endswith(".part") or f"{name}.next" in names]
        assert not unfinished, unfinished

    return kill_at_each_call(start, folder, step, finished, n_call, check)


def main(run):
    """Call `run` for each policy on the command line: MODEL FOLDER STEP POLICY ..."""
    for policy in sys.argv[4:]:
        place = Path(sys.argv[2]) / policy
        place.mkdir(parents=True)
        print(policy, run(sys.argv[1], place, policy, int(sys.argv[3])), flush=True)


if __name__ == "__main__":
    main(run)
