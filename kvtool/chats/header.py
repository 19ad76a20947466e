"""The header of a reply: the template's text between a user's message and the reply.

If a client gives the beginning of the reply, the header includes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtool.chats.marks import tokens_of
from kvtool.chats.template import Message, Template
from kvtool.llama.model import Model

_MORE = 2
"""Tokens before the part that is left out, which a prompt must also end with to have the header."""


@dataclass(frozen=True, slots=True)
class Header:
    """A reply's header, and the part of it with which earlier replies also begin.

    Attributes
    ----------
    tokens
        The header, i32[n].
    kept, left_out
        Its text in two parts. Earlier replies begin with the first one. The second one opens a thought, or an
        empty thought is part of the header.
    n_left_out
        Tokens of the second part.
    earlier
        The text with which an earlier reply without a thought begins behind the first part.
    begun, n_begun
        The beginning of the reply, which is behind both parts; tokens behind the first part that stay.
    """

    tokens: np.ndarray = field(compare=False)
    kept: str
    left_out: str
    n_left_out: int
    earlier: str
    begun: str = ""
    n_begun: int = 0

    @classmethod
    def of(cls, model: Model, template: Template) -> Header:
        """The header of a template's replies. A difference without a tag of a thought is no part of it."""
        header, earlier = template.reply_start(), template.earlier_start
        tokens = model.tokenize(header, special=True)
        whole = cls(tokens, header, "", 0, template.tags.plain)
        if earlier is None:
            return whole
        thoughtful = template.start_of_earlier({"reasoning_content": "Hm."})
        texts = [header, earlier, earlier if thoughtful is None else thoughtful]
        others = [model.tokenize(text, special=True) for text in texts]
        kept = os.path.commonprefix(texts)
        start, end, plain = template.tags
        # a token or a tag may go across the place where they part
        while n := len(cut := model.tokenize(kept, special=True)):
            is_tag_cut = any(_is_cut(text, len(kept), tag) for text in texts for tag in (start, plain or end))
            if not is_tag_cut and all(np.array_equal(cut, each[:n]) for each in others):
                break
            kept = kept[:-1]
        left_out, rest = header[len(kept) :], earlier[len(kept) :]
        if not any(tag and tag in left_out + rest for tag in template.tags):
            return whole
        return cls(tokens, kept, left_out, len(tokens) - n, rest)

    def with_begun(self, model: Model, template: Template, begun: str) -> Header:
        """The header of a reply that begins with this text, as earlier replies begin.

        A text that begins with a thought is the beginning of the thought. Any other text is behind the
        thought, which is left out.
        """
        start, end, _ = template.tags
        if begun.lstrip().startswith(start):
            text = (self.kept + self.left_out).removesuffix(template.opening)
        else:
            text, earlier = self.kept + self.earlier, template.earlier_start
            if earlier and earlier.startswith(text):
                # some templates have more before a reply, such as whom it is for
                text = earlier
            if template.opens_thought and text.endswith(template.opening):
                text += f"\n{end}\n\n"
        kept = os.path.commonprefix([self.kept, text])
        words = template.marked({"role": "assistant", "content": begun})["content"]
        tokens = tokens_of(model, text + words)
        n_begun = len(tokens) - len(model.tokenize(kept, special=True))
        return Header(
            tokens, kept, text[len(kept) :], 0, (self.kept + self.earlier)[len(kept) :], begun, n_begun
        )

    def start(self, template: Template, before: Sequence[Message], reply: Message) -> str:
        """The text between the first part and a reply in a chat that goes on, as the template has it."""
        text = template.before_reply(before, reply) if "reasoning_content" in reply and self.kept else None
        _, is_there, start = (text or "").rpartition(self.kept or "\0")
        return start if is_there else self.earlier

    @property
    def n(self) -> int:
        """Number of its tokens."""
        return len(self.tokens)

    @property
    def n_opening(self) -> int:
        """Number of the tokens behind the first part."""
        return self.n_left_out + self.n_begun

    def ends(self, prompt: np.ndarray) -> bool:
        """True if a prompt of i32[n] tokens ends as the header does. Behind a tool's result it may not."""
        # the first token may be one with the text before it, and the cache may have some of them
        n = min(self.n_opening + _MORE, self.n - 1, len(prompt))
        return n <= 0 or np.array_equal(prompt[-n:], self.tokens[-n:])


def _is_cut(text: str, at: int, tag: str) -> bool:
    """True if the tag is in the text with its beginning before this place and its end behind it."""
    return any(text.startswith(tag, max(at - n, 0)) for n in range(1, len(tag)) if n <= at)
