"""Reasoning: what a model writes for itself at the start of a reply, between two tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvtool.chats.stops import n_begun

if TYPE_CHECKING:
    from kvtool.llama.model import Model


class Tags(NamedTuple):
    """What stands around a thought at the start of a reply.

    Attributes
    ----------
    start, end
        What opens the thought, and what closes it.
    plain
        What opens a reply without a thought, and is no part of what it says.
    """

    start: str
    end: str
    plain: str = ""


THINK = Tags("<think>", "</think>")
"""The tags of most models; recognized whatever the template says."""

_KNOWN = (
    THINK,
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<mm:think>", "</mm:think>"),
    Tags("<think:opensource>", "</think:opensource>"),
    # Apriel 1.6; it names <thinking>, too
    Tags("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
    Tags("<thinking>", "</thinking>"),
    Tags("<reasoning>", "</reasoning>"),
    # Gemma 4
    Tags("<|channel>thought\n", "<channel|>"),
    # gpt-oss
    Tags(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
    # Solar Open
    Tags("<|think|>", "<|end|><|begin|>assistant<|content|>", "<|content|>"),
    # Kimi K3
    Tags(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|><|open|>response<|sep|>",
        "<|open|>response<|sep|>",
    ),
)


def tags_in(*texts: str) -> Tags:
    """Return the tags that the first of these texts names that names any; `THINK` if none does.

    A chat template names them in its source, or puts them together, so that only its reply header has them.
    """
    found = (tags for text in texts for tags in _KNOWN if tags.start in text or tags.end in text)
    return next(found, THINK)


class Splitter:
    """Tells a reply's thought from what it says, piece by piece.

    Only what a reply begins with is a thought: a tag further on is text like any other.

    Parameters
    ----------
    is_open
        Whether the reply's header has opened the thought already.

    Attributes
    ----------
    had_thought
        Whether there was one so far.
    """

    def __init__(self, tags: Tags, *, is_open: bool = False) -> None:
        self._tags = tags
        self._held = ""
        # None: not known yet whether the reply begins with a thought
        self._is_thought: bool | None = True if is_open else None
        self.had_thought = is_open

    @classmethod
    def behind(cls, tags: Tags, begun: str) -> Splitter:
        """The splitter of a reply behind this beginning of it, which is not empty."""
        splitter = cls(tags)
        if not begun.lstrip().startswith(tags.start):
            splitter._is_thought = False
        for _ in splitter.feed(begun):
            pass
        return splitter

    def feed(self, piece: str) -> Iterator[tuple[bool, str]]:
        """Yields (whether it is thought, text). What may be the start of a tag waits for the next piece."""
        text, self._held = self._held + piece, ""
        if self._is_thought is None:
            bare = text.lstrip()
            start, _, plain = self._tags
            if bare.startswith(start):
                self._is_thought = self.had_thought = True
                text = bare[len(start) :]
            elif plain and bare.startswith(plain):
                self._is_thought = False
                text = bare[len(plain) :]
            elif start.startswith(bare) or plain.startswith(bare):
                self._held = text
                return
            else:
                self._is_thought = False
        if self._is_thought:
            thought, found, text = text.partition(self._tags.end)
            if not found:
                n = n_begun(thought, self._tags.end)
                self._held = thought[len(thought) - n :]
                thought = thought[: len(thought) - n]
            if thought:
                yield True, thought
            if not found:
                return
            self._is_thought = False
        if text:
            yield False, text

    def end(self) -> Iterator[tuple[bool, str]]:
        """Yields what has waited: the reply is over."""
        if self._held:
            yield bool(self._is_thought), self._held
            self._held = ""


def control_tokens(model: Model, tags: Tags) -> frozenset[int]:
    """The control tokens of the tags: a writer hides their text unless they are in `Writer.shown`."""
    tokens = {token for tag in tags if tag for token in model.tokenize(tag, special=True).tolist()}
    return frozenset(token for token in tokens if model.piece(token) != model.piece(token, special=True))


def apart(text: str, splitter: Splitter) -> tuple[str, str]:
    """The thought of a reply, and its answer without the line breaks between them."""
    parts = [*splitter.feed(text), *splitter.end()]
    thought, said = (
        "".join(part for kind, part in parts if kind is is_thought) for is_thought in (True, False)
    )
    return thought, said.lstrip("\n") if splitter.had_thought else said


def without_thought(text: str, splitter: Splitter) -> str:
    """The answer of a reply, without its thought and the line breaks behind it."""
    return apart(text, splitter)[1]
