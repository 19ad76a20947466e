"""Options of a request about thinking: the effort, the budget, and variables of the template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvtool.chats.effort import LEVELS, OFF, ON, Efforts
from kvtool.chats.template import RAW, Template
from kvtool.errors import ModelError
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import Fields, need, need_whole, optional, shown

_KINDS = {"enabled": ON, "disabled": OFF, "adaptive": None, "auto": None}
"""Values of thinking.type, mapped to efforts. None means that the template decides."""

_BUDGETS = ("thinking_budget", "reasoning_budget", "thinking_budget_tokens", "thinking_token_budget")
"""Fields for the maximum number of tokens of a thought, as other servers name them."""

_MAX_BUDGET = 2**31 - 1


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
    is_needed
        True to raise an error if the template does not support the effort. False to use the nearest effort
        instead.
    budget
        Maximum number of tokens of a thought. None for no limit.
    budget_name
        Field of the request that sets the budget, for remarks. "" if the request has no such field.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    effort: str | None = None
    name: str = ""
    is_needed: bool = False
    budget: int | None = None
    budget_name: str = ""


def check(fields: Fields, default: ThinkingOptions) -> ThinkingOptions:
    """Return the options that the fields of a request set. Raises ApiError.

    default: the server's options. The server's effort is used if a request sets no effort. The server's
    budget is an upper limit for the budget of a request.
    """
    variables = need(fields.pop("chat_template_kwargs") or {}, dict, "chat_template_kwargs")
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in variables and (name, variables[name]) != ("add_generation_prompt", True):
            raise ApiError.at(f"chat_template_kwargs.{name}", "cannot be set; it follows from the request")
    budgets = {name: fields.whole(name, -1, _MAX_BUDGET) for name in _BUDGETS}
    effort, where, is_needed, more = _effort(fields)
    given = ((name, each) for name, each in (budgets | more).items() if each is not None)
    name, budget = next(given, ("", None))
    if budget == 0 and effort is None:
        effort, where = OFF, name
    limits = [each for each in (budget, default.budget) if each is not None and each >= 0]
    if effort is None:
        effort, where = default.effort, default.name
    return ThinkingOptions(variables, effort, where, is_needed, min(limits, default=None), name)


def _effort(fields: Fields) -> tuple[str | None, str, bool, dict[str, int | None]]:
    """Return (effort or None, name of the field that sets the effort, `is_needed`, budgets).

    The keys of the budgets are names of fields. The caller uses the first budget that is not None.
    """
    switch = optional(fields.pop("enable_thinking"), bool, "enable_thinking")
    kind, n_thinking = _thinking(fields.mapping("thinking"))
    reasoning, level, n_reasoning = _reasoning(fields.mapping("reasoning"))
    named = _level(fields.pop("reasoning_effort"), "reasoning_effort")
    where = "reasoning.effort" if level else "reasoning_effort"
    level = level or named
    budgets = {"thinking.budget_tokens": n_thinking, "reasoning.max_tokens": n_reasoning}
    if switch is False:
        return OFF, "enable_thinking", True, budgets
    if OFF in (kind, reasoning):
        return OFF, "thinking.type" if kind == OFF else "reasoning.enabled", False, budgets
    if level and not (switch and level == OFF):
        return level, where, False, budgets
    if switch:
        return ON, "enable_thinking", True, budgets
    if ON in (kind, reasoning):
        return ON, "thinking.type" if kind == ON else "reasoning.enabled", False, budgets
    return None, "", False, budgets


def _thinking(value: dict[str, Any] | None) -> tuple[str | None, int | None]:
    """Return the effort and the budget in `thinking`, such as {"type": "enabled", "budget_tokens": 1024}."""
    if value is None:
        return None, None
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ApiError.at("thinking.type", f"must be one of {', '.join(_KINDS)}, got {shown(kind)}")
    return _KINDS[kind], _whole(value, "thinking", "budget_tokens")


def _reasoning(value: dict[str, Any] | None) -> tuple[str | None, str | None, int | None]:
    """Return switch, level and budget of {"enabled": true, "effort": "high", "max_tokens": 1024}.

    The switch is ON, OFF or None.
    """
    if value is None:
        return None, None, None
    enabled = optional(value.get("enabled"), bool, "reasoning.enabled")
    switch = None if enabled is None else ON if enabled else OFF
    level = _level(value.get("effort"), "reasoning.effort")
    return switch, level, _whole(value, "reasoning", "max_tokens")


def _whole(value: dict[str, Any], of: str, name: str) -> int | None:
    n = value.get(name)
    return None if n is None else need_whole(n, f"{of}.{name}", -1, _MAX_BUDGET)


def _level(value: Any, name: str) -> str | None:
    if value is None:
        return None
    level = {"none": OFF}.get(value, value) if isinstance(value, str) else None
    if level not in (OFF, *LEVELS):
        right = ", ".join(("none", *LEVELS))
        raise ApiError.at(name, f"must be one of {right}, got {shown(value)}")
    return level


def template_for(
    template: Template, efforts: Efforts, options: ThinkingOptions
) -> tuple[Template, list[str]]:
    """Return the template with the variables for these options, and remarks on options that have no effect.

    Raises ApiError if the template does not support an effort that is needed, or if the template cannot
    render chats with these variables.

    template: the model's template, which has no variables yet.
    """
    remarks: list[str] = []
    variables: dict[str, Any] = {}
    if options.effort is not None or (options.budget is not None and efforts.takes_budget):
        variables, why = efforts.variables(options.effort or ON, options.budget)
        if why and options.is_needed:
            message = f"{options.name}: the model's chat template {why.partition(';')[0]}"
            raise ApiError(message, param=options.name, code="unsupported_parameter")
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
