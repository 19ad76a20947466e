"""Kill a server just before a call that changes its folder of chats. Test each such call.

    python -m tests.serve.killed_turns MODEL FOLDER STEP h2o recall

STEP: 1 tests every call, 4 tests every fourth call. A child process takes turns, and copies its folder just
before each tested call: a server that is killed at the call leaves the folder in this state. For each copy,
another child continues the newest turns. Turns that were finished before the call must be in the cache as a
whole, and the next reply must be the same as if the server had not been killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from kvtool import policies
from kvtool.chats.archive_file import archive_path
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


def copies_of(folder):
    """Return the folder of the copies that `copy_at_calls` and `copy` make."""
    return folder.with_name(f"{folder.name}-copies")


def copy(folder, name):
    """Copy a folder, with its hard links and times."""
    place = copies_of(folder) / name
    place.parent.mkdir(exist_ok=True)
    if folder.exists():
        subprocess.run(["cp", "-a", folder, place], check=True)
    else:
        place.mkdir()


def restore(folder, name):
    """Replace a folder by its copy."""
    shutil.rmtree(folder)
    (copies_of(folder) / name).rename(folder)


def copy_at_calls(folder, step, write):
    """Copy a folder just before every `step`-th call of any function in CALLS.

    The copy has the call's number as its name. write(number) is called after the copy. Return a list. Its
    only item is the number of calls so far. step: None to copy nothing.
    """
    n_call = [0]

    def copying(call):
        def counted(*args, **kwargs):
            if step and n_call[0] % step == 0:
                copy(folder, f"call-{n_call[0]}")
                write(n_call[0])
            n_call[0] += 1
            return call(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, copying(getattr(os, name)))
    return n_call


def live(model, policy, folder, step):
    """Take all turns, and copy the folder at calls and after each turn.

    Return (exit code, values). The values are numbers of calls and finished turns, in the order of time. The
    last value is the number of all calls.
    """

    def work(write):
        n_call = copy_at_calls(folder, step, write)
        for i, (messages, n) in enumerate(turns(SlotServer(model, policy, folder))):
            write({"messages": messages, "n": n})
            copy(folder, f"turn-{i}")
        write(n_call[0])

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
            # a server deletes a chat's archive first: this one was killed before it deleted the session
            is_deleted = policy == "recall" and not archive_path(snapshot.path).exists()
            try:
                return load(snapshot)
            except SessionError as error:
                if is_deleted:
                    raise
                raise AssertionError(f"damaged: {error}") from None

        chats.load = whole
        for turn in finished:
            reply, n_cached, _ = server.ask([*turn["messages"], message("user", "And then?")])
            write([reply, n_cached])

    code, answers = in_child(work)
    assert code == 0, "the server that goes on has failed"
    return answers


def lived(live, folder, step):
    """Return (results of turns, [(number of a call, number of turns before it), ...], number of all calls).

    live(folder, step): see `live`. The results are the values that are no numbers.
    """
    # the first process may also write compiled kernels, so its calls are not counted
    live(folder.with_name("first"), None)
    code, (*values, n_call) = live(folder, step)
    assert code == 0
    results, calls = [], []
    for value in values:
        if isinstance(value, int):
            calls.append((value, len(results)))
        else:
            results.append(value)
    return results, calls, n_call


def check_each_call(folder, calls, check):
    """Check the state of a folder at each call. calls: see `lived`.

    check(number of turns): check the folder of a run that was killed after this number of turns.
    """
    for n, n_turn in calls:
        restore(folder, f"call-{n}")
        try:
            check(n_turn)
        except AssertionError as error:
            raise AssertionError(f"call {n}: {error}") from error


def run(model_path, folder, policy, step=1):
    """Kill a server at every `step`-th call. Return the number of all calls."""
    model, place = Model(model_path), folder / "chats"
    finished, calls, n_call = lived(partial(live, model, policy), place, step)
    expected = []
    for i, turn in enumerate(finished):
        # Get the expected reply from a server that has not read later turns: after rewinding from a later
        # turn, the cache may hold other tokens, and the reply may differ.
        restore(place, f"turn-{i}")
        expected += go_on(model, policy, place, [turn])

    def check(n_turn):
        # Check the two newest finished turns: older ones may have been deleted to free space. Also check the
        # turn that was being stored, which may be incomplete.
        first, end = max(n_turn - 2, 0), n_turn + 1
        answers = go_on(model, policy, place, finished[first:end])
        for i, (reply, n_cached) in enumerate(answers, first):
            turn, (expected_reply, _) = finished[i], expected[i]
            # n_cached exceeds the turn's tokens if the new question begins with the same tokens as an earlier
            # question in the cache, and the cache can be rewound to the end of these tokens
            if n_cached < turn["n"]:
                assert i == n_turn, f"{n_cached} of {turn['n']} tokens were stored"
            else:
                assert reply == expected_reply, f"{reply!r} instead of {expected_reply!r}"
        names = {path.name for path in place.iterdir()}
        # no unfinished file may be left; FILE.archive.next may be left only if there is no FILE.archive
        unfinished = [name for name in names if name.endswith(".part") or f"{name}.next" in names]
        assert not unfinished, unfinished

    check_each_call(place, calls, check)
    return n_call


def main(run):
    """Call `run` for each policy on the command line: MODEL FOLDER STEP POLICY ..."""
    for policy in sys.argv[4:]:
        place = Path(sys.argv[2]) / policy
        place.mkdir(parents=True)
        print(policy, run(sys.argv[1], place, policy, int(sys.argv[3])), flush=True)


if __name__ == "__main__":
    main(run)
