"""If a chat with a hybrid model changes, the server reads on from the newest checkpoint before the change."""

from __future__ import annotations

from functools import partial

import pytest

from tests import tiny_kinds
from tests.serve import subprocess_server
from tests.serve.http_requests import ask, message

pytestmark = pytest.mark.engine

RECALL = ("--policy", "recall", "--budget", "96", "-o", "search=all", "--archive-type", "f16")
FULL = ("--policy", "full")
N_BATCH = 32
SPACING = 256
"""Spacing of checkpoints in these servers. It is smaller than usual, so that short chats have several."""

LONG = "The tide comes and goes, and someone counts the waves. " * 15

PROGRAM = f"""
from kvtool.engine import checkpoints
from kvtool.__main__ import main

checkpoints.SPACING = {SPACING}
main()
"""
start_server = partial(subprocess_server.start_server, program=PROGRAM)


@pytest.fixture(scope="module", params=[RECALL, FULL], ids=["recall", "full"])
def options(request):
    return *request.param, "--temp", "0", "-b", str(N_BATCH)


@pytest.fixture(scope="module")
def url(hybrid_talker, options):
    with start_server(hybrid_talker, *options) as server:
        yield server.url


def talked(url):
    """Return the messages of a chat of two turns. The first turn is long."""
    messages = [message("system", "Be kind.")]
    for text in (LONG, "Who is it?"):
        messages.append(message("user", text))
        messages.append(ask(url, messages).reply)
    return messages


def check_edits(url, messages, *shares):
    """Change a chat in several places, and check how many tokens are read.

    shares: where the first message is changed, each as a share of its length.
    """
    answer = ask(url, messages[:4])
    # a repeated request continues from a checkpoint, and reads at most the last question again
    assert answer.n_read < 30 < answer.n_prompt
    assert ask(url, [*messages[:3], message("user", "Who was it?")]).n_read < 30
    # the checkpoint is just before the reply header, so only the header is read
    assert ask(url, messages[:2]).n_read == len("[e][a]")
    for share in shares:
        offset = int(len(LONG) * share)
        answer = ask(url, [messages[0], message("user", LONG[:offset] + "! " + LONG[offset:])])
        n_changed = answer.n_prompt * (1 - share)
        assert n_changed < answer.n_read < n_changed + SPACING + N_BATCH


def test_edited_chat_rereads_at_most_one_checkpoint_spacing(hybrid_talker, options, tmp_path):
    arguments = (*options, "--sessions", str(tmp_path))
    with start_server(hybrid_talker, *arguments) as server:
        messages = talked(server.url)
        check_edits(server.url, messages, 0.9, 0.5)
        server.stop()
    # the next server has the stored checkpoints
    with start_server(hybrid_talker, *arguments) as server:
        check_edits(server.url, messages, 0.8, 0.4)


def test_changed_reply_after_a_short_prompt_rereads_no_prompt(url):
    chat = [message("user", "Who is it?")]
    n_prompt = ask(url, chat).n_prompt
    chat += [message("assistant", "Nobody."), message("user", "Why?")]
    assert ask(url, chat).n_cached == n_prompt


def test_changed_first_message_is_read_from_the_end_of_the_system_prompt(hybrid_talker, options):
    system = message("system", "Be kind. " * 40)
    with start_server(hybrid_talker, *options) as server:
        ask(server.url, [system, message("user", "Who is it?")])
        answer = ask(server.url, [system, message("user", "Why?")])
        assert answer.n_read == len("[e][u]Why?[e][a]") < answer.n_prompt % N_BATCH


def test_changed_message_in_a_long_prompt_is_read_from_its_start(tmp_path, options):
    path = tmp_path / "hybrid.gguf"
    template = "{% for m in messages %}</s>{{ m.role }}:{{ m.content }}{% endfor %}</s>assistant:"
    tiny_kinds.write_lfm2(path, chat_template=template, n_ctx_train=8192)
    texts = [f"Is it {word}? " * 8 for word in ("cold", "late", "deep", "far", "high", "low")]
    chat = [message(("user", "assistant")[i % 2], text) for i, text in enumerate([*texts, "Why?"])]
    with start_server(path, *options) as server:
        n_prompt = ask(server.url, chat).n_prompt
        for i in (4, 1):
            changed = [*chat[:i], message(chat[i]["role"], "No. " + chat[i]["content"]), *chat[i + 1 :]]
            answer = ask(server.url, changed)
            assert answer.n_prompt == n_prompt + len("No. ")
            n_after = sum(len(f"_{each['role']}:{each['content']}") for each in changed[i:])
            n_after += len("_assistant:")
            assert answer.n_read <= n_after * 9 // 8


def test_edited_chat_gets_the_answer_of_a_fresh_server(url, hybrid_talker, options):
    messages = talked(url)
    edited = [messages[0], message("user", LONG[:-600] + "And who is kind?")]
    reply = ask(url, edited).reply
    assert ask(url, messages[:4]).reply == messages[4]
    with start_server(hybrid_talker, *options) as fresh:
        assert ask(fresh.url, edited).reply == reply
