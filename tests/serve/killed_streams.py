"""Kill servers in the middle of streams, while two clients chat with the server at the same time.

    python -m tests.serve.killed_streams --kills 20 --policies h2o recall

After each kill, a new server continues both chats. If a client saw the end of a turn, the new server's cache
must have the whole turn. Every answer must be the same as the answer of a server that has only this chat.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from tests import tiny
from tests.held import until
from tests.serve.asking import connected, message
from tests.serve.crowd_serve import RECALL, reply_to
from tests.serve.gone import events, response
from tests.serve.serving import serving


def options_of(policy):
    if policy == "full":
        return ("--policy", policy)
    options = ("--policy", policy, "--budget", "64", "--evict-every", "16")
    return options + (RECALL if policy == "recall" else ())


def streamed(url, messages, n_max):
    """Yield the events of an answer to these messages. Raises an error of GONE if the stream is cut."""
    body = {"messages": messages, "max_tokens": n_max, "temperature": 0, "stream": True}
    with connected(url) as link:
        link.request("POST", "/v1/messages", json.dumps(body), {"anthropic-version": "2023-06-01"})
        yield from events(response(link))


class Life:
    """A server that is killed at a random moment.

    At this moment, both clients have received part of an answer. The kill comes just after an event of one
    client: a piece of its answer, or the end. (The server must store a turn before it sends the end.)
    """

    def __init__(self, server, chats, rng):
        self.server, self._chats = server, chats
        self._kind = rng.choice(["content_block_delta", "message_stop"])
        self._n_turn, self._n_delta = rng.randint(0, 2), rng.randint(1, 30)

    def seen(self, kind):
        """Kill the server if it is time to do so.

        A client calls this with the kind of each event that it gets.
        """
        is_due = kind == self._kind and all(chat.n_turn >= self._n_turn for chat in self._chats)
        n_delta = [chat.n_delta for chat in self._chats]
        if is_due and min(n_delta) and max(n_delta) >= self._n_delta:
            self.server.kill()


def kill_amid(server, talks, is_time=lambda: False):
    """Call all `talks` in parallel. Kill the server once is_time() is true or one of the calls has ended.

    Raises the error of a call that failed.
    """
    with ThreadPoolExecutor(len(talks)) as pool:
        threads = [pool.submit(talk) for talk in talks]
        try:
            until(lambda: is_time() or any(thread.done() for thread in threads))
        finally:
            server.kill()
    for thread in threads:
        thread.result()


class KilledChat:
    """One of the two chats whose servers are killed.

    messages: messages of its finished turns.
    n_token: number of tokens of its finished turns.
    n_max: list of the token limits of its finished answers.
    n_delta: number of pieces received of the answer that is being streamed.
    n_turn: number of turns that were finished under the present server.
    n_cut: number of turns that were cut by kills.
    """

    def __init__(self, number, seed):
        self.number = number
        self.rng = random.Random(2 * seed + number)
        self.messages, self.n_token, self.n_max = [], 0, []
        self.n_turn = self.n_asked = self.n_delta = self.n_cut = 0

    def live(self, life):
        """Take turns until the server is killed."""
        self.n_turn = 0
        with life.server.until_killed():
            while not life.server.is_killed:
                self.turn(life.server.url, self.rng.randint(8, 60), life.seen)
        self.n_cut += self.n_delta > 0
        self.n_delta = 0

    def turn(self, url, n_max, seen=lambda kind: None):
        """Ask a question. When the answer is complete, add both to the chat.

        seen: function that is called with the kind of each event.
        """
        self.n_asked += 1
        question = f"{self.number}: What is stone {self.n_asked}? " + "It is long. " * self.rng.randint(0, 9)
        messages, text, usage = [*self.messages, message("user", question)], "", {}
        with closing(streamed(url, messages, n_max)) as answer:
            for event in answer:
                assert event["type"] != "error", event
                usage = event.get("usage") or usage
                if event["type"] == "content_block_delta":
                    text += event["delta"]["text"]
                    self.n_delta += 1
                seen(event["type"])
                if event["type"] == "message_stop":
                    break
            else:
                raise AssertionError(f"chat {self.number}: a stream without message_stop")
        n_cached, n_all = usage["cache_read_input_tokens"], sum(usage.values())
        # n_cached exceeds n_token if an interrupted question in the cache has the same first tokens
        assert self.n_token <= n_cached <= n_all, f"chat {self.number}: {n_cached} of {self.n_token} tokens"
        self.messages, self.n_token = [*messages, message("assistant", text)], n_all
        self.n_max.append(n_max)
        self.n_turn += 1
        self.n_delta = 0


def run(model, policy, folder, n_kill, seed=0):
    """Kill n_kill servers amid streams. Return how many streams were cut and how many turns were finished.

    Raises AssertionError if a finished turn is lost, or if an answer changes when its chat is replayed alone.
    """
    rng, options = random.Random(seed), options_of(policy)
    chats = [KilledChat(number, seed) for number in range(2)]
    n_left = n_kill
    while n_left:
        n_cut = sum(chat.n_cut for chat in chats)
        with serving(model, *options, "--sessions", str(folder)) as server:
            life = Life(server, chats, rng)
            kill_amid(server, [partial(chat.live, life) for chat in chats])
        # Only kills that cut a stream are counted. If clients are slow, both streams may have ended before
        # the kill.
        n_left -= sum(chat.n_cut for chat in chats) > n_cut
    with serving(model, *options, "--sessions", str(folder)) as server:
        for chat in chats:
            n = len(chat.messages)
            chat.turn(server.url, 8)
            assert len(chat.messages) == n + 2, f"chat {chat.number}: no answer after the last kill"
    unfinished = [path.name for path in folder.iterdir() if path.name.endswith(".part")]
    assert not unfinished, unfinished
    for chat in chats:
        with serving(model, *options) as server:
            for i, n_max in enumerate(chat.n_max):
                want = chat.messages[2 * i + 1]["content"]
                alone = reply_to(server.url, chat.messages[: 2 * i + 1], n_max=n_max)
                assert alone == want, f"chat {chat.number}: {want!r}, alone {alone!r}"
    return {
        "turns": sum(len(chat.n_max) for chat in chats),
        "streams cut": sum(chat.n_cut for chat in chats),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["h2o", "recall"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for policy in args.policies:
        with tempfile.TemporaryDirectory() as folder:
            model, sessions = Path(folder) / "talker.gguf", Path(folder) / "sessions"
            tiny.write_llama(model, letters=True, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=8192)
            counts = run(model, policy, sessions, args.kills, args.seed)
            print(
                f"{policy}: {args.kills} kills,", *(f"{n} {what}" for what, n in counts.items()), flush=True
            )


if __name__ == "__main__":
    main()
