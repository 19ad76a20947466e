"""Parameters of policies and tasks. They are fields of dataclasses, and users set them as name=value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from inspect import cleandoc
from typing import Any, get_args, get_origin, get_type_hints

from kvtool.errors import UsageError

_KINDS = {int: "a whole number", float: "a number", str: "a text"}


def defaults(kind: type, but: Iterable[str] = ()) -> dict[str, Any]:
    """Return the default of each field of a dataclass, or None if a field has no default.

    but: names of fields that are left out.
    """
    return {f.name: None if f.default is MISSING else f.default for f in fields(kind) if f.name not in but}


def explained(kind: type) -> dict[str, str]:
    """Return an explanation of each field, as one line, from the docstrings of a dataclass and its bases.

    A docstring can explain a field in two ways. It may have a section in the style of numpydoc. Or a line or
    a sentence begins with "NAME:", and the explanation follows. The styles of Google ("NAME (int):") and of
    reStructuredText (":param NAME:") also work.
    """
    texts: dict[str, str] = {}
    names = [field.name for field in fields(kind)]
    lead = r"(?:^|(?<=[.;] )) *(?::(?:param|ivar|var)(?: \w+)? )?"
    inline = rf"{lead}({'|'.join(names)})(?: \([^)\n]*\))?:\s+"
    for base in reversed(kind.__mro__):
        # `inspect.getdoc` is not used, because it can return the docstring of a base class
        doc = cleandoc(vars(base).get("__doc__") or "")
        parts = re.split(r"^(\w+)(?: : .*)?\n(?=[ ]+\S)", doc, flags=re.M)
        if not set(names) & set(parts[1::2]):
            parts = re.split(inline, doc, flags=re.M)
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name in names:
                texts[name] = " ".join(text.split("\n\n")[0].split())
    return texts


def parse(kind: type, given: Iterable[str], flag: str, of: str, but: Iterable[str] = ()) -> dict[str, Any]:
    """Parse texts like "window=64". Return the values of a dataclass's fields, in the types of the fields.

    If a field is a tuple, its values are separated by commas. Raises UsageError. If a name is wrong, the
    error lists the right names.

    given: the texts that the user typed. flag: the option to which the user gave the texts. of: the policy or
    the task that has the parameters. Errors name `flag` and `of`. but: names of fields that cannot be set.
    """
    kinds, known = get_type_hints(kind), defaults(kind, but)
    parsed: dict[str, Any] = {}
    for option in given:
        name, equals, text = option.partition("=")
        if not equals:
            raise UsageError(f"{flag} takes name=value, got {option!r}")
        if name not in known:
            names = ", ".join(known) or "none"
            raise UsageError(f"{of}: there is no parameter {name!r} ({flag}); its parameters: {names}")
        try:
            parsed[name] = _value(kinds[name], name, text)
        except ValueError as error:
            raise UsageError(f"{of}: {error}") from None
    return parsed


def _value(kind: type, name: str, text: str) -> Any:
    if get_origin(kind) is tuple:
        return tuple(_value(get_args(kind)[0], name, part.strip()) for part in text.split(","))
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"{name} must be true or false, got {text!r}")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} must be {_KINDS.get(kind, kind.__name__)}, got {text!r}") from None
