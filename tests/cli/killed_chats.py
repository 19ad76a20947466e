"""Kill a chat before each call that changes its files.

    python -m tests.cli.killed_chats MODEL FOLDER STEP h2o recall

STEP: test every STEP-th call.

A child process makes turns, resets, retries, continuations and undoes, and copies its folder just before each
tested call: a chat that is killed at the call leaves the folder in this state. In each copy, each chat that
was saved before must be in the session file or in a file that was set aside. Another child must be able to
continue the session.
"""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial

from kvtool import policies
from kvtool.chats import session
from kvtool.chats.conversation import Conversation
from kvtool.chats.prompt import template_of
from kvtool.chats.writer import Writer
from kvtool.cli.chat.files import ChatFiles
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import RunOptions
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from tests.serve.killed_turns import check_each_call, copy_at_calls, in_child, lived, main

NAME = "chat.kvs"
NAMES = re.compile(rf"{re.escape(NAME)}(\.\d+)?")
LONG = "Tell me a story of the sea, and of a storm. " * 2


def open_chat(model, policy, folder):
    params = ["search=all"] if policy == "recall" else []
    settings = Settings(n_batch=64, n_threads=1, archive_type="f16")
    engine = Engine(model, policies.fit(policy, 64, 16, params), settings)
    writer = Writer(engine, Sampler(model))
    chat = Conversation(writer, template_of(model), undoable=True)
    return chat, ChatFiles(chat, RunOptions(policy=policy), GenerationOptions(), folder / NAME)


class User:
    """Simulated user who takes turns and undoes them, like the commands of `kvtool chat`.

    saved: {id of a chat: its saved messages}, oldest chat first.
    """

    def __init__(self, chat, files):
        self.chat, self.files = chat, files
        self.saved = {}

    def say(self, text, *, again=False):
        if again:
            self.chat.undo_turn()
        "".join(self.chat.reply(text, 8))
        self.files.keep(undone=again)
        self._is_saved()

    def continue_reply(self):
        self.chat.read_turn(self.chat.newest_turn, self.chat.last_turn(), self.chat.unfinished_reply())
        "".join(self.chat.answer(8))
        self.files.keep(undone=True)
        self._is_saved()

    def reset(self):
        self.chat.remember("/reset")
        self.chat.reset(self.chat.system)

    def undo(self, n=1):
        for _ in range(n):
            assert self.chat.undo() is not None
        self.files.keep_session(undone=True)
        self._is_saved()

    def _is_saved(self):
        self.files.check()
        self.saved[self.chat.id] = list(self.chat.messages)


def turns(user):
    """Take all turns of a run. Yield after each change of the files."""
    for text in (LONG, f"0: {LONG}"):
        yield user.say(text)
    yield user.say(f"1: {LONG}", again=True)
    yield user.continue_reply()
    # `reset` begins a second chat. The three undoes take back its two turns and the reset. Then the session
    # file holds the first chat again.
    user.reset()
    for text in ("What is a stone?", LONG):
        yield user.say(text)
    for _ in range(3):
        yield user.undo()
    yield user.say("And then?")
    # The first `undo(2)` takes back the next turn and this reset.
    user.reset()
    yield user.say(f"2: {LONG}")
    yield user.undo(2)
    yield user.say("Why?")
    yield user.undo(2)


def live(model, policy, folder, step):
    """Take turns in a child process, which copies its folder before every `step`-th call that changes a file.

    Return (exit code, values). The values are numbers of calls, and after each turn the messages of each
    saved chat. The last value is the number of all calls.
    """

    def work(write):
        folder.mkdir(parents=True)
        chat, files = open_chat(model, policy, folder)
        user = User(chat, files)
        n_call = copy_at_calls(folder, step, write)
        for _ in turns(user):
            write([*user.saved.values()])
        write(n_call[0])

    return in_child(work)


def go_on(model, policy, folder):
    """Continue the session by one turn, in another process. Return the session's earlier messages."""

    def work(write):
        chat, files = open_chat(model, policy, folder)
        with closing(files):
            files.resume(files.path)
            n = len(chat.messages)
            User(chat, files).say("And then?")
            write(session.read(files.path)[0]["messages"][:n])

    code, (before,) = in_child(work)
    assert code == 0
    return before


def stored(folder):
    """Return the messages of each session in the folder. Raises SessionError if a session is damaged."""
    paths = [path for path in folder.iterdir() if NAMES.fullmatch(path.name)]
    return {path.name: session.read(path)[0]["messages"] for path in sorted(paths)}


def check(folder, before, after):
    """Check that each chat is in a session file of the folder.

    before, after: the messages of each chat before and after the interrupted turn. Either version is
    accepted.
    """
    sessions = stored(folder)
    for i, messages in enumerate(before):
        candidates = [messages, *after[i : i + 1]]
        # a chat whose turns were all undone has no messages, so every session matches it
        assert any(
            messages[: len(candidate)] == candidate
            for messages in sessions.values()
            for candidate in candidates
        ), (i, sessions)


def run(model_path, folder, policy, step=1):
    """Kill a chat at every `step`-th call. Return the number of all calls."""
    model, place = Model(model_path), folder / "chats"
    saved, calls, n_call = lived(partial(live, model, policy), place, step)
    check(place, saved[-1], [])

    def check_killed(n):
        check(place, saved[n - 1] if n else [], saved[n] if n < len(saved) else [])
        if (place / NAME).exists():
            messages = session.read_meta(place / NAME)["messages"]
            assert go_on(model, policy, place) == messages
        unfinished = [path.name for path in place.iterdir() if path.name.endswith((".part", ".next"))]
        assert not unfinished or not (place / NAME).exists(), unfinished

    check_each_call(place, calls, check_killed)
    return n_call


if __name__ == "__main__":
    main(run)
