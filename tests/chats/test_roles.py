"""Chats with roles, or with orders of roles, that a template does not support."""

from __future__ import annotations

import httpx2 as httpx
import numpy as np
import pytest

from kvtool.chats.prompt import prefix_tokens
from kvtool.chats.template import Template
from kvtool.errors import ModelError
from kvtool.llama.loaded.model import Model
from kvtool.serve.rendering import Rendering
from kvtool.serve.tools.conversion import tools_text
from kvtool.serve.tools.formats import HERMES, MISTRAL
from tests import tiny
from tests.blocking_policy import TIMEOUT_S
from tests.serve.http_requests import check_messages as check
from tests.serve.http_requests import check_tools
from tests.serve.subprocess_server import start_server
from tests.serve.test_serve_tools import CALLS, tool

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
GEMMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<{{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' ~ messages[0].content ~ '<</SYS>>' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ (system if loop.first else '') ~ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MISTRAL3 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% if m.role == 'user' %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{{ m.tool_calls[0].function | tojson }}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
QWEN35 = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role == 'user' %}{% set ns.n = 1 %}{% endif %}{% endfor %}"
    "{% if not ns.n %}{{ raise_exception('No user query found.') }}{% endif %}" + CHATML
)
FIRST_ONLY = "{% if messages[0].role == 'system' %}<s>{{ messages[0].content }}{% endif %}" + CHATML.replace(
    "in messages", "in messages if m.role != 'system'"
)
TWO_AT_MOST = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 > 1 %}{{ raise_exception('late') }}"
    "{% endif %}{% endfor %}" + CHATML
)
DROPS = CHATML.replace("in messages", "in messages if m.role != 'system'")


def chat_of(roles):
    """Return a chat with these roles (letters s, u, a and t). The content of a message is its index."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[role], "content": f"{n}"} for n, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("source", "roles", "text"),
    [
        # the template accepts these roles, so they stay
        (CHATML, "ssuuaasu", "<system>0<system>1<user>2<user>3<assistant>4<assistant>5<system>6<user>7<a>"),
        (CHATML, "au", "<assistant>0<user>1<a>"),
        (CHATML, "s", "<system>0<a>"),
        (CHATML.replace("m.content", "m.content | upper"), "su", "<system>0<user>1<a>"),
        (GEMMA2, "uau", "<user>0<end><model>1<end><user>2<end><model>"),
        (LLAMA2, "suau", "[INST]<<SYS>>0<</SYS>>1[/INST] 2</s>[INST]3[/INST]"),
        # the template has no system role
        (GEMMA2, "su", "<user>0\n\n1<end><model>"),
        (GEMMA2, "ssuau", "<user>0\n\n1\n\n2<end><model>3<end><user>4<end><model>"),
        (GEMMA2, "s", "<user>0<end><model>"),
        (GEMMA2, "sau", "<user>0<end><model>1<end><user>2<end><model>"),
        (DROPS, "su", "<user>0\n\n1<a>"),
        # the template puts the system prompt into the newest message, but kvtool puts it into the first
        (MISTRAL3, "suau", "[INST]0\n\n1[/INST] 2</s>[INST]3[/INST]"),
        # the template accepts only one system prompt, at the beginning
        (QWEN35, "ssuasu", "<system>0\n\n1<user>2<assistant>3<user>4<user>5<a>"),
        (TWO_AT_MOST, "ssuasu", "<system>0\n\n1<user>2<assistant>3<user>4<user>5<a>"),
        (FIRST_ONLY, "ssuasu", "<s>0\n\n1<user>2<assistant>3<user>4<user>5<a>"),
        (LLAMA2, "ssuasu", "[INST]<<SYS>>0\n\n1<</SYS>>2[/INST] 3</s>[INST]4\n\n5[/INST]"),
        # the template wants user and assistant to alternate
        (GEMMA2, "uuaau", "<user>0\n\n1<end><model>2\n\n3<end><user>4<end><model>"),
        (GEMMA2, "au", "<user><end><model>0<end><user>1<end><model>"),
        (LLAMA2, "sau", "[INST]<<SYS>>0<</SYS>>[/INST] 1</s>[INST]2[/INST]"),
        (LLAMA2, "s", "[INST]<<SYS>>0<</SYS>>[/INST]"),
        (QWEN35, "s", "<system>0<user><a>"),
    ],
)
def test_unsupported_roles_are_converted_for_the_template(source, roles, text):
    messages = chat_of(roles)
    assert Template(source, "", "").render(messages) == text
    assert messages == chat_of(roles)


def test_template_that_loops_over_tools_renders_without_tools():
    for source in ("{% for t in tools %}{{ t.name }}{% endfor %}", "{{ tools | length }}{{ tools | join }}"):
        template = Template(source + "{{ messages[0].content }}", "", "")
        assert template.render([{"role": "user", "content": "Hello"}]).endswith("Hello")
    # `tools is none` must still be true, although the templates above loop over `tools`
    assert Template("{{ tools is none }}", "", "").render([{"role": "user", "content": "."}]) == "True"


def test_template_that_accepts_no_chat_raises_its_own_error():
    template = Template("{{ raise_exception('no ' ~ messages | length) }}", "", "")
    with pytest.raises(Exception, match="no 3"):
        template.render(chat_of("ssu"))


TOOLS = check_tools([tool("now")])
CALL = {"role": "assistant", "content": None, "tool_calls": [{**CALLS[0]}]}
RESULT = {"role": "tool", "tool_call_id": CALLS[0]["id"], "content": "noon"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("roles") / "m.gguf"
    tiny.write_llama(path)
    return Model(path)


def rendering(model, source):
    return Rendering(model, Template(source, "", ""))


def text_of(model, tokens):
    return b"".join(model.piece(token, special=True) for token in tokens.tolist()).decode()


@pytest.mark.parametrize(
    ("source", "start"),
    [
        (GEMMA2, "<user>Be brief."),
        (LLAMA2, "[INST]<<SYS>>Be brief."),
        (MISTRAL3, "[INST]Be brief."),
        (DROPS, "<user>Be brief."),
        (QWEN35, "<system>Be brief."),
    ],
)
def test_system_prompt_is_pinned_wherever_the_template_puts_it(model, source, start):
    renderer = rendering(model, source)
    for roles in ("u", "uau", "uu"):
        tokens, n = renderer.whole(check([{"role": "system", "content": "Be brief."}, *chat_of(roles)]), [])
        assert text_of(model, tokens[:n]) == start
        assert text_of(model, tokens).count("Be brief.") == 1
    if source is MISTRAL3:
        # MISTRAL3 shows the tools before the newest message, so they are not in the pinned part
        chat = check([{"role": "system", "content": "Be brief."}, *chat_of("uau")])
        tokens, n = renderer.whole(chat, TOOLS)
        assert text_of(model, tokens[:n]) == start


def test_two_system_prompts_are_pinned_together(model):
    for source, start in ((CHATML, "<system>0\n\n1<user>"), (GEMMA2, "<user>0\n\n1\n\n")):
        renderer = rendering(model, source)
        tokens, n = renderer.whole(check(chat_of("ssu")), [])
        assert start.startswith(text_of(model, tokens[:n]))
        assert text_of(model, tokens[:n]).endswith("1")


@pytest.mark.parametrize("source", [GEMMA2, LLAMA2, DROPS, QWEN35])
def test_tools_are_described_and_pinned_if_the_template_has_no_tools(model, source):
    renderer = rendering(model, source)
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        tokens, n = renderer.whole(check([*system, *chat_of("uau")]), TOOLS)
        text = text_of(model, tokens)
        expected = tools_text(TOOLS) + ("\n\nBe brief." if system else "")
        assert text.count(expected) == 1
        assert text_of(model, tokens[:n]) == text[: text.index(expected) + len(expected)]
        assert renderer.format is HERMES


@pytest.mark.parametrize("source", [GEMMA2, LLAMA2, MISTRAL3, DROPS, QWEN35, CHATML])
def test_text_after_a_reply_equals_that_part_of_the_whole_chat(model, source):
    renderer = rendering(model, source)
    turns = [*chat_of("su"), {"role": "assistant", "content": "#"}, *chat_of("uausuu")]
    for tools in ([], TOOLS) if source is not MISTRAL3 else ([],):
        whole, _ = renderer.whole(check(turns), tools)
        after = text_of(model, renderer.following(check(turns), 3, tools))
        assert text_of(model, whole).rpartition("#")[2] == after


def test_tool_result_becomes_a_user_message_if_there_is_no_tool_role(model):
    turns = check([*chat_of("u"), CALL, RESULT])
    call = HERMES.written([("now", {})])
    answer = "<tool_response>\nnoon\n</tool_response>"
    for source, text in (
        (GEMMA2, f"<user>{tools_text(TOOLS)}\n\n0<end><model>{call}<end><user>{answer}<end><model>"),
        (LLAMA2, f"[INST]<<SYS>>{tools_text(TOOLS)}<</SYS>>0[/INST] {call}</s>[INST]{answer}[/INST]"),
    ):
        renderer = rendering(model, source)
        assert text_of(model, renderer.whole(turns, TOOLS)[0]) == text
        assert text_of(model, renderer.following(turns, 2, TOOLS)) == text.rpartition(call)[2]
        # kvtool merges the tool's result and the user's next message
        more = text_of(model, renderer.whole(check([*chat_of("u"), CALL, RESULT, *chat_of("u")]), TOOLS)[0])
        assert f"{answer}\n\n0" in more
    # this template has tools, but no role for their results
    raises = "{% if m.role == 'tool' %}{{ raise_exception('Only user and assistant') }}{% endif %}"
    listed = "{{ tools }}<tool_call>" + CHATML.replace("<{{ m.role }}>", raises + "<{{ m.role }}>")
    assert f"<user>{answer}<a>" in text_of(model, rendering(model, listed).whole(turns, TOOLS)[0])


def test_user_message_may_directly_follow_a_tool_call_or_result(model):
    renderer = rendering(model, MISTRAL3)
    assert renderer.format is MISTRAL
    for results in ([RESULT], []):
        text = text_of(model, renderer.whole(check([*chat_of("u"), CALL, *results, *chat_of("u")]), TOOLS)[0])
        assert text.startswith('[INST]0[/INST][TOOL_CALLS][{"name": "now", "arguments": {}}]</s>')
        assert text.endswith("[INST]0[/INST]")
    # kvtool merges a reply and the tool call that follows it
    text = text_of(model, renderer.whole(check([*chat_of("ua"), CALL, RESULT, *chat_of("a")]), TOOLS)[0])
    assert text.count("</s>") == 2


GEMMA4 = (
    "{{ tools | tojson }}{% for m in messages if m.role != 'tool' %}<{{ m.role }}>"
    "{% for c in m.tool_calls %}{{ '<|tool_call>call:' ~ c.function.name }}{}<tool_call|>{% endfor %}"
    "{% for c in m.tool_calls %}{% for r in messages if r.tool_call_id == c.id %}"
    "<|tool_response>{{ c.function.name }}:{{ r.content }}<tool_response|>{% endfor %}{% endfor %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<a>{% endif %}"
)


def test_tool_results_that_belong_to_the_reply_follow_its_calls(model):
    renderer = rendering(model, GEMMA4)
    turns = check([*chat_of("su"), CALL, RESULT])
    result = "<|tool_response>now:noon<tool_response|>"
    assert text_of(model, renderer.whole(turns, TOOLS)[0]).endswith(
        f"<|tool_call>call:now{{}}<tool_call|>{result}"
    )
    assert text_of(model, renderer.following(turns, 3, TOOLS)) == result
    turns = [*turns, *check([{"role": "assistant", "content": "Noon."}, *chat_of("u")])]
    assert text_of(model, renderer.following(turns, 5, TOOLS)) == "<user>0<a>"
    assert text_of(model, renderer.following(turns, 3, TOOLS)) == f"{result}<assistant>Noon.<user>0<a>"
    leaves_out = rendering(model, GEMMA4.replace("<tool_call|>", ""))
    with pytest.raises(ModelError, match="leaves calls out"):
        leaves_out.following(turns, 3, TOOLS)


def test_pinned_prefix_consists_of_whole_tokens(model):
    tokens, n = rendering(model, GEMMA2).whole(check(chat_of("su")), [])
    again, n_again = prefix_tokens(model, text_of(model, tokens), len("<user>0"))
    assert n == n_again
    assert np.array_equal(tokens, again)


def test_chat_with_tools_continues_if_the_template_lacks_system_and_tools(tmp_path):
    path = tmp_path / "gemma2.gguf"
    tiny.write_llama(path, chat_template=GEMMA2, n_ctx_train=4096)
    turns = [{"role": "system", "content": "Be brief."}, *chat_of("u")]
    with start_server(path, "--budget", "1024", "--temp", "0", "-n", "8") as server:
        n_all = 0
        for more in ([CALL, RESULT], chat_of("su"), []):
            body = {"messages": turns, "tools": TOOLS}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S).json()
            usage = answer["usage"]
            # earlier text is not read again
            assert usage["prompt_tokens_details"]["cached_tokens"] == n_all
            n_all = usage["total_tokens"]
            turns += [answer["choices"][0]["message"], *more]


def test_empty_reply_gets_a_text_if_the_template_needs_one():
    refuses = CHATML.replace(
        "<{{ m.role", "{% if not m.content %}{{ raise_exception('no') }}{% endif %}<{{ m.role"
    )
    chat = [
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", ""), ("user", "b"))
    ]
    assert Template(refuses, "", "").render(chat) == "<user>a<assistant>...<user>b<a>"
    assert Template(CHATML, "", "").render(chat) == "<user>a<assistant><user>b<a>"
