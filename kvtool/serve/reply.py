"""The message of a reply: thought, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvtool.chats.thinking import Splitter
from kvtool.serve.tools.calls import Call, Parser, TextOrCall

Delta = dict[str, Any]


class Reply:
    """Builds the message of a reply from its pieces.

    splitter: None if the model writes no thoughts.
    parser: None if no tool may be called.

    Attributes
    ----------
    message
        The whole message, in the form in which a client gets it.
    n_thought
        Number of tokens of the thought, without its tags. A token that has both text of the thought and a
        part of a tag is counted.
    """

    def __init__(self, splitter: Splitter | None = None, parser: Parser | None = None) -> None:
        self._splitter = splitter
        self._parser = parser
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self.n_thought = 0
        # number of tokens before the thought, which are the tokens of its start tag
        self._n_before = 0

    def feed(self, piece: str, n_written: int = 0) -> list[Delta]:
        """Return the deltas of a piece. Each delta has one field of the message.

        n_written: number of tokens of the reply up to the end of this piece.
        """
        if not self._splitter:
            return list(self._deltas([(False, piece)]))
        had_thought = self._splitter.had_thought
        parts = [*self._splitter.feed(piece)]
        self._count(parts, n_written)
        if not (had_thought or self.n_thought):
            # no text of a thought has come yet: all tokens so far are before the thought
            self._n_before = n_written
        return list(self._deltas(parts))

    def end(self, n_written: int = 0) -> list[Delta]:
        """End the reply. Return the deltas of text that was held back."""
        parts = [*self._splitter.end()] if self._splitter else []
        self._count(parts, n_written)
        deltas = list(self._deltas(parts))
        if self._parser:
            deltas += self._of_parts(self._parser.end())
        return deltas

    def repeat(self, text: str) -> list[Delta]:
        """Add the prompt to the message, if the answer must repeat the prompt. Return the deltas."""
        return [self._add("content", text)] if text else []

    @property
    def is_done(self) -> bool:
        """True if the reply may have only one call, and has it. The reply then ends here."""
        return bool(self._parser and self._parser.is_done)

    def finish(self, is_cut: bool) -> str:
        """Return OpenAI's finish reason. is_cut: True if a limit ended the reply."""
        return "length" if is_cut else "tool_calls" if "tool_calls" in self.message else "stop"

    def _count(self, parts: Iterable[tuple[bool, str]], n_written: int) -> None:
        """Update `n_thought` if any part belongs to the thought.

        Text that may begin the end tag is held back. Its tokens are counted only after it has turned out to
        be text of the thought.
        """
        if any(is_thought for is_thought, _ in parts):
            self.n_thought = n_written - self._n_before

    def _deltas(self, parts: Iterable[tuple[bool, str]]) -> Iterator[Delta]:
        for is_thought, text in parts:
            if is_thought:
                yield self._add("reasoning_content", text)
            elif self._parser:
                yield from self._of_parts(self._parser.feed(text))
            else:
                yield self._add("content", text)

    def _of_parts(self, parts: Iterable[TextOrCall]) -> Iterator[Delta]:
        for part in parts:
            if isinstance(part, Call):
                arguments = {"arguments": part.arguments}
                call = {"id": part.id, "type": "function", "function": {"name": part.name, **arguments}}
                self.message.setdefault("tool_calls", []).append(call)
                begun = {**call, "function": {"name": part.name, "arguments": ""}}
                yield {"tool_calls": [{"index": part.index, **begun}]}
                yield {"tool_calls": [{"index": part.index, "function": arguments}]}
            else:
                yield self._add("content", part)

    def _add(self, name: str, text: str) -> Delta:
        self.message[name] = self.message.get(name, "") + text
        return {name: text}
