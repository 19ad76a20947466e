"""Constraints that apply after a reply's thought, and the limit of the thought's length."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from kvtool.chats.thinking import Tags, n_begun
from kvtool.llama.grammar.constraint import Constraint, Matcher, Vocabulary
from kvtool.llama.grammar.triggered import Triggered

if TYPE_CHECKING:
    from kvtool.chats.template import Template
    from kvtool.llama.loaded.model import Model
    from kvtool.llama.sampler import Around

_MAX_BREAKS = 2
"""Maximum number of line breaks between a thought and the answer. Chat templates do not write more."""


class _Place(Enum):
    """Position in a reply.

    START: it is not known yet whether a thought or an answer begins. BREAK: the thought has ended, but the
    answer has not begun.
    """

    START = auto()
    THOUGHT = auto()
    BREAK = auto()
    ANSWER = auto()


class AfterThought(Constraint):
    """Allows any thought at the start of a reply, and applies another constraint to the answer.

    If a thought reaches its maximum length, its end tag is forced. If the answer has a constraint, the reply
    cannot end before the end tag; a `Triggered` constraint, which allows any answer, has no such effect. If a
    token contains the end tag and more text, that text belongs to the answer.

    Some models begin a tool call without ending their thought. If the answer is free, the end tag is then not
    forced, because it would cut the call: see `Splitter`.

    inner: constraint of the answer. None if any answer is allowed.
    header: reply header. It may open or close a thought. Otherwise the model decides whether to think.
    budget: maximum tokens of the thought, without its tags; None for no limit.
    call_replaces_answer: True if a tool call, or another thought, may follow `Tags.bare_end` in place of the
    answer. The answer then begins after this text, and the inner constraint must allow `Tags.plain` before
    other answers.
    call_opening: text with which tool calls begin. "" if there are no tools.
    """

    def __init__(
        self,
        inner: Constraint | None,
        model: Model,
        tags: Tags,
        header: str,
        budget: int | None = None,
        *,
        call_replaces_answer: bool = False,
        call_opening: str = "",
    ) -> None:
        self._inner, self._budget = inner, budget
        # True if the answer may be any text, perhaps with rules for the calls in it
        self._is_free = inner is None or isinstance(inner, Triggered)
        self._tags = Tags(tags.start, tags.bare_end) if call_replaces_answer else tags
        self._plain, self._call_replaces_answer = tags.plain.encode(), call_replaces_answer
        self._max_breaks = 0 if call_replaces_answer else _MAX_BREAKS
        self._call_opening = call_opening.encode() if self._is_free else b""
        self._vocabulary = Vocabulary.of(model)
        self._first = _place_after(header, tags)
        # beginning of the thought, if the header opens one: the end tag or a call may begin in it
        self._opened = header.rpartition(tags.start)[2].encode()
        # for each checked beginning of an answer: True if the inner constraint allows this beginning
        self._known: dict[bytes, bool] = {}
        self.restart()

    def restart(self) -> None:
        if self._inner:
            self._inner.restart()
        self._place = self._first
        # last bytes of the text so far: a tag may begin in them
        self._held = b""
        # used only in position START: True if the text so far is an answer that the inner constraint allows
        self._fits = True
        self._n_thought = self._n_break = 0
        # True if a tool call has begun in the thought
        self._has_call = False
        self._forced: list[int] = []
        if self._place is _Place.THOUGHT:
            self._add(self._opened)
        self._close_if_long()

    def mask(self) -> np.ndarray | None:
        if self._place is _Place.THOUGHT and self._forced:
            return self._vocabulary.mask_of(self._forced[:1])
        if self._place is _Place.START and self._plain and self._is_free and self._is_used_up:
            return ~self._vocabulary.mask_of(self._opening_thoughts())
        if self._inner is None or (self._is_free and self._place is not _Place.ANSWER):
            return None
        if self._place is _Place.START:
            tokens = self._opening()
            can_answer = self._fits and not self._tags.plain
            return self._and(self._inner, tokens) if can_answer else self._vocabulary.mask_of(tokens)
        if self._place is _Place.THOUGHT:
            fits = self._vocabulary.all_but_ends
            bad = self._bad_ends(self._inner)
            return fits & ~self._vocabulary.mask_of(bad) if bad else fits
        if self._place is _Place.BREAK:
            breaks = (b"\n" * n for n in range(1, self._max_breaks - self._n_break + 1))
            return self._and(self._inner, [self._vocabulary.tokens_of(text)[0] for text in breaks])
        return self._inner.mask()

    def accept(self, token: int) -> bool:
        piece = self._vocabulary.pieces[token]
        if self._place is _Place.START:
            return self._begin(token, piece)
        if self._place is _Place.THOUGHT:
            return self._think(token, piece)
        if self._inner is None or self._inner.accept(token):
            self._place = _Place.ANSWER
            if self._call_replaces_answer and self._is_free:
                self._find_next(piece)
            return True
        self._n_break += len(piece)
        return self._place is _Place.BREAK and not piece.strip(b"\n") and self._n_break <= self._max_breaks

    def n_fitting(self, tokens: Sequence[int]) -> int:
        if self._place is _Place.START:
            # it is not known yet whether a thought or an answer begins, so no token is certain to fit
            return 0
        if self._place is not _Place.THOUGHT:
            return self._inner.n_fitting(tokens) if self._inner else len(tokens)
        if self._forced:
            pairs = zip(tokens, self._forced, strict=False)
            return next(
                (n for n, (one, other) in enumerate(pairs) if one != other),
                min(len(tokens), len(self._forced)),
            )
        text, most = self._held, len(tokens)
        if self._budget is not None and not self._has_call:
            most = min(most, max(self._budget - self._n_thought, 0))
        for n, token in enumerate(tokens[:most]):
            text += self._vocabulary.pieces[token]
            if token in self._vocabulary.ends or self._tags.end.encode() in text:
                return n
        return most

    def forced(self) -> Sequence[int]:
        if self._place is _Place.THOUGHT:
            return self._forced
        return self._inner.forced() if self._inner and self._place is _Place.ANSWER else []

    # tokens at the start of a reply

    def _begin(self, token: int, piece: bytes) -> bool:
        text = (self._held + piece).lstrip()
        for tag, place in self._tags_at_start:
            if text.startswith(tag):
                if self._inner:
                    self._inner.restart()
                if place is _Place.ANSWER:
                    return self._answer(text[len(tag) :])
                self._place, self._held = place, b""
                self._close_if_long()
                return self._add(text[len(tag) :])
        goes_on = any(tag.startswith(text) for tag, _ in self._tags_at_start)
        if not self._is_free and self._tags.plain:
            self._fits = False
        elif self._inner:
            self._fits = self._fits and self._inner.accept(token)
        if goes_on:
            self._held += piece
        elif self._fits:
            self._place = _Place.ANSWER
        return goes_on or self._fits

    def _find_next(self, piece: bytes) -> None:
        """Add text of the answer. If it ends a message, the next message may be a thought."""
        end, text = self._tags.end.encode(), self._held + piece
        if text.endswith(end):
            self._place, text = _Place.START, b""
        self._held = text[max(len(text) - len(end) + 1, 0) :]

    @property
    def _is_used_up(self) -> bool:
        return self._budget is not None and self._n_thought >= self._budget

    @property
    def _tags_at_start(self) -> list[tuple[bytes, _Place]]:
        """Tags with which a reply may begin, each with the position after the tag."""
        places = [(self._tags.plain, _Place.ANSWER), (self._tags.start, _Place.THOUGHT)]
        if self._plain and self._is_used_up and not self._is_free:
            # no further thought is allowed; if the answer is free, `_opening_thoughts` prevents a thought
            del places[1]
        return [(tag.encode(), place) for tag, place in places if tag]

    def _opening(self) -> list[int]:
        """Return the tokens that begin or continue a tag at the start of the reply."""
        held, pieces, allowed = self._held.lstrip(), self._vocabulary.pieces, list[int]()
        for tag, place in self._tags_at_start:
            if tag.startswith(held):
                rest = tag[len(held) :]
                tokens = self._vocabulary.continuing(rest)
                # A token may continue after a tag that opens a thought. It must not continue after the tag
                # `plain`, because the answer's constraint could forbid the text there
                allowed += [n for n in tokens if place is _Place.THOUGHT or len(pieces[n]) <= len(rest)]
        return allowed

    def _opening_thoughts(self) -> list[int]:
        """Return the tokens that begin or continue the tag of a thought, but not the tag `plain`."""
        held, start = self._held.lstrip(), self._tags.start.encode()
        tokens = self._vocabulary.continuing(start[len(held) :]) if start.startswith(held) else []
        return [n for n in tokens if not self._plain.startswith(held + self._vocabulary.pieces[n])]

    # tokens of a thought and its end tag

    def _think(self, token: int, piece: bytes) -> bool:
        if token in self._vocabulary.ends:
            return self._is_free
        if self._forced:
            if token != self._forced[0]:
                return False
            self._forced = self._forced[1:]
            return self._add(piece)
        if not self._add(piece):
            return False
        if self._place is _Place.THOUGHT:
            self._n_thought += 1
            self._close_if_long()
            if not self._is_free and token in self._vocabulary.control and self._n_begun():
                # the model has begun an end tag of several tokens: force the rest, so that the answer follows
                self._close()
        return True

    def _add(self, text: bytes) -> bool:
        """Accept text of the thought. If the text completes the end tag, the answer begins after the tag."""
        end, text = self._tags.end.encode(), self._held + text
        at = text.find(end)
        if at >= 0:
            self._has_call = False
            return self._answer(text[at + len(end) :])
        self._has_call |= bool(self._call_opening) and self._call_opening in text
        self._held = text[max(len(text) - max(len(end), len(self._call_opening)) + 1, 0) :]
        return True

    def _answer(self, text: bytes) -> bool:
        """Begin the answer with this text, possibly "". Return False if the constraint forbids the text."""
        answer = text.lstrip(b"\n")
        if self._inner and not self._can_begin(self._inner, answer):
            return False
        if self._call_replaces_answer:
            # a call, an answer or another thought follows
            self._place, self._held, self._fits = _Place.START, b"", True
            tokens = self._vocabulary.tokens_of(text)
            return all(self._begin(token, self._vocabulary.pieces[token]) for token in tokens)
        if self._inner:
            for token in self._vocabulary.tokens_of(answer):
                self._inner.accept(token)
        self._n_break = len(text) - len(answer)
        self._place = _Place.ANSWER if answer or not self._inner else _Place.BREAK
        return True

    def _can_begin(self, inner: Constraint, answer: bytes) -> bool:
        """True if the inner constraint allows an answer that begins with this text."""
        if self._is_free:
            return True
        if answer not in self._known:
            tokens = self._vocabulary.tokens_of(answer)
            self._known[answer] = inner.n_fitting(tokens) == len(tokens)
        return self._known[answer]

    def _bad_ends(self, inner: Constraint) -> list[int]:
        """Return the tokens that complete the end tag and continue with text that the constraint forbids."""
        end, bad = self._tags.end.encode(), []
        for token in self._vocabulary.with_inside(end[-1:]):
            text = self._held + self._vocabulary.pieces[token]
            at = text.find(end)
            if at >= 0 and not self._can_begin(inner, text[at + len(end) :].lstrip(b"\n")):
                bad.append(token)
        return bad

    def _close_if_long(self) -> None:
        may_be_call = self._has_call or n_begun(self._held, self._call_opening)
        if self._place is _Place.THOUGHT and self._is_used_up and not may_be_call:
            self._close()

    def _close(self) -> None:
        self._forced = self._vocabulary.tokens_of(self._tags.end.encode()[self._n_begun() :])

    def _n_begun(self) -> int:
        """Number of bytes of an incomplete end tag at the end of the thought so far; 0 if there is none."""
        return n_begun(self._held, self._tags.end.encode())

    def _and(self, inner: Constraint, tokens: Sequence[int]) -> np.ndarray | None:
        """Return a mask of these tokens and the tokens that `inner` allows; None if `inner` allows all."""
        mask = inner.mask()
        return None if mask is None else mask | self._vocabulary.mask_of(tokens)


def _place_after(header: str, tags: Tags) -> _Place:
    """Return the position of the first token after a reply header.

    It is THOUGHT if the header opens a thought. It is ANSWER if the header closes a thought or has the tag
    `plain`. Otherwise it is START.
    """
    _, opened, rest = header.rpartition(tags.start)
    if opened and tags.end not in rest:
        return _Place.THOUGHT
    is_closed = tags.end in header or (tags.plain and tags.plain in header)
    return _Place.ANSWER if is_closed else _Place.START


def after_thought(
    model: Model,
    template: Template,
    budget: int | None = None,
    header: str | None = None,
    begun: str = "",
    *,
    call_replaces_answer: bool = False,
    call_opening: str = "",
) -> Around:
    """Return a function that wraps a constraint, so that it applies only after the thought of a reply.

    header, budget, call_replaces_answer, call_opening: see `AfterThought`. If `header` is None, the
    template's reply header is used.
    begun: given beginning of the reply; "" if there is none. Its thought counts as part of the budget.
    """
    header = template.reply_start() if header is None else header
    tags, answer = template.tags, ""
    if begun:
        is_thought = begun.lstrip().startswith(tags.start)
        thought, closed, answer = begun.partition(tags.end) if is_thought else ("", tags.end, begun)
        header = thought + closed
        if budget is not None and is_thought:
            n_thought = len(model.tokenize(thought.lstrip().removeprefix(tags.start)))
            budget = max(budget - n_thought, 0)

    def around(inner: Matcher | Triggered | None) -> Constraint | None:
        if inner:
            inner.begin(Vocabulary.of(model).tokens_of(answer.encode()))
        if not template.has_thoughts or (inner is None and budget is None):
            return inner
        return AfterThought(
            inner,
            model,
            tags,
            header,
            budget,
            call_replaces_answer=call_replaces_answer,
            call_opening=call_opening,
        )

    return around
