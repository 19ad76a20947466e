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
"""The template that Gemma models were trained on, for files without it.

Gemma has no system role: the system prompt opens the user's first message.
"""

RAW = "kvtool generate and kvtool eval need none with --raw"
"""What a user can do without a working template."""

_STAND_IN = "kvtool stands in for the reply"
"""Text that marks a place in a rendered chat."""


class Template:
    """Renders messages ({"role", "content"}) as the text that the model was trained on. Raises ModelError."""

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
            # for example one nested too deeply for Python's compiler
            raise _failed(error) from error

    def render(self, messages: list[Message], *, reply: bool = True) -> str:
        """The text of a whole chat. reply: ends with the header after which the model answers."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=reply, tools=None)
        except Exception as error:
            # a template is a program from a stranger: it may raise anything
            raise _failed(error) from error

    def turn(self, before: list[Message], user: str) -> str:
        """The text that follows the model's last reply when the user says something.

        It starts with the end of that reply. before: the chat up to the reply, without it.
        """
        stand_in = _STAND_IN
        while stand_in in user:
            stand_in += "."
        chat = [*before, {"role": "assistant", "content": stand_in}, {"role": "user", "content": user}]
        _, found, text = self.render(chat).rpartition(stand_in)
        if not found:
            raise ModelError(f"the model's chat template leaves replies out; {RAW}")
        return text

    def reply_start(self) -> str:
        """The model's reply header: the text between what a user says and the model's reply."""
        return self.render([{"role": "user", "content": _STAND_IN}]).rpartition(_STAND_IN)[2]


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _failed(error: Exception) -> ModelError:
    first = str(error).split("\n")[0] or type(error).__name__
    return ModelError(f"the model's chat template fails ({first}); {RAW}")
