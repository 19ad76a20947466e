"""Parameters of policies and tasks. They are fields of dataclasses, and users set them as name=value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from inspect import cleandoc
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvtool.errors import UsageError

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


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


def check_types(kind: type, of: str, but: Iterable[str] = ()) -> None:
    """Raise UsageError if a field of a dataclass has a type that `parse` does not know.

    of: the class, for the error. but: names of fields that cannot be set.
    """
    try:
        kinds = get_type_hints(kind)
    except Exception as error:
        # an annotation may use a name that does not exist
        raise UsageError(f"{of}: {type(error).__name__} in the type of a field: {error}") from error
    for name in defaults(kind, but):
        if not _is_known(kinds[name]):
            raise UsageError(
                f"{of}: {name} cannot be of type {_type_name(kinds[name])}; use bool, int, float, str, "
                "tuple[int, ...], Literal, or one of these with | None"
            )


def _is_known(kind: Any) -> bool:
    kind, _ = _without_none(kind)
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        return rest == [...] and get_origin(first) is not tuple and _is_known(first)
    return get_origin(kind) is Literal or kind in _KINDS


def _type_name(kind: Any) -> str:
    return str(kind) if get_origin(kind) else getattr(kind, "__name__", str(kind))


def _without_none(kind: Any) -> tuple[Any, bool]:
    """Return (X, True) for the type X | None, and (kind, False) for any other type."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    others = [part for part in parts if part is not NoneType]
    return (others[0], True) if len(others) == 1 else (kind, False)


def parse(kind: type, given: Iterable[str], flag: str, of: str, but: Iterable[str] = ()) -> dict[str, Any]:
    """Parse texts like "window=64". Return the values of a dataclass's fields, in the types of the fields.

    If a field is a tuple, its values are separated by commas. If a field may be None, the text is "none".
    Raises UsageError. If a name is wrong, the error lists the right names.

    given: the texts that the user typed. flag: the option to which the user gave the texts. of: the policy or
    the task that has the parameters. Errors name `flag` and `of`. but: names of fields that cannot be set.
    """
    texts: dict[str, str] = {}
    for option in given:
        name, equals, text = option.partition("=")
        if not equals:
            raise UsageError(f"{flag} takes name=value, got {option!r}")
        texts[name] = text
    return _values(kind, texts, flag, of, but, _parsed)


def check(
    kind: type, given: Mapping[str, object], flag: str, of: str, but: Iterable[str] = ()
) -> dict[str, Any]:
    """Return values of a dataclass's fields. Raises UsageError for a wrong name, or a value of a wrong type.

    The other arguments are those of `parse`. A whole number is converted if the field is a float, a list if
    it is a tuple, and a scalar of NumPy always.
    """
    return _values(kind, given, flag, of, but, _checked)


def _values(
    kind: type,
    given: Mapping[str, Any],
    flag: str,
    of: str,
    but: Iterable[str],
    value_of: Callable[[Any, str, Any], Any],
) -> dict[str, Any]:
    kinds, known = get_type_hints(kind), defaults(kind, but)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            names = ", ".join(known) or "none"
            raise UsageError(f"{of}: there is no parameter {name!r} ({flag}); its parameters: {names}")
        try:
            values[name] = value_of(kinds[name], name, value)
        except ValueError as error:
            raise UsageError(f"{of}: {error}") from None
    return values


def _parsed(kind: Any, name: str, text: str) -> Any:
    """Return the value that a text means. Raises ValueError."""
    plain, may_be_none = _without_none(kind)
    if may_be_none and text.lower() == "none":
        return None
    if get_origin(plain) is tuple:
        return tuple(_parsed(get_args(plain)[0], name, part.strip()) for part in text.split(","))
    if get_origin(plain) is Literal:
        values = {str(choice): choice for choice in get_args(plain)}
        if text in values:
            return values[text]
    elif plain is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
    else:
        with suppress(ValueError):
            return plain(text)
    raise _refusal(kind, name, text)


def _checked(kind: Any, name: str, value: Any) -> Any:
    """Return a value in the type of a field. Raises ValueError."""
    plain, may_be_none = _without_none(kind)
    if value is None and may_be_none:
        return None
    if getattr(value, "ndim", None) == 0:
        # a scalar of NumPy
        value = value.item()
    if get_origin(plain) is tuple:
        if isinstance(value, (tuple, list)):
            return tuple(_checked(get_args(plain)[0], name, part) for part in value)
    elif get_origin(plain) is Literal:
        # compare types, because True == 1
        if (type(value), value) in [(type(choice), choice) for choice in get_args(plain)]:
            return value
    elif plain is float and type(value) is int:
        return float(value)
    elif isinstance(value, plain) and (plain is bool or not isinstance(value, bool)):
        return value
    raise _refusal(kind, name, value)


def _refusal(kind: Any, name: str, value: object) -> ValueError:
    plain, may_be_none = _without_none(kind)
    if get_origin(plain) is Literal:
        what = f"one of {', '.join(map(str, get_args(plain)))}"
    else:
        what = "a tuple" if get_origin(plain) is tuple else _KINDS[plain]
    return ValueError(f"{name} must be {what}{' or none' if may_be_none else ''}, got {value!r}")
