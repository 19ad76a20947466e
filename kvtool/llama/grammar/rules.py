"""Rules: a grammar in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from kvtool.errors import UsageError

MAX_REPETITIONS = 10_000
"""Maximum count of a repetition such as a{10000}. llguidance takes about a minute to compile a million."""


class Rules(NamedTuple):
    """A grammar.

    Attributes
    ----------
    start
        Expression for the whole text.
    more
        Further rules that `start` refers to, one line each.
    name
        The grammar's name in messages, such as "the JSON schema".
    triggers
        Texts with which a text of this grammar may begin. If there are any, the grammar does not describe the
        whole text, but each part that begins with a trigger.
    tokens
        Tokens of the model that the rules refer to, as `token_rule` says: <think>, or !<think> for any other
        token.
    """

    start: str
    more: tuple[str, ...] = ()
    name: str = "the grammar"
    triggers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join(["%llguidance {}", f"start: {self.start}", *self.more]) + "\n"


def token_rule(n: int) -> str:
    """Return the name of the rule for token n of `Rules.tokens`. The matcher of a model defines it."""
    return f"token{n}"


def repeats_too_often(pattern: str) -> bool:
    """True if a repetition of a regular expression has a count above MAX_REPETITIONS."""
    counts = re.findall(r"\{0*(\d*)(?:,0*(\d*))?\}", pattern)
    return any(len(n) > 5 or int(n or 0) > MAX_REPETITIONS for pair in counts for n in pair)


def literal(text: str) -> str:
    """Return a text as a literal of a rule. Raises UsageError for an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not Unicode: character {error.start} is half of a pair") from None
    return json.dumps(text, ensure_ascii=False)
