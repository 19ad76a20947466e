"""Options for generating text: the sampler's settings, the length limit, thinking and the seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

from kvtool.errors import UsageError, suggestion
from kvtool.llama.sampling import Sampling
from kvtool.options import SAMPLING, Options, Range, declared, option, redeclared, unless

EFFORTS = ("on", "off", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `--think`. A chat template supports only some of them."""

_option = partial(option, group=SAMPLING, in_session=True)


def _limit(raw: int | None, flag: str) -> int | None:
    """Convert a maximum number of tokens. -1 (no limit) becomes None. Raises UsageError for 0."""
    if raw == 0:
        raise UsageError(f"{flag} must be at least 1, or -1 for no limit, got 0")
    return None if raw == -1 else raw


@dataclass(frozen=True)
class _LengthOptions(Options):
    """Options for the length of a reply and of the thought before the reply."""

    n: int | None = _option(
        "-n, --predict, --n-predict N",
        2048,
        "Maximum tokens of a reply; -1 means no limit.",
        valid=Range(-1),
        read=_limit,
        request=("max_completion_tokens", "max_tokens", "n_predict"),
        aliases=("--num-predict", "--max-new-tokens"),
    )
    think: str | None = _option(
        "--think EFFORT",
        None,
        "Thinking before the answer: on, off, or a level if the model has levels (minimal, low, medium, "
        "high, xhigh or max).",
        default_text="the model's own",
        choices=EFFORTS,
        read=lambda raw, flag: raw and {"none": "off"}.get(raw.lower(), raw.lower()),
    )
    think_budget: int | None = _option(
        "--think-budget N",
        None,
        "Maximum tokens of a thought: then it is closed, and the answer follows; -1 means no limit.",
        default_text="no limit",
        valid=Range(-1),
        read=unless(-1),
    )


@dataclass(frozen=True)
class GenerationOptions(Sampling, _LengthOptions):
    """Options for generating text, with llama.cpp's defaults.

    A text cannot have both a grammar and a schema. If the user typed one of them, and the other comes from a
    setting or a session, the typed option is used. Otherwise UsageError is raised.
    """

    temp: float = redeclared(Sampling, "temp", 0.8)
    top_k: int = redeclared(Sampling, "top_k", 40)
    top_p: float = redeclared(Sampling, "top_p", 0.95)
    min_p: float = redeclared(Sampling, "min_p", 0.05)
    stop_loops: str = _option(
        "--stop-loops on|off",
        "on",
        "End a reply that repeats the same words over and over (docs/sampling.md says when).",
        choices=("on", "off"),
    )
    seed: int | None = option(
        "--seed N",
        None,
        "Random seed of the sampler.",
        group=SAMPLING,
        default_text="random",
        valid=Range(-1),
        read=unless(-1),
        aliases=("-s",),
    )

    def __post_init__(self) -> None:
        typed = self.typed & {*_SHAPES}
        if self.grammar and self.json_schema and len(typed) == 1:
            (other,) = {*_SHAPES} - typed
            object.__setattr__(self, other, None)
        super().__post_init__()

    def sampling(self) -> Sampling:
        """Return the sampler's settings."""
        return Sampling(**{name: getattr(self, name) for name in declared(Sampling)})

    @classmethod
    def field(cls, name: str) -> str:
        """Return the field to which a name belongs: any name in `Option.names`. Raises UsageError."""
        names = {each: field for field, option in declared(cls).items() for each in option.names(field)}
        name = name.lstrip("-").replace("-", "_")
        if name not in names:
            # if the similar name is another name of a field, this suggests the field's own name
            hint = suggestion(name, names, names)
            raise UsageError(f"there is no setting {name}.{hint} There are: {', '.join(declared(cls))}")
        return names[name]

    def set(self, name: str, text: str | None) -> GenerationOptions:
        """Return a copy with a new value of one setting, which is converted like the value of an option.

        name: see `field`. text: the value, or None for the default. A repeatable option gets this single
        value, or no value if the text is "". Raises UsageError or InputError.
        """
        name = self.field(name)
        if text is None:
            return self.changed(**{name: getattr(GenerationOptions, name)})
        none = dict.fromkeys(_SHAPES, None) if name in _SHAPES else {}
        option = declared(GenerationOptions)[name]
        value = option.parse(_raw(name, text), name)
        # pass `name`, so that an error names the setting and not the flag
        option.check(value, name)
        return self.changed(**none | {name: value})


_SHAPES = ("grammar", "json_schema")


def _raw(name: str, text: str) -> Any:
    """Convert a text to the type of a field. Raises UsageError."""
    kind = str(get_type_hints(GenerationOptions)[name])
    if kind.startswith("tuple"):
        return [text] if text else None
    if "str" in kind:
        return text or None
    try:
        return float(text) if "float" in kind else int(text)
    except ValueError:
        expected = "a number" if "float" in kind else "a whole number"
        raise UsageError(f"{name} must be {expected}, got {text!r}") from None
