"""Reply header: the template's text between a user's message and the reply.

If the reply has a given beginning (from a client, or the text that /continue goes on with), the header
includes it: `Header.with_begun` makes such a header, and `Header.begin` puts it into a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtool.chats.shields import tokens_of
from kvtool.chats.template import Message, Template
from kvtool.llama.loaded.model import Model

_MORE = 2
"""`Header.ends` compares this many tokens at the end of `Header.kept`, and all tokens after `Header.kept`.
"""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a reply, in two parts: `kept`, and a lead.

    The template also writes `kept` before earlier replies. A lead is the text between `kept` and an answer,
    for example a thought.

    Attributes
    ----------
    tokens
        Tokens of the header, i32[n].
    kept
        First part of the text.
    lead
        Second part, with which this reply begins. It opens a thought or is an empty thought.
    earlier_lead
        Lead of an earlier reply without a thought.
    n_lead
        Number of tokens after `kept`: those of the lead and of `begun`.
    begun
        Given beginning of the reply; "" if there is none. It follows both parts. The lead then stays in the
        cache.
    replaced
        If there is `begun`: the template's own header, which this header replaces.
    """

    tokens: np.ndarray = field(compare=False)
    kept: str
    lead: str
    earlier_lead: str
    n_lead: int
    begun: str = ""
    replaced: str = ""

    @classmethod
    def of(cls, model: Model, template: Template) -> Header:
        """Return a template's reply header.

        If no tag of a thought is in `lead` or `earlier_lead`, the whole header becomes `kept`.
        """
        header, earlier = template.reply_start(), template.earlier_start
        tokens = model.tokenize(header, special=True)
        whole = cls(tokens, header, "", template.tags.plain, 0)
        if earlier is None:
            return whole
        thoughtful = template.start_of_earlier({"reasoning_content": "Hm."})
        texts = [header, earlier, earlier if thoughtful is None else thoughtful]
        others = [model.tokenize(text, special=True) for text in texts]
        kept = os.path.commonprefix(texts)
        tags = template.tags
        uncut = tags.start, tags.plain or tags.end
        # the common text must end between tokens, and not within a tag
        while n := len(cut := model.tokenize(kept, special=True)):
            is_tag_cut = any(_is_cut(text, len(kept), tag) for text in texts for tag in uncut)
            if not is_tag_cut and all(np.array_equal(cut, each[:n]) for each in others):
                break
            kept = kept[:-1]
        lead, earlier_lead = header[len(kept) :], earlier[len(kept) :]
        if not any(tag and tag in lead + earlier_lead for tag in tags):
            return whole
        return cls(tokens, kept, lead, earlier_lead, len(tokens) - n)

    def with_begun(self, model: Model, template: Template, begun: str) -> Header:
        """Return the header of a reply that begins with this text. "" for any beginning.

        If the text begins with a thought's tag, it is the beginning of a thought. Any other text is the
        beginning of the answer, without a thought before it.
        """
        if not begun:
            return self
        if begun.lstrip().startswith(template.tags.start):
            text = self._before_thought(template)
        else:
            text, earlier = self.kept + self.earlier_lead, template.earlier_start
            if earlier and earlier.startswith(text):
                # some templates put more text before an earlier reply, such as its recipient: keep this text
                text = earlier
            if template.opens_thought and text.endswith(template.opening):
                text += f"\n{template.tags.end}\n\n"
        kept = os.path.commonprefix([self.kept, text])
        tokens = tokens_of(model, text + _shielded(template, begun))
        n_lead = len(tokens) - len(model.tokenize(kept, special=True))
        earlier_lead = (self.kept + self.earlier_lead)[len(kept) :]
        replaced = self.kept + self.lead
        return Header(tokens, kept, text[len(kept) :], earlier_lead, n_lead, begun, replaced)

    def _before_thought(self, template: Template) -> str:
        """Return the text of the header up to its thought, which may be open, empty, or only an end tag."""
        text, tags = self.kept + self.lead, template.tags
        before, is_there, _ = text.rpartition(tags.start)
        if is_there:
            return before
        end = tags.plain or tags.end
        return text.rstrip().removesuffix(end) if text.rstrip().endswith(end) else text

    def begin(self, template: Template, text: str) -> str:
        """Return a rendered chat with this header and `begun` at its end; unchanged without `begun`."""
        if not self.begun:
            return text
        # some templates write no header after a tool's result
        header = self.kept + self.lead if text.endswith(self.replaced) else ""
        return text.removesuffix(self.replaced) + header + _shielded(template, self.begun)

    def lead_of(self, template: Template, before: Sequence[Message], reply: Message) -> str:
        """Return the lead of an earlier reply.

        The reply is rendered with the messages before it, and with another message after it.
        """
        text = template.before_reply(before, reply) if "reasoning_content" in reply and self.kept else None
        _, is_there, lead = (text or "").rpartition(self.kept or "\0")
        return lead if is_there else self.earlier_lead

    @property
    def n(self) -> int:
        return len(self.tokens)

    @property
    def n_left_out(self) -> int:
        """Number of tokens of the lead if the template may leave them out of earlier replies, otherwise 0."""
        return 0 if self.begun else self.n_lead

    @property
    def n_held(self) -> int:
        """Number of tokens that must not be evicted while they are the newest tokens."""
        return self.n - self.n_lead if self.begun else self.n

    def ends(self, prompt: np.ndarray) -> bool:
        """True if a prompt i32[n] ends with the header. A prompt with a tool's result may end differently."""
        # The header's first token is not compared: in the prompt, this token may also contain text before the
        # header
        n = min(self.n_lead + _MORE, self.n - 1, len(prompt))
        return n <= 0 or np.array_equal(prompt[-n:], self.tokens[-n:])


def _shielded(template: Template, begun: str) -> str:
    content: str = template.shielded({"role": "assistant", "content": begun})["content"]
    return content


def _is_cut(text: str, at: int, tag: str) -> bool:
    """True if a tag in the text begins before this position and ends after it."""
    return any(text.startswith(tag, max(at - n, 0)) for n in range(1, len(tag)) if n <= at)
