"""The texts of a vocabulary's markers, such as <|im_end|>: tokens that only a chat template writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

from kvtool.llama.library import api

_CONTROL = api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_UNKNOWN
_DEFINED = api.LLAMA_TOKEN_ATTR_USER_DEFINED
_N_START = 3
"""Characters of a marker that are looked for: what follows them is looked up."""
_MARKER, _TAG = re.compile(r"<[|｜].*|.*[|｜]>", re.S), re.compile(r"[<\[].*[>\]]", re.S)
_BLANKS = " \t\n\v\f\r"


class Markers:
    """Finds markers in texts.

    Control tokens are markers. User-defined ones, such as <think> in most vocabularies, are words, which
    llama.cpp finds in any text; but those in <| or |> are markers, which some files call user-defined.

    Parameters
    ----------
    attrs
        llama.cpp's attributes of each.
    tags
        Words that look like markers, and theirs.
    """

    def __init__(self, attrs: Mapping[str, int], tags: Mapping[str, int]) -> None:
        self._attrs = attrs
        self._tags = tags
        self._sizes = sorted(set(map(len, attrs)), reverse=True)
        # without any, nothing fits
        self._start, self._first = (
            re.compile("|".join(map(re.escape, sorted({text[:n] for text in attrs}))) or r"(?!)")
            for n in (_N_START, 1)
        )

    @classmethod
    def of(cls, vocab: Any, n: int) -> Markers:
        """Those of llama.cpp's vocabulary of n tokens."""
        found = map(api.llama_vocab_get_attr, repeat(vocab, n), range(n))
        own = {token: attr for token, attr in enumerate(found) if attr & (_CONTROL | _DEFINED)}
        texts = [api.llama_vocab_get_text(vocab, token).decode("utf-8", "replace") for token in own]
        attrs = {text: attr for text, attr in zip(texts, own.values(), strict=True) if text[1:]}
        markers = {text: attr for text, attr in attrs.items() if attr & _CONTROL or _MARKER.fullmatch(text)}
        return cls(markers, {text: attr for text, attr in attrs.items() if _TAG.fullmatch(text)})

    def and_tags(self, source: str) -> Markers:
        """These, and the tags that a template's source has."""
        return Markers({**self._attrs, **{text: a for text, a in self._tags.items() if text in source}}, {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._attrs)

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields where a marker begins, and the marker: the longest at each place. They may overlap."""
        at = 0
        while match := self._start.search(text, at):
            begin, at = match.start(), match.start() + 1
            pieces = (text[begin : begin + size] for size in self._sizes)
            if found := next((piece for piece in pieces if piece in self._attrs), ""):
                yield begin, found

    def may_be_in(self, text: str) -> bool:
        """Whether a marker or the start of one can be in the text: quicker than to find it."""
        return self._first.search(text) is not None

    def begun(self, text: str) -> Iterator[int]:
        """Yields where the text's end begins a marker with more than one character."""
        first = max(len(text) - max(self._sizes, default=0), 0)
        for match in self._first.finditer(text, first, len(text) - 1):
            if any(each.startswith(text[match.start() :]) for each in self._attrs):
                yield match.start()

    def is_word(self, marker: str) -> bool:
        """Whether llama.cpp finds it in plain texts, too."""
        return not self._attrs[marker] & _CONTROL

    def between(self, before: str, text: str, after: str) -> str:
        """A text without the blanks that these markers take from it; "" stands for none."""
        if self._attrs.get(before, 0) & api.LLAMA_TOKEN_ATTR_RSTRIP:
            text = text.lstrip(_BLANKS)
        if self._attrs.get(after, 0) & api.LLAMA_TOKEN_ATTR_LSTRIP:
            text = text.rstrip(_BLANKS)
        return text
