"""gpt-oss writes thoughts, calls and answers as messages with headers (OpenAI's format Harmony)."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from kvtool.chats.after_thought import AfterThought
from kvtool.chats.template import Template
from kvtool.chats.thinking import Splitter, apart, tags_in
from kvtool.llama.grammar.constraint import Vocabulary
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampling import Sampling
from kvtool.serve.tools.conversion import for_template
from kvtool.serve.tools.formats import HARMONY
from tests import tiny
from tests.chats import published_templates
from tests.chats.published_templates import needs_published
from tests.serve.slot_requests import dictated_slot

pytestmark = needs_published

CONTROL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
PARAMETERS = {"type": "object", "properties": {"at": {"enum": ["the door", "a wall"]}}, "required": ["at"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
IN_JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}

THOUGHT, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT, LOOKS = "<|end|><|start|>assistant", "<|channel|>commentary<|message|>I look."
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "a wall"}'
RESULT = '<|call|><|start|>functions.look to=assistant<|channel|>commentary<|message|>"A wall."'
USER = {"role": "user", "content": "Look around."}


@pytest.fixture(scope="module")
def source():
    return published_templates.templates()["openai-gpt-oss-120b"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("harmony") / "harmony.gguf"
    tiny.write_llama(path, n_ctx_train=4096, control=CONTROL)
    with closing(Model(path)) as model:
        yield model


@pytest.mark.parametrize("n", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{THOUGHT}Hm.{NEXT}{FINAL}Yes.", ("Hm.", "Yes.")),
        (f"{THOUGHT}Hm.{NEXT}{CALL}", ("Hm.", CALL)),
        (f"{THOUGHT}Hm.{NEXT}{THOUGHT}So.{NEXT}{FINAL}Yes.", ("Hm.\n\nSo.", "Yes.")),
        (f"{FINAL}Yes.{NEXT}{FINAL}", ("", "Yes.")),
        (CALL, ("", CALL)),
        (f"{FINAL.replace('<|m', ' <|constrain|>json<|m')}{{}}", ("", "{}")),
        (f"{LOOKS}{NEXT}{THOUGHT}Hm.{NEXT}{LOOKS}{NEXT}{FINAL}Yes.", ("Hm.", "I look.\n\nI look.\n\nYes.")),
        (f"<|channel|>commentary to=assistant{THOUGHT}Hm.{NEXT}{FINAL}Yes.", ("Hm.", "Yes.")),
        ("<|channel|>fin", ("", "<|channel|>fin")),
    ],
)
def test_thought_ends_before_a_call_or_an_answer(text, parts, n):
    splitter = Splitter(tags_in(THOUGHT), call_opening=HARMONY.opening)
    pieces = [part for i in range(0, len(text), n) for part in splitter.feed(text[i : i + n])]
    pieces += splitter.end()
    joined = ("".join(piece for kind, piece in pieces if kind is is_thought) for is_thought in (True, False))
    assert tuple(joined) == parts
    # without tools, a call is a message like any other
    without = apart(text, Splitter(tags_in(THOUGHT)))
    assert without == tuple(part.replace(CALL, '{"at": "a wall"}') for part in parts)


def test_template_gets_one_call_with_its_thought_or_text(source):
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "look", "arguments": f'{{"at": {n}}}'}}
        for n in range(2)
    ]
    reply = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"Wall {n}."} for n in range(2)]
    template = Template(source, "", "")
    for thought, expected in (({}, "I look."), ({"reasoning_content": "Hm."}, "Hm.")):
        text = template.render(for_template([USER, reply | thought, *results], template))
        text = text.partition("Look around.")[2]
        assert text == (
            f"{NEXT}{THOUGHT}{expected}"
            f'{NEXT} to=functions.look<|channel|>commentary json<|message|>{{"at": 0}}<|call|>'
            '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"Wall 0."'
            f'{NEXT} to=functions.look<|channel|>commentary json<|message|>{{"at": 1}}<|call|>'
            '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"Wall 1."'
            f"{NEXT}"
        )


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["full", "recall"])
@pytest.mark.parametrize("sends", [True, False], ids=["sends thoughts", "keeps thoughts"])
def test_engine_reads_only_the_result_after_a_call(model, source, tmp_path, policy, sends):
    with dictated_slot(model, source, tmp_path, policy, budget=1024) as serve:
        messages, read, n_read = [USER], "", 0
        for thought in ("First I look.", "Once more."):
            end = serve(messages, f"{THOUGHT}{thought}{NEXT}{CALL}", tools=[LOOK])
            assert serve.prompt == (f"{read}{RESULT}{NEXT}" if read else serve.prompt)
            assert end["n_cached"] == n_read
            message = end["message"]
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "look", "arguments": '{"at": "a wall"}'}
            assert (message["content"], message["reasoning_content"]) == ("", thought)
            assert end["finish"] == "tool_calls"
            read, n_read = serve.text, end["kvtool"]["tokens"]
            assert read == f"{serve.prompt}{THOUGHT}{thought}{NEXT}{CALL}"
            if not sends:
                del message["reasoning_content"]
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "A wall."}]
        end = serve(messages, f"{THOUGHT}That is all.{NEXT}{FINAL}It is a room.", tools=[LOOK])
        assert (end["message"]["content"], end["finish"]) == ("It is a room.", "stop")
        # the thought of an answer is not kept
        assert serve.text == f"{read}{RESULT}{NEXT}{FINAL}It is a room."


@pytest.mark.parametrize("call_replaces_answer", [True, False])
@pytest.mark.parametrize("thinks", [False, True])
def test_budget_limits_all_thoughts_of_a_reply_together(model, thinks, call_replaces_answer):
    def tokens(text):
        return Vocabulary.of(model).tokens_of(text.encode())

    def allows(token):
        mask = constraint.mask()
        return mask is None or bool(mask[token >> 5] >> (token & 31) & 1)

    # two thoughts, or only one if no tool may be called. The end tag counts until its last token
    thoughts = [f"{THOUGHT}a{NEXT}", f"{THOUGHT}bc"][not call_replaces_answer :] if thinks else []
    budget = sum(len(tokens(text.removeprefix(THOUGHT))) for text in thoughts) - (len(thoughts) > 1)
    constraint = AfterThought(
        None, model, tags_in(THOUGHT), "<|start|>assistant", budget, call_replaces_answer=call_replaces_answer
    )
    written = [token for text in (*thoughts, *[NEXT] * thinks) for token in tokens(text)]
    written += tokens(f"{LOOKS}{NEXT}") if call_replaces_answer else []
    for token in written:
        assert allows(token)
        assert constraint.accept(token)
    (header,), name, final = tokens("<|channel|>"), tokens("analysis")[0], tokens("final")[0]
    assert allows(header)
    assert constraint.accept(header)
    assert (allows(name), allows(final)) == (False, True)


@pytest.mark.engine
def test_forced_call_follows_the_thought(model, source, tmp_path):
    with dictated_slot(model, source, tmp_path, sampling=Sampling(temp=1.0)) as answer:
        n_thoughts = 0
        for seed in range(8):
            more = {"tools": [LOOK], "tool_choice": "required", "thinking_budget": 6}
            end = answer([USER], seed=seed, **more, max_tokens=400)
            (call,) = end["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["at"] in ("the door", "a wall")
            assert (end["message"]["content"], end["finish"]) == ("", "tool_calls")
            assert f"<|start|>assistant{CALL.partition('look')[0]}look" in answer.text
            n_thoughts += "reasoning_content" in end["message"]
    assert n_thoughts


@pytest.mark.engine
def test_reply_with_a_schema_is_an_answer_in_json_or_a_call(model, source, tmp_path):
    with dictated_slot(model, source, tmp_path, sampling=Sampling(temp=1.0)) as answer:
        n_calls = n_answers = 0
        for seed in range(24):
            more = {"tools": [LOOK], "thinking_budget": 6} | IN_JSON
            message = answer([USER], seed=seed, **more, max_tokens=400)["message"]
            if "tool_calls" in message:
                n_calls += 1
                assert message["content"] == ""
            else:
                n_answers += 1
                assert json.loads(message["content"])["n"] in (1, 2)
                assert f"{FINAL}{message['content']}" in answer.slot._resumer.conversation._reply.text
    assert n_calls
    assert n_answers


@pytest.mark.engine
def test_call_that_the_model_begins_fits_its_schema(model, source, tmp_path):
    opening = f"{THOUGHT}Hm.{NEXT}{CALL.partition('look')[0]}"
    with dictated_slot(model, source, tmp_path, sampling=Sampling(temp=1.0)) as answer:
        for seed in range(6):
            message = answer([USER], opening, continues=True, seed=seed, tools=[LOOK])["message"]
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"])["at"] in ("the door", "a wall")
            assert message["reasoning_content"] == "Hm."
