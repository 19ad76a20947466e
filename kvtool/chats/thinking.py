"""Thoughts: the reasoning that a model writes between two tags at the start of a reply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvtool.chats.stops import n_begun

if TYPE_CHECKING:
    from kvtool.llama.loaded.model import Model


class Tags(NamedTuple):
    """Texts around a thought at the start of a reply.

    `plain` begins a reply without a thought, and is not part of the answer.
    """

    start: str
    end: str
    plain: str = ""

    @property
    def bare_end(self) -> str:
        """The text `end` without `plain`. After it, a tool call may follow in place of `plain`."""
        return self.end.removesuffix(self.plain)


THINK = Tags("<think>", "</think>")
"""Tags of most models, assumed for a template without tags."""

_KNOWN = (
    THINK,
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<mm:think>", "</mm:think>"),
    Tags("<think:opensource>", "</think:opensource>"),
    # Apriel 1.6. Its template also names <thinking>, so these tags must be tried first
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
    """Return the tags in the first of these texts that has tags; `THINK` if no text has tags.

    The texts are a chat template's source and its reply header. The header is needed for templates whose
    source composes the tags from parts.
    """
    tags_found = (tags for text in texts for tags in _KNOWN if tags.start in text or tags.end in text)
    return next(tags_found, THINK)


class Splitter:
    """Splits a reply into its thought and its answer, piece by piece.

    A thought can only be at the beginning of a reply, or directly after another thought. Later tags are
    ordinary text. Line breaks between the thought and the answer belong to neither.

    is_open: True if the reply header opens the thought.
    """

    def __init__(self, tags: Tags, *, is_open: bool = False) -> None:
        self._tags = tags
        self._held = ""
        # None while it is unknown whether the reply begins with a thought
        self._is_thought: bool | None = True if is_open else None
        self.had_thought = is_open
        self._has_answer = False

    @classmethod
    def behind(cls, tags: Tags, begun: str) -> Splitter:
        """Return a splitter for the rest of a reply. begun: beginning of the reply, not empty."""
        splitter = cls(tags)
        if not begun.lstrip().startswith(tags.start):
            splitter._is_thought = False
        for _ in splitter.feed(begun):
            pass
        return splitter

    @classmethod
    def of_earlier(cls, tags: Tags, content: str) -> Splitter:
        """Return a splitter for the content of an earlier reply.

        Earlier versions of kvtool saved only the end tag of a thought that the reply header opened.
        """
        return cls(tags, is_open=tags.end in content and tags.start not in content)

    def feed(self, piece: str) -> Iterator[tuple[bool, str]]:
        """Yield (is_thought, text). Text that may begin a tag is held back until the next piece."""
        text, self._held = self._held + piece, ""
        (start, _, plain), end = self._tags, self._tags.bare_end
        while self._is_thought is not False:
            if self._is_thought is None:
                bare = text.lstrip()
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
                continue
            thought, is_closed, text = text.partition(end)
            if not is_closed:
                n = n_begun(thought, end)
                self._held = thought[len(thought) - n :]
                thought = thought[: len(thought) - n]
            if thought:
                yield True, thought
            if not is_closed:
                return
            # `plain`, a tool call or another thought may follow
            self._is_thought = None if plain else False
        yield from self._answer(text)

    def end(self) -> Iterator[tuple[bool, str]]:
        """Yield the text that `feed` has held back. Called at the end of the reply."""
        text, self._held = self._held, ""
        if not self._is_thought:
            yield from self._answer(text)
        elif text:
            yield True, text

    def _answer(self, text: str) -> Iterator[tuple[bool, str]]:
        if self.had_thought and not self._has_answer:
            text = text.lstrip("\n")
        if text:
            self._has_answer = True
            yield False, text


def control_tokens(model: Model, tags: Tags) -> frozenset[int]:
    """Return the control tokens in the tags. `Writer.write` yields their text only if `shown` has them."""
    tokens = {token for tag in tags if tag for token in model.tokenize(tag, special=True).tolist()}
    return frozenset(token for token in tokens if model.piece(token) != model.piece(token, special=True))


def apart(text: str, splitter: Splitter) -> tuple[str, str]:
    """Return the thought and the answer of a reply."""
    parts = [*splitter.feed(text), *splitter.end()]
    thought, answer = (
        "".join(part for kind, part in parts if kind is is_thought) for is_thought in (True, False)
    )
    return thought, answer


def without_thought(text: str, splitter: Splitter) -> str:
    """Return the answer of a reply, without its thought."""
    return apart(text, splitter)[1]
