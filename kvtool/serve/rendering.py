"""Messages and tools as the tokens that a model was trained on."""

from __future__ import annotations

import json
import secrets
from bisect import bisect_left
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kvtool.chats.effort import NAMES, Efforts
from kvtool.chats.header import Header
from kvtool.chats.marks import marked, tokens_of
from kvtool.chats.prompt import prefix_tokens, system_prefix
from kvtool.chats.template import RAW, Template
from kvtool.errors import ModelError
from kvtool.llama.constraint import Vocabulary
from kvtool.llama.model import Model
from kvtool.llama.rules import Rules
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.messages import Message
from kvtool.serve.api.requests import ChatRequest
from kvtool.serve.api.thinking import ThinkingOptions, template_for
from kvtool.serve.store.history import START, History
from kvtool.serve.tools.forced import Forced
from kvtool.serve.tools.formats import Format
from kvtool.serve.tools.prompt import for_template, tools_text

_MOST = 16
"""Sets of variables whose renderings are kept."""


class Renderings:
    """The renderings of a model's chats: one for each set of variables of the template."""

    def __init__(self, model: Model, template: Template) -> None:
        self._model, self._template = model, template
        self._found: dict[str, Rendering] = {}

    @cached_property
    def _efforts(self) -> Efforts:
        return Efforts.of(self._template)

    def of(self, options: ThinkingOptions) -> tuple[Rendering, list[str]]:
        """Return the rendering for these options, and a remark on each option that the template lacks.

        Raises ApiError as `template_for` does.
        """
        asks = options.effort is not None or options.budget is not None
        template, remarks = self._template, list[str]()
        if asks or options.variables:
            template, remarks = template_for(template, self._efforts, options)
        key = json.dumps(template.variables, sort_keys=True)
        if key not in self._found:
            while len(self._found) >= _MOST:
                del self._found[next(iter(self._found))]
            self._found[key] = Rendering(self._model, template, self._past(template))
        return self._found[key], remarks

    def _past(self, template: Template) -> str:
        """Return a mark of histories under these variables; "" if they leave earlier turns unchanged."""
        is_known = template.variables.keys() <= NAMES
        same = is_known and _earlier_turns(template) == _earlier_turns(self._template)
        return "" if same else json.dumps(template.variables, sort_keys=True)


def _earlier_turns(template: Template) -> list[str | None]:
    """Small chats of earlier turns as the template renders them: with a thought, with a tool and its calls.

    None for one that it does not take.
    """
    user: Message = {"role": "user", "content": "."}
    said = {"content": "Hm.", "reasoning_content": "Hm?"}
    tool = {"name": "tool", "description": ".", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "a12345678", "type": "function", "function": {"name": "tool", "arguments": {}}}
    plain = [{"role": "system", "content": "."}, user, {"role": "assistant", **said}, user]
    calls = [user, {"role": "assistant", "tool_calls": [call], **said}]
    calls += [{"role": "tool", "tool_call_id": call["id"], "content": "."}]
    texts: list[str | None] = []
    for chat in (plain, calls, [*calls, *plain[2:]]):
        for tools in (None, [{"type": "function", "function": tool}]):
            try:
                texts.append(template.render(chat, tools=tools, reply=False))
            except ModelError:
                texts.append(None)
    return texts


class Later(NamedTuple):
    """A reply once it is an earlier one.

    Attributes
    ----------
    message
        As in a history.
    start
        The text between the kept part of the reply's header and the reply; None if it is not known.
    """

    message: Message
    start: str | None


class Rendering:
    """Renders chats by a model's template.

    Attributes
    ----------
    template
        The template, under the variables of a request.
    past
        The mark of histories under these variables: chats of other marks do not share their beginnings.
    format
        The syntax in which the model writes calls.
    """

    def __init__(self, model: Model, template: Template, past: str = "") -> None:
        self._model = model
        self.template = template
        self.past = past
        self._bare = template.of_marked
        # what `whole` was asked for last, and what it gave
        self._last: tuple[list[Message], list[Any], tuple[np.ndarray, int]] | None = None
        # the header in place of which the reply has a beginning
        self._replaced = ""
        self.format = Format.of(template)

    @cached_property
    def header(self) -> Header:
        """The header of replies."""
        return Header.of(self._model, self.template)

    def with_begun(self, begun: str) -> Rendering:
        """The rendering of chats behind which the reply begins with this text."""
        other = copy(self)
        other._last, other._replaced = None, self.header.kept + self.header.left_out
        other.header = self.header.with_begun(self._model, self.template, begun)
        return other

    def _ended(self, text: str) -> str:
        """A rendered chat, with the beginning of the reply if there is one."""
        if not self._replaced:
            return text
        # behind a tool's result there may be no header
        header = self.header.kept + self.header.left_out if text.endswith(self._replaced) else ""
        begun = {"role": "assistant", "content": self.header.begun}
        words: str = self.template.marked(begun)["content"]
        return text.removesuffix(self._replaced) + header + words

    def whole(self, messages: list[Message], tools: list[Any]) -> tuple[np.ndarray, int]:
        """The tokens i32[n] of a whole chat, and how many of them are the system prompt's and the tools'.

        Raises ApiError for a message that the template does not take. The list of messages, which nobody
        changes, is not rendered again if it is the one of the last call.
        """
        last = self._last
        if not (last and last[0] is messages and last[1] == tools):
            last = self._last = messages, tools, self._rendered(messages, tools)
        return last[2]

    def history(self, name: str | None, messages: list[Message], tools: list[Any]) -> History:
        """The digests of a chat's beginnings: equal ones read the same under the template."""
        return History(name, tools, self._with_starts(messages, tools), self.past)

    def later(self, messages: list[Message], reply: Message, tools: list[Any]) -> Later:
        """The reply to these messages as the template shows it once it is an earlier one.

        reply: with its thought as "reasoning_content", if the client will send it back. A reply with calls is
        followed by their results, any other by a message of the user.
        """
        calls = reply.get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "."} for call in calls]
        chat = [*messages, reply, *(results or [{"role": "user", "content": "."}])]
        region = self._starts(chat, tools).get(len(messages))
        if region is None:
            return Later(reply, None)
        return Later(self._with_start(reply, region), self._behind_header(region))

    def _with_starts(self, messages: list[Message], tools: list[Any]) -> list[Message]:
        """The messages, with the thoughts that the template shows for replies: see `_with_start`."""
        starts = self._starts(messages, tools)
        return [self._with_start(each, starts[i]) if i in starts else each for i, each in enumerate(messages)]

    def _with_start(self, reply: Message, region: str) -> Message:
        """The message, with the thought that the template shows before it unless that is as usual."""
        start = self._thought_in(region)
        # clients cut blanks at the ends of thoughts
        return reply if start == self._usual_start else {**reply, START: " ".join(start.split())}

    @cached_property
    def _usual_start(self) -> str:
        return self._thought_in(self.template.earlier_start or "")

    def _behind_header(self, region: str) -> str | None:
        """The end of a text behind the kept part of the reply header; None if it does not have that."""
        at = region.rfind(self.header.kept) if self.header.kept else -1
        return region[at + len(self.header.kept) :] if at >= 0 else None

    def _thought_in(self, region: str) -> str:
        """The thought at the end of a text, with its tags, and the blanks around them; "" for none."""
        if (start := self._behind_header(region)) is not None:
            return start
        opening, end, _ = self.template.tags
        bare = region.rstrip()
        if not bare.endswith(end.rstrip()):
            return ""
        at = bare.rfind(opening)
        return region[at if at >= 0 else bare.rfind(end.rstrip()) :]

    def _starts(self, messages: list[Message], tools: list[Any]) -> dict[int, str]:
        """The text before each reply that the template shows, behind the one before it.

        Thoughts in it are as in the messages, without the blanks around them. Empty for a model that does not
        think, and where the template does not take the chat.
        """
        replies = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
        if not (replies and self.template.has_thoughts):
            return {}
        chat, marks = list(messages), {i: f"kvtool stands in for reply {i}." for i in replies}
        for i in replies:
            chat[i] = {**messages[i], "content": marks[i]}
        try:
            found, shown = self._shown(chat, tools)
            text = self._bare.render(found, tools=shown)
        except ModelError:
            return {}
        starts: dict[int, str] = {}
        for i, mark in marks.items():
            before, is_there, rest = text.partition(mark)
            if is_there:
                starts[i], text = before, rest
        return starts

    def _rendered(self, messages: list[Message], tools: list[Any]) -> tuple[np.ndarray, int]:
        found, shown = self._shown(messages, tools)
        try:
            whole = self._ended(self._bare.render(found, tools=shown))
        except ModelError:
            raise self._refused(messages, tools) from None
        return prefix_tokens(self._model, whole, len(self._prefix(whole, found, shown)))

    def _prefix(self, whole: str, found: list[Message], shown: list[Any] | None) -> str:
        """What a chat of this system prompt and these tools begins with, whatever follows."""
        system = found[0]["content"] if found[0]["role"] == "system" else ""
        # a template may show the tools later on: then the system prompt alone
        for listed in (shown, None) if shown else (None,):
            if system or listed:
                prefix = system_prefix(self._bare, system, listed)
                if prefix and whole.startswith(prefix):
                    return prefix
        return ""

    def _refused(self, messages: list[Message], tools: list[Any]) -> ApiError:
        """Names the first message that the template does not take."""
        why = ""

        def fails(n: int) -> bool:
            nonlocal why
            found, shown = self._shown(messages[:n], tools)
            try:
                self._bare.render(found, tools=shown)
            except ModelError as error:
                why = str(error).removesuffix(f"; {RAW}")
                return True
            return False

        first = bisect_left(range(1, len(messages)), True, key=fails)
        fails(first + 1)
        where = f"messages[{first}]"
        return ApiError(
            f"{where}, of role {messages[first]['role']}: {why}", param=where, code="chat_template"
        )

    def following(self, messages: list[Message], i: int, tools: list[Any]) -> np.ndarray:
        """The tokens i32[n] behind the first i messages, the last of which is a reply. Raises ModelError."""
        if self.format.holds_results and "tool_calls" in messages[i - 1]:
            text = self._after_calls(messages, i, tools)
        else:
            before, shown = self._shown(messages[: i - 1], tools)
            text = self._bare.following(before, for_template(messages[i:], self.template), shown)
        return tokens_of(self._model, self._ended(text))

    def _after_calls(self, messages: list[Message], i: int, tools: list[Any]) -> str:
        """The text behind the calls of a reply, which also has their results."""
        name = f"kvtool_{secrets.token_hex(8)}"
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        reply = {**messages[i - 1], "content": "", "tool_calls": [*messages[i - 1]["tool_calls"], call]}
        found, shown = self._shown([*messages[: i - 1], reply, *messages[i:]], tools)
        whole = self._bare.render(found, tools=shown)
        _, last, text = whole.rpartition(self.format.written([(name, {})]))
        if not last:
            raise ModelError("the model's chat template leaves calls out")
        return text

    def rules(self, request: ChatRequest) -> tuple[Rules | None, list[str]]:
        """The rules of the answer that a request demands, if any, and remarks about them. Raises ApiError."""
        shape = request.shape
        forced = Forced(Vocabulary.of(self._model), self.format)
        if request.choice.kind == "required":
            if shape:
                raise ApiError(f"tool_choice demands a call, and {shape.where} does not", param="tool_choice")
            return forced.call(request.tools, request.choice.name), forced.remarks
        if not shape:
            return None, []
        rules, remarks = shape.rules()
        # a grammar is the client's own for the whole reply
        if request.choice.kind == "none" or shape.kind == "grammar":
            return rules, remarks
        return forced.call_or(request.tools, rules), [*remarks, *forced.remarks]

    def _shown(self, messages: list[Message], tools: list[Any]) -> tuple[list[Message], list[Any] | None]:
        """Messages and tools as the template takes them, marked; tools that it does not show are a text."""
        found, shown = for_template(messages, self.template), marked(self.template.markers, tools)
        if tools and not Format.native(self.template):
            is_system = bool(found) and found[0]["role"] == "system"
            system = found[0]["content"] if is_system else ""
            said = f"{tools_text(shown)}\n\n{system}".rstrip()
            return [{"role": "system", "content": said}, *found[1 if is_system else 0 :]], None
        return found, shown or None
