"""Markers of a vocabulary, such as <|im_end|>: tokens that only a chat template may write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvtool.llama.libllama.library import api

CONTROL = api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_UNKNOWN
"""llama.cpp's attributes of control tokens."""
_DEFINED = api.LLAMA_TOKEN_ATTR_USER_DEFINED
_N_START = 3
"""`find` first searches for prefixes of this length, then looks up whole markers at the places it found."""
_MARKER, _TAG = re.compile(r"<[|｜].*|.*[|｜]>", re.S), re.compile(r"[<\[].*[>\]]", re.S)
_BLANKS = " \t\n\v\f\r"


class Markers:
    """Search for markers in texts.

    Markers are control tokens. User-defined tokens that begin with <| or end with |> are also markers,
    because some model files wrongly declare control tokens as user-defined. Other user-defined tokens, such
    as <think> in most vocabularies, are ordinary words, which llama.cpp finds in any text.

    attrs, tags: llama.cpp's attributes of each marker and of each tag. A tag is a control token or a
    user-defined token in brackets, such as <think>. Some tags are also markers.
    """

    def __init__(self, attrs: Mapping[str, int], tags: Mapping[str, int]) -> None:
        self._attrs = attrs
        self._tags = tags
        self._sizes = sorted(set(map(len, attrs)), reverse=True)
        # without markers, a pattern that matches nothing
        self._start, self._first = (
            re.compile("|".join(map(re.escape, sorted({text[:n] for text in attrs}))) or r"(?!)")
            for n in (_N_START, 1)
        )

    @classmethod
    def of(cls, vocab: Any, token_attrs: np.ndarray) -> Markers:
        """Return the markers of llama.cpp's vocabulary. token_attrs: attributes i32[token]."""
        attrs = {
            text: int(token_attrs[token])
            for token in np.flatnonzero(token_attrs & (CONTROL | _DEFINED)).tolist()
            if (text := api.llama_vocab_get_text(vocab, token).decode("utf-8", "replace"))[1:]
        }
        markers = {text: attr for text, attr in attrs.items() if attr & CONTROL or _MARKER.fullmatch(text)}
        return cls(markers, {text: attr for text, attr in attrs.items() if _TAG.fullmatch(text)})

    def and_tags(self, source: str) -> Markers:
        """Return these markers plus the tags that occur in a template's source."""
        return Markers({**self._attrs, **{text: a for text, a in self._tags.items() if text in source}}, {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._attrs)

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield (index, marker) for the longest marker at each place of the text. Markers may overlap."""
        at = 0
        while match := self._start.search(text, at):
            begin, at = match.start(), match.start() + 1
            pieces = (text[begin : begin + size] for size in self._sizes)
            if marker := next((piece for piece in pieces if piece in self._attrs), ""):
                yield begin, marker

    def may_be_in(self, text: str) -> bool:
        """Return True if the text may contain a marker or the start of a marker. Faster than `find`."""
        return self._first.search(text) is not None

    def begun(self, text: str) -> Iterator[int]:
        """Yield each index where the rest of the text (two or more characters) is the start of a marker."""
        first = max(len(text) - max(self._sizes, default=0), 0)
        for match in self._first.finditer(text, first, len(text) - 1):
            if any(marker.startswith(text[match.start() :]) for marker in self._attrs):
                yield match.start()

    def is_word(self, marker: str) -> bool:
        """Return True if llama.cpp finds the marker in any text, because the marker is user-defined."""
        return not self._attrs[marker] & CONTROL

    def separates(self, marker: str) -> bool:
        """Return True if the parts of a text before and after the marker can be tokenized separately."""
        if self._attrs[marker] & api.LLAMA_TOKEN_ATTR_RSTRIP:
            return False
        # llama.cpp finds longer tokens first
        longer = (text for text in {**self._attrs, **self._tags} if len(text) >= len(marker))
        return not any(_may_overlap(marker, text) for text in longer if text != marker)

    def between(self, before: str, text: str, after: str) -> str:
        """Strip from a text the whitespace that llama.cpp drops next to markers.

        before, after: the markers before and after the text, or "" if there is no marker.
        """
        if self._attrs.get(before, 0) & api.LLAMA_TOKEN_ATTR_RSTRIP:
            text = text.lstrip(_BLANKS)
        if self._attrs.get(after, 0) & api.LLAMA_TOKEN_ATTR_LSTRIP:
            text = text.rstrip(_BLANKS)
        return text


def _may_overlap(one: str, other: str) -> bool:
    """Return True if the two can overlap in a text. other: at least as long as `one`."""
    ends = range(1, len(one))
    return one in other or any(other.startswith(one[n:]) or other.endswith(one[:n]) for n in ends)
