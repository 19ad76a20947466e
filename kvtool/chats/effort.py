"""Efforts: how much a model thinks, set by variables that its chat template reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2.nodes

from kvtool.chats.template import Template
from kvtool.errors import ModelError, UsageError

OFF, ON = "off", "on"

LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of effort, lowest first."""

Variables = dict[str, Any]

_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("reasoning", True, False),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_option", "on", "off"),
    ("reasoning_effort", "high", "no_think"),
    ("thinking_budget", -1, 0),
)
"""Variables that switch thinking, each with its values for on and off."""

_LEVEL_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength")

NAMES = frozenset([*(name for name, *_ in _SWITCHES), *_LEVEL_NAMES])
"""Variables that switch thinking, or set its level or its budget."""

_BUDGET = "thinking_budget"
"""Variable for the number of tokens of a thought."""

_ANY_LEVEL = ("low", "medium", "high")
"""Levels assumed for a template that copies any value of the variable into the prompt."""

_MADE_UP = "kvtool-made-up"


@dataclass(frozen=True, slots=True)
class Efforts:
    """The efforts that a chat template takes, learned from its source and from small chats that it renders.

    Attributes
    ----------
    has_thoughts
        True if the template has the tags of a thought, or a variable that switches thinking.
    on, off
        Variables that switch thinking on and off; None if no variable switches thinking.
    levels
        Variables of each level that the template takes, lowest level first.
    takes_budget
        True if the template writes the number of tokens for a thought into the prompt.
    """

    has_thoughts: bool
    on: Variables | None
    off: Variables | None
    levels: Mapping[str, Variables]
    takes_budget: bool = False

    @classmethod
    def of(cls, template: Template) -> Efforts:
        """Return the efforts of a template. Raises ModelError if it renders no chat."""
        on = off = None
        for name, yes, no in _SWITCHES:
            is_text = isinstance(no, str)
            if name in template.reads and (not is_text or no in _compared(template, name)):
                shown = _text(template, {name: yes}), _text(template, {name: no})
                if all(shown) and shown[0] != shown[1]:
                    on, off = {name: yes}, {name: no}
                    break
        return cls(
            has_thoughts=template.has_thoughts or on is not None,
            on=on,
            off=off,
            levels=dict(_levels(template, on or {})),
            takes_budget=_BUDGET in template.reads and "512" in _text(template, {_BUDGET: 512}),
        )

    def variables(self, effort: str, budget: int | None = None) -> tuple[Variables, str | None]:
        """Return the variables for an effort. Also return a remark if the template does not take the effort.

        effort: "on", "off" or one of `LEVELS`. budget: maximum tokens of a thought; None for no limit.

        If the template does not take the effort, the variables set another effort. Usually this is the next
        lower level that the template takes, or "on" if the template takes no lower level. The remark is the
        end of a sentence whose subject is the template, for example "takes off and on; on was used for low".
        """
        variables, remark = self._of(effort)
        if self.takes_budget and budget is not None and effort != OFF:
            variables = {**variables, _BUDGET: budget}
        return variables, remark

    def exact(self, effort: str | None, budget: int | None = None) -> Variables:
        """Return the variables for an effort and a budget; None means the template's default.

        Raises UsageError if the template does not take the effort.
        """
        if effort is None and (budget is None or not self.takes_budget):
            return {}
        variables, remark = self.variables(effort or ON, budget)
        if remark:
            raise UsageError(f"think {effort}: the model's chat template {remark.partition(';')[0]}")
        return variables

    def _of(self, effort: str) -> tuple[Variables, str | None]:
        least = next(iter(self.levels), None)
        if effort == OFF:
            if self.off is not None or not self.has_thoughts:
                return self.off or {}, None
            used = f"; {least} is its least effort" if least else ""
            return self.levels[least] if least else {}, f"cannot switch thinking off{used}"
        if not self.has_thoughts and not self.levels:
            return {}, "has no thinking to switch on"
        if effort == ON or effort in self.levels:
            return self.levels.get(effort, self.on or {}), None
        if effort == LEVELS[0] and self.off is not None:
            # a minimal thought is closer to no thought than to a thought of the next level
            return self.off, f"takes {self.taken}; {OFF} was used for {effort}"
        lower = [level for level in self.levels if LEVELS.index(level) < LEVELS.index(effort)]
        used = lower[-1] if lower else ON if self.on is not None or least is None else least
        return self.levels.get(used, self.on or {}), f"takes {self.taken}; {used} was used for {effort}"

    @property
    def taken(self) -> str:
        """Text that lists the efforts that the template takes."""
        names = [OFF] if self.off is not None or not self.has_thoughts else []
        names += [ON] if self.has_thoughts else []
        *first, last = [*names, *self.levels]
        return f"{', '.join(first)} and {last}" if first else f"only {last}"


def _levels(template: Template, on: Variables) -> Iterator[tuple[str, Variables]]:
    for name in _LEVEL_NAMES:
        if name not in template.reads:
            continue
        known = _compared(template, name)
        if _MADE_UP in _text(template, {**on, name: _MADE_UP}):
            known |= {*_ANY_LEVEL}
        levels = {level: {**on, name: level} for level in LEVELS if level in known}
        if levels:
            yield from (item for item in levels.items() if _text(template, item[1]))
            return


def _compared(template: Template, name: str) -> set[str]:
    """Texts that the template's source compares with a variable or assigns to the variable."""
    texts: set[str] = set()
    for node in template.syntax.find_all((jinja2.nodes.Compare, jinja2.nodes.Assign)):
        if any(variable.name == name for variable in node.find_all(jinja2.nodes.Name)):
            values = (const.value for const in node.find_all(jinja2.nodes.Const))
            texts |= {value for value in values if isinstance(value, str)}
    return texts


def _text(template: Template, variables: Variables) -> str:
    """Return the text of a small chat with these variables; "" if the template fails."""
    try:
        return template.under(variables).render([{"role": "user", "content": "."}])
    except ModelError:
        return ""
