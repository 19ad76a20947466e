"""Let many clients use one server at once, then replay each chat alone and compare the answers.

    python -m tests.serve.crowd_serve --models tiny smollm2-135m --policies h2o recall --budgets 64 128

The clients ask, repeat a question, change earlier messages, and disconnect in the middle of streams. Some
clients start with the same messages. At temperature 0, every complete answer must be the same when its chat
is replayed alone. This shows that no text of a chat gets into another chat, and that the text of a replaced
message is gone.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import tiny
from tests.serve.http_requests import message, request
from tests.serve.subprocess_server import start_server

WORDS = ("stone", "river", "lamp", "bread", "iron", "music", "winter", "paper", "garden", "thunder", "window")
EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")
"""Options that limit rounding errors. Rounding depends on how many chats take part in a step."""

RECALL = ("-o", "search=all", "--archive-type", "f32")
"""Options with which a reply of recall does not depend on how its prompt was divided into steps.

If a client changes an earlier message, the server divides the prompt differently than in the replay.
"""

SYSTEMS = [None, "Be helpful.", "Answer in few words, please. " * 10]
"""System prompts. The last one is long: the server stores it separately. It needs a budget of 512."""


def reply_to(url, messages, **options):
    status, answer = request(url, *_chat_request(messages, **options))
    assert status == 200, answer
    return answer if isinstance(answer, str) else answer["choices"][0]["message"]["content"]


def _chat_request(messages, n_max=12, stream=False, name=None):
    body = {"messages": messages, "max_tokens": n_max, "temperature": 0, "stream": stream}
    return body, {"X-Session-Id": name} if name else {}


class Client:
    """A client of the crowd.

    messages: its chat so far.
    answers: its answers. The key is the JSON of the messages before the answer.
    did: number of its actions of each kind.
    """

    def __init__(self, url, number, seed, systems, n_alike=2):
        self.url, self.number = url, number
        self.rng = random.Random(seed * 1000 + number)
        # the clients of a group (of size `n_alike`) have the same seed, so they begin with the same messages
        start = random.Random(seed * 1000 + number // n_alike)
        system = start.choice(systems)
        self.secret = f"secret{number}x{WORDS[number % len(WORDS)]}"
        self.messages = [message("system", system)] if system else []
        self.first = f"What is {start.choice(WORDS)}?"
        self.answers, self.did = {}, Counter()

    def question(self):
        words = " ".join(self.rng.choices(WORDS, k=self.rng.choice((2, 8, 40))))
        return f"My word is {self.secret}; {words}"

    def turn(self):
        is_first = not any(each["role"] == "assistant" for each in self.messages)
        messages = [*self.messages, message("user", self.first if is_first else self.question())]
        if self.rng.random() < 0.25:
            self.did["gone"] += 1
            request(
                self.url, *_chat_request(messages, n_max=200, stream=True), n_events=self.rng.randint(1, 6)
            )
        if self.rng.random() < 0.25:
            self.did["asked again"] += 1
            self.answer(messages)
        self.messages = [*messages, message("assistant", self.answer(messages))]
        if len(self.messages) > 3 and self.rng.random() < 0.3:
            self.did["changed"] += 1
            # cut the chat before one of its questions
            places = [i for i, each in enumerate(self.messages) if each["role"] == "user"]
            self.messages = self.messages[: self.rng.choice(places[1:] or places)]

    def answer(self, messages):
        text = reply_to(self.url, messages, stream=self.rng.random() < 0.5)
        self.did["answered"] += 1
        before = self.answers.setdefault(json.dumps(messages), text)
        assert before == text, f"client {self.number} got another answer to the same messages"
        return text


def crowd(url, n_client, n_turn, seed, systems, n_alike=2):
    """Let n_client clients take n_turn turns each, all at the same time. Return the clients."""
    clients = [Client(url, number, seed, systems, n_alike) for number in range(n_client)]

    def work(client):
        for _ in range(n_turn):
            client.turn()

    with ThreadPoolExecutor(n_client) as pool:
        # `list` raises the errors of the clients' threads
        list(pool.map(work, clients))
    return clients


def check(url, clients):
    """Replay every chat alone, under its own session name. Return the number of compared answers."""
    client_of = {}
    for client in clients:
        for chat in client.answers:
            client_of[chat] = client
    # A chat is skipped if a longer chat begins with it: the replay of the longer chat includes it.
    before = {json.dumps(json.loads(chat)[: -2 * n]) for chat in client_of for n in range(1, len(chat))}
    n = 0
    for chat, client in client_of.items():
        if chat in before:
            continue
        messages = json.loads(chat)
        for i, each in enumerate(messages):
            if each["role"] != "user":
                continue
            single_reply = reply_to(url, messages[: i + 1], name=f"alone-{n}")
            expected = client_of[json.dumps(messages[: i + 1])].answers[json.dumps(messages[: i + 1])]
            assert single_reply == expected, (
                f"client {client.number}: {expected!r} in the crowd, {single_reply!r} alone"
            )
        n += 1
        other_secrets = {other.secret for other in clients} - {client.secret}
        assert not any(secret in text for text in client.answers.values() for secret in other_secrets)
    return len(client_of)


def run(model, policy, budget, *, n_client=20, n_turn=5, seed=0, n_alike=2, more=()):
    """Run a crowd and replay its chats. Return counts of the clients' actions and of the compared answers."""
    size = "-c" if policy == "full" else "--budget"
    options = ("--policy", policy, size, str(budget), "--temp", "0", *EXACT, *more)
    counts = Counter()
    with start_server(model, *options) as server:
        clients = crowd(
            server.url, n_client, n_turn, seed, SYSTEMS if budget >= 512 else SYSTEMS[:2], n_alike
        )
        code, stderr = server.stop()
        assert stderr == "kvtool: stopped\n", stderr
    with start_server(model, *options) as server:
        counts["compared"] = check(server.url, clients)
    return sum((client.did for client in clients), counts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny"])
    parser.add_argument("--policies", nargs="+", default=["h2o", "recall"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny_path = Path(folder) / "tiny.gguf"
        tiny.write_llama(tiny_path, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=8192)
        for model in args.models:
            for policy in args.policies:
                for budget in args.budgets:
                    path = tiny_path if model == "tiny" else model
                    options = {"n_client": args.clients, "n_turn": args.turns, "seed": args.seed}
                    counts = run(path, policy, budget, **options, more=RECALL if policy == "recall" else ())
                    print(
                        model,
                        policy,
                        budget,
                        *(f"{n} {what}" for what, n in sorted(counts.items())),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
