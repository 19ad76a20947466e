"""The header of a reply: the template's text between a user's message and the reply."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from kvtool.chats.template import Template
from kvtool.llama.model import Model


@dataclass(frozen=True, slots=True)
class Header:
    """A reply's header, and the part of it with which earlier replies also begin.

    Attributes
    ----------
    n
        Tokens of the header.
    n_left_out
        Last tokens of the header that earlier replies do not begin with: they open a thought, or an empty
        thought is part of the header.
    kept
        The text of the other tokens.
    earlier
        The text with which an earlier reply without a thought begins behind `kept`.
    """

    n: int
    n_left_out: int
    kept: str
    earlier: str

    @classmethod
    def of(cls, model: Model, template: Template) -> Header:
        """The header of a template's replies.

        No token is left out if the template keeps thoughts, or if the difference has no tag of a thought.
        """
        header, earlier = template.reply_start(), template.earlier_start
        tokens = model.tokenize(header, special=True)
        whole = cls(len(tokens), 0, header, template.tags.plain)
        if earlier is None or (template.opens_thought and not template.drops_thoughts):
            return whole
        kept, others = os.path.commonprefix([header, earlier]), model.tokenize(earlier, special=True)
        # a token may go across the place where they part
        while n := len(cut := model.tokenize(kept, special=True)):
            if np.array_equal(cut, tokens[:n]) and np.array_equal(cut, others[:n]):
                break
            kept = kept[:-1]
        left_out, rest = header[len(kept) :], earlier[len(kept) :]
        if left_out and not any(tag and tag in left_out + rest for tag in template.tags):
            return whole
        return cls(len(tokens), len(tokens) - n, kept, rest)
