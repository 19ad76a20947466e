"""Chats as a template takes them: what it refuses or leaves out is said in roles that it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from kvtool.errors import ModelError

_GAP = "\n\n"
"""What stands between texts that become one message."""


class Roles:
    """Which messages a chat template takes, found out with small chats.

    Parameters
    ----------
    render
        The text of a chat. Raises ModelError.
    """

    def __init__(self, render: Callable[[list[dict[str, Any]]], str]) -> None:
        self._render = render

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages in an order and in roles that the template takes; `messages` stay as they are.

        System prompts become one, and open the user's first message where there is no place for one; later
        ones become the user's. Where a template wants the user and the model to take turns, messages of one
        role become one, and an empty one stands for each that is missing.
        """
        found = [dict(message) for message in messages]
        n = sum(1 for _ in takewhile(_is_system, found))
        if not self._takes_systems and any(map(_is_system, found)):
            for message in filter(_is_system, found[n:]):
                message["role"] = "user"
            if n:
                found[:n] = [{**found[0], "content": _GAP.join(each["content"] for each in found[:n])}]
                n = 1
        first, rest = found[:n], found[n:]
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
        """Whether a system prompt stays where it is, however long the chat gets."""
        return self._shows("system", "user", "assistant", "user")

    @cached_property
    def _takes_systems(self) -> bool:
        """Whether there may be several, anywhere."""
        return self._shows("system", "system", "user", "assistant", "system", "user")

    @cached_property
    def _takes_runs(self) -> bool:
        """Whether messages of one role may follow each other."""
        return self._shows("user", "user", "assistant", "assistant", "user")

    @cached_property
    def _starts_anyhow(self) -> bool:
        """Whether the user need not speak first, or at all."""
        chats = [["system"], ["system", "assistant", "user"]] if self._takes_system else []
        return all(self._shows(*roles) for roles in [["assistant", "user"], *chats])

    @cached_property
    def _is_known(self) -> bool:
        """Whether the template takes the simplest chat: otherwise nothing can be told."""
        return self._shows_all(["user"])

    def _shows(self, *roles: str) -> bool:
        return not self._is_known or self._shows_all(roles)

    def _shows_all(self, roles: Sequence[str]) -> bool:
        """Whether it renders messages of these roles, in their order."""
        marks = [f"kv{n}." for n in range(len(roles))]
        try:
            chat = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
            text = self._render(chat)
        except ModelError:
            return False
        places = [text.find(mark) for mark in marks]
        return places[0] >= 0 and places == sorted(set(places))


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")


def _in_turns(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages with those of the user and of the model in turns."""
    last: dict[str, Any] | None = None
    for message in messages:
        role = message["role"]
        is_call = last is not None and "tool_calls" in last
        if last and role == last["role"] and role != "tool" and not is_call:
            texts = [each["content"] for each in (last, message) if each["content"]]
            last = {**last, **message, "content": _GAP.join(texts)}
            continue
        if last:
            yield last
            if role == "user" and (is_call or last["role"] == "tool"):
                # the model has not answered to what its call brought; some templates want a text
                yield {"role": "assistant", "content": "..."}
        last = message
    if last:
        yield last
