"""Messages and tools as the tokens that a model was trained on."""

from __future__ import annotations

import json
import secrets
from bisect import bisect_left
from functools import cached_property
from typing import Any

import numpy as np

from kvtool.chats.effort import NAMES, Efforts
from kvtool.chats.header import Header
from kvtool.chats.marks import marked, tokens_of
from kvtool.chats.prompt import prefix_tokens, system_prefix
from kvtool.chats.template import RAW, Template
from kvtool.errors import ModelError
from kvtool.llama.constraint import Rules, Vocabulary
from kvtool.llama.model import Model
from kvtool.serve.errors import ApiError
from kvtool.serve.forced import Forced
from kvtool.serve.formats import Format
from kvtool.serve.messages import Message
from kvtool.serve.requests import ChatRequest
from kvtool.serve.tools import for_template, tools_text
from kvtool.serve.wishes import Wish, template_for

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

    def of(self, wish: Wish) -> tuple[Rendering, list[str]]:
        """Return the rendering for a wish, and a remark on each part that the template does not take.

        Raises ApiError as `template_for` does.
        """
        asks = wish.effort is not None or wish.budget is not None
        template, remarks = self._template, list[str]()
        if asks or wish.variables:
            template, remarks = template_for(template, self._efforts, wish)
        key = json.dumps(template.variables, sort_keys=True)
        if key not in self._found:
            while len(self._found) >= _MOST:
                del self._found[next(iter(self._found))]
            self._found[key] = Rendering(self._model, template, self._past(template))
        return self._found[key], remarks

    def _past(self, template: Template) -> str:
        """Return a mark of histories under these variables; "" if they leave earlier turns unchanged."""
        is_known = template.variables.keys() <= NAMES
        same = is_known and template.earlier_turns == self._template.earlier_turns
        return "" if same else json.dumps(template.variables, sort_keys=True)


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
        self.format = Format.of(template)

    @cached_property
    def header(self) -> Header:
        """The header of replies."""
        return Header.of(self._model, self.template)

    def whole(self, messages: list[Message], tools: list[Any]) -> tuple[np.ndarray, int]:
        """The tokens i32[n] of a whole chat, and how many of them are the system prompt's and the tools'.

        Raises ApiError for a message that the template does not take. The list of messages, which nobody
        changes, is not rendered again if it is the one of the last call.
        """
        last = self._last
        if not (last and last[0] is messages and last[1] == tools):
            last = self._last = messages, tools, self._rendered(messages, tools)
        return last[2]

    def _rendered(self, messages: list[Message], tools: list[Any]) -> tuple[np.ndarray, int]:
        found, shown = self._shown(messages, tools)
        try:
            whole = self._bare.render(found, tools=shown)
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
        return tokens_of(self._model, text)

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

    def forced(self, request: ChatRequest) -> Rules | None:
        """The rules of the call that a request demands; None if it demands none. Raises ApiError."""
        if request.choice.kind != "required":
            return None
        if request.sampling.json_schema is not None or request.sampling.grammar:
            raise ApiError("tool_choice and response_format demand two things at once", param="tool_choice")
        return Forced(Vocabulary.of(self._model), self.format).rules(request.tools, request.choice)

    def _shown(self, messages: list[Message], tools: list[Any]) -> tuple[list[Message], list[Any] | None]:
        """Messages and tools as the template takes them, marked; tools that it does not show are a text."""
        found, shown = for_template(messages, self.template), marked(self.template.markers, tools)
        if tools and not Format.native(self.template):
            is_system = bool(found) and found[0]["role"] == "system"
            system = found[0]["content"] if is_system else ""
            said = f"{tools_text(shown)}\n\n{system}".rstrip()
            return [{"role": "system", "content": said}, *found[1 if is_system else 0 :]], None
        return found, shown or None
