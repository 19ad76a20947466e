"""Options about thinking: the thought that some models write before an answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvtool.options.field import DRAWS, Options, option, unless

EFFORTS = ("on", "off", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `--think`; a chat template takes some of them."""

_drawn = partial(option, group=DRAWS, kept=True)


@dataclass(frozen=True)
class Thinking(Options):
    """The amount of thinking before an answer. A budget of 0 closes a thought at once."""

    think: str | None = _drawn(
        "--think EFFORT",
        None,
        "Thinking before the answer: on, off, or a level (low, medium, high) if the model has levels.",
        words="the model's own",
        choices=EFFORTS,
        read=lambda raw, flag: raw and {"none": "off"}.get(raw.lower(), raw.lower()),
    )
    think_budget: int | None = _drawn(
        "--think-budget N",
        None,
        "Maximum tokens of a thought: then it is closed, and the answer follows; -1 means no limit.",
        words="no limit",
        least=-1,
        read=unless(-1),
    )
