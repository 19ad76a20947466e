"""Chat template of a model: Jinja source from the GGUF header, run in a sandbox."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
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

from kvtool.chats.roles import Roles
from kvtool.chats.shields import CUT, JOINT, shielded
from kvtool.chats.thinking import THINK, Tags, tags_in
from kvtool.errors import ModelError
from kvtool.llama.loaded.markers import Markers

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
"""Template that Gemma models were trained with, for files without a template.

Gemma has no system role: the user's first message begins with the system prompt.
"""

RAW = "kvtool generate and kvtool eval need none with --raw"
"""End of error messages. It names the commands that work without a template."""

_STAND_IN = "kvtool stands in for the reply"
_THOUGHT = "kvtool stands in for the thought"
_QUESTION = "kvtool stands in for the question"
"""Texts that mark positions in a rendered chat."""

_NOT_ASCII = re.compile(f"{JOINT}{JOINT}|{CUT}{CUT}|[^\0-\x7f{JOINT}{CUT}]")
"""Text that `ensure_ascii` escapes in JSON. Single shields (see `chats.shields`) are not escaped."""


_MARKED, _WORDS = re.compile(r"<[^<>\s]+>|\[[^][\s]+\]"), re.compile(r"\w\W+\w")
"""Patterns of text that looks like a marker, and of text with at least two words."""


_THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking", "thought")
"""Names that different templates use for the field with a message's thought."""


class TemplateError(ModelError):
    """The model's chat template cannot render a chat."""


class _Generation(jinja2.ext.Extension):
    """Jinja tag {% generation %}, which marks the model's text for training. Here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Parsed:
    """What follows from a template's source alone. All copies of a template share it: parsing takes long."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        self._environment, self._source = environment, source

    @cached_property
    def syntax(self) -> jinja2.nodes.Template:
        return self._environment.parse(self._source)

    @cached_property
    def reads(self) -> frozenset[str]:
        # do not search `syntax`, because Jinja changes the tree that it searches: parse the source again
        return frozenset(jinja2.meta.find_undeclared_variables(self._environment.parse(self._source)))

    @cached_property
    def thought_name(self) -> str | None:
        """Name of the field with a message's thought; None if the template reads no such field."""
        read = set(_fields_read(self.syntax))
        # other variables, such as the parts of a content, may have fields of the same names
        messages = {variable for variable, name in read if name == "role"}
        names = {name for variable, name in read if variable in messages}
        return next((name for name in _THOUGHT_NAMES if name in names), None)


class Template:
    """Renders messages ({"role", "content"}) in the model's chat format. Raises TemplateError if it fails.

    Texts of messages and tools are shielded, so that they contain no markers: see `chats.shields`.

    markers: markers of the model; None without a model.

    `variables` has the values of other variables that the template may read, such as enable_thinking.
    """

    def __init__(self, source: str, bos: str, eos: str, markers: Markers | None = None) -> None:
        self.source = source
        self._bos = bos
        self.markers = markers
        self.variables: Mapping[str, Any] = {}
        self._and_tags = markers and markers.and_tags(source)
        self._shields = True
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.globals.update(
            bos_token=bos,
            eos_token=eos,
            raise_exception=_raise,
            strftime_now=lambda form: datetime.now().strftime(form),
        )
        # Jinja's filter escapes HTML and sorts keys, and models were trained without that
        environment.filters["tojson"] = _to_json
        self._environment = environment
        self._parsed = _Parsed(environment, source)
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            # catch all errors: Python's compiler, for example, refuses a template that is nested too deeply
            raise _failed(error) from error
        self._roles = Roles(self._as_it_is)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        reply: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of a whole chat, with roles that the template takes: see `Roles`.

        reply: if True, the text ends with the reply header.
        tools: functions that the model may call, as {"type": "function", "function": {"name", "description",
        "parameters"}}. A template may omit them.
        """
        shown = list(tools) if tools else None
        if self._shields:
            messages, shown = [*map(self.shielded, messages)], shielded(self.markers, shown)
        return self._as_it_is(self._roles.fitted(messages), reply, shown)

    @property
    def sha256(self) -> str:
        """SHA-256 of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    @cached_property
    def of_shielded(self) -> Template:
        """Copy of the template for messages and tools that are already shielded. The copy adds no shields."""
        other = self._copy()
        other._shields = False
        return other

    def under(self, variables: Mapping[str, Any]) -> Template:
        """Return the same template with other variables, whose values are JSON values."""
        other = self._copy()
        other.variables = dict(variables)
        return other

    def _copy(self) -> Template:
        """Return a copy that has no cached properties except the tags."""
        tags, other = self.tags, copy(self)
        # look at the copy only: another thread may be adding a property to this template
        for name in list(vars(other)):
            if isinstance(getattr(Template, name, None), cached_property):
                delattr(other, name)
        other.tags, other._roles = tags, Roles(other._as_it_is)
        return other

    @cached_property
    def tags(self) -> Tags:
        """Texts around a thought."""
        try:
            return tags_in(self.source, self.reply_start())
        except ModelError:
            return tags_in(self.source)

    @property
    def syntax(self) -> jinja2.nodes.Template:
        return self._parsed.syntax

    @property
    def reads(self) -> frozenset[str]:
        """Names of the variables that the template may read, including some that it sets itself."""
        return self._parsed.reads

    def shielded(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with shields in its texts."""
        # a tool's result is untrusted: also shield the ordinary words that the template uses as tags
        markers = self._and_tags if message["role"] == "tool" else self.markers
        copied: dict[str, Any] = shielded(markers, dict(message))
        if message["role"] == "assistant" and isinstance(content := message.get("content"), str):
            copied["content"] = self._shielded_reply(content)
        return copied

    def _shielded_reply(self, content: str) -> str:
        """Shield a reply, but not the tags of a thought at its beginning, because the template reads them."""
        opening = self.tags.start
        blanks, is_there, text = content.partition(opening)
        if not is_there or blanks.strip():
            if self.tags.end not in content or not self.opens_thought:
                return str(shielded(self.markers, content))
            blanks = opening = ""
            text = content
        thought, end, answer = text.partition(self.tags.end)
        return f"{blanks}{opening}{shielded(self.markers, thought)}{end}{shielded(self.markers, answer)}"

    @cached_property
    def has_thoughts(self) -> bool:
        """True if the template contains the tags of a thought, so that the model may think."""
        tags = self.tags
        return tags.start in self.source or tags.end in self.source or tags != THINK

    @property
    def takes_thoughts(self) -> bool:
        """True if the template reads the thought of a message from a field of the message."""
        return self._parsed.thought_name is not None

    def _renamed(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its thought in the field that the template reads, or without it."""
        thought = message.get("reasoning_content")
        if thought is None or (name := self._parsed.thought_name) == "reasoning_content":
            return message
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        return rest | ({name: thought} if name else {})

    def _as_it_is(
        self, messages: list[dict[str, Any]], reply: bool = True, tools: list[Any] | None = None
    ) -> str:
        messages = [self._renamed(message) for message in messages]
        # the chat's values win over variables of the same names
        chat = {"messages": messages, "add_generation_prompt": reply}
        try:
            return self._template.render({**self.variables, **chat, "tools": tools})
        except Exception as error:
            # a template is an untrusted program: it may raise anything
            with suppress(Exception):
                # some templates loop over `tools`: the loop fails for None, but not for an undefined variable
                if tools is None:
                    return self._template.render({**self.variables, **chat})
            raise _failed(error) from error

    def turn(self, before: list[Message], user: str) -> str:
        """Return the text of a user's turn, from the end of the model's last reply to the next reply header.

        before: messages before the last reply.
        """
        return self.following(before, [{"role": "user", "content": user}])

    def following(
        self,
        before: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of messages after the model's last reply, starting with the end of that reply.

        before: messages before the last reply.
        """
        stand_in = _STAND_IN
        while any(stand_in in str(message) for message in messages):
            stand_in += "."
        chat = [*before, {"role": "assistant", "content": stand_in}, *messages]
        _, is_there, text = self.render(chat, tools=tools).rpartition(stand_in)
        if not is_there:
            raise TemplateError(f"the model's chat template leaves replies out; {RAW}")
        return text

    def reply_start(self) -> str:
        """Return the reply header: the text between a user's message and the model's reply."""
        return self.render([{"role": "user", "content": _STAND_IN}]).rpartition(_STAND_IN)[2]

    @cached_property
    def earlier_start(self) -> str | None:
        """The result of `start_of_earlier` for a reply without a thought."""
        return self.start_of_earlier({})

    def start_of_earlier(self, more: Mapping[str, Any]) -> str | None:
        """Return the text between a user's message and an earlier reply; None if the reply is not rendered.

        more: fields of the reply in addition to its content.
        """
        user = {"role": "user", "content": _QUESTION}
        text = self.before_reply([user], {"role": "assistant", **more})
        _, is_shown, text = (text or "").partition(_QUESTION)
        return text if is_shown else None

    def before_reply(self, before: Sequence[Mapping[str, Any]], reply: Mapping[str, Any]) -> str | None:
        """Return a chat up to the content of an earlier reply; None if the content is not rendered."""
        try:
            text = self.render([*before, {**reply, "content": _STAND_IN}, _USER])
        except ModelError:
            return None
        text, is_shown, _ = text.rpartition(_STAND_IN)
        return text if is_shown else None

    @cached_property
    def opening(self) -> str:
        """The tag that opens a thought in the reply header, with the text after the tag.

        "" if the header opens no thought.
        """
        header = self.reply_start()
        at = header.rfind(self.tags.start)
        return header[at:] if at >= 0 and self.tags.end not in header[at:] else ""

    @property
    def opens_thought(self) -> bool:
        return bool(self.opening)

    @cached_property
    def drops_thoughts(self) -> bool:
        """True if the template omits the thought of a reply once another message of the user follows."""
        if not self.has_thoughts:
            return False
        reply = {"role": "assistant", "content": _STAND_IN, "reasoning_content": _THOUGHT}
        if not self.takes_thoughts:
            reply["content"] = f"{self.tags.start}\n{_THOUGHT}\n{self.tags.end}\n\n{_STAND_IN}"
        try:
            text = self.render([_USER, reply, _USER])
        except ModelError:
            # The template refuses a message with a thought. If there is a tag for replies without a thought,
            # assume that the template drops thoughts
            return bool(self.tags.plain)
        return _STAND_IN in text and _THOUGHT not in text

    @cached_property
    def has_own_system(self) -> bool:
        """True if the template adds its own system prompt to a chat without one."""
        user, reply = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _STAND_IN}
        try:
            before = self.render([user]).partition(_QUESTION)[0].removeprefix(self._bos)
            between = self.render([user, reply, user]).partition(_STAND_IN)[2].partition(_QUESTION)[0]
        except ModelError:
            return False
        # text that the template writes before every user's message is not a system prompt
        n = len(os.path.commonprefix([before[::-1], between[::-1]]))
        return _WORDS.search(_MARKED.sub("", before[: len(before) - n])) is not None

    @cached_property
    def has_tools(self) -> bool:
        """True if the template renders the tools."""
        tool = _made_up_tool()
        return tool["function"]["name"] in self._rendered([_USER], [tool])

    @cached_property
    def has_calls(self) -> bool:
        """True if the template renders the tool calls of earlier replies."""
        name = _made_up_tool()["function"]["name"]
        return name in self._with_result(name, ".")

    @cached_property
    def has_results(self) -> bool:
        """True if the template renders the results of tools."""
        return _STAND_IN in self._with_result("tool", _STAND_IN)

    def _with_result(self, name: str, content: str) -> str:
        """Return the text of a chat with a call and its result."""
        # some templates require an id of nine characters
        call = {"id": "a12345678", "type": "function", "function": {"name": name, "arguments": {}}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": content}
        return self._rendered([_USER, reply, result], [_made_up_tool()])

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """Return the text of a chat; "" if the template fails."""
        try:
            return self.render(messages, tools=tools)
        except ModelError:
            return ""


_USER: dict[str, Any] = {"role": "user", "content": "."}


def _fields_read(syntax: jinja2.nodes.Template) -> Iterator[tuple[str, str]]:
    """Yield (variable, name) for each variable of a template with a field that the template reads."""
    nodes = jinja2.nodes
    pairs: list[tuple[jinja2.nodes.Node, object]] = []
    pairs += [(node.node, nodes.Const(node.attr)) for node in syntax.find_all(nodes.Getattr)]
    pairs += [(node.node, node.arg) for node in syntax.find_all(nodes.Getitem)]
    for call in syntax.find_all(nodes.Call):
        # message.get("role")
        pairs += [(call.node.node, arg) for arg in call.args[:1] if isinstance(call.node, nodes.Getattr)]
    for compared in syntax.find_all(nodes.Compare):
        # "role" in message
        pairs += [(operand.expr, compared.expr) for operand in compared.ops]
    for variable, name in pairs:
        if isinstance(variable, nodes.Name) and isinstance(name, nodes.Const):
            yield variable.name, str(name.value)


def _made_up_tool() -> dict[str, Any]:
    """Return a tool whose random name occurs in no template."""
    parameters = {"type": "object", "properties": {}}
    function = {"name": f"tool_{secrets.token_hex(8)}", "description": ".", "parameters": parameters}
    return {"type": "function", "function": function}


def _to_json(value: object, ensure_ascii: bool = False, **how: Any) -> str:
    """Filter "tojson", as transformers defines it for chat templates."""
    text = json.dumps(value, ensure_ascii=False, **how)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0][0])[1:-1], text) if ensure_ascii else text


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _failed(error: Exception) -> TemplateError:
    first = str(error).split("\n")[0] or type(error).__name__
    return TemplateError(f"the model's chat template fails ({first}); {RAW}")
