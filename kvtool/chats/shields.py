"""Shields: characters in messages which ensure that only the template writes control tokens.

A marker is the text of a control token, for example <|im_end|>. A chat is rendered as one text. If a message
quotes a web page that contains <|im_end|>, this marker would end the turn. Therefore, before rendering, each
marker in messages and tool definitions gets a shield after its first character. When the text is tokenized,
the shields are removed, and the texts that had shields are tokenized without looking for markers. Templates
can trim and compare shielded texts, and write them as JSON.

The model's replies are shielded in the same way. The tags of a thought at the beginning of a reply are not
shielded, because the template reads them.

Some special tokens are ordinary words of the vocabulary, such as <think> in most models. Messages may contain
these tokens, because prompts use them. Therefore they get no shields, with one exception: in a tool's result,
such a token gets a shield if the template uses it. Otherwise a </tool_response> in a result would end the
result.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np

from kvtool.llama.loaded.markers import Markers
from kvtool.llama.loaded.model import Model

JOINT, CUT = "\U00010877", "\U00010878"
"""The shields are two ornaments of the Palmyrene script. Jinja filters and Python's repr do not change them.

When a JOINT is removed, the text before it and the text after it are tokenized together. When a CUT is
removed, these two texts are tokenized separately. A CUT is needed for markers that llama.cpp would find even
in plain text. If a message itself contains one of the ornaments, the ornament is doubled.
"""

_LONG = 2**14
"""Long texts are tokenized in parts. A part ends at the first marker after this many characters. Without
parts, the time would grow with the square of the number of markers in the text.
"""

_SHIELD = re.compile(f"[{JOINT}{CUT}]")
_SHIELDS = re.compile(f"({JOINT}{JOINT}|{CUT}{CUT}|{JOINT}|{CUT})")


def escaped(text: str) -> str:
    """Double the ornaments in a text, so that `tokens_of` does not read them as shields.

    Markers in the text stay markers.
    """
    return _SHIELD.sub(r"\g<0>\g<0>", text) if JOINT in text or CUT in text else text


def shielded(markers: Markers | None, value: Any) -> Any:
    """Return a JSON value with shields in all its strings. markers: None for a template without a model."""
    if isinstance(value, dict):
        return {shielded(markers, key): shielded(markers, part) for key, part in value.items()}
    if isinstance(value, list):
        return [shielded(markers, part) for part in value]
    return _shielded(markers, escaped(value)) if isinstance(value, str) else value


def _shielded(markers: Markers | None, text: str) -> str:
    if not (markers and markers.may_be_in(text)):
        return text
    # also shield an incomplete marker at the end of this text: text of the template may complete the marker
    shields = {at + 1: JOINT for at in markers.begun(text)}
    shields |= {at + 1: CUT if markers.is_word(marker) else JOINT for at, marker in markers.find(text)}
    if not shields:
        return text
    ends = [*sorted(shields), len(text)]
    return text[: ends[0]] + "".join(shields[at] + text[at:end] for at, end in pairwise(ends))


def tokens_of(model: Model, text: str, *, start: bool = False) -> np.ndarray:
    """Return the tokens i32[n] of a rendered chat, or of a part of a chat.

    start: True to begin with a BOS token if the model needs one.
    """
    if JOINT not in text and CUT not in text and len(text) <= _LONG:
        return model.tokenize(text, special=True, start=start)
    # tokens that some models add at the start and the end of a text
    ends = model.tokenize("", start=start)
    n = int(start and model.adds_bos)
    found, plain, before, at = [ends[:n]], 0, "", 0
    for begin, marker in [*model.markers.find(text), (len(text), "")]:
        if begin < at:
            continue
        fragment = text[at:begin]
        if _SHIELD.search(fragment):
            found.append(model.tokenize(text[plain:at], special=True))
            first, *others = _parts(model.markers.between(before, fragment, marker))
            found.append(model.tokenize(first))
            # Some tokenizers put a space before a text. A line break before the text prevents that. The
            # tokens of the line break are cut off again
            found += [model.tokenize(f"\n{part}")[len(model.tokenize("\n")) :] for part in others]
            plain = begin
        before, at = marker, begin + len(marker)
        if marker and at - plain > _LONG and model.markers.separates(marker):
            found.append(model.tokenize(text[plain:at], special=True))
            plain = at
    return np.concatenate([*found, model.tokenize(text[plain:], special=True), ends[n:]])


def _parts(text: str) -> list[str]:
    """Remove the shields, and return the parts that are tokenized separately."""
    parts = [""]
    for piece in _SHIELDS.split(text):
        if piece == CUT:
            parts.append("")
        elif piece != JOINT:
            parts[-1] += piece[0] if _SHIELD.match(piece) else piece
    return parts
