"""A model's own chat template: Jinja from the GGUF header, run in a sandbox."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvtool.chats.marks import CUT, JOINT, marked
from kvtool.chats.roles import Roles
from kvtool.chats.thinking import THINK, Tags, tags_in
from kvtool.errors import ModelError
from kvtool.llama.markers import Markers

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
_THOUGHT = "kvtool stands in for the thought"
_QUESTION = "kvtool stands in for the question"
"""Texts that mark places in a rendered chat."""

_NOT_ASCII = re.compile(f"{JOINT}{JOINT}|{CUT}{CUT}|[^\0-\x7f{JOINT}{CUT}]")
"""What JSON in ASCII escapes: all but marks."""


_MARKED, _WORDS = re.compile(r"<[^<>\s]+>|\[[^][\s]+\]"), re.compile(r"\w\W+\w")
"""What looks like a marker; two words or more."""


_THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking", "thought")
"""Names that templates have for the thought of a message."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model wrote, for its training. Here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """Renders messages ({"role", "content"}) as the text that the model was trained on. Raises ModelError.

    What messages and tools say is marked, so that it stays text: see `chats.marks`.

    Attributes
    ----------
    source
        The Jinja text.
    markers
        Those of the model.
    variables
        Values of further variables that the template may read, such as enable_thinking.
    """

    def __init__(self, source: str, bos: str, eos: str, markers: Markers | None = None) -> None:
        self.source = source
        self._bos = bos
        self.markers = markers
        self.variables: Mapping[str, Any] = {}
        self._and_tags = markers and markers.and_tags(source)
        self._marks = True
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.globals.update(
            bos_token=bos,
            eos_token=eos,
            raise_exception=_raise,
            strftime_now=lambda form: datetime.now().strftime(form),
        )
        # Jinja's own escapes HTML and sorts keys; models were trained without
        environment.filters["tojson"] = _to_json
        self._environment = environment
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            # for example one nested too deeply for Python's compiler
            raise _failed(error) from error
        self._roles = Roles(self._as_it_is)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        reply: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a whole chat, in roles that the template takes: see `Roles`.

        reply: ends with the header after which the model answers.
        tools: what the model may call, as {"type": "function", "function": {"name", "description",
        "parameters"}}; a template may leave them out.
        """
        shown = list(tools) if tools else None
        if self._marks:
            messages, shown = [*map(self.marked, messages)], marked(self.markers, shown)
        return self._as_it_is(self._roles.fitted(messages), reply, shown)

    @cached_property
    def of_marked(self) -> Template:
        """The same for messages and tools that are marked already."""
        other = self._copy()
        other._marks = False
        return other

    def under(self, variables: Mapping[str, Any]) -> Template:
        """Return the same template with other variables, whose values are JSON's."""
        other = self._copy()
        other.variables = dict(variables)
        return other

    def _copy(self) -> Template:
        """Return a copy with the same tags, which learns everything else about the template again."""
        tags, other = self.tags, copy(self)
        for name in vars(self):
            if isinstance(getattr(Template, name, None), cached_property):
                delattr(other, name)
        other.tags, other._roles = tags, Roles(other._as_it_is)
        return other

    @cached_property
    def tags(self) -> Tags:
        """The texts around thoughts."""
        try:
            return tags_in(self.source, self.reply_start())
        except ModelError:
            return tags_in(self.source)

    @cached_property
    def syntax(self) -> jinja2.nodes.Template:
        """The parsed source."""
        return self._environment.parse(self.source)

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of the variables that the template may read, with some that it sets itself."""
        # Jinja folds constants of the tree that it looks through
        return frozenset(jinja2.meta.find_undeclared_variables(self._environment.parse(self.source)))

    def marked(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with marks in what it says."""
        # results are strangers' words: not even the words that a model may use
        markers = self._and_tags if message["role"] == "tool" else self.markers
        found: dict[str, Any] = marked(markers, dict(message))
        if message["role"] == "assistant" and isinstance(content := message.get("content"), str):
            found["content"] = self._marked_reply(content)
        return found

    def _marked_reply(self, content: str) -> str:
        """What a reply says: the tags of a thought that it begins with stay, for the template."""
        opening, end, _ = self.tags
        blanks, found, text = content.partition(opening)
        if not found or blanks.strip():
            if end not in content or not self.opens_thought:
                return str(marked(self.markers, content))
            blanks = opening = ""
            text = content
        thought, end, said = text.partition(end)
        return f"{blanks}{opening}{marked(self.markers, thought)}{end}{marked(self.markers, said)}"

    @cached_property
    def has_thoughts(self) -> bool:
        """True if the template names the tags of a thought: its model may think."""
        start, end, _ = self.tags
        return start in self.source or end in self.source or self.tags != THINK

    @cached_property
    def _thought_name(self) -> str | None:
        """The template's name for the thought of a message; None if it takes none."""
        names = {node.attr for node in self.syntax.find_all(jinja2.nodes.Getattr)}
        names |= {node.value for node in self.syntax.find_all(jinja2.nodes.Const)}
        return next((name for name in _THOUGHT_NAMES if name in names), None)

    @property
    def takes_thoughts(self) -> bool:
        """True if a message's thought has a field for it in the template, apart from the content."""
        return self._thought_name is not None

    def _renamed(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its thought under the template's name, if it has one."""
        thought = message.get("reasoning_content")
        if thought is None or self._thought_name == "reasoning_content":
            return message
        rest = {name: value for name, value in message.items() if name != "reasoning_content"}
        return rest | ({self._thought_name: thought} if self._thought_name else {})

    def _as_it_is(
        self, messages: list[dict[str, Any]], reply: bool = True, tools: list[Any] | None = None
    ) -> str:
        messages = [self._renamed(message) for message in messages]
        # the chat's own values win over a variable of the same name
        own = {"messages": messages, "add_generation_prompt": reply}
        try:
            return self._template.render({**self.variables, **own, "tools": tools})
        except Exception as error:
            # a template is a program from a stranger: it may raise anything
            with suppress(Exception):
                # a loop over no tools fails for null, and runs over what is missing
                if tools is None:
                    return self._template.render({**self.variables, **own})
            raise _failed(error) from error

    def turn(self, before: list[Message], user: str) -> str:
        """The text that follows the model's last reply when the user says something.

        It starts with the end of that reply. before: the chat up to the reply, without it.
        """
        return self.following(before, [{"role": "user", "content": user}])

    def following(
        self,
        before: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of these messages behind the model's last reply, from the end of that reply on.

        before: the chat up to the reply, without it.
        """
        stand_in = _STAND_IN
        while any(stand_in in str(message) for message in messages):
            stand_in += "."
        chat = [*before, {"role": "assistant", "content": stand_in}, *messages]
        _, found, text = self.render(chat, tools=tools).rpartition(stand_in)
        if not found:
            raise ModelError(f"the model's chat template leaves replies out; {RAW}")
        return text

    def reply_start(self) -> str:
        """The model's reply header: the text between what a user says and the model's reply."""
        return self.render([{"role": "user", "content": _STAND_IN}]).rpartition(_STAND_IN)[2]

    @cached_property
    def earlier_start(self) -> str | None:
        """The text between a user's message and an earlier reply without a thought; None if it is hidden."""
        return self.start_of_earlier({})

    def start_of_earlier(self, more: Mapping[str, Any]) -> str | None:
        """The text between a user's message and an earlier reply; None if it is hidden.

        more: fields of the reply besides its content.
        """
        user = {"role": "user", "content": _QUESTION}
        text = self.before_reply([user], {"role": "assistant", **more})
        _, is_shown, text = (text or "").partition(_QUESTION)
        return text if is_shown else None

    def before_reply(self, before: Sequence[Mapping[str, Any]], reply: Mapping[str, Any]) -> str | None:
        """The text of a chat up to the content of a reply to which the user answers; None if it is hidden."""
        try:
            text = self.render([*before, {**reply, "content": _STAND_IN}, _USER])
        except ModelError:
            return None
        text, is_shown, _ = text.rpartition(_STAND_IN)
        return text if is_shown else None

    @cached_property
    def opening(self) -> str:
        """The end of the reply header from the tag on that opens a thought; "" if it opens none."""
        header = self.reply_start()
        at = header.rfind(self.tags.start)
        return header[at:] if at >= 0 and self.tags.end not in header[at:] else ""

    @property
    def opens_thought(self) -> bool:
        """Whether the reply header opens a thought."""
        return bool(self.opening)

    @cached_property
    def drops_thoughts(self) -> bool:
        """Whether the thought of a reply is left out once the user has said something after it."""
        if not self.has_thoughts:
            return False
        reply = {"role": "assistant", "content": _STAND_IN, "reasoning_content": _THOUGHT}
        if not self.takes_thoughts:
            reply["content"] = f"{self.tags.start}\n{_THOUGHT}\n{self.tags.end}\n\n{_STAND_IN}"
        try:
            text = self.render([_USER, reply, _USER])
        except ModelError:
            # it takes no thought in a message
            return bool(self.tags.plain)
        return _STAND_IN in text and _THOUGHT not in text

    @cached_property
    def has_own_system(self) -> bool:
        """True if the template begins a chat without a system prompt with one that it has itself."""
        user, reply = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _STAND_IN}
        try:
            before = self.render([user]).partition(_QUESTION)[0].removeprefix(self._bos)
            between = self.render([user, reply, user]).partition(_STAND_IN)[2].partition(_QUESTION)[0]
        except ModelError:
            return False
        # the user's turns begin alike
        n = len(os.path.commonprefix([before[::-1], between[::-1]]))
        return _WORDS.search(_MARKED.sub("", before[: len(before) - n])) is not None

    @cached_property
    def has_tools(self) -> bool:
        """Whether the template shows the model the tools that it may call."""
        tool = _made_up_tool()
        return tool["function"]["name"] in self._rendered([_USER], [tool])

    @cached_property
    def has_calls(self) -> bool:
        """Whether the template shows the calls of tools that earlier replies made."""
        name = _made_up_tool()["function"]["name"]
        return name in self._with_result(name, ".")

    @cached_property
    def has_results(self) -> bool:
        """Whether the template shows what tools have returned."""
        return _STAND_IN in self._with_result("tool", _STAND_IN)

    def _with_result(self, name: str, content: str) -> str:
        """The text of a chat with a call and its result."""
        # some templates want an id of nine characters
        call = {"id": "a12345678", "type": "function", "function": {"name": name, "arguments": {}}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": content}
        return self._rendered([_USER, reply, result], [_made_up_tool()])

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The text of a chat; "" where the template fails."""
        try:
            return self.render(messages, tools=tools)
        except ModelError:
            return ""


_USER: dict[str, Any] = {"role": "user", "content": "."}


def _made_up_tool() -> dict[str, Any]:
    """A tool under a name that is in no template."""
    parameters = {"type": "object", "properties": {}}
    function = {"name": f"tool_{secrets.token_hex(8)}", "description": ".", "parameters": parameters}
    return {"type": "function", "function": function}


def _to_json(value: object, ensure_ascii: bool = False, **how: Any) -> str:
    """The filter "tojson" that templates are written for."""
    text = json.dumps(value, ensure_ascii=False, **how)
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0][0])[1:-1], text) if ensure_ascii else text


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _failed(error: Exception) -> ModelError:
    first = str(error).split("\n")[0] or type(error).__name__
    return ModelError(f"the model's chat template fails ({first}); {RAW}")
