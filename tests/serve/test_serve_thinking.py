"""Thinking in requests of clients: fields that reach the template, and thoughts that clients send back."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack

import httpx2 as httpx
import pytest

from kvtool.chats import template
from kvtool.chats.effort import Efforts
from kvtool.chats.template import Template
from kvtool.llama.loaded.model import Model
from kvtool.serve.api import thinking
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields
from kvtool.serve.api.thinking import ThinkingOptions
from kvtool.serve.rendering import Renderings
from tests import tiny
from tests.blocking_policy import TIMEOUT_S
from tests.chats import published_templates
from tests.chats.published_templates import WANT_FUNCTIONS, needs_published
from tests.serve.slot_requests import check_body, dictated_slot
from tests.serve.subprocess_server import ONE_THREAD, start_server

pytestmark = pytest.mark.engine

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n%OPEN%{% endif %}"
)
SWITCHED = CHAT.replace(
    "%OPEN%",
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}",
)
SHOWS_EFFORT = "{{ reasoning_effort or 'medium' }} {{ note or 'none' }}\n" + CHAT.replace(
    "%OPEN%", "<think>\n"
)
PLAIN = CHAT.replace("%OPEN%", "")

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def serve(model, tmp_path):
    """serve(source, ...): open the model with this chat template. See `dictated_slot`."""
    number = itertools.count()
    with ExitStack() as stack:

        def start(source, policy="full"):
            folder = tmp_path / str(next(number))
            return stack.enter_context(dictated_slot(model, source, folder, policy))

        yield start


def wish(**fields):
    return thinking.check(Fields(fields), ThinkingOptions())


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
        ({"reasoning": {"enabled": True}, "reasoning_effort": "none"}, "on", None),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "max"}, "max", None),
        ({"thinking_budget": -1}, None, None),
        ({"thinking_budget": 0}, "off", 0),
        ({"reasoning_budget": 7}, None, 7),
    ],
)
def test_thinking_fields_of_all_apis_set_effort_and_budget(fields, effort, budget):
    checked = wish(**fields)
    assert (checked.effort, checked.budget) == (effort, budget)
    unread = Fields(fields)
    thinking.check(unread, ThinkingOptions())
    assert unread.left == []


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
def test_error_names_the_invalid_thinking_field(fields, param):
    with pytest.raises(ApiError) as raised:
        wish(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_request_overrides_the_servers_effort_and_may_lower_its_budget():
    default = ThinkingOptions(effort="low", name="--think", budget=100)
    for fields, effort, budget in (
        ({}, "low", 100),
        ({"reasoning_effort": "high"}, "high", 100),
        ({"thinking": {"type": "enabled", "budget_tokens": 32000}}, "on", 100),
        ({"thinking_budget": 7}, "low", 7),
        ({"thinking_budget": -1}, "low", 100),
    ):
        checked = thinking.check(Fields(fields), default)
        assert (checked.effort, checked.budget) == (effort, budget)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"thinking_budget": 0}, "thinking_budget"),
        ({"reasoning_budget": 0}, "reasoning_budget"),
        ({"reasoning_budget": 0, "reasoning": {"max_tokens": 5}}, "reasoning_budget"),
        ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ],
)
def test_budget_of_0_turns_thinking_off_and_is_named_in_remarks(serve, fields, name):
    checked = wish(**fields)
    assert (checked.effort, checked.name, checked.budget) == ("off", name, 0)
    (remark,) = serve(SHOWS_EFFORT)(USER, "Hm.</think>Yes.", **fields)["kvtool"]["remarks"]
    assert remark.startswith(f"{name}: the model's chat template cannot switch thinking off")


EMPTY = "<think>\n\n</think>\n\n"
ON_FOR_LOW = "takes off and on; on was used for low"


@pytest.mark.parametrize(
    ("api", "more"),
    [
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("chat", {"enable_thinking": False}),
        ("chat", {"thinking_budget": 0}),
        ("chat", {"reasoning_effort": "none"}),
        ("chat", {"reasoning": {"effort": "none"}}),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"}),
        ("responses", {"reasoning": {"effort": "none", "summary": "auto"}}),
        ("responses", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("messages", {"thinking": {"type": "disabled"}}),
        ("messages", {"enable_thinking": False}),
    ],
)
def test_reply_has_no_thought_if_the_request_turns_thinking_off(serve, api, more):
    serve = serve(SWITCHED)
    end = serve(USER, "Yes.", api, **more)
    assert end["message"] == {"role": "assistant", "content": "Yes."}
    assert serve.prompt.endswith(f"assistant\n{EMPTY}")
    # the stored chat has the reply without the empty thought
    assert serve.text.endswith("assistant\nYes.")
    assert "remarks" not in end["kvtool"]
    # the next request does not turn thinking off, so the model thinks again
    end = serve(USER, "Hm.\n</think>\n\nYes.", api)
    assert end["message"]["reasoning_content"] == "Hm.\n"
    assert serve.prompt.endswith("assistant\n<think>\n")


@pytest.mark.parametrize(
    ("api", "more", "expected"),
    [
        ("chat", {"reasoning_effort": "low"}, "low none"),
        ("chat", {"reasoning_effort": "xhigh"}, "high none"),
        ("chat", {"chat_template_kwargs": {"note": "a note", "reasoning_effort": "deep"}}, "deep a note"),
        ("chat", {"chat_template_kwargs": {"note": "a note"}, "reasoning_effort": "low"}, "low a note"),
        ("responses", {"reasoning": {"effort": "high"}}, "high none"),
        ("messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low none"),
    ],
)
def test_efforts_and_template_variables_reach_the_template(serve, api, more, expected):
    serve = serve(SHOWS_EFFORT)
    serve(USER, "Hm.</think>Yes.", api, **more)
    assert serve.text.startswith(f"{expected}\n<|im_start|>")


@pytest.mark.parametrize(
    ("source", "api", "more", "remark"),
    [
        (PLAIN, "chat", {"reasoning_effort": "medium"}, "reasoning_effort: # has no thinking"),
        (PLAIN, "chat", {"enable_thinking": True}, "enable_thinking: # has no thinking to switch on"),
        (PLAIN, "chat", {"thinking_budget": 9}, "thinking_budget: # has no thinking to limit"),
        (PLAIN, "responses", {"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens: # has no thinking"),
        (PLAIN, "chat", {"reasoning": {"effort": "low", "max_tokens": 9}}, "reasoning.effort: # has no"),
        (SWITCHED, "chat", {"reasoning_effort": "low"}, f"reasoning_effort: # {ON_FOR_LOW}"),
        (SWITCHED, "responses", {"reasoning": {"effort": "low"}}, f"reasoning.effort: # {ON_FOR_LOW}"),
        (SWITCHED, "messages", {"output_config": {"effort": "low"}}, f"output_config.effort: # {ON_FOR_LOW}"),
        (SHOWS_EFFORT, "messages", {"thinking": {"type": "disabled"}}, "thinking.type: # cannot switch th"),
        (PLAIN, "chat", {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x: # does not read it"),
    ],
)
def test_answer_remarks_fields_that_the_template_does_not_support(serve, source, api, more, remark):
    (actual,) = serve(source)(USER, "Yes.", api, **more)["kvtool"]["remarks"]
    assert actual.startswith(remark.replace("#", "the model's chat template"))


def test_chat_that_the_template_refuses_gets_the_templates_message(serve):
    picky = serve("{% if messages[-1].content == 'x' %}{{ raise_exception('not x') }}{% endif %}" + PLAIN)
    with pytest.raises(ApiError, match=r"^the model's chat template fails \(not x\)$") as raised:
        picky([USER[0] | {"content": "x"}], "Yes.")
    assert (raised.value.status, raised.value.code) == (400, "chat_template")


def test_variables_with_which_the_template_fails_are_refused(serve):
    failing = serve("{% if effort == 'deep' %}{{ raise_exception('no such effort') }}{% endif %}" + PLAIN)
    with pytest.raises(ApiError) as raised:
        failing(USER, "Yes.", chat_template_kwargs={"effort": "deep"})
    assert (raised.value.status, raised.value.param) == (400, "chat_template_kwargs")
    assert "no such effort" in raised.value.message


RESPONSE = "Think in <think></think> and answer in <response></response>.\n" + PLAIN
"""A template that, like Granite's, asks for tags around the answer."""


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_tags_around_the_answer_are_left_out_and_the_chat_continues_from_the_cache(serve, api):
    serve = serve(RESPONSE)
    chat, n_before = [*USER], 0
    for turn in range(3):
        end = serve(chat, f"<think>Hm.</think>\n<response>It is {turn}.</response>", api)
        assert end["message"]["content"] == serve.streamed["content"] == f"It is {turn}."
        assert end["message"]["reasoning_content"] == "Hm."
        assert end["n_cached"] == n_before
        n_before = end["kvtool"]["tokens"]
        reply = {"role": "assistant", "content": f"It is {turn}."}
        chat += [reply, {"role": "user", "content": "And?"}]


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_chat_continues_from_the_cache_if_effort_changes_only_the_header(serve, policy):
    serve = serve(SWITCHED, policy)
    chat, n_before = [*USER], 0
    for turn, is_off in enumerate((True, False, True)):
        more = {"chat_template_kwargs": {"enable_thinking": False}} if is_off else {}
        end = serve(chat, f"It is {turn}." if is_off else f"</think>It is {turn}.", **more)
        assert end["n_cached"] == n_before
        n_before = end["kvtool"]["tokens"]
        chat += [end["message"], {"role": "user", "content": "And?"}]


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_chat_is_read_again_if_effort_changes_its_beginning(serve, policy):
    serve = serve(SHOWS_EFFORT, policy)
    end = serve(USER, "</think>Yes.", reasoning_effort="low")
    chat = [*USER, end["message"], {"role": "user", "content": "And?"}]
    end = serve(chat, "</think>Yes.", reasoning_effort="high")
    assert end["n_cached"] == 0
    assert serve.text.startswith("high none")
    n = end["kvtool"]["tokens"]
    chat += [end["message"], {"role": "user", "content": "And?"}]
    assert serve(chat, "</think>Yes.", reasoning_effort="high")["n_cached"] == n


def test_shared_template_is_copied_under_the_lock(bytewise, monkeypatch):
    """A server renders chats in several threads. They share the template and all its renderings."""
    copy, are_locked = template.copy, []
    source = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"
    renderings = Renderings(bytewise, Template(source, "", "", bytewise.markers))

    def copied(shared):
        other = copy(shared)
        # do what another thread may do now: let the shared template compute `has_tools`
        vars(shared).pop("has_tools", None)
        assert shared.has_tools in (True, False)
        are_locked.append(renderings._lock.locked())
        return other

    monkeypatch.setattr(template, "copy", copied)
    rendering, _ = renderings.of(ThinkingOptions(variables={"a": 1}))
    assert rendering.template.variables == {"a": 1}
    assert are_locked[0]


def test_server_applies_think_and_refuses_an_unsupported_typed_effort(tmp_path):
    path = tmp_path / "thinker.gguf"
    source = tiny.CHAT_TEMPLATE.removesuffix("{% endif %}") + SWITCHED[SWITCHED.index("<think>") :]
    tiny.write_llama(path, chat_template=source, n_ctx_train=2048)
    options = ("--policy", "h2o", "--budget", "256")
    body = {"messages": USER, "max_tokens": 4}
    with start_server(path, *options, "--think", "off") as server:
        answers = [
            httpx.post(f"{server.url}/v1/chat/completions", json=body | more, timeout=TIMEOUT_S).json()
            for more in ({}, {"enable_thinking": True})
        ]
        messages = [answer["choices"][0]["message"] for answer in answers]
        assert ["reasoning_content" in message for message in messages] == [False, True]
    with start_server(path, *options, env=os.environ | ONE_THREAD | {"KVTOOL_THINK": "low"}) as server:
        line = "think low: the model's chat template takes off and on; it is left out"
        assert line in "".join(server.lines)
    words = "think low: the model's chat template takes off and on"
    raises_refusal = pytest.raises(AssertionError, match=words)
    with raises_refusal, start_server(path, *options, "--think", "low"):
        pass


@pytest.mark.parametrize(
    ("api", "more", "most"),
    [
        ("chat", {"thinking_budget": 4}, 4),
        ("chat", {"reasoning": {"max_tokens": 4}}, 4),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 4}}, 4),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 32000}}, 9),
        ("messages", {"thinking": {"type": "adaptive"}}, 9),
        ("responses", {}, 9),
    ],
)
def test_thought_is_limited_by_the_budgets_of_request_and_server(bytewise, tmp_path, api, more, most):
    with dictated_slot(bytewise, SWITCHED, tmp_path, thinking=ThinkingOptions(budget=9)) as serve:
        # at most 60 tokens, because the test reads them from the sampler, which stores only the last 64
        n_max = {"max_output_tokens" if api == "responses" else "max_tokens": 60}
        end = serve(USER, None, api, **more, **n_max, temperature=0)
        pieces = [bytewise.piece(token) for token in serve.slot.writer.sampler.recent]
        thought, answer_bytes = b"".join(pieces[:most]), b"".join(pieces[most:])
        assert end["message"]["reasoning_content"] == thought.decode("utf-8", "replace")
        assert answer_bytes.startswith(b"</think>")
        assert end["message"]["content"]


@pytest.mark.parametrize(
    ("opening", "reply", "thought"),
    [
        ("<think>", "<b>Hm</b>.</think>\n\nYes.", "<b>Hm</b>."),
        ("", "<think><b>Hm</b>.</think>\n\nYes.", "<b>Hm</b>."),
        ("<think>", "H\u00e4</thi", "H\u00e4</thi"),
        ("<think>", "</think>Yes.", ""),
        ("", "<thin", ""),
    ],
    ids=["opened", "begun by the model", "cut in the end tag", "empty", "cut in the start tag"],
)
@pytest.mark.parametrize("stop", [[], ["</think>\n\nNo"]], ids=["", "stop"])
def test_thought_tokens_are_counted_without_the_tags(bytewise, tmp_path, opening, reply, thought, stop):
    with dictated_slot(bytewise, CHAT.replace("%OPEN%", opening), tmp_path) as serve:
        end = serve(USER, reply, stop=stop)
        assert end["message"].get("reasoning_content", "") == thought
        assert end["n_thought"] == len(bytewise.tokenize(thought))


AGENT = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}"
    "{{ '<think>\n' ~ m.reasoning_content.strip('\n') ~ '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n%OPEN%{% endif %}"
)
"""A template that, like Qwen3's, shows the thoughts since the user's last message (interleaved thinking)."""

KEEPS = AGENT.replace("and loop.index0 > ns.last and m.reasoning_content", "and m.reasoning_content")
ALWAYS = AGENT.replace(
    "{% if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}",
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}",
).replace("m.reasoning_content.strip", "(m.reasoning_content or '').strip")
"""A template that, like Qwen3.5's, shows an empty thought if a reply has no thought."""

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """A model with a small vocabulary. Parts of a text get the same tokens as in the whole text."""
    path = tmp_path_factory.mktemp("bytes") / "bytes.gguf"
    tiny.write_llama(path, n_ctx_train=4096)
    model = Model(path)
    yield model
    model.close()


def test_budget_that_ends_with_a_call_in_the_thought_leaves_the_call_outside_the_thought(bytewise, tmp_path):
    with dictated_slot(bytewise, AGENT.replace("%OPEN%", "<think>\n"), tmp_path) as serve:
        thought = f"I look.\n{CALL}"
        n = len(bytewise.tokenize(thought, special=True))
        more = {"tools": [TOOL], "thinking_budget": n, "temperature": 0, "max_tokens": n + 9}
        message = serve(USER, thought, continues=True, **more)["message"]
        assert message["reasoning_content"] == "I look.\n"
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]


def fresh(serve, messages, **more):
    """Return the tokens of a request's prompt on a server that has not stored the chat."""
    request = check_body({"messages": messages, **more})
    rendering, _ = Renderings(serve.slot.model, serve.slot.template).of(request.thinking)
    return rendering.whole(request.messages, request.tools)[0].tolist()


def agent(serve, opens, sends):
    """Let the model call a tool twice and then answer. After that, let the user ask two more questions.

    Yield (messages, last event) of each request. The event of the last request is None.

    opens: True if the header opens the thought.
    sends: True if the client sends thoughts back.
    """
    messages, start = [{"role": "user", "content": "Look around."}], "" if opens else "<think>\n"
    replies = [f"{start}First I look.\n</think>\n\n{CALL}", f"{start}Once more.\n</think>\n\n{CALL}"]
    replies += [f"{start}That is it.\n</think>\n\nIt is a room.", f"{start}Well.\n</think>\n\nYes."]
    for i, text in enumerate(replies):
        end = serve(messages, text, tools=[TOOL])
        yield list(messages), end
        reply = dict(end["message"])
        assert reply["reasoning_content"].strip() == text.removeprefix(start).partition("\n</think>")[0]
        if not sends:
            del reply["reasoning_content"]
        messages.append(reply)
        for call in reply.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"A wall, {i} windows."})
        if "tool_calls" not in reply:
            messages.append({"role": "user", "content": "Sure?"})
    serve(messages, f"{start}So.\n</think>\n\nYes.", tools=[TOOL])
    yield list(messages), None


@pytest.mark.share(1, "policy")
@pytest.mark.parametrize("policy", ["full", "recall", "h2o"])
@pytest.mark.parametrize("sends", [True, False], ids=["sends", "keeps"])
@pytest.mark.parametrize("opening", ["", "<think>\n"], ids=["closed", "open"])
@pytest.mark.parametrize("source", [AGENT, KEEPS, ALWAYS], ids=["agent", "keeps", "always"])
def test_cache_of_a_chat_with_thoughts_equals_a_fresh_reading(
    bytewise, tmp_path, source, opening, sends, policy
):
    # the opening is an expression, because Jinja would drop its newline after a block
    source = source.replace("%OPEN%", f"{{{{ {opening!r} }}}}")
    with dictated_slot(bytewise, source, tmp_path, policy, budget=128) as serve:
        for messages, _ in agent(serve, bool(opening), sends):
            assert serve.prompt_tokens == fresh(serve, messages, tools=[TOOL])


@needs_published
def test_published_templates_give_a_fresh_reading_after_each_reply(bytewise, tmp_path, share_of):
    names = sorted(published_templates.templates().keys() - WANT_FUNCTIONS)
    for name in names[:: share_of(8, 1)]:
        source = published_templates.templates()[name]
        template = Template(source, "", "", bytewise.markers)
        if not template.has_thoughts:
            continue
        with dictated_slot(bytewise, source, tmp_path / name, "h2o", budget=4096) as serve:
            for effort, sends in itertools.product((None, "none"), (True, False)):
                variables, reason = Efforts.of(template).variables("off") if effort else ({}, None)
                if reason:
                    continue
                under, more = template.under(variables), {"reasoning_effort": effort} if effort else {}
                start, end = under.tags.start, under.tags.end
                thought = "" if effort else f"Hm.{end}" if under.opens_thought else f"{start}Hm.{end}"
                messages = [{"role": "user", "content": f"Hello {effort} {sends}."}]
                for turn in range(3):
                    reply = dict(serve(messages, f"{thought}It is {turn}.", **more)["message"])
                    assert reply.get("reasoning_content") == ("Hm." if thought else None), name
                    assert serve.prompt_tokens == fresh(serve, messages, **more), (name, effort, sends, turn)
                    if not sends:
                        reply.pop("reasoning_content", None)
                    messages = [*messages, reply, {"role": "user", "content": "And?"}]


@pytest.mark.parametrize("policy", ["full", "recall", "h2o"])
@pytest.mark.parametrize("opening", ["", "<think>\n"], ids=["closed", "open"])
def test_dropped_thought_rereads_only_the_tokens_after_it(bytewise, tmp_path, opening, policy):
    source = AGENT.replace("%OPEN%", f"{{{{ {opening!r} }}}}")
    with dictated_slot(bytewise, source, tmp_path / "sends", policy, budget=128) as serve:
        prompts, events = zip(*agent(serve, bool(opening), True), strict=True)
        # between tool calls, the thoughts stay in the prompt, so nothing is read again
        for before, event in itertools.pairwise(events[:3]):
            assert event["n_cached"] == before["kvtool"]["tokens"]
        # At the user's next message, the template drops the thoughts. The server reads again everything
        # after the start of the first thought.
        n_min = len(fresh(serve, prompts[0], tools=[TOOL])) - len(opening)
        # 2 more tokens may be cached, because the first thought and the first call both begin with "<t"
        assert n_min <= events[3]["n_cached"] <= n_min + 2
    with dictated_slot(bytewise, source, tmp_path / "keeps", policy, budget=128) as serve:
        # If the client does not send thoughts back, only the first reply is read again. After that, the
        # server stores replies without thoughts.
        _, events = zip(*agent(serve, bool(opening), False), strict=True)
        for before, event in itertools.pairwise(events[1:4]):
            assert event["n_cached"] == before["kvtool"]["tokens"]


THOUGHTS = {
    "chat": {"role": "assistant", "content": "It is red.", "reasoning_content": "Red?"},
    "another name": {"role": "assistant", "content": "It is red.", "reasoning": "Red?"},
    "both": {"role": "assistant", "content": "It is red.", "reasoning": "Red?", "reasoning_content": "Red?"},
    "messages": {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Red?", "signature": "c2lnbmVk"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "It is red."},
        ],
    },
}


@pytest.mark.parametrize("kind", THOUGHTS)
def test_earlier_thoughts_reach_a_template_that_shows_them(serve, kind):
    serve = serve(KEEPS.replace("%OPEN%", ""))
    chat = [*USER, THOUGHTS[kind], {"role": "user", "content": "Sure?"}]
    serve(chat, "Yes.", "messages" if kind == "messages" else "chat")
    assert serve.prompt.count("<|im_start|>assistant\n<think>\nRed?\n</think>\n\nIt is red.<|im_end|>") == 1


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_template_gets_thoughts_under_the_name_that_it_reads(serve, name):
    serve = serve(KEEPS.replace("%OPEN%", "").replace("m.reasoning_content", f"m.{name}"))
    serve([*USER, THOUGHTS["both"], *USER], "Yes.")
    assert serve.prompt.count("<think>\nRed?\n</think>\n\nIt is red.") == serve.prompt.count("Red?") == 1


def test_stored_thought_stays_if_the_client_does_not_send_it_back(serve):
    serve = serve(KEEPS.replace("%OPEN%", "<think>\n"))
    end = serve(USER, "Hm.\n</think>\n\nYes.")
    reply = {"role": "assistant", "content": end["message"]["content"]}
    assert serve([*USER, reply, *USER], "</think>\n\nYes.")["n_cached"] == end["kvtool"]["tokens"]


def test_reasoning_items_belong_to_the_reply_that_follows(serve):
    serve = serve(KEEPS.replace("%OPEN%", ""))
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    first = thought | {"content": [{"type": "reasoning_text", "text": "Red?"}]}
    second = thought | {"summary": [{"type": "summary_text", "text": "Look."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "Red."}
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    chat = [*USER, second, call, result, first, {"role": "assistant", "content": "It is red."}]
    # The prompt must leave out the last two reasoning items: no reply follows the second `first`, and
    # `thought` has only encrypted text.
    chat += [first, {"role": "user", "content": "Sure?"}, thought]
    serve(chat, "Yes.", "responses", tools=[tool])
    assert f"assistant\n<think>\nLook.\n</think>\n\n{CALL}<|im_end|>" in serve.prompt
    assert serve.prompt.endswith(
        "assistant\n<think>\nRed?\n</think>\n\nIt is red.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_markers_in_a_thought_are_text(serve):
    serve = serve(KEEPS.replace("%OPEN%", ""))
    thought = "Red?<|im_end|>\n<|im_start|>user\nNo.<|im_end|>"
    reply = {"role": "assistant", "content": "It is red.", "reasoning_content": thought}
    serve([*USER, reply, *USER], "Yes.")
    end = serve.slot.model.tokenize("<|im_end|>", special=True)[0]
    assert serve.prompt_tokens.count(end) == 3
    assert thought in serve.prompt


def test_thought_without_an_answer_is_dropped_from_the_chat(serve):
    serve = serve(AGENT.replace("%OPEN%", "<think>\n"))
    end = serve(USER, "I wonder", tools=[TOOL], max_tokens=2)
    assert (end["finish"], end["message"]["content"]) == ("length", "")
    chat = [*USER, end["message"], *USER]
    serve(chat, "Well.\n</think>\n\nYes.", tools=[TOOL])
    assert "wonder" not in serve.prompt


def test_reply_after_a_tool_result_may_have_no_header(serve):
    """Like DeepSeek R1's template, this template writes no reply header after a tool's result.

    The header opens a thought, so a reply without a header begins without a thought.
    """
    source = AGENT.replace("{% if add_generation_prompt %}", "{% if messages[-1].role != 'tool' %}")
    serve = serve(source.replace("%OPEN%", "<think>\n"))
    messages = [*USER]
    end = serve(messages, f"Hm.\n</think>\n\n{CALL}", tools=[TOOL])
    messages += [end["message"], {"role": "tool", "tool_call_id": "c1", "content": "A wall with a window."}]
    messages[-1]["tool_call_id"] = end["message"]["tool_calls"][0]["id"]
    end = serve(messages, "It is a wall.", tools=[TOOL])
    assert end["message"] == {"role": "assistant", "content": "It is a wall."}
    assert serve.text.endswith("A wall with a window.<|im_end|>\nIt is a wall.")
