"""Digests of a chat's beginnings, which find the stored chat that a request continues."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvtool.serve.api.messages import Message, loaded

START = "start"
"""The part of a reply by which `Rendering` tells how a template begins it."""


class History:
    """Digests of a chat's beginnings: equal ones began with the same tools and the same messages.

    Parameters
    ----------
    name
        Of the chat, if its client names chats: chats of other names share at most the system prompt.
    tools
        What templates get as tools.
    past
        As in `Rendering`.
    """

    def __init__(
        self, name: str | None, tools: list[Any] | None, messages: list[Message], past: str = ""
    ) -> None:
        self._name = name
        self.digests = [_digest(past.encode(), tools or [])]
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        """One message more."""
        # agents name each chat, and begin all with the same long prompt: it is read once for all
        is_start = len(self.digests) == 1 and message["role"] == "system"
        name = None if is_start else self._name
        self.digests.append(_digest(self.digests[-1], [name, _compared(message)]))

    @property
    def now(self) -> bytes:
        """The digest of all messages."""
        return self.digests[-1]


def _compared(message: Message) -> Message:
    """A message without what clients change on the way: blanks at the ends of a reply, ids of calls."""
    own: Message = {name: message[name] for name in (*("role", "content", "name"), START) if name in message}
    if message["role"] == "assistant":
        own["content"] = own["content"].strip()
    if "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        own["tool_calls"] = [[each["name"], loaded(each["arguments"])] for each in functions]
    return own


def _digest(before: bytes, what: object) -> bytes:
    text = json.dumps(what, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(before + text.encode("utf-8", "surrogatepass")).digest()
