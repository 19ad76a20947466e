"""Settings of llama.cpp's samplers, with llama.cpp's names and meanings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from kvtool.errors import UsageError
from kvtool.options import SAMPLING, Options, Range, option
from kvtool.system.texts import exists, read_text, shown, utf8

MAX_LOOK_BACK = 2**20
"""Maximum tokens that a penalty looks back at; llama.cpp allocates memory for them."""

LIMIT = 10_000
"""Maximum value of several options. Useful values are much lower, and floats overflow only much higher."""

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\"}


def _texts(raw: Sequence[str] | None, flag: str) -> tuple[str, ...]:
    """Resolve escapes as llama.cpp does; unknown escapes stay unchanged."""

    def resolved(match: re.Match[str]) -> str:
        return _ESCAPES.get(match[1], match[0])

    return tuple(re.sub(r"\\(.)", resolved, utf8(flag, text) or "") for text in raw or ())


def _stops(raw: Sequence[str] | None, flag: str) -> tuple[str, ...]:
    return tuple(text for text in _texts(raw, flag) if text)


def _breakers(raw: Sequence[str] | None, flag: str) -> tuple[str, ...]:
    if not raw:
        return Sampling.dry_sequence_breaker
    return tuple(text for text in _texts(raw, flag) if text not in ("", "none"))


def _look_back(raw: int, flag: str) -> int:
    """Convert a number of latest tokens. -1 means all, as in llama.cpp."""
    return MAX_LOOK_BACK if raw == -1 else raw


def _escaped(texts: tuple[str, ...]) -> list[str]:
    escapes = {char: f"\\{letter}" for letter, char in _ESCAPES.items() if char not in "\"'"}
    return ["".join(escapes.get(char, char) for char in text) for text in texts]


def _bias(text: str) -> tuple[int, float]:
    if match := re.fullmatch(r"\s*(\d+)\s*([+-])\s*(\S+)\s*", text):
        try:
            return int(match[1]), float(match[2] + match[3])
        except ValueError:
            pass
    raise UsageError(
        f"--logit-bias must be the number of a token and a bias (15043+1), got {shown(text)!r}; "
        "`generate --json --logprobs 0` shows the numbers of tokens"
    )


def _or_file(is_text: Callable[[str], bool], kind: str) -> Callable[[str | None, str], str | None]:
    """Return a function that reads an option's value.

    If `is_text` accepts the value, the value is the text itself. Otherwise the value is the name of a file
    with the text. An empty value becomes None. kind: description of valid texts for error messages.
    """

    def read(raw: str | None, flag: str) -> str | None:
        if not raw:
            return None
        if is_text(raw):
            return utf8(flag, raw)
        # a number, false or null may be meant as JSON
        if re.search(r"""["'={}\[\]|\n]|^\s*(?:-?[\d.]+|false|null)\s*$""", raw) and not exists(raw):
            raise UsageError(f"{flag}: {shown(raw)} is neither a file nor {kind}")
        return read_text(raw)

    return read


_option = partial(option, group=SAMPLING, in_session=True)


def _number(usage: str, default: Any, valid: Range, help: str, **more: Any) -> Any:
    """Declare a numeric option with its range.

    In clients' requests, the field has the same name as the option, unless `request` gives other names.
    """
    name = usage.partition(" ")[0].strip(",-").replace("-", "_")
    return _option(usage, default, help, **{"request": (name,), "valid": valid, **more})


@dataclass(frozen=True)
class Sampling(Options):
    """Settings of the sampler, without its seed. The defaults pick the most likely token."""

    temp: float = _number(
        "--temp T",
        0.0,
        Range(0, LIMIT, "; 0 picks the most likely token"),
        "Temperature; 0 always picks the most likely token.",
        request=("temperature",),
        aliases=("--temperature",),
    )
    top_k: int = _number(
        "--top-k K",
        0,
        Range(-(2**31), 2**31 - 1),
        "Sample from the K most likely tokens; 0 or a negative number means all.",
    )
    top_p: float = _number(
        "--top-p P", 1.0, Range(0, 1), "Sample from the most likely tokens whose probabilities add up to P."
    )
    min_p: float = _number(
        "--min-p P", 0.0, Range(0, 1), "Drop tokens less likely than P times the most likely one."
    )
    repeat_penalty: float = _number(
        "--repeat-penalty X",
        1.0,
        Range(0.001, 1000, "; 1 is off"),
        "Make recently used tokens less likely; 1 means off.",
        request=("repeat_penalty", "repetition_penalty"),
        aliases=("--repetition-penalty",),
    )
    repeat_last_n: int = _number(
        "--repeat-last-n N",
        64,
        Range(0, MAX_LOOK_BACK),
        "Number of latest tokens that the repeat, presence and frequency penalties look at; 0 means off, "
        "-1 means all.",
        read=_look_back,
    )
    presence_penalty: float = _number(
        "--presence-penalty X",
        0.0,
        Range(-LIMIT, LIMIT),
        "Penalty on each recently used token, subtracted from its logit.",
    )
    frequency_penalty: float = _number(
        "--frequency-penalty X",
        0.0,
        Range(-LIMIT, LIMIT),
        "Penalty on a token for each recent use, subtracted from its logit.",
    )
    typical: float = _number(
        "--typical, --typical-p P",
        1.0,
        Range(0.001, 1, "; 1 is off"),
        "Locally typical sampling; 1 means off.",
        request=("typical_p",),
    )
    xtc_probability: float = _number(
        "--xtc-probability P",
        0.0,
        Range(0, 1),
        "Probability that XTC drops the most likely tokens in a step; 0 means off.",
    )
    xtc_threshold: float = _number(
        "--xtc-threshold P",
        0.1,
        Range(0, 1),
        "XTC drops all tokens above this probability except the least likely of them; above 0.5 means off.",
    )
    dry_multiplier: float = _number(
        "--dry-multiplier X", 0.0, Range(0, LIMIT), "DRY penalty on repeated sequences; 0 means off."
    )
    dry_base: float = _number(
        "--dry-base X",
        1.75,
        Range(1, LIMIT),
        "Factor by which each further repeated token raises the DRY penalty.",
    )
    dry_allowed_length: int = _number(
        "--dry-allowed-length N", 2, Range(0, MAX_LOOK_BACK), "Longest repeated sequence that DRY allows."
    )
    dry_penalty_last_n: int = _number(
        "--dry-penalty-last-n N",
        64,
        Range(0, MAX_LOOK_BACK),
        "Number of latest tokens that DRY looks at; 0 means off, -1 means all.",
        read=_look_back,
    )
    dry_sequence_breaker: tuple[str, ...] = _option(
        "--dry-sequence-breaker TEXT",
        ("\n", ":", '"', "*"),
        "Text at which a sequence of DRY ends, instead of the default texts; `none` means no such text. "
        "Repeatable.",
        default_text=r"\n, :, \" and *",
        read=_breakers,
        write=lambda texts: _escaped(texts) or ["none"],
    )
    mirostat: int = _number(
        "--mirostat 0|1|2",
        0,
        Range(0, 2),
        "Mirostat version 1 or 2, instead of all other samplers except --temp and --logit-bias; 0 means off.",
    )
    mirostat_lr: float = _number(
        "--mirostat-lr X",
        0.1,
        Range(0, LIMIT),
        "Learning rate (eta) of Mirostat.",
        request=("mirostat_eta",),
    )
    mirostat_ent: float = _number(
        "--mirostat-ent X",
        5.0,
        Range(0, LIMIT),
        "Target entropy (tau) of Mirostat, in bits.",
        request=("mirostat_tau",),
    )
    logit_bias: tuple[tuple[int, float], ...] = _option(
        "-l, --logit-bias TOKEN+BIAS",
        (),
        "Raise or lower the logit of a token: 15043+1, 15043-2.5; 15043-inf bans it. Repeatable.",
        read=lambda raw, flag: tuple(map(_bias, raw or ())),
        write=lambda pairs: [f"{token}{bias:+}" for token, bias in pairs],
    )
    stop: tuple[str, ...] = _option(
        "--stop TEXT",
        (),
        r"Stop before this text; \n is a line break. Repeatable.",
        read=_stops,
        aliases=("-r", "--reverse-prompt"),
        write=_escaped,
    )
    grammar: str | None = _option(
        "--grammar FILE|TEXT",
        None,
        "Write only text that fits this GBNF grammar: a file, or the grammar itself.",
        read=_or_file(lambda text: "::=" in text, "a grammar, whose rules look like root ::= ..."),
        aliases=("--grammar-file",),
    )
    json_schema: str | None = _option(
        "-j, --json-schema FILE|TEXT",
        None,
        "Write only JSON that fits this schema: a file, or the schema itself.",
        read=_or_file(
            lambda text: text.strip() == "true" or text.lstrip().startswith("{"),
            "a JSON schema, which is an object {...} or true",
        ),
        aliases=("-jf", "--json-schema-file"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for token, bias in self.logit_bias:
            if not (bias == -inf or abs(bias) <= LIMIT):
                raise UsageError(
                    f"--logit-bias of token {token} must be in -{LIMIT}..{LIMIT} or -inf, got {bias:g}"
                )
        if "" in self.stop or "" in self.dry_sequence_breaker:
            raise UsageError("the text of --stop and --dry-sequence-breaker must not be empty")
        if self.grammar and self.json_schema:
            raise UsageError("--grammar and --json-schema cannot be combined; choose one")
        if self.grammar is not None and "\0" in self.grammar:
            raise UsageError("the grammar has a NUL character; it must be text")

    @property
    def n_recent(self) -> int:
        """Number of sampled tokens that the sampler remembers for its penalties."""
        return max(64, self.repeat_last_n, self.dry_penalty_last_n)
