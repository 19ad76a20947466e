"""Tools that a model may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtool.serve.errors import ApiError


@dataclass(frozen=True, slots=True)
class Choice:
    mode: str = "none"
    name: str | None = None


def check_tools(value: object) -> list[dict[str, Any]]:
    if value:
        raise ApiError("tools are not there yet", param="tools")
    return []


def check_choice(value: object, tools: list[dict[str, Any]]) -> Choice:
    return Choice()


def for_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages
