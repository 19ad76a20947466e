"""A model's own chat template: Jinja from the GGUF header, run in a sandbox."""

from __future__ import annotations

from datetime import datetime

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtool.errors import ModelError

Message = dict[str, str]

GEMMA = """\
{{ bos_token }}{% set first = messages[0].content if messages[0].role == "system" %}
{% for message in messages if message.role != "system" %}
{{ "<start_of_turn>" ~ ("model" if message.role == "assistant" else "user") }}
{% if first and loop.first %}
{{ first ~ "\n" }}
{% endif %}
{{ message.content | trim ~ "<end_of_turn>" }}
{% endfor %}
{% if add_generation_prompt %}
{{ "<start_of_turn>model\n" }}
{%- endif %}
"""
"""What Gemma models were trained on, for files that lack it. They have no system role: it opens the chat."""

RAW = "kvtool generate and kvtool eval work without one: --raw"
"""What to do about a template that is of no use."""

_STAND_IN = "kvtool stands in for the reply"


class Template:
    """Turns messages ({"role", "content"}) into text as the model was trained on. Raises ModelError."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(
            bos_token=bos,
            eos_token=eos,
            raise_exception=_raise,
            strftime_now=lambda form: datetime.now().strftime(form),
        )
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            # nested too deep for Python's compiler, for example
            raise _failed(error) from error

    def render(self, messages: list[Message], *, reply: bool = True) -> str:
        """The whole text of a chat. reply: with the words after which the model answers."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=reply, tools=None)
        except Exception as error:
            # a template is a program, and anybody's
            raise _failed(error) from error

    def turn(self, before: list[Message], user: str) -> str:
        """What follows the model's last reply when the user says something: its end, and the new turn.

        before: the chat up to that reply, without it.
        """
        chat = [*before, {"role": "assistant", "content": _STAND_IN}, {"role": "user", "content": user}]
        _, found, text = self.render(chat).rpartition(_STAND_IN)
        if not found:
            raise ModelError(f"the model's chat template leaves replies out; {RAW}")
        return text

    def reply_start(self) -> str:
        """What stands between a user's words and the model's reply to them."""
        return self.render([{"role": "user", "content": _STAND_IN}]).rpartition(_STAND_IN)[2]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _failed(error: Exception) -> ModelError:
    first = str(error).split("\n")[0] or type(error).__name__
    return ModelError(f"the model's chat template fails ({first}); {RAW}")
