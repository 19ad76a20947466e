"""Messages and tools as the tokens that a model was trained on."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtool.chats.prompt import prefix_tokens, system_prefix
from kvtool.chats.template import Template
from kvtool.llama.model import Model
from kvtool.serve.errors import ApiError
from kvtool.serve.forced import forced_grammar
from kvtool.serve.formats import Format
from kvtool.serve.messages import Message
from kvtool.serve.requests import ChatRequest
from kvtool.serve.tools import for_template, tools_text


class Rendering:
    """What a model's template makes of chats.

    Attributes
    ----------
    format
        The syntax in which the model writes calls.
    """

    def __init__(self, model: Model, template: Template) -> None:
        self._model = model
        self._template = template
        self.format = Format.of(template)

    def whole(self, messages: list[Message], tools: list[Any]) -> tuple[np.ndarray, int]:
        """The tokens i32[n] of a whole chat, and how many of them are the system prompt's and the tools'."""
        found, shown = self._shown(messages, tools)
        whole = self._template.render(found, tools=shown)
        system = found[0]["content"] if found[0]["role"] == "system" else ""
        prefix = system_prefix(self._template, system, shown) if system or shown else ""
        is_pinned = bool(prefix) and whole.startswith(prefix or "")
        return prefix_tokens(self._model, whole, len(prefix or "") if is_pinned else 0)

    def following(self, messages: list[Message], i: int, tools: list[Any]) -> np.ndarray:
        """The tokens i32[n] behind the first i messages, the last of which is a reply. Raises ModelError."""
        before, shown = self._shown(messages[: i - 1], tools)
        text = self._template.following(before, for_template(messages[i:], self._template), shown)
        return self._model.tokenize(text, special=True)

    def forced(self, request: ChatRequest) -> str | None:
        """The grammar of the call that a request demands; None if it demands none. Raises ApiError."""
        end = self._template.tags.end if self._template.opens_thought else ""
        grammar = forced_grammar(self.format, request.tools, request.choice, thought_end=end)
        if grammar and (request.schema is not None or request.sampling.grammar):
            raise ApiError("tool_choice and response_format demand two things at once", param="tool_choice")
        return grammar

    def _shown(self, messages: list[Message], tools: list[Any]) -> tuple[list[Message], list[Any] | None]:
        """Messages and tools as the template takes them: tools that it does not show come in a text."""
        if tools and not Format.native(self._template):
            is_system = bool(messages) and messages[0]["role"] == "system"
            system = messages[0]["content"] if is_system else ""
            said = f"{tools_text(tools)}\n\n{system}".rstrip()
            messages = [{"role": "system", "content": said}, *messages[1 if is_system else 0 :]]
            tools = []
        return for_template(messages, self._template), tools or None
