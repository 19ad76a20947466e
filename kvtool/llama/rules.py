"""Rules: a grammar as llguidance takes it, in its own form of Lark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from kvtool.errors import UsageError

MOST_CHOICES = 10_000
"""Most texts to choose from."""


class Rules(NamedTuple):
    """A grammar.

    Attributes
    ----------
    start
        Expression of a whole text.
    more
        Rules that it refers to, one a line.
    name
        The grammar's name in messages, such as "the JSON schema".
    """

    start: str
    more: tuple[str, ...] = ()
    name: str = "the grammar"

    @property
    def text(self) -> str:
        """The grammar in Lark."""
        return "\n".join(["%llguidance {}", f"start: {self.start}", *self.more]) + "\n"


def of_choice(texts: Sequence[str]) -> Rules:
    """One of these texts. Raises UsageError for none, and for too many."""
    if not texts or len(texts) > MOST_CHOICES:
        raise UsageError(f"a choice must be among 1 to {MOST_CHOICES:,} texts, got {len(texts):,}")
    # one lexeme: a text may begin with another one
    return Rules("CHOICE", (f"CHOICE: {' | '.join(map(literal, texts))}",), "the choice")


def of_regex(pattern: str) -> Rules:
    """The texts that a regular expression matches as a whole."""
    import llguidance

    return Rules("TEXT", (f"TEXT: /{llguidance.regex_to_lark(pattern, 'd')}/",), "the regular expression")


def literal(text: str) -> str:
    """A text in a rule. Raises UsageError for half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not Unicode: character {error.start} is half of a pair") from None
    return json.dumps(text, ensure_ascii=False)
