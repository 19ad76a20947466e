"""Thoughts: the reasoning that a model writes between two tags at the start of a reply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, AnyStr, NamedTuple

if TYPE_CHECKING:
    from kvtool.llama.loaded.model import Model


class Tags(NamedTuple):
    """Texts around a thought at the start of a reply.

    `plain` begins a reply without a thought, and is not part of the answer. `answer_start` and `answer_end`
    may stand around the answer, and are not part of it either.
    """

    start: str
    end: str
    plain: str = ""
    answer_start: str = ""
    answer_end: str = ""

    @property
    def bare_end(self) -> str:
        """The text `end` without `plain`. After it, a tool call may follow in place of `plain`."""
        return self.end.removesuffix(self.plain)


THINK = Tags("<think>", "</think>")
"""Tags of most models, assumed for a template without tags."""

_GEMMA = Tags("<|channel>thought\n", "<channel|>")
"""Gemma 4."""

_GPT_OSS = Tags(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|channel|>final<|message|>",
)
"""gpt-oss, in OpenAI's format Harmony. A reply has several messages, each with a header."""

_KIMI = Tags(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|><|open|>response<|sep|>",
    "<|open|>response<|sep|>",
)
"""Kimi K3."""

_GRANITE = Tags("<think>", "</think>", answer_start="<response>", answer_end="</response>")
"""Granite 3.3. The system prompt of its template asks for these tags."""

_KNOWN = (
    # this template also names the tags of THINK, so it must be tried first
    _GRANITE,
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
    _GEMMA,
    _GPT_OSS,
    # Solar Open
    Tags("<|think|>", "<|end|><|begin|>assistant<|content|>", "<|content|>"),
    _KIMI,
)


def tags_in(*texts: str) -> Tags:
    """Return the tags in the first of these texts that has tags; `THINK` if no text has tags.

    The texts are a chat template's source and its reply header. The header is needed for templates whose
    source composes the tags from parts. Tags of the answer must be next to each other in the text, as in a
    system prompt that asks for them, because some templates write results of tools in such tags.
    """
    tags_found = (
        tags
        for text in texts
        for tags in _KNOWN
        if (tags.start in text or tags.end in text) and tags.answer_start + tags.answer_end in text
    )
    return next(tags_found, THINK)


class _Part(Enum):
    """Part of a reply.

    START: it is unknown which part begins. HEADER: the header of a message of gpt-oss. RESPONSE: an answer
    in tags. CALL: a tool call of gpt-oss with its header, and everything after it.
    """

    START = auto()
    HEADER = auto()
    THOUGHT = auto()
    RESPONSE = auto()
    ANSWER = auto()
    CALL = auto()


_Marks = Mapping[_Part, Mapping[str, _Part]]
"""For each part, the texts that end it, and the part after each of these texts.

If other text follows START, it is an answer.
"""


def _marks_of(tags: Tags) -> _Marks:
    start, end, plain = tags.start, tags.bare_end, tags.plain
    if tags == _GEMMA:
        # Gemma sometimes leaves out the line break, writes a tag twice, or writes tags after its answer
        opens = {**dict.fromkeys((start, start.rstrip(), "<|channel>"), _Part.THOUGHT), end: _Part.START}
        thought = {start: _Part.THOUGHT, end: _Part.START}
        answer = {start: _Part.THOUGHT, end: _Part.ANSWER}
        return {_Part.START: opens, _Part.THOUGHT: thought, _Part.ANSWER: answer}
    if tags == _GPT_OSS:
        # the recipient of a call may come first in a header
        opens = {"<|channel|>": _Part.HEADER, "to=": _Part.HEADER}
        header, ends = {"<|message|>": _Part.ANSWER}, {end: _Part.START}
        return {_Part.START: opens, _Part.HEADER: header, _Part.THOUGHT: ends, _Part.ANSWER: ends}
    if tags == _KIMI:
        opens = {start: _Part.THOUGHT, plain: _Part.ANSWER, "<|close|>message<|sep|>": _Part.START}
        answer = {"<|close|>response<|sep|>": _Part.START}
        return {_Part.START: opens, _Part.THOUGHT: {end: _Part.START}, _Part.ANSWER: answer}
    if tags.answer_start:
        opens = {start: _Part.THOUGHT, tags.answer_start: _Part.RESPONSE}
        response = {tags.answer_end: _Part.ANSWER}
        return {_Part.START: opens, _Part.THOUGHT: {end: _Part.START}, _Part.RESPONSE: response}
    if plain:
        # after `bare_end`, `plain`, a tool call or another thought may follow
        return {_Part.START: {start: _Part.THOUGHT, plain: _Part.ANSWER}, _Part.THOUGHT: {end: _Part.START}}
    return {_Part.START: {start: _Part.THOUGHT}, _Part.THOUGHT: {end: _Part.ANSWER}}


_GAP = "\n\n"
"""Text between two messages of gpt-oss that are both thoughts, or both answers."""


class Splitter:
    """Splits a reply into its thought and its answer, piece by piece.

    A thought can only be at the beginning of a reply, or directly after another thought. Later tags are
    ordinary text, except in the formats with control tokens that `_marks_of` lists. Line breaks between the
    thought and the answer belong to neither. An answer in tags ends at the first `Tags.answer_end`. Text
    after it is also a part of the answer.

    Some models begin a tool call without ending their thought. If a thought never ends, the answer begins at
    the first call in it. If the thought does end, the call is a part of it.

    is_open: True if the reply header opens the thought.
    call_opening: text with which tool calls begin. "" if there are no tools.
    """

    def __init__(self, tags: Tags, *, is_open: bool = False, call_opening: str = "") -> None:
        self._start, self._marks, self._call_opening = tags.start, _marks_of(tags), call_opening
        self._part = _Part.THOUGHT if is_open else _Part.START
        self._held = self._header = ""
        self.had_thought = is_open
        # kinds of text so far: True for a thought, False for an answer
        self._kinds: set[bool] = set()
        # text before the next text, if there is earlier text of the same kind
        self._gap = ""

    def after(self, begun: str) -> Splitter:
        """Read the beginning of the reply, and return this splitter for the rest. begun: not empty."""
        if not begun.lstrip().startswith(self._start):
            self._part = _Part.ANSWER
        for _ in self.feed(begun):
            pass
        return self

    @classmethod
    def of_earlier(cls, tags: Tags, content: str) -> Splitter:
        """Return a splitter for the content of an earlier reply.

        Earlier versions of kvtool saved only the end tag of a thought that the reply header opened.
        """
        return cls(tags, is_open=tags.end in content and tags.start not in content)

    @property
    def n_held(self) -> int:
        """Number of characters at the end of the text so far that are held back."""
        return len(self._held)

    def feed(self, piece: str) -> Iterator[tuple[bool, str]]:
        """Yield (is_thought, text). Text that may begin a tag is held back until the next piece."""
        text, self._held = self._held + piece, ""
        while True:
            marks = self._marks.get(self._part, {})
            # the first mark in the text; of several marks there, the longest
            places = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
            at, _, mark = min(places, default=(0, 0, ""))
            if self._part is _Part.START and text[: at if mark else None].strip():
                if not mark and any(each.startswith(text.lstrip()) for each in marks):
                    self._held = text
                    return
                self._part = _Part.ANSWER
                continue
            is_longer = any(len(each) > len(mark) and each.startswith(text[at:]) for each in marks)
            if not mark or is_longer:
                if self._part is _Part.START:
                    at = 0
                elif not mark:
                    at = self._n_certain(text, marks)
                self._held = text[at:]
                yield from self._texts(text[:at])
                return
            if self._part is not _Part.START:
                yield from self._texts(text[:at])
            text = text[at + len(mark) :]
            yield from self._begin(mark, marks[mark])

    def end(self) -> Iterator[tuple[bool, str]]:
        """Yield the text that `feed` has held back. Called at the end of the reply."""
        text, self._held = self._held, ""
        if self._part is _Part.THOUGHT and not (self._call_opening and text.startswith(self._call_opening)):
            yield from self._texts(text)
            return
        # an incomplete header is text
        text, self._header = self._header + text, ""
        self._part = _Part.ANSWER
        yield from self._texts(text)

    def _n_certain(self, text: str, marks: Iterable[str]) -> int:
        """Return how many characters of a text without marks belong to the present part in any case."""
        may_end = [*marks]
        if self._call_opening and self._part is _Part.THOUGHT:
            if (at := text.find(self._call_opening)) >= 0:
                return at
            may_end.append(self._call_opening)
        return len(text) - max((n_begun(text, mark) for mark in may_end), default=0)

    def _begin(self, mark: str, part: _Part) -> Iterator[tuple[bool, str]]:
        """Begin the part after a mark."""
        header, self._header = self._header + mark, ""
        if part is _Part.HEADER:
            self._header = mark
        elif self._part is _Part.HEADER:
            part, self._gap = _part_after(header, has_tools=bool(self._call_opening)), _GAP
        self._part = part
        self.had_thought |= part is _Part.THOUGHT
        if part is _Part.CALL:
            yield from self._texts(header)

    def _texts(self, text: str) -> Iterator[tuple[bool, str]]:
        """Yield text of the present part."""
        if self._part is _Part.HEADER:
            self._header += text
            return
        is_thought = self._part is _Part.THOUGHT
        if not is_thought and self.had_thought and False not in self._kinds:
            text = text.lstrip("\n")
        if not text:
            return
        if is_thought in self._kinds:
            text = self._gap + text
        self._gap = ""
        self._kinds.add(is_thought)
        yield is_thought, text


def _part_after(header: str, *, has_tools: bool) -> _Part:
    """Return the part after the header of a message of gpt-oss."""
    if has_tools and "to=functions." in header:
        return _Part.CALL
    channel = header.rpartition("<|channel|>")[2]
    return _Part.THOUGHT if channel.lstrip().startswith("analysis") else _Part.ANSWER


def n_begun(text: AnyStr, tag: AnyStr) -> int:
    """Return the largest n below len(tag) for which the text ends with the first n characters of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


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
