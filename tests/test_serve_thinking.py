"""Thinking as clients ask for it: fields that reach the template, and thoughts that come back."""

from __future__ import annotations

import os

import httpx2 as httpx
import pytest

from kvtool.llama.model import Model
from kvtool.serve import wishes
from kvtool.serve.errors import ApiError
from kvtool.serve.fields import Fields
from kvtool.serve.wishes import Wish
from tests import tiny
from tests.answered import answering
from tests.held import PATIENCE_S
from tests.serving import ONE_THREAD, serving

pytestmark = pytest.mark.engine

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n%OPEN%{% endif %}"
)
SWITCHED = CHAT.replace(
    "%OPEN%",
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}",
)
TOLD = "{{ reasoning_effort or 'medium' }} {{ note or 'none' }}\n" + CHAT.replace("%OPEN%", "<think>\n")
PLAIN = CHAT.replace("%OPEN%", "")

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(smol):
    model = Model(smol)
    yield model
    model.close()


@pytest.fixture
def serve(model, tmp_path):
    """serve(source, ...): what answers under a template; see `answering`."""
    opened = []

    def start(source, policy="full", **more):
        opened.append(answering(model, source, tmp_path / str(len(opened)), policy, **more))
        return opened[-1].__enter__()

    yield start
    for each in opened:
        each.__exit__(None, None, None)


# fields


def wish(**fields):
    return wishes.check(Fields(fields), Wish())


@pytest.mark.parametrize(
    ("fields", "effort", "budget"),
    [
        ({}, None, None),
        ({"reasoning_effort": "none"}, "off", None),
        ({"reasoning_effort": "minimal"}, "minimal", None),
        ({"reasoning_effort": "xhigh"}, "xhigh", None),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "high", None),
        ({"reasoning": {"effort": None}}, None, None),
        ({"reasoning": {"enabled": False}}, "off", None),
        ({"reasoning": {"max_tokens": 512}}, None, 512),
        ({"enable_thinking": True, "thinking_budget": 512}, "on", 512),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "off", None),
        ({"enable_thinking": True, "reasoning_effort": "high"}, "high", None),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "on", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "on", 1023),
        ({"thinking": {"type": "disabled"}}, "off", None),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None, None),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}, "low", None),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "max"}, "max", None),
        ({"thinking_budget": -1}, None, None),
        ({"thinking_budget": 0}, "off", 0),
        ({"reasoning_budget": 7}, None, 7),
    ],
)
def test_fields_of_all_servers_ask_for_an_effort_and_a_budget(fields, effort, budget):
    found = wish(**fields)
    assert (found.effort, found.budget) == (effort, budget)
    left = Fields(fields)
    wishes.check(left, Wish())
    assert left.left == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "deep"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": "deep"}}, "reasoning.effort"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "all"}}, "thinking.budget_tokens"),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
def test_a_field_that_asks_for_nothing_known_is_named(fields, param):
    with pytest.raises(ApiError) as raised:
        wish(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_the_servers_effort_and_budget_hold_where_a_request_asks_for_no_other_and_no_less():
    default = Wish(effort="low", name="--think", budget=100)
    for fields, effort, budget in (
        ({}, "low", 100),
        ({"reasoning_effort": "high"}, "high", 100),
        ({"thinking": {"type": "enabled", "budget_tokens": 32000}}, "on", 100),
        ({"thinking_budget": 7}, "low", 7),
        ({"thinking_budget": -1}, "low", 100),
    ):
        found = wishes.check(Fields(fields), default)
        assert (found.effort, found.budget) == (effort, budget)


# what reaches the template

EMPTY = "<think>\n\n</think>\n\n"
ON_FOR_LOW = "takes off and on; on was used for low"


@pytest.mark.parametrize(
    ("api", "more"),
    [
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("chat", {"enable_thinking": False}),
        ("chat", {"reasoning_effort": "none"}),
        ("chat", {"reasoning": {"effort": "none"}}),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"}),
        ("responses", {"reasoning": {"effort": "none", "summary": "auto"}}),
        ("responses", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("messages", {"thinking": {"type": "disabled"}}),
        ("messages", {"enable_thinking": False}),
    ],
)
def test_a_request_that_wants_no_thinking_gets_a_reply_that_does_not_begin_in_a_thought(serve, api, more):
    serve = serve(SWITCHED)
    end = serve(USER, "Yes.", api, **more)
    assert end["message"] == {"role": "assistant", "content": "Yes."}
    assert serve.prompt.endswith(f"assistant\n{EMPTY}")
    # earlier replies do not begin so
    assert serve.text.endswith("assistant\nYes.")
    assert "remarks" not in end["held"]
    # the next request asks for nothing
    end = serve(USER, "Hm.\n</think>\n\nYes.", api)
    assert end["message"]["reasoning_content"] == "Hm.\n"
    assert serve.prompt.endswith("assistant\n<think>\n")


@pytest.mark.parametrize(
    ("api", "more", "shown"),
    [
        ("chat", {"reasoning_effort": "low"}, "low none"),
        ("chat", {"reasoning_effort": "xhigh"}, "high none"),
        ("chat", {"chat_template_kwargs": {"note": "a note", "reasoning_effort": "deep"}}, "deep a note"),
        ("chat", {"chat_template_kwargs": {"note": "a note"}, "reasoning_effort": "low"}, "low a note"),
        ("responses", {"reasoning": {"effort": "high"}}, "high none"),
        ("messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low none"),
    ],
)
def test_efforts_and_any_variable_reach_the_template(serve, api, more, shown):
    serve = serve(TOLD)
    serve(USER, "Hm.</think>Yes.", api, **more)
    assert serve.text.startswith(f"{shown}\n<|im_start|>")


@pytest.mark.parametrize(
    ("source", "api", "more", "remark"),
    [
        (PLAIN, "chat", {"reasoning_effort": "medium"}, "reasoning_effort: # has no thinking"),
        (SWITCHED, "chat", {"reasoning_effort": "low"}, f"reasoning_effort: # {ON_FOR_LOW}"),
        (SWITCHED, "responses", {"reasoning": {"effort": "low"}}, f"reasoning.effort: # {ON_FOR_LOW}"),
        (SWITCHED, "messages", {"output_config": {"effort": "low"}}, f"output_config.effort: # {ON_FOR_LOW}"),
        (TOLD, "messages", {"thinking": {"type": "disabled"}}, "thinking.type: # cannot switch thinking off"),
        (PLAIN, "chat", {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x: # does not read it"),
    ],
)
def test_an_answer_says_what_the_template_does_not_take(serve, source, api, more, remark):
    (said,) = serve(source)(USER, "Yes.", api, **more)["held"]["remarks"]
    assert said.startswith(remark.replace("#", "the model's chat template"))


def test_what_is_asked_for_in_so_many_words_is_refused_where_it_cannot_be(serve):
    refuse = serve(PLAIN)
    with pytest.raises(ApiError) as raised:
        refuse(USER, "Yes.", enable_thinking=True)
    assert (raised.value.status, raised.value.param) == (400, "enable_thinking")
    assert raised.value.message == "enable_thinking: the model's chat template has no thinking to switch on"
    # no thinking is what there is
    assert refuse(USER, "Yes.", enable_thinking=False)["message"]["content"] == "Yes."
    failing = serve("{% if effort == 'deep' %}{{ raise_exception('no such effort') }}{% endif %}" + PLAIN)
    with pytest.raises(ApiError) as raised:
        failing(USER, "Yes.", chat_template_kwargs={"effort": "deep"})
    assert (raised.value.status, raised.value.param) == (400, "chat_template_kwargs")
    assert "no such effort" in raised.value.message


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_a_chat_goes_on_under_another_effort_where_only_the_header_changes(serve, policy):
    serve = serve(SWITCHED, policy)
    chat, n_before = [*USER], 0
    for turn, off in enumerate((True, False, True)):
        more = {"chat_template_kwargs": {"enable_thinking": False}} if off else {}
        end = serve(chat, f"It is {turn}." if off else f"</think>It is {turn}.", **more)
        assert end["n_cached"] == n_before
        n_before = end["held"]["tokens"]
        chat += [end["message"], {"role": "user", "content": "And?"}]


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_a_chat_is_another_one_under_variables_that_change_its_beginning(serve, policy):
    serve = serve(TOLD, policy)
    end = serve(USER, "</think>Yes.", reasoning_effort="low")
    chat = [*USER, end["message"], {"role": "user", "content": "And?"}]
    end = serve(chat, "</think>Yes.", reasoning_effort="high")
    assert end["n_cached"] == 0
    assert serve.text.startswith("high none")
    n = end["held"]["tokens"]
    chat += [end["message"], {"role": "user", "content": "And?"}]
    assert serve(chat, "</think>Yes.", reasoning_effort="high")["n_cached"] == n


def test_a_server_starts_with_an_effort_that_its_template_takes(tmp_path):
    path = tmp_path / "thinker.gguf"
    source = tiny.CHAT_TEMPLATE.removesuffix("{% endif %}") + SWITCHED[SWITCHED.index("<think>") :]
    tiny.write_llama(path, chat_template=source, n_ctx_train=2048)
    options = ("--policy", "h2o", "--budget", "256")
    asked = {"messages": USER, "max_tokens": 4}
    with serving(path, *options, "--think", "off") as server:
        answers = [
            httpx.post(f"{server.url}/v1/chat/completions", json=asked | more, timeout=PATIENCE_S).json()
            for more in ({}, {"enable_thinking": True})
        ]
        messages = [answer["choices"][0]["message"] for answer in answers]
        assert ["reasoning_content" in message for message in messages] == [False, True]
    with serving(path, *options, env=os.environ | ONE_THREAD | {"KVTOOL_THINK": "low"}) as server:
        said = "--think low: the model's chat template takes off and on; it is left out"
        assert said in "".join(server.lines)
    refused = pytest.raises(AssertionError, match="--think low: the model's chat template takes off and on")
    with refused, serving(path, *options, "--think", "low"):
        pass
