"""Message roles: rewrite a chat for a template that refuses or omits some roles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from kvtool.errors import ModelError

_GAP = "\n\n"
"""Text between two messages that are joined."""

_NO_REPLY = "..."
"""Text of a missing or empty reply, if a template needs a text."""


class Roles:
    """Roles and orders of messages that a chat template takes, learned by rendering small chats.

    render: returns the text of a chat, or raises ModelError.
    """

    def __init__(self, render: Callable[[list[dict[str, Any]]], str]) -> None:
        self._render = render

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of the messages, in an order and in roles that the template takes.

        If the template takes at most one system message, the system messages at the beginning are joined, and
        later system messages become messages of the user. If the template takes no system message, the text
        of the system prompt is put before the text of the user's first message.

        If the user and the model must alternate, successive messages of one role are joined. If the user
        speaks after a tool's result, the reply "..." is inserted before the user's message. If a chat must
        begin with the user, an empty message of the user may be inserted at the beginning. If a reply must
        have a text, empty replies become "...".
        """
        fitted = [dict(message) for message in messages]
        n = sum(1 for _ in takewhile(_is_system, fitted))
        if not self._takes_systems and any(map(_is_system, fitted)):
            for message in filter(_is_system, fitted[n:]):
                message["role"] = "user"
            if n:
                fitted[:n] = [{**fitted[0], "content": _GAP.join(part["content"] for part in fitted[:n])}]
                n = 1
        for message in fitted:
            if _is_empty_reply(message) and not self._takes_empty_replies:
                message["content"] = _NO_REPLY
        first, rest = fitted[:n], fitted[n:]
        if not self._takes_runs:
            rest = list(_in_turns(rest))
        is_folded = bool(first) and not self._takes_system
        if (not rest or rest[0]["role"] != "user") and (is_folded or not self._starts_anyhow):
            rest.insert(0, {"role": "user", "content": ""})
        if is_folded:
            rest[0]["content"] = f"{first.pop()['content']}{_GAP}{rest[0]['content']}".rstrip()
        return [*first, *rest]

    @cached_property
    def _takes_system(self) -> bool:
        """True if the template renders a system prompt at the beginning of a chat with two turns."""
        return self._shows("system", "user", "assistant", "user")

    @cached_property
    def _takes_systems(self) -> bool:
        """True if the template renders several system messages, at the beginning and later."""
        return self._shows("system", "system", "user", "assistant", "system", "user")

    @cached_property
    def _takes_runs(self) -> bool:
        """True if the template renders successive messages of one role."""
        return self._shows("user", "user", "assistant", "assistant", "user")

    @cached_property
    def _starts_anyhow(self) -> bool:
        """True if a chat need not begin with a message of the user, and need not have one."""
        chats = [["system"], ["system", "assistant", "user"]] if self._takes_system else []
        return all(self._shows(*roles) for roles in [["assistant", "user"], *chats])

    @cached_property
    def _takes_empty_replies(self) -> bool:
        """True if the template renders a chat with a reply that has no text."""
        roles = {"user": "kv0.", "assistant": ""}
        try:
            self._render([{"role": role, "content": text} for role, text in roles.items()])
        except ModelError:
            return not self._is_known
        return True

    @cached_property
    def _is_known(self) -> bool:
        """True if the template renders a chat with a single message of the user.

        If False, small chats cannot show which roles it takes. `_shows` then assumes that it takes all roles.
        """
        return self._shows_all(["user"])

    def _shows(self, *roles: str) -> bool:
        return not self._is_known or self._shows_all(roles)

    def _shows_all(self, roles: Sequence[str]) -> bool:
        """True if the template renders messages of these roles, in this order."""
        stand_ins = [f"kv{n}." for n in range(len(roles))]
        try:
            pairs = zip(roles, stand_ins, strict=True)
            chat = [{"role": role, "content": stand_in} for role, stand_in in pairs]
            text = self._render(chat)
        except ModelError:
            return False
        places = [text.find(stand_in) for stand_in in stand_ins]
        return places[0] >= 0 and places == sorted(set(places))


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")


def _is_empty_reply(message: Mapping[str, Any]) -> bool:
    is_empty = not (message.get("content") or message.get("tool_calls"))
    return is_empty and message["role"] == "assistant"


def _in_turns(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages so that the user and the model alternate."""
    last: dict[str, Any] | None = None
    for message in messages:
        role = message["role"]
        is_call = last is not None and "tool_calls" in last
        if last and role == last["role"] and role != "tool" and not is_call:
            texts = [part["content"] for part in (last, message) if part["content"]]
            last = {**last, **message, "content": _GAP.join(texts)}
            continue
        if last:
            yield last
            if role == "user" and (is_call or last["role"] == "tool"):
                # a reply is missing here. Insert one that is not empty: some templates refuse an empty reply
                yield {"role": "assistant", "content": _NO_REPLY}
        last = message
    if last:
        yield last
