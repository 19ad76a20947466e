"""Digests of the beginnings of a chat. They are used to find the stored chat that a request continues."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvtool.serve.api.messages import Message, loaded

LEAD = "start"
"""Field that `Rendering` adds to a reply: its lead, such as the thought. See `Header`.

The field is omitted if the template writes the same lead for a reply without a thought. The name of the field
is part of the digests of stored chats, so it must not change.
"""


class History:
    """Digests of the beginnings of a chat. If two digests are equal, the tools and the messages are the same.

    name: name of the chat, if the client names its chats. All digests after the system prompt depend on it.
    tools: the tools in the prompt.
    variables_key: see `Rendering`.
    """

    def __init__(
        self, name: str | None, tools: list[Any] | None, messages: list[Message], variables_key: str = ""
    ) -> None:
        self._name = name
        # ASCII, because a name may have a half of a surrogate pair, which cannot be written to a file
        self.name = name and ascii(name)
        self.digests = [_digest(variables_key.encode(), tools or [])]
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        # the digest of the system prompt does not depend on the name: agents give each chat a name, but begin
        # all chats with the same long system prompt
        is_start = len(self.digests) == 1 and message["role"] == "system"
        name = None if is_start else self._name
        self.digests.append(_digest(self.digests[-1], [name, _compared(message)]))

    @property
    def now(self) -> bytes:
        """Digest of all messages."""
        return self.digests[-1]


def _compared(message: Message) -> Message:
    """Return a message without parts that clients change: white space around a reply, ids of calls."""
    compared: Message = {name: message[name] for name in ("role", "content", "name", LEAD) if name in message}
    if message["role"] == "assistant":
        compared["content"] = compared["content"].strip()
    if "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        compared["tool_calls"] = [[each["name"], loaded(each["arguments"])] for each in functions]
    return compared


def _digest(before: bytes, value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(before + text.encode("utf-8", "surrogatepass")).digest()
