"""How tokens are drawn: the settings of llama.cpp's samplers, under its names and with its meanings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvtool.errors import UsageError

MOST = 2**20
"""The most tokens that a penalty looks back at: llama.cpp allocates them."""

LIMIT = 10_000
"""Far beyond what makes sense, and far from where llama.cpp's 32-bit floats overflow: it would abort."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What `Sampler` does, apart from its seed. The defaults take the likeliest token.

    Attributes
    ----------
    temp
        Temperature; 0 takes the likeliest token that is left.
    top_k
        Keep the K likeliest tokens; 0 or less keeps all.
    top_p
        Keep the likeliest tokens whose probabilities add up to P; 1 keeps all.
    min_p
        Drop tokens less likely than P times the likeliest; 0 drops none.
    typical
        Keep the tokens whose surprise is nearest to the expected one, up to probability P; 1 keeps all.
    xtc_probability
        How often XTC drops the likeliest tokens; 0 is never.
    xtc_threshold
        XTC drops all but the least likely of the tokens above this probability; above 0.5 it does nothing.
    repeat_penalty
        Divides the positive logits of recent tokens and multiplies the others; 1 is off.
    repeat_last_n
        Tokens written that this and the next two penalties look back at; 0 is off.
    presence_penalty
        Subtracted from the logit of each recent token; 0 is off.
    frequency_penalty
        Subtracted from it once for each time that the token is among the recent ones; 0 is off.
    dry_multiplier
        Size of the DRY penalty for tokens that continue a repetition; 0 is off.
    dry_base
        The DRY penalty grows by this factor with each token of the repetition.
    dry_allowed_length
        Repetitions of up to this many tokens are free.
    dry_penalty_last_n
        Tokens written that DRY looks back at; 0 is off.
    dry_sequence_breaker
        Texts that no repetition goes across.
    logit_bias
        Pairs of a token and what is added to its logit; -inf bans the token.
    mirostat
        1 or 2: Mirostat of this version keeps the surprise constant, in place of all samplers above but
        `temp` and `logit_bias`, as in llama.cpp. 0 is off.
    mirostat_lr
        How fast Mirostat learns, the paper's eta.
    mirostat_ent
        The surprise that Mirostat aims at in bits, the paper's tau.
    grammar
        A GBNF grammar with a rule named root; a text that does not fit it is never written. None is off.
    stop
        Texts before which a text ends.

    Raises
    ------
    UsageError
        For a value out of its range. It names the command's option, which is the field's name with dashes.
    """

    temp: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breaker: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    mirostat: int = 0
    mirostat_lr: float = 0.1
    mirostat_ent: float = 5.0
    grammar: str | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, (fits, needed) in _RANGES.items():
            value = getattr(self, name)
            if not fits(value):
                needed, semicolon, hint = needed.partition(";")
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} must be {needed}, got {value:g}{semicolon}{hint}")
        for token, bias in self.logit_bias:
            if not (bias == -inf or abs(bias) <= LIMIT):
                raise UsageError(
                    f"--logit-bias of token {token} must be in -{LIMIT}..{LIMIT} or -inf, got {bias:g}"
                )
        if "" in self.stop or "" in self.dry_sequence_breaker:
            raise UsageError("the text of --stop and --dry-sequence-breaker must not be empty")
        if self.grammar is not None and "\0" in self.grammar:
            raise UsageError("the grammar must be a text; it has a character 0")

    @property
    def n_recent(self) -> int:
        """Tokens written that the penalties must know."""
        return max(64, self.repeat_last_n, self.dry_penalty_last_n)


def _within(low: float, high: float, hint: str = "") -> tuple[Callable[[float], bool], str]:
    # NaN is in no range
    return (lambda x: low <= x <= high), f"in {low}..{high}{hint}"


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temp": _within(0, LIMIT, "; 0 takes the likeliest token"),
    "top_k": ((lambda k: -(2**31) <= k < 2**31), "a 32-bit number"),
    "top_p": _within(0, 1),
    "min_p": _within(0, 1),
    "typical": ((lambda p: 0 < p <= 1), "above 0 and at most 1; 1 is off"),
    "xtc_probability": _within(0, 1),
    "xtc_threshold": _within(0, 1),
    "repeat_penalty": _within(0.001, 1000, "; 1 is off"),
    "repeat_last_n": _within(0, MOST),
    "presence_penalty": _within(-LIMIT, LIMIT),
    "frequency_penalty": _within(-LIMIT, LIMIT),
    "dry_multiplier": _within(0, LIMIT),
    "dry_base": _within(1, LIMIT),
    "dry_allowed_length": _within(0, MOST),
    "dry_penalty_last_n": _within(0, MOST),
    "mirostat": ((lambda version: version in (0, 1, 2)), "0, 1 or 2"),
    "mirostat_lr": _within(0, LIMIT),
    "mirostat_ent": _within(0, LIMIT),
}
"""For each number, whether a value is in its range, and the range in words."""
