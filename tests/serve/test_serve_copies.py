"""Tokens that a server reads again if its cache has checkpoints or cannot be rewound.

If it cannot be rewound, copies are stored before replies.
"""

from __future__ import annotations

from contextlib import closing

import pytest

from kvtool.llama.model import Model
from tests import tiny
from tests.serve.crowd_serve import said
from tests.serve.killed_turns import SlotServer
from tests.serve.serving import serving
from tests.serve.test_serve_back import RECALL, asked

pytestmark = pytest.mark.engine

LONG = said("user", "Waves come and go. " * 30)
NEXT = said("user", "And who counts them? " * 16)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    path = tmp_path_factory.mktemp("copies") / "sliding.gguf"
    tiny.write_gemma3(path, chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=2048)
    return path


@pytest.fixture(scope="module", params=["sliding", "h2o"])
def url(request, talker, sliding):
    chosen = (sliding, *RECALL) if request.param == "sliding" else (talker, "--policy", "h2o", "--temp", "0")
    with serving(*chosen) as server:
        yield server.url


def test_a_request_that_comes_again_reads_its_reply_header(url):
    first, n, n_read, _ = asked(url, [LONG])
    assert n_read == n - 12 > 500
    again, _, n_again, _ = asked(url, [LONG])
    assert again == first
    assert n_again < 8
    # a later turn's prompt is not read again either
    messages = [LONG, first, NEXT]
    reply, _, n_read, _ = asked(url, messages)
    assert n_read > 300
    again, _, n_again, _ = asked(url, messages)
    assert again == reply
    assert n_again < 8


def test_another_reply_is_read_behind_the_prompt_that_it_answers(url):
    messages = [said("user", "Rivers are long. " * 40)]
    asked(url, messages)
    messages += [said("assistant", "They are."), NEXT]
    _, n, n_read, _ = asked(url, messages)
    assert len(NEXT["content"]) < n_read < n - 600
    # the copy for the last request has the reply that the client sent: only the new messages are read
    _, n, n_read, _ = asked(url, [*messages, said("assistant", "Nobody."), said("user", "Why?")])
    assert n_read < 40


def test_a_short_prompt_gets_no_copy(talker, tmp_path):
    with serving(talker, "--policy", "h2o", "--sessions", str(tmp_path)) as server:
        asked(server.url, [said("user", "Why?")])
        assert len([*tmp_path.glob("*.kv*")]) == 1


def test_a_copy_is_one_of_its_chat(sliding, tmp_path):
    with serving(sliding, *RECALL, "--checkpoints", "0", "--sessions", str(tmp_path)) as server:
        asked(server.url, [LONG])
        # the chat and its copy share one archive
        names = sorted(path.name.partition(".")[2] for path in tmp_path.glob("*.kv*"))
        assert names == ["kv", "kv.1", "kv.archive"]


def test_a_prompt_is_read_on_where_a_client_has_left_it(sliding, tmp_path):
    messages = [said("user", "Waves come and go. " * 60)]
    with closing(Model(sliding)) as model:
        server = SlotServer(model, "recall", tmp_path / "chats")
        server.slot.chats.most_bytes = 10**9
        server.leave(messages, 512)
        reply, n_cached, _ = server.ask(messages)
        assert 512 <= n_cached < 1000
        other = [said("user", messages[0]["content"] + "!")]
        # the checkpoint is before the reply header, so that a longer message continues from it as well
        assert all(server.ask(each)[1] > 1000 for each in (messages, other))
        whole = SlotServer(model, "recall", tmp_path / "fresh")
        assert whole.ask(messages)[0] == reply


def test_another_prompt_begins_anew_where_a_client_has_left_one(sliding, tmp_path):
    text = "Waves come and go. " * 60
    with closing(Model(sliding)) as model:
        server = SlotServer(model, "recall", tmp_path / "chats")
        server.leave([said("user", text)], 512)
        assert server.ask([said("user", "But " + text)])[1] == 0
