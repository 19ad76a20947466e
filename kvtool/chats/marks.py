"""Text stays text: of a rendered chat, only what the template itself writes becomes markers.

A chat is rendered as one text, in which the <|im_end|> of a web page would end the turn that has it. So
before it is rendered, each marker in what messages and tools say gets a mark behind its first character. The
tokens are then those that the text has where llama.cpp finds no marker at these places. Templates trim and
compare such texts, and write them as JSON, as before.

What the model itself has written comes back as text. The tags of a thought with which a reply begins are left
to the template; the syntax of calls is the template's or kvtool's own. Words of the vocabulary, as <think> is
in most, stay the tokens that they are in any text: prompts teach them. But in results of tools, those in the
template are marked, too: </tool_response> would end the result.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np

from kvtool.llama.markers import Markers
from kvtool.llama.model import Model

JOINT, CUT = "\U00010877", "\U00010878"
"""Marks: ornaments of Palmyrene, which filters and Python's repr leave alone. Texts that have them get two.

CUT: the two sides are tokenized apart, as llama.cpp finds this marker in plain texts, too.
"""

_MARK = re.compile(f"[{JOINT}{CUT}]")
_MARKS = re.compile(f"({JOINT}{JOINT}|{CUT}{CUT}|{JOINT}|{CUT})")


def escaped(text: str) -> str:
    """A text in which every marker is one."""
    return _MARK.sub(r"\g<0>\g<0>", text) if JOINT in text or CUT in text else text


def marked(markers: Markers | None, value: Any) -> Any:
    """The value, with marks in all texts in it; markers: None without a vocabulary."""
    if isinstance(value, dict):
        return {marked(markers, key): marked(markers, part) for key, part in value.items()}
    if isinstance(value, list):
        return [marked(markers, part) for part in value]
    return _marked(markers, escaped(value)) if isinstance(value, str) else value


def _marked(markers: Markers | None, text: str) -> str:
    if not (markers and markers.may_be_in(text)):
        return text
    # what follows in a template may end a marker
    marks = {at + 1: JOINT for at in markers.begun(text)}
    marks |= {at + 1: CUT if markers.is_word(marker) else JOINT for at, marker in markers.find(text)}
    if not marks:
        return text
    ends = [*sorted(marks), len(text)]
    return text[: ends[0]] + "".join(marks[at] + text[at:end] for at, end in pairwise(ends))


def tokens_of(model: Model, text: str, *, start: bool = False) -> np.ndarray:
    """The tokens i32[n] of a rendered chat, or of a part of it. start: as for Model.tokenize."""
    if JOINT not in text and CUT not in text:
        return model.tokenize(text, special=True, start=start)
    # some models want tokens at both ends
    ends = model.tokenize("", start=start)
    n = int(start and model.adds_bos)
    found, plain, before, at = [ends[:n]], 0, "", 0
    for begin, marker in [*model.markers.find(text), (len(text), "")]:
        if begin < at:
            continue
        fragment = text[at:begin]
        if _MARK.search(fragment):
            found.append(model.tokenize(text[plain:at], special=True))
            first, *others = _parts(model.markers.between(before, fragment, marker))
            found.append(model.tokenize(first))
            # some tokenizers begin a text with a space; none joins a line break and these parts
            found += [model.tokenize(f"\n{part}")[len(model.tokenize("\n")) :] for part in others]
            plain = begin
        before, at = marker, begin + len(marker)
    return np.concatenate([*found, model.tokenize(text[plain:], special=True), ends[n:]])


def _parts(text: str) -> list[str]:
    """The text without marks; the parts that are tokenized apart."""
    parts = [""]
    for piece in _MARKS.split(text):
        if piece == CUT:
            parts.append("")
        elif piece != JOINT:
            parts[-1] += piece[0] if _MARK.match(piece) else piece
    return parts
