"""If the assistant's message is the last, the model continues it. The stored chat has the whole reply."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from kvtool.chats.header import Header
from kvtool.chats.template import Template
from kvtool.chats.thinking import THINK, Splitter
from kvtool.errors import ModelError
from kvtool.serve.api.errors import ApiError
from tests.chats import published_templates
from tests.chats.published_templates import needs_published
from tests.serve.http_requests import message, pieces_of, refused
from tests.serve.in_process_server import serve_in_process
from tests.serve.slot_requests import check_body, dictated_slot
from tests.serve.test_serve_thinking import CHAT, PLAIN, SWITCHED
from tests.serve.test_serve_tools import tool

OPENS = CHAT.replace("%OPEN%", "<think>\n")
"""A template whose reply header opens a thought. It shows earlier replies without their thoughts."""

HI = message("user", "Hi.")
BEGUN = message("assistant", "The answer")
NEW_REPLY = {"continue_final_message": False}


def chat(messages, **fields):
    return check_body({"messages": messages, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": True},
    ],
    ids=str,
)
def test_last_message_of_the_assistant_is_continued(fields):
    request = chat([HI, BEGUN | {"prefix": True}], **fields)
    assert (request.messages, request.begun, request.ignored) == ([HI], "The answer", [])


def test_last_message_is_answered_if_continuing_is_off_or_impossible():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {**BEGUN, "tool_calls": [call]}
    for messages, fields in (([HI, BEGUN], NEW_REPLY), ([HI, calling], {}), ([BEGUN], {})):
        request = chat(messages, **fields)
        assert (request.messages, request.begun) == (messages, "")
    # an empty message is dropped
    assert chat([HI, message("assistant", "")]).messages == [HI]
    assert chat([HI, message("assistant", None)]).messages == [HI]
    assert check_body({"input": [HI, {"type": "message", **BEGUN}]}, "responses").begun == ""


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([HI], {"continue_final_message": True}, "continue_final_message"),
        ([BEGUN], {"continue_final_message": True}, "continue_final_message"),
        ([HI], {"add_generation_prompt": False}, "add_generation_prompt"),
        ([HI, BEGUN], {"add_generation_prompt": False, **NEW_REPLY}, "add_generation_prompt"),
        ([HI], {"add_generation_prompt": "no"}, "add_generation_prompt"),
        ([HI, BEGUN], {"tools": [tool("f")], "tool_choice": "required"}, "tool_choice"),
    ],
    ids=str,
)
def test_error_names_the_field_that_prevents_continuing(messages, fields, param):
    with refused(param):
        chat(messages, **fields)


def test_messages_api_refuses_a_begun_reply_with_blanks_at_its_end():
    def request_of(*messages):
        return check_body({"max_tokens": 5, "system": "Be.", "messages": list(messages)}, "messages")

    assert request_of(HI, message("assistant", [{"type": "text", "text": "So"}])).begun == "So"
    with pytest.raises(ApiError, match=r"messages\[1\] must not end with white space") as caught:
        request_of(HI, message("assistant", "So: "))
    assert caught.value.param == "messages[1]"
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    with pytest.raises(ApiError, match=r"messages\[1\] must be followed by the results"):
        request_of(HI, message("assistant", [{"type": "text", "text": "So"}, use]))


def test_splitter_continues_after_a_begun_reply():
    def parts(begun, text):
        splitter = Splitter(THINK).after(begun)
        return [*splitter.feed(text), *splitter.end()]

    assert parts("So", "<think>x</think>y") == [(False, "<think>x</think>y")]
    assert parts("<", "b>") == [(False, "b>")]
    assert parts("<think>Hm", "m</think>So") == [(True, "m"), (False, "So")]
    assert parts("<think>Hm</think>So", " it is") == [(False, " it is")]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("source", "variables", "begun", "ends"),
    [
        (PLAIN, {}, "So", "<|im_start|>assistant\nSo"),
        (PLAIN, {}, " So:\n", "<|im_start|>assistant\n So:\n"),
        # if the header opens a thought, the opening is left out of the prompt
        (OPENS, {}, "So", "<|im_start|>assistant\nSo"),
        (SWITCHED, {}, "So", "<|im_start|>assistant\nSo"),
        (SWITCHED, {"enable_thinking": False}, "So", "<|im_start|>assistant\nSo"),
        # the beginning that the client sends may contain a thought
        (OPENS, {}, "<think>\nHm", "<|im_start|>assistant\n<think>\nHm"),
        (PLAIN + "{# <think> #}", {}, "<think>Hm</think>So", "<|im_start|>assistant\n<think>Hm</think>So"),
        # a marker in the client's text does not end the turn
        (PLAIN, {}, "a<|im_end|>\n", "<|im_start|>assistant\na<|im_end|>\n"),
    ],
)
def test_prompt_ends_with_the_begun_reply(model, tmp_path, source, variables, begun, ends):
    with dictated_slot(model, source, tmp_path) as ask:
        end = ask([HI, message("assistant", begun)], " it is.", chat_template_kwargs=variables)
        assert ask.prompt.endswith(f"Hi.<|im_end|>\n{ends}")
        assert ask.text.endswith("it is.") or "<think>" in begun
        assert end["message"].get("content", "") + end["message"].get("reasoning_content", "") == " it is."
        tokens = ask.slot.writer.tokens.tolist()
        n_ends = sum(model.piece(token, special=True) == b"<|im_end|>" for token in tokens)
        assert n_ends == 1


@pytest.mark.engine
@needs_published
def test_published_templates_render_a_begun_reply_like_a_whole_reply(model, share_of):
    """A prompt that ends with the beginning of a reply must be a prefix of the chat with the whole reply.

    Only the texts from the user's message on are compared.
    """
    user, later = message("user", "Kvtool asks."), message("user", "And?")
    # this template writes instructions into the header of the next reply, but not into the headers of earlier
    # replies
    exceptions = {"CohereForAI-c4ai-command-r-plus-tool_use"}
    names, step = set(), share_of(2, 1)
    for name, source in list(published_templates.templates().items())[::step]:
        template = Template(source, "<|im_start|>", "<|im_end|>", model.markers)
        with suppress(ModelError):
            earlier = template.render([user, message("assistant", "Kvtool says so."), later])
            base = Header.of(model, template)
            header = base.with_begun(model, template, "Kvtool says")
            text = header.begin(template, template.render([user]))
            prompt_end = earlier[
                earlier.index("Kvtool asks.") : earlier.index("Kvtool says") + len("Kvtool says")
            ]
            if text[text.index("Kvtool asks.") :] == prompt_end:
                names.add(name)
            else:
                exceptions.remove(name)
    assert len(names) > 60 // step


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["full", "h2o", "recall"])
@pytest.mark.parametrize(
    ("source", "thought"),
    [(PLAIN, ""), (OPENS, "<think>\n"), (SWITCHED, "<think>\n")],
    ids=["plain", "opens", "switched"],
)
def test_stored_chat_has_the_whole_reply_and_continues_from_the_cache(
    model, tmp_path, source, thought, policy
):
    with dictated_slot(model, source, tmp_path, policy, budget=128) as ask:
        first = ask([HI, BEGUN], " is 42.")
        assert first["message"] == message("assistant", " is 42.")
        n = first["n_prompt"] + first["n_written"]
        assert n == len(ask.slot.writer.tokens)
        whole = [HI, message("assistant", "The answer is 42.")]
        second_answer = ask([*whole, message("user", "Why?")], f"{'</think>' if thought else ''}So.")
        assert second_answer["n_cached"] == n
        assert ask.prompt.endswith(
            "Hi.<|im_end|>\n<|im_start|>assistant\nThe answer is 42.<|im_end|>\n<|im_start|>user\nWhy?"
            f"<|im_end|>\n<|im_start|>assistant\n{thought}"
        )
        # the same question, with another beginning of the reply
        shorter = ask([HI, message("assistant", "It")], " is.")
        assert ask.text.endswith("Hi.<|im_end|>\n<|im_start|>assistant\nIt is.")
        assert shorter["message"]["content"] == " is."


@pytest.mark.engine
def test_long_prompt_is_read_once_for_several_begun_replies(model, tmp_path):
    long = message("user", "The river is long and the boat is slow. " * 40)
    with dictated_slot(model, PLAIN, tmp_path, "h2o", budget=128) as ask:
        n = ask([long, BEGUN], " is 42.")["n_prompt"]
        assert ask([long, message("assistant", "It")], " is.")["n_cached"] > n - 12
        assert ask([long], "So.")["n_cached"] > n - 12


@pytest.mark.engine
def test_begun_thought_is_dropped_from_the_stored_chat(model, tmp_path):
    with dictated_slot(model, SWITCHED, tmp_path) as ask:
        end = ask([HI, message("assistant", "<think>\nHm")], "m.\n</think>\n\nSo.")
        assert end["message"] == {"role": "assistant", "reasoning_content": "m.\n", "content": "So."}
        assert ask.text.endswith("<|im_start|>assistant\nSo.")


@pytest.mark.engine
def test_begun_reply_and_its_continuation_fit_the_schema_together(model, tmp_path):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [41, 42]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    shape = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    for source in (PLAIN, OPENS):
        with dictated_slot(model, source, tmp_path / str(len(source))) as ask:
            end = ask([HI, message("assistant", '{"n": 4')], temperature=0, **shape)
            assert json.loads('{"n": 4' + end["message"]["content"]) in ({"n": 41}, {"n": 42})
            assert end["finish"] == "stop"
            with pytest.raises(ApiError, match="does not fit its grammar or JSON schema") as caught:
                ask([HI, message("assistant", '{"m')], temperature=0, **shape)
            assert caught.value.status == 400


@pytest.mark.engine
def test_chat_completions_and_messages_continue_a_begun_reply(talker):
    with serve_in_process(talker, policy="h2o", budget="256") as server:
        begun = [HI, message("assistant", "ab")]
        reply, usage = server.chat(begun)
        plain, others = server.chat([HI])
        n_begun = len(server.ask("/tokenize", {"content": "ab"}).json()["tokens"])
        assert usage["prompt_tokens"] == others["prompt_tokens"] + n_begun
        assert reply["content"] != plain["content"]
        sent = {"max_tokens": 6, "messages": begun}
        answer = server.ask("/v1/messages", sent).json()
        assert [block["text"] for block in answer["content"]] == [reply["content"]]
        pieces = pieces_of(server.ask("/v1/chat/completions", sent | {"stream": True}).text)
        deltas = [piece["choices"][0]["delta"] for piece in pieces]
        assert "".join(delta.get("content", "") for delta in deltas) == reply["content"]
        count = server.ask("/v1/messages/count_tokens", {"messages": begun}).json()
        assert count["input_tokens"] == usage["prompt_tokens"]
        later = [HI, message("assistant", "ab" + reply["content"]), message("user", "And?")]
        assert server.chat(later)[1]["prompt_tokens_details"]["cached_tokens"] == usage["total_tokens"]
