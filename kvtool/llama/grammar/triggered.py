"""A constraint on parts of a text, such as the tool calls of a reply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtool.errors import UsageError
from kvtool.llama.grammar.constraint import Constraint, Matcher, Vocabulary
from kvtool.llama.grammar.rules import Rules


class Triggered(Constraint):
    """Allows any text, but from a trigger on the text must follow rules, until their text is complete.

    The text stays free if what follows the trigger within its last token does not fit the rules, or if
    llguidance rejects the rules. It becomes free if the rules are too complex for llguidance at some place.
    """

    def __init__(self, vocabulary: Vocabulary, rules: Rules) -> None:
        self._vocabulary, self._rules = vocabulary, rules
        self._triggers = [text.encode() for text in rules.triggers]
        self._n_held = max(map(len, self._triggers)) - 1
        # made at the first trigger, because compiling the rules takes time, and most replies have no trigger
        self._matcher: Matcher | None = None
        self._begun: Sequence[int] = ()
        self.restart()

    def restart(self) -> None:
        # last bytes of the free text: a trigger may begin in them
        self._held = b""
        # the matcher of the rules while they apply, otherwise None
        self._active: Matcher | None = None
        for token in self._begun:
            self.accept(token)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start the text with these tokens. Each later `restart` also starts with them."""
        self._begun = tokens
        self.restart()

    def mask(self) -> np.ndarray | None:
        try:
            return self._active.mask() if self._active else None
        except UsageError:
            self._active = None
            return None

    def accept(self, token: int) -> bool:
        if self._active:
            try:
                fits = self._active.accept(token)
            except UsageError:
                fits, self._active = True, None
            if self._active and self._active.is_complete:
                self._active = None
            return fits
        text = self._held + self._vocabulary.pieces[token]
        at = self._place_in(text)
        self._held = text[max(len(text) - self._n_held, 0) :]
        if at >= 0:
            self._apply(text[at:])
        return True

    def n_fitting(self, tokens: Sequence[int]) -> int:
        if self._active:
            try:
                return self._active.n_fitting(tokens)
            except UsageError:
                return 0
        text = self._held
        for n, token in enumerate(tokens, 1):
            text += self._vocabulary.pieces[token]
            if self._place_in(text) >= 0:
                # the rules decide about the tokens after the trigger
                return n
        return len(tokens)

    def forced(self) -> Sequence[int]:
        return self._active.forced() if self._active else []

    def _place_in(self, text: bytes) -> int:
        """Return the index of the first trigger in the text, or -1 if there is none."""
        return min((at for trigger in self._triggers if (at := text.find(trigger)) >= 0), default=-1)

    def _apply(self, text: bytes) -> None:
        """Apply the rules to the text from here on. text: the trigger, and the rest of its last token."""
        self._held = b""
        try:
            matcher = self._matcher = self._matcher or Matcher(self._vocabulary, self._rules)
            matcher.restart()
            if all(map(matcher.accept, self._vocabulary.tokens_of(text))) and not matcher.is_complete:
                self._active = matcher
        except UsageError:
            self._triggers = []
