"""If a cache can be rewound only to checkpoints, the server reads again the tokens after a checkpoint.

Other tests here check which files and checkpoints a server stores for a chat.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest

from kvtool.chats import archive_file, session
from kvtool.llama.cache.segment import SavedCheckpoint, listed
from kvtool.llama.loaded.model import Model
from kvtool.serve.store.chats import ChatStore
from tests import tiny
from tests.serve.http_requests import ask, message
from tests.serve.in_process_server import serve_in_process
from tests.serve.killed_turns import SlotServer
from tests.serve.subprocess_server import start_server
from tests.serve.test_serve_back import KEEPS_ALL, RECALL

pytestmark = pytest.mark.engine

LONG = message("user", "Waves come and go. " * 30)
NEXT = message("user", "And who counts them? " * 16)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    path = tmp_path_factory.mktemp("copies") / "sliding.gguf"
    tiny.write_gemma3(path, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=2048)
    return path


@pytest.fixture(scope="module", params=["sliding", "h2o"])
def url(request, talker, sliding):
    arguments = (
        (sliding, *RECALL) if request.param == "sliding" else (talker, "--policy", "h2o", "--temp", "0")
    )
    with start_server(*arguments) as server:
        yield server.url


def test_repeated_request_reads_only_its_reply_header(url):
    messages = []
    for question, n_min in ((LONG, 500), (NEXT, 300)):
        messages.append(question)
        answer = ask(url, messages)
        assert answer.n_read > n_min
        second_answer = ask(url, messages)
        assert second_answer.reply == answer.reply
        assert second_answer.n_read < 8
        messages.append(answer.reply)


def test_changed_reply_is_read_from_the_end_of_its_prompt(url):
    messages = [message("user", "Rivers are long. " * 40)]
    ask(url, messages)
    messages += [message("assistant", "They are."), NEXT]
    answer = ask(url, messages)
    assert len(NEXT["content"]) < answer.n_read < answer.n_prompt - 600
    # the stored chat now has the client's reply ("They are."), so only newer messages are read
    assert ask(url, [*messages, message("assistant", "Nobody."), message("user", "Why?")]).n_read < 40


@pytest.mark.parametrize(("prompt", "n"), [(message("user", "Why?"), 0), (LONG, 1)], ids=["short", "long"])
def test_only_long_prompts_get_a_checkpoint_before_the_reply(talker, tmp_path, prompt, n):
    with serve_in_process(talker, tmp_path, policy="h2o", checkpoints="64MiB") as server:
        server.chat([prompt])
        (path,) = tmp_path.glob("*.kv")
        assert len(listed(session.read(path)[1], SavedCheckpoint)) == n


@pytest.mark.parametrize("options", [KEEPS_ALL["recall"], {"policy": "h2o"}], ids=["recall", "h2o"])
@pytest.mark.parametrize("size", ["64MiB", "0"])
def test_each_chat_has_one_session_file(sliding, tmp_path, options, size):
    def asked(server, messages):
        """Return (reply, number of cached tokens of the prompt, number of its other tokens)."""
        reply, usage = server.chat(messages)
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return reply, n_cached, usage["prompt_tokens"] - n_cached

    start = partial(serve_in_process, sliding, tmp_path, **options | {"checkpoints": size})
    with start() as server:
        messages = [LONG]
        for _ in range(2):
            messages += [server.chat(messages)[0], NEXT]
        reply, n_cached, n_read = asked(server, messages)
        assert n_read < 400 < n_cached
        assert len([*tmp_path.glob("*.kv")]) == 1
        # the server reads an edited chat again from the newest checkpoint, and stores it as another chat
        _, n_cached, n_read = asked(server, [*messages[:-1], message("user", "Nobody.")])
        assert n_cached == 0 if size == "0" else n_read < 100
        assert len([*tmp_path.glob("*.kv")]) == 2
        assert not [*tmp_path.glob("*.kv.[0-9]*")]
    with start() as server:
        assert asked(server, [*messages, reply, message("user", "Why?")])[2] < 100


@pytest.mark.parametrize(
    "options",
    [(*RECALL, "--checkpoints", "0"), ("--policy", "h2o", "--budget", "1500", "--temp", "0")],
    ids=["recall", "h2o"],
)
def test_system_prompt_that_begins_like_another_is_stored(sliding, options):
    with start_server(sliding, *options) as server:
        # the server stores full batches of 256 tokens; each letter is one token
        for n, n_first, n_stored in ((45, 0, 256), (100, 256, 768), (60, 256, 512)):
            system = message("system", "Be kind. " * n)
            chats = [[system, message("user", text)] for text in ("Why?", "Who?", "How?")]
            answers = [ask(server.url, chat) for chat in chats]
            assert [answer.n_cached for answer in answers] == [n_first, n_stored, n_stored]
            assert ask(server.url, chats[1], cache_prompt=False).reply == answers[1].reply


def test_size_of_stored_chats_is_known_without_reading_files(sliding, tmp_path, monkeypatch):
    folder = tmp_path / "chats"

    def n_bytes():
        return sum(path.stat().st_size for path in folder.iterdir())

    with closing(Model(sliding)) as model:
        server = SlotServer(model, "recall", folder)
        store = server.slot.chats
        store.max_bytes = 10**9
        for i in range(2):
            messages = [message("user", f"{i}: " + "Waves come and go. " * 60)]
            messages += [message("assistant", server.ask(messages)[0]), message("user", "Why?")]
            server.ask(messages)
        reopened = ChatStore(folder, 10**9, store.fixed)
        # from here on, sizes of files can no longer be read
        size = n_bytes()
        monkeypatch.setattr(archive_file, "size", lambda path: 1 / 0)
        assert len(store) == 2
        assert store.n_bytes == reopened.n_bytes == size
        newest = store.chats[-1]
        store.max_bytes = size - 1
        store._shrink(keep=newest)
        assert store.chats == [newest]
        assert store.n_bytes == n_bytes()


def test_prompt_of_a_disconnected_client_is_continued(sliding, tmp_path):
    messages = [message("user", "Waves come and go. " * 60)]
    with closing(Model(sliding)) as model:
        server = SlotServer(model, "recall", tmp_path / "chats")
        server.slot.chats.max_bytes = 10**9
        server.leave(messages, 512)
        reply, n_cached, _ = server.ask(messages)
        assert 512 <= n_cached < 1000
        longer = [message("user", messages[0]["content"] + "!")]
        # the checkpoint is at the end of the message's text, so a longer message can continue from it
        assert all(server.ask(chat)[1] > 1000 for chat in (messages, longer))
        whole = SlotServer(model, "recall", tmp_path / "fresh")
        assert whole.ask(messages)[0] == reply


def test_different_prompt_after_a_disconnect_starts_from_the_beginning(sliding, tmp_path):
    text = "Waves come and go. " * 60
    with closing(Model(sliding)) as model:
        server = SlotServer(model, "recall", tmp_path / "chats")
        server.leave([message("user", text)], 512)
        assert server.ask([message("user", "But " + text)])[1] == 0
