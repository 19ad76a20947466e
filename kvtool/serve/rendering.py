"""Render chats: turn messages and tools into tokens with the model's chat template."""

from __future__ import annotations

import json
import secrets
import threading
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from kvtool.chats.effort import NAMES, Efforts
from kvtool.chats.header import Header
from kvtool.chats.prompt import prefix_tokens, system_prefix
from kvtool.chats.shields import shielded, tokens_of
from kvtool.chats.template import Template, TemplateError
from kvtool.errors import ModelError
from kvtool.llama.grammar.constraint import Vocabulary
from kvtool.llama.grammar.rules import Rules
from kvtool.llama.loaded.model import Model
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.messages import Message
from kvtool.serve.api.requests import ChatRequest
from kvtool.serve.api.thinking import ThinkingOptions, template_for
from kvtool.serve.store.history import LEAD, History
from kvtool.serve.tools.conversion import for_template, tools_text
from kvtool.serve.tools.forced import CallRules
from kvtool.serve.tools.formats import HARMONY, Format

_N_KEPT = 16
"""Maximum number of `Rendering` objects that are kept. Each set of template variables has one."""


class Renderings:
    """Makes and keeps a `Rendering` for each set of template variables in requests. All threads share it."""

    def __init__(self, model: Model, template: Template) -> None:
        self._model = model
        self.template = template
        self._by_variables: dict[str, Rendering] = {}
        self._lock = threading.Lock()

    @cached_property
    def _efforts(self) -> Efforts:
        return Efforts.of(self.template)

    def of(self, options: ThinkingOptions) -> tuple[Rendering, list[str]]:
        """Return the rendering for options, and the remarks of `template_for`. Raises ApiError."""
        sets_effort = options.effort is not None or options.budget is not None
        template, remarks = self.template, list[str]()
        with self._lock:
            if sets_effort or options.variables:
                template, remarks = template_for(template, self._efforts, options)
            key = json.dumps(template.variables, sort_keys=True)
            if key not in self._by_variables:
                if len(self._by_variables) >= _N_KEPT:
                    del self._by_variables[next(iter(self._by_variables))]
                self._by_variables[key] = Rendering(self._model, template, self._variables_key(template))
            return self._by_variables[key], remarks

    def _variables_key(self, template: Template) -> str:
        """Return the variables of the template as a key for `History`.

        The key is "" if the variables do not change how earlier turns are rendered.
        """
        is_known = template.variables.keys() <= NAMES
        same = is_known and _earlier_turns(template) == _earlier_turns(self.template)
        return "" if same else json.dumps(template.variables, sort_keys=True)


def _earlier_turns(template: Template) -> list[str | None]:
    """Return the texts of small chats whose earlier turns have a thought, or a tool call with its result.

    A text is None if the template cannot render the chat.
    """
    user: Message = {"role": "user", "content": "."}
    reply = {"content": "Hm.", "reasoning_content": "Hm?"}
    tool = {"name": "tool", "description": ".", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "a12345678", "type": "function", "function": {"name": "tool", "arguments": {}}}
    plain = [{"role": "system", "content": "."}, user, {"role": "assistant", **reply}, user]
    calls = [user, {"role": "assistant", "tool_calls": [call], **reply}]
    calls += [{"role": "tool", "tool_call_id": call["id"], "content": "."}]
    texts: list[str | None] = []
    for chat in (plain, calls, [*calls, *plain[2:]]):
        for tools in (None, [{"type": "function", "function": tool}]):
            try:
                texts.append(template.render(chat, tools=tools, reply=False))
            except ModelError:
                texts.append(None)
    return texts


class Rendering:
    """Renders chats with a model's template, which has the variables of a request.

    Only requests with the same `variables_key` continue a stored chat: see `Renderings._variables_key`.
    """

    def __init__(self, model: Model, template: Template, variables_key: str = "") -> None:
        self._model = model
        self.template = template
        self.variables_key = variables_key
        self._bare = template.of_shielded
        # arguments and result of the last call of `whole`
        self._last: tuple[list[Message], list[Any], tuple[np.ndarray, int]] | None = None
        # arguments and results of calls of `following`
        self._following: dict[int, tuple[list[Message], list[Any], np.ndarray]] = {}
        self.format = Format.of(template)

    @cached_property
    def header(self) -> Header:
        """The header that the template writes before a reply."""
        return Header.of(self._model, self.template)

    def for_request(self, begun: str) -> Rendering:
        """Return a copy for one request, which keeps the tokens of the request's chat.

        begun: text with which the reply begins, or "".
        """
        header = self.header.with_begun(self._model, self.template, begun)
        other = copy(self)
        other.header, other._last, other._following = header, None, {}
        return other

    def whole(self, messages: list[Message], tools: list[Any]) -> tuple[np.ndarray, int]:
        """Return the tokens i32[n] of a whole chat, and the number of tokens of its system prompt and tools.

        Callers never change a list of messages. Therefore the last result is returned again if a call has the
        same `messages` object and equal tools. Raises TemplateError if the template cannot render the chat.
        """
        last = self._last
        if not (last and last[0] is messages and last[1] == tools):
            last = self._last = messages, tools, self._rendered(messages, tools)
        return last[2]

    def history(self, name: str | None, messages: list[Message], tools: list[Any]) -> History:
        """Return the `History` of a chat, with thoughts in the form in which the template renders them."""
        compared = list(messages)
        for i, region in self._regions(messages, tools).items():
            compared[i] = self._with_lead(messages[i], region)
        return History(name, tools, compared, self.variables_key)

    def earlier_reply(
        self, messages: list[Message], reply: Message, tools: list[Any]
    ) -> tuple[Message, str | None]:
        """Return the reply to these messages, in the form that it will have in later requests.

        Returns the message to add to `History`, and the lead of the reply (see `Header`), such as the
        thought. The lead is None if it is unknown.

        To find this form, the chat is rendered with placeholders after the reply. The placeholders are
        results of the reply's calls, or a user's message if there are no calls.

        reply: the reply. It has its thought as "reasoning_content" if the client will send the thought back.
        """
        calls = reply.get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "."} for call in calls]
        chat = [*messages, reply, *(results or [{"role": "user", "content": "."}])]
        region = self._regions(chat, tools).get(len(messages))
        if region is None:
            return reply, None
        return self._with_lead(reply, region), self._after_kept(region)

    def _with_lead(self, reply: Message, region: str) -> Message:
        """Return the reply with its lead in the field LEAD. The field is omitted if it is `_usual_lead`.

        region: see `_regions`.
        """
        lead = self._lead_in(region)
        # clients strip white space from thoughts; normalize the white space, so that equal thoughts have
        # equal digests
        return reply if lead == self._usual_lead else {**reply, LEAD: " ".join(lead.split())}

    @cached_property
    def _usual_lead(self) -> str:
        """Lead that the template writes for a reply without a thought."""
        return self._lead_in(self.template.earlier_start or "")

    def _after_kept(self, region: str) -> str | None:
        """Return the part of a text after the last `Header.kept`. None if the text has no such header."""
        at = region.rfind(self.header.kept) if self.header.kept else -1
        return region[at + len(self.header.kept) :] if at >= 0 else None

    def _lead_in(self, region: str) -> str:
        """Return the lead of a reply. region: see `_regions`.

        The lead follows the last `Header.kept`. If the region does not have `Header.kept`, return the
        thought at the end of the region, or "" if the region does not end with a thought.
        """
        if (lead := self._after_kept(region)) is not None:
            return lead
        tags, bare = self.template.tags, region.rstrip()
        if not bare.endswith(tags.end.rstrip()):
            return ""
        at = bare.rfind(tags.start)
        return region[at if at >= 0 else bare.rfind(tags.end.rstrip()) :]

    def _regions(self, messages: list[Message], tools: list[Any]) -> dict[int, str]:
        """Return the region of each reply: the text between the previous reply's answer and this answer.

        The keys are the indexes of the replies in `messages`. The region includes the thought of the reply if
        the template shows the thought. Replies that the template leaves out are missing. The result is empty
        if the model does not think, or if the template cannot render the chat.
        """
        # if a call takes the place of the answer, templates show the content as a thought
        without = {"tool_calls"} if self.format.end_token else set[str]()
        replies = [
            i for i, each in enumerate(messages) if each["role"] == "assistant" and not without & {*each}
        ]
        if not (replies and self.template.has_thoughts):
            return {}
        chat, placeholders = list(messages), {i: f"kvtool stands in for reply {i}." for i in replies}
        for i in replies:
            chat[i] = {**messages[i], "content": placeholders[i]}
        try:
            text = self._text(*self._prepared(chat, tools))
        except ModelError:
            return {}
        regions: dict[int, str] = {}
        at = 0
        for i, placeholder in placeholders.items():
            if (end := text.find(placeholder, at)) >= 0:
                regions[i], at = text[at:end], end + len(placeholder)
        return regions

    def _rendered(self, messages: list[Message], tools: list[Any]) -> tuple[np.ndarray, int]:
        prepared, shown_tools = self._prepared(messages, tools)
        whole = self.header.begin(self.template, self._text(prepared, shown_tools))
        return prefix_tokens(self._model, whole, len(self._prefix(whole, prepared, shown_tools)))

    def _text(self, prepared: list[Message], shown_tools: list[Any] | None) -> str:
        """Render the result of `_prepared`. Raises ModelError."""
        return self._bare.render(prepared, tools=shown_tools)

    def _prefix(self, whole: str, prepared: list[Message], shown_tools: list[Any] | None) -> str:
        """Return the common beginning of all chats with this system prompt and these tools, or ""."""
        system = prepared[0]["content"] if prepared[0]["role"] == "system" else ""
        # if a template writes the tools after the first message, the chats share only the system prompt
        for listed in (shown_tools, None) if shown_tools else (None,):
            if system or listed:
                prefix = system_prefix(self._bare, system, listed)
                if prefix and whole.startswith(prefix):
                    return prefix
        return ""

    def following(self, messages: list[Message], i: int, tools: list[Any]) -> np.ndarray:
        """Return the tokens i32[n] after the first i messages, which end with a reply. Raises ModelError.

        Results are returned again as in `whole`.
        """
        last = self._following.get(i)
        if not (last and last[0] is messages and last[1] == tools):
            last = self._following[i] = messages, tools, self._tokens_after(messages, i, tools)
        return last[2]

    def _tokens_after(self, messages: list[Message], i: int, tools: list[Any]) -> np.ndarray:
        if self.format.holds_results and "tool_calls" in messages[i - 1]:
            text = self._after_calls(messages, i, tools)
        elif self.format.end_token and "tool_calls" in messages[i - 1]:
            text = self._after_last_call(messages, i, tools)
        else:
            before, shown_tools = self._prepared(messages[: i - 1], tools)
            text = self._bare.following(before, for_template(messages[i:], self.template), shown_tools)
        return tokens_of(self._model, self.header.begin(self.template, text))

    def _after_calls(self, messages: list[Message], i: int, tools: list[Any]) -> str:
        """Return the text of a chat after the tool calls of the reply `messages[i - 1]`.

        Used if a template writes the results of calls inside the reply. A call with a random name is added
        to the reply. The result is the text after this call in the rendered chat.
        """
        name = f"kvtool_{secrets.token_hex(8)}"
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        reply = {**messages[i - 1], "content": "", "tool_calls": [*messages[i - 1]["tool_calls"], call]}
        whole = self._text(*self._prepared([*messages[: i - 1], reply, *messages[i:]], tools))
        _, last, text = whole.rpartition(self.format.written([(name, {})]))
        if not last:
            raise TemplateError("the model's chat template leaves calls out")
        return text

    def _after_last_call(self, messages: list[Message], i: int, tools: list[Any]) -> str:
        """Return the text of a chat from the end of the call on that ends the reply `messages[i - 1]`."""
        prepared, shown_tools = self._prepared(messages[:i], tools)
        rendered = self._bare.render(prepared, tools=shown_tools, reply=False)
        before = rendered.removesuffix(self.format.end_token)
        whole = self._text(*self._prepared(messages, tools))
        if not whole.startswith(before):
            raise TemplateError("the model's chat template leaves calls out")
        return whole.removeprefix(before)

    def call_replaces_answer(self, request: ChatRequest) -> bool:
        """True if a call may take the place of the answer: see `Format.end_token`."""
        return bool(self.format.end_token) and request.choice.kind != "none" and not request.begun

    def rules(self, request: ChatRequest) -> tuple[Rules | None, list[str]]:
        """Return (rules, remarks). Raises ApiError.

        The rules are None if any answer is allowed. The remarks are about keywords that are not enforced.
        """
        output_format = request.output_format
        plain = self.template.tags.plain if self.call_replaces_answer(request) else ""
        call_rules = CallRules(Vocabulary.of(self._model), self.format, plain, request.schema_places)
        if request.choice.kind == "required":
            if output_format:
                raise ApiError(
                    f"tool_choice demands a call, and {output_format.where} does not", param="tool_choice"
                )
            return call_rules.required_call(request.tools, request.choice.name), call_rules.remarks
        if not output_format:
            is_free = request.sampling.grammar is None and request.sampling.json_schema is None
            if request.choice.kind == "auto" and is_free:
                # a call that the model begins must be complete and fit the tool's schema
                return call_rules.begun_call(request.tools, one_call=request.choice.one_call), []
            return None, []
        rules, remarks = output_format.rules()
        # a client's grammar describes the whole reply, including calls, so it needs no rules for calls
        if request.choice.kind == "none" or output_format.kind == "grammar":
            return call_rules.answer(rules), remarks
        return call_rules.call_or(request.tools, rules), [*remarks, *call_rules.remarks]

    def _prepared(self, messages: list[Message], tools: list[Any]) -> tuple[list[Message], list[Any] | None]:
        """Return the arguments of `_text`: messages, and the tools that the template shows, all shielded.

        The tools are None if there are no tools, or if the system prompt lists them because the template has
        no native format for tools.
        """
        if self.format is HARMONY:
            # the template fails if a tool has no description
            tools = [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]
        prepared, shown_tools = for_template(messages, self.template), shielded(self.template.markers, tools)
        if tools and not Format.native(self.template):
            is_system = bool(prepared) and prepared[0]["role"] == "system"
            system = prepared[0]["content"] if is_system else ""
            content = f"{tools_text(shown_tools)}\n\n{system}".rstrip()
            return [{"role": "system", "content": content}, *prepared[1 if is_system else 0 :]], None
        return prepared, shown_tools or None
