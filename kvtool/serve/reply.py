"""A reply as it comes: what is thought, what is said, which tools are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvtool.chats.thinking import Splitter
from kvtool.serve.tools.calls import Call, Event, Parser

Delta = dict[str, Any]


class Reply:
    """Puts a reply together from its pieces.

    Parameters
    ----------
    splitter
        Tells thought from speech; None where there are no thoughts.
    parser
        Tells calls from speech; None where no tool may be called.

    Attributes
    ----------
    message
        All of it, as a client gets it.
    """

    def __init__(self, splitter: Splitter | None = None, parser: Parser | None = None) -> None:
        self._splitter = splitter
        self._parser = parser
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}

    def feed(self, piece: str) -> list[Delta]:
        """What a stream says of a piece: no more than one field of the message each."""
        parts = self._splitter.feed(piece) if self._splitter else [(False, piece)]
        return list(self._deltas(parts))

    def end(self) -> list[Delta]:
        """What has waited: the reply is over."""
        deltas = list(self._deltas(self._splitter.end() if self._splitter else []))
        if self._parser:
            deltas += self._of_events(self._parser.end())
        return deltas

    def repeat(self, text: str) -> list[Delta]:
        """What a stream says of the prompt, where the reply begins with it."""
        return [self._add("content", text)] if text else []

    def finish(self, is_cut: bool) -> str:
        """Why it ended, in OpenAI's words."""
        return "length" if is_cut else "tool_calls" if "tool_calls" in self.message else "stop"

    def _deltas(self, parts: Iterable[tuple[bool, str]]) -> Iterator[Delta]:
        for is_thought, text in parts:
            if is_thought:
                yield self._add("reasoning_content", text)
            elif self._parser:
                yield from self._of_events(self._parser.feed(text))
            else:
                yield from self._said(text)

    def _of_events(self, events: Iterable[Event]) -> Iterator[Delta]:
        for event in events:
            if isinstance(event, Call):
                arguments = {"arguments": event.arguments}
                call = {"id": event.id, "type": "function", "function": {"name": event.name, **arguments}}
                self.message.setdefault("tool_calls", []).append(call)
                begun = {**call, "function": {"name": event.name, "arguments": ""}}
                yield {"tool_calls": [{"index": event.index, **begun}]}
                yield {"tool_calls": [{"index": event.index, "function": arguments}]}
            else:
                yield from self._said(event)

    def _said(self, text: str) -> Iterator[Delta]:
        if self._splitter and self._splitter.had_thought and not self.message["content"]:
            # line breaks behind the thought
            text = text.lstrip("\n")
        if text:
            yield self._add("content", text)

    def _add(self, name: str, text: str) -> Delta:
        self.message[name] = self.message.get(name, "") + text
        return {name: text}
