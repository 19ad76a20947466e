"""Efforts: a user's wish for more or less thinking is converted to variables of a chat template."""

from __future__ import annotations

import re
from functools import partial

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtool.chats.effort import LEVELS, OFF, ON, Efforts
from kvtool.chats.template import Template, _Generation
from kvtool.errors import ModelError
from tests.chats import published_templates
from tests.chats.published_templates import WANT_FUNCTIONS, needs_published

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}[assistant] %OPEN%{% endif %}"
USER = [{"role": "user", "content": "Hello"}]


def template_of(opening="", before=""):
    return Template(before + CHAT + HEADER.replace("%OPEN%", opening), "", "")


SWITCHED = template_of(
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
OPENS = template_of("<think>{% if thinking is defined and not thinking %}</think>{% endif %}")
WRITES = template_of(before="{{ 'Reasoning: ' ~ (reasoning_effort | default('medium')) }}<think>")
TAKES_THREE = template_of(
    before="{% if reasoning_effort not in ['low', 'high', 'max', undefined] %}"
    "{{ raise_exception('no such effort') }}{% endif %}{{ reasoning_effort }}</think>"
)
ALWAYS = template_of("<think>\n")
PLAIN = template_of()
COUNTS = template_of(before="{{ 'no </think>' if thinking_budget == 0 else 'at most ' ~ thinking_budget }}")


LOW, HIGH = {"reasoning_effort": "low"}, {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("template", "effort", "variables", "reason"),
    [
        (SWITCHED, "off", {"enable_thinking": False}, None),
        (SWITCHED, "on", {"enable_thinking": True}, None),
        (SWITCHED, "high", {"enable_thinking": True}, "takes off and on; on was used for high"),
        (SWITCHED, "minimal", {"enable_thinking": False}, "takes off and on; off was used for minimal"),
        (OPENS, "off", {"thinking": False}, None),
        (WRITES, "low", LOW, None),
        (WRITES, "on", {}, None),
        (WRITES, "off", LOW, "cannot switch thinking off; low is its least effort"),
        (WRITES, "minimal", LOW, "takes on, low, medium and high; low was used for minimal"),
        (WRITES, "max", HIGH, "takes on, low, medium and high; high was used for max"),
        (TAKES_THREE, "medium", LOW, "takes on, low, high and max; low was used for medium"),
        (TAKES_THREE, "max", {"reasoning_effort": "max"}, None),
        (ALWAYS, "on", {}, None),
        (ALWAYS, "off", {}, "cannot switch thinking off"),
        (ALWAYS, "low", {}, "takes only on; on was used for low"),
        (PLAIN, "off", {}, None),
        (PLAIN, "on", {}, "has no thinking to switch on"),
        (PLAIN, "medium", {}, "has no thinking to switch on"),
        (COUNTS, "off", {"thinking_budget": 0}, None),
    ],
)  # fmt: skip
def test_effort_sets_the_variables_that_the_template_reads(template, effort, variables, reason):
    assert Efforts.of(template).variables(effort) == (variables, reason)


def test_thinking_budget_reaches_a_template_that_reads_it():
    assert Efforts.of(COUNTS).variables("on", 64) == ({"thinking_budget": 64}, None)
    assert Efforts.of(COUNTS).variables("off", 64) == ({"thinking_budget": 0}, None)
    assert Efforts.of(SWITCHED).variables("on", 64) == ({"enable_thinking": True}, None)


def test_template_variables_change_rendering_and_derived_properties():
    without_thoughts = SWITCHED.under({"enable_thinking": False})
    assert SWITCHED.reply_start().endswith("[assistant] ")
    assert without_thoughts.reply_start().endswith("[assistant] <think></think>")
    assert (OPENS.opens_thought, OPENS.under({"thinking": False}).opens_thought) == (True, False)
    assert OPENS.under({"thinking": False}).under({}).opens_thought
    # a variable may have any JSON value, but it cannot override `messages` or `add_generation_prompt`
    other = template_of(before="{{ names | join(' ') }} {{ n + 1 }} ").under({"names": ["a", "b"], "n": 3})
    assert other.render(USER).startswith("a b 4 [user] Hello")
    assert PLAIN.under({"messages": [], "add_generation_prompt": False}).render(USER) == PLAIN.render(USER)


def test_a_template_names_the_variables_that_it_reads():
    assert "enable_thinking" in SWITCHED.reads
    assert "thinking" not in SWITCHED.reads
    # `Efforts.of` finds the same levels after `reads` was computed
    assert TAKES_THREE.reads
    assert list(Efforts.of(TAKES_THREE).levels) == ["low", "high", "max"]


SWITCHES = {
    "enable_thinking": (
        *("Apertus-8B-Instruct", "Bielik-11B-v3.0-Instruct", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
        *("GLM-4.6", "GLM-4.7-Flash", "HuggingFaceTB-SmolLM3-3B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        *("Qwen-QwQ-32B", "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Reka-Edge", "Spark2.5", "llama-cpp-rwkv-world"),
        *(f"deepseek-ai-DeepSeek-{name}" for name in ("R1-Distill-Qwen-32B", "V3.1", "V3.2")),
        *("deepseek-ai-DeepSeek-V4-Flash-0731", "deepseek-ai-DeepSeek-V4", "google-gemma-4-31B-it"),
        *("google-gemma-4-31B-it-interleaved", "inclusionai-ling-3.0-flash", "openbmb-MiniCPM5-1B"),
        *("poolside-Laguna-S-2.1", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"),
    ),
    "thinking": ("Kimi-K3", "ibm-granite-granite-3.3-2B-Instruct"),
    "reasoning": ("Cohere2MoE",),
    "thinking_mode": ("MiniMax-M3",),
    "reasoning_effort": ("tencent-Hy3",),
    "thinking_budget": ("ByteDance-Seed-OSS",),
}  # fmt: skip
"""For each variable: names of the templates whose thinking it switches on and off.

The list was made by reading the templates.
"""

LEVELED = {
    "Kimi-K3": ("thinking_effort", ("low", "high", "max")),
    "deepseek-ai-DeepSeek-V4": ("reasoning_effort", ("max",)),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("reasoning_effort", ("high", "max")),
    "muse-glimmer": ("reasoning_strength", ("low", "medium", "high")),
    "openai-gpt-oss-120b": ("reasoning_effort", ("low", "medium", "high")),
    "tencent-Hy3": ("reasoning_effort", ("low", "high")),
    "upstage-Solar-Open-100B": ("reasoning_effort", ("minimal", "low", "high")),
}
"""Templates that accept levels of effort: the name of the variable, and its levels."""


def with_jinja_alone(source):
    """Return a function that renders the chat with Jinja alone. Its arguments are template variables."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )

    def fail(reason):
        raise jinja2.TemplateError(reason)

    environment.globals.update(
        bos_token="<s>", eos_token="</s>", raise_exception=fail, strftime_now=lambda form: "today"
    )
    chat = partial(environment.from_string(source).render, messages=USER, add_generation_prompt=True)

    def rendered(**variables):
        try:
            return chat(tools=None, **variables)
        except TypeError:
            # some templates loop over `tools` without a check, and fail if it is None
            return chat(**variables)

    return rendered


@needs_published
def test_efforts_of_published_templates_match_their_variables(share_of):
    sources = published_templates.templates()
    assert len(sources) >= 68
    switches = {name: variable for variable, names in SWITCHES.items() for name in names}
    assert {*switches, *LEVELED, *WANT_FUNCTIONS} <= sources.keys()
    for name, source in list(sources.items())[:: share_of(2, 1)]:
        template = Template(source, "<s>", "</s>")
        template._environment.globals["strftime_now"] = lambda form: "today"
        if name in WANT_FUNCTIONS:
            with pytest.raises(ModelError):
                template.render(USER)
            continue
        efforts, rendered = Efforts.of(template), with_jinja_alone(source)
        switch = [switches[name]] if name in switches else []
        assert list(efforts.on or {}) == list(efforts.off or {}) == switch, name
        variable, levels = LEVELED.get(name, (None, ()))
        assert tuple(efforts.levels) == levels, name
        assert all(values[variable] == level for level, values in efforts.levels.items()), name
        for effort in (OFF, ON, *LEVELS):
            variables, reason = efforts.variables(effort)
            under = template.under(variables)
            assert under.render(USER) == rendered(**variables), (name, effort)
            if effort == OFF and reason is None:
                assert not under.opens_thought, name
                # with thinking off, the header must close a thought that it opens
                start, end = under.tags.start, under.tags.end
                after = under.reply_start().rpartition(start)[2] if start in under.reply_start() else end
                assert re.search(re.escape(end), after), name
            if effort == ON and efforts.on is not None:
                assert under.render(USER) != template.under(efforts.off).render(USER), name
