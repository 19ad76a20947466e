"""Replies that end at a stop string: the next request continues the chat from the slot or from the store."""

from __future__ import annotations

import pytest

from tests.serve.http_requests import message
from tests.serve.slot_requests import dictated_slot
from tests.serve.test_serve_thinking import CHAT, PLAIN

pytestmark = pytest.mark.engine

REPLIES = {
    # the stop string has several tokens
    "The Nile is long.": "\nUSER:",
    # a token has the last letters of the reply and the stop string
    "Call foo()": ";",
}


def two_turns(model, folder, policy, reply, *, thought="", is_stored=False, cache_prompt=True):
    """Ask two questions. Return (tokens read before the second reply, n_cached, number of stored chats).

    The first reply ends at a stop string.
    thought: text before this reply.
    is_stored: True to ask in another chat in between, so that the first chat is loaded from its file.
    """
    stop = REPLIES[reply]
    with dictated_slot(model, PLAIN, folder, policy, 256) as ask:
        messages = [message("user", "Tell me about rivers. " * 40)]
        answer = ask(messages, f"{thought}{reply}{stop} and more", stop=[stop])
        assert answer["message"]["content"] == reply
        messages += [answer["message"], message("user", "Why?")]
        if is_stored:
            ask([message("user", "Something else, please. " * 12)], "Fine.")
            for chat in ask.slot.chats.chats:
                # a server that has just started has not read the tokens yet
                chat.token_bytes = None
        answer = ask(messages, "Because.", cache_prompt=cache_prompt)
        return ask.prompt_tokens, answer["n_cached"], len(ask.slot.chats)


@pytest.mark.parametrize("policy", ["h2o", "recall", "full"])
@pytest.mark.parametrize("reply", REPLIES)
def test_chat_after_a_stop_string_continues_alike_from_slot_and_store(model, tmp_path, policy, reply):
    in_slot, n_cached, n_stored = two_turns(model, tmp_path / "slot", policy, reply)
    assert n_stored == 1
    assert n_cached > 200
    stored = two_turns(model, tmp_path / "store", policy, reply, is_stored=True)
    assert stored == (in_slot, n_cached, 2)


@pytest.mark.parametrize("policy", ["recall", "full"])
@pytest.mark.parametrize("reply", REPLIES)
def test_rewindable_stream_keeps_no_stop_string(model, tmp_path, policy, reply):
    continued, n_cached, _ = two_turns(model, tmp_path / "slot", policy, reply)
    read_again, n_cached_again, _ = two_turns(model, tmp_path / "again", policy, reply, cache_prompt=False)
    assert continued == read_again
    assert (n_cached > 200, n_cached_again) == (True, 0)


@pytest.mark.parametrize("reply", REPLIES)
def test_stop_string_in_a_thought_is_not_where_the_reply_ends(model, tmp_path, reply):
    thought = f"<think>\nOne{REPLIES[reply]} two.\n</think>\n\n"
    tokens, n_cached, _ = two_turns(model, tmp_path, "full", reply, thought=thought)
    text = b"".join(model.piece(token, special=True) for token in tokens).decode()
    assert f"{thought}{reply}<|im_end|>\n<|im_start|>user\nWhy?" in text
    assert n_cached > 200


@pytest.mark.parametrize("opening", ["", "<think>\n"])
@pytest.mark.parametrize("policy", ["h2o", "full"])
def test_stop_string_may_begin_in_held_text_or_be_read_out_of_the_stream(model, tmp_path, policy, opening):
    # the splitter holds "<thi" back, because it may begin a tag; this template drops earlier thoughts
    source = CHAT.replace("%OPEN%", opening).replace(
        "{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    )
    thought = "Hm.\n</think>\n\n" if opening else ""
    with dictated_slot(model, source, tmp_path, policy, 256) as ask:
        messages = [message("user", "Tell me about rivers. " * 40)]
        for reply, stop in (("", "<"), ("So", ";")):
            answer = ask(messages, f"{thought}{reply}{stop}thi> and more", stop=[stop])
            assert (answer["message"]["content"], answer["finish"]) == (reply, "stop")
        answer = ask([*messages, answer["message"], message("user", "Why?")], f"{thought}Because.")
        assert answer["message"]["content"] == "Because."
        assert answer["n_cached"] > 200
