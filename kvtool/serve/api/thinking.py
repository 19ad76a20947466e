"""Options of a request about thinking: the effort, the budget, and variables of the template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvtool.chats.effort import LEVELS, OFF, ON, Efforts
from kvtool.chats.template import RAW, Template
from kvtool.errors import ModelError
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, need, shown

_KINDS = {"enabled": ON, "disabled": OFF, "adaptive": None, "auto": None}
"""Values of thinking.type, mapped to efforts. None means that the template decides."""

_GROUPS = ("thinking", "reasoning", "output_config")
"""Objects such as {"type": "enabled", "budget_tokens": 1024} or {"effort": "high"}."""

_BUDGETS = ("thinking_budget", "reasoning_budget", "thinking.budget_tokens", "reasoning.max_tokens")
"""Fields for the maximum number of tokens of a thought. The first that is given applies."""


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """Options about thinking. A request can set them, and the server has default values for requests.

    Attributes
    ----------
    variables
        Variables of the chat template. Their values may be any JSON.
    effort
        Effort of thinking. See `Efforts.variables`. None if the template decides.
    name
        Field of the request that sets the effort, for errors.
    budget
        Maximum number of tokens of a thought. None for no limit.
    budget_name
        Field of the request that sets the budget, for remarks. "" if the request has no such field.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    effort: str | None = None
    name: str = ""
    budget: int | None = None
    budget_name: str = ""


def check(fields: Fields, default: ThinkingOptions) -> ThinkingOptions:
    """Return the options that the fields of a request set. default: the server's options.

    The server's effort is used if a request sets no effort. The server's budget is an upper limit.
    """
    variables = need(fields.pop("chat_template_kwargs") or {}, dict, "chat_template_kwargs")
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in variables and (name, variables[name]) != ("add_generation_prompt", True):
            raise ApiError.at(f"chat_template_kwargs.{name}", "cannot be set; it follows from the request")
    values = {name: fields.pop(name) for name in (*_BUDGETS, *_EFFORTS) if "." not in name}
    for group in _GROUPS:
        values |= {f"{group}.{name}": value for name, value in (fields.mapping(group) or {}).items()}
    given = Fields(values)
    budgets = {name: given.whole(name, -1, 2**31 - 1) for name in _BUDGETS}
    budget_name = next((name for name, budget in budgets.items() if budget is not None), "")
    budget = budgets.get(budget_name)
    name, effort = _effort(given)
    if effort is None and budget == 0:
        name, effort = budget_name, OFF
    if effort is None:
        name, effort = default.name, default.effort
    limits = [each for each in (budget, default.budget) if each is not None and each >= 0]
    return ThinkingOptions(variables, effort, name, min(limits, default=None), budget_name)


def _effort(given: Fields) -> tuple[str, str | None]:
    """Return (name of the field that sets the effort, effort). Without such a field, return ("", None).

    A switch that is off has priority, then a level above "none", then a switch that is on.
    """
    efforts: dict[str, str] = {}
    for name, read in _EFFORTS.items():
        value = given.pop(name)
        if value is not None and (effort := read(value, name)):
            efforts[name] = effort

    def rank(name: str) -> int:
        is_off = efforts[name] == OFF
        if name.endswith("effort"):
            return 3 if is_off else 1
        return 0 if is_off else 2

    name = min(efforts, key=rank, default="")
    return name, efforts.get(name)


def _switch(value: object, name: str) -> str:
    return ON if need(value, bool, name) else OFF


def _kind(value: object, name: str) -> str | None:
    if not isinstance(value, str) or value not in _KINDS:
        raise ApiError.at(name, f"must be one of {', '.join(_KINDS)}, got {shown(value)}")
    return _KINDS[value]


def _level(value: object, name: str) -> str:
    level = {"none": OFF}.get(value, value) if isinstance(value, str) else None
    if level not in (OFF, *LEVELS):
        right = ", ".join(("none", *LEVELS))
        raise ApiError.at(name, f"must be one of {right}, got {shown(value)}")
    return level


_EFFORTS: dict[str, Callable[[object, str], str | None]] = {
    "enable_thinking": _switch,
    "thinking.type": _kind,
    "reasoning.enabled": _switch,
    "reasoning.effort": _level,
    "reasoning_effort": _level,
    "output_config.effort": _level,
}
"""Fields that set the effort, each with the function that reads it."""


def template_for(
    template: Template, efforts: Efforts, options: ThinkingOptions
) -> tuple[Template, list[str]]:
    """Return the template with the variables for these options, and remarks on options that have no effect.

    Raises ApiError if the template cannot render chats with these variables.

    template: the model's template, which has no variables yet.
    """
    remarks: list[str] = []
    variables: dict[str, Any] = {}
    if options.effort is not None or (options.budget is not None and efforts.takes_budget):
        variables, why = efforts.variables(options.effort or ON, options.budget)
        if why:
            remarks.append(f"{options.name}: the model's chat template {why}")
    elif options.budget_name and not (efforts.has_thoughts or efforts.levels):
        remarks.append(f"{options.budget_name}: the model's chat template has no thinking to limit")
    for name in options.variables.keys() - template.reads:
        remarks.append(f"chat_template_kwargs.{shown(name)}: the model's chat template does not read it")
    changed = template.under({**variables, **options.variables})
    if options.variables:
        try:
            changed.reply_start()
        except ModelError as error:
            raise ApiError(
                f"chat_template_kwargs: {str(error).removesuffix(f'; {RAW}')}",
                param="chat_template_kwargs",
                code="chat_template",
            ) from None
    return changed, remarks
