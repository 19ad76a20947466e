"""Options that are declared as fields of dataclasses, with their flags, help and allowed values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from kvtool.errors import KvtoolError, UsageError

CACHE = "Cache and eviction"
SAMPLING = "Sampling"
HARDWARE = "Model and hardware"
ARCHIVE = "Archive (recall)"
OUTPUT = "Output"
SERVER = "Server"
"""Names of the groups of options in the help."""

Self = TypeVar("Self", bound="Options")

_KINDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    tuple: "a tuple",
}
"""Types of options, as errors name them."""


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed numbers: from `low` to `high`, or without an upper limit if `high` is None. Never NaN.

    hint: text at the end of the error.
    """

    low: float
    high: float | None = None
    hint: str = ""

    def check(self, value: float, name: str) -> None:
        """Raise UsageError if a number is not allowed. name: the option's name in the error."""
        # NaN compares as False
        if not (value >= self.low and (self.high is None or value <= self.high)):
            allowed = f"at least {self.low}" if self.high is None else f"in {self.low}..{self.high}"
            number = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"{name} must be {allowed}, got {number}{self.hint}")


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of an option. The dataclass field has the option's type and default value.

    Attributes
    ----------
    flags
        All names of the option on the command line.
    group
        Group in the help, or None for options of a single command.
    default_text
        Text that the help shows as the default. True shows the default value, False shows nothing. In the
        text, "{NAME}" is replaced by the attribute NAME of the options' class, and "{model}" by the default
        model.
    words
        Words that the user may type instead of a number, such as "auto".
    completes
        Name of the function in `kvtool.cli.completion` that completes the value in a shell.
    read
        Function that converts a value that was typed, set or saved in a session to the field's value. Its
        second argument is the option's name, for errors.
    find
        Function that raises KvtoolError if there is no model or file with the name that is the value. Only
        `kvtool config` and `kvtool doctor` call it: a command finds the model or file itself.
    write
        Function that converts the field's value back to a value that `read` accepts.
    is_count
        True if the option takes no value, and its value is the number of times that it is typed.
    in_record
        True if the value changes results. It is then stored in the record of a result.
    request
        Names of the value in requests to the server. `/set` also accepts them.
    aliases
        Other programs' names of the option, with dashes. They are accepted wherever the option's own names
        are, and shown nowhere.
    """

    flags: tuple[str, ...]
    help: str
    group: str | None = None
    metavar: str | None = None
    default_text: str | bool = True
    words: Mapping[str, int] = field(default_factory=dict)
    valid: Range | None = None
    choices: tuple[str, ...] = ()
    completes: str | None = None
    read: Callable[[Any, str], Any] | None = None
    find: Callable[[str], None] | None = None
    write: Callable[[Any], Any] | None = None
    is_count: bool = False
    in_session: bool = False
    in_record: bool = False
    request: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in errors and documents: the first flag with two dashes, or else the first flag."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])

    def check(self, value: Any, name: str) -> None:
        """Raise UsageError if a value is not allowed."""
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            if self.choices:
                check_choice(item, self.choices, name)
            if self.valid:
                self.valid.check(item, name)

    def names(self, field: str) -> tuple[str, ...]:
        """Return all names that `/set` accepts. field: the name of the option's field."""
        others = [name.lstrip("-").replace("-", "_") for name in (*self.flags, *self.aliases)]
        return (field, *self.request, *others)

    def is_called(self, name: str) -> bool:
        """Return True for the option's own names and for its aliases, with or without dashes before them."""
        return name.lstrip("-").replace("_", "-") in {
            each.lstrip("-") for each in (*self.flags, *self.aliases)
        }

    def parse(self, raw: Any, name: str | None = None) -> Any:
        """Apply `read` if it is set. Raises UsageError, which calls the option `name` or `self.name`."""
        return self.read(raw, name or self.name) if self.read else raw


def option(usage: str, default: Any, help: str, **attributes: Any) -> Any:
    """Declare an option as a dataclass field.

    usage: flags and metavar, such as "-c, --ctx-size N". attributes: other attributes of `Option`.
    """
    *first, last = usage.split(", ")
    flag, _, metavar = last.partition(" ")
    declaration = Option((*first, flag), help, metavar=metavar or None, **attributes)
    return field(default=default, metadata={"option": declaration})


def redeclared(kind: type[Options], name: str, default: Any = dataclasses.MISSING, **attributes: Any) -> Any:
    """Declare an option of the class `kind` again, with a new default or other attributes."""
    (original,) = (field for field in fields(kind) if field.name == name)
    changed = dataclasses.replace(original.metadata["option"], **attributes)
    return field(
        default=original.default if default is dataclasses.MISSING else default, metadata={"option": changed}
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class for dataclasses of options. Raises UsageError if a value is not allowed.

    A number may be given instead of a text that can be a number, such as the budget 512.

    typed: names of the fields that were typed on the command line.
    given: names of the fields that were typed on the command line, or set in a file or a variable.
    hidden: names of the fields that are not options of the command. They keep their defaults.
    """

    typed: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    hidden: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        kinds = _kinds(kind)
        for name, declaration in declared(type(self)).items():
            value = _in_type(kinds[name], getattr(self, name), declaration.name)
            # the class is frozen
            object.__setattr__(self, name, value)
            declaration.check(value, declaration.name)

    @classmethod
    def from_values(
        cls: type[Self], raw: Mapping[str, Any], typed: Iterable[str] = (), given: Iterable[str] = ()
    ) -> Self:
        """Make the options from values by field name, which were typed, set or saved. Raises UsageError.

        Names that are not fields of this class are ignored.
        """
        declarations = declared(cls)
        values = {name: declarations[name].parse(raw[name]) for name in declarations if name in raw}
        names = frozenset(declarations)
        return cls(**values, typed=names & frozenset(typed), given=names & frozenset(given))

    def changed(self: Self, **values: Any) -> Self:
        """Return a copy with new values. Their names are added to `given`. Raises UsageError."""
        return dataclasses.replace(self, **values, given=self.given | values.keys())

    def resumed(self: Self, saved: Mapping[str, Any]) -> Self:
        """Return a copy that has a session's values in all fields that were not typed. Raises UsageError."""
        names = [name for name in declared(type(self)) if name in saved and name not in self.typed]
        values = {name: declared(type(self))[name].parse(saved[name]) for name in names}
        return dataclasses.replace(self, **values, given=self.given - values.keys())

    def values(self) -> dict[str, Any]:
        """Return all values by field name, in the form that `from_values` takes."""
        return {
            name: declaration.write(getattr(self, name)) if declaration.write else getattr(self, name)
            for name, declaration in declared(type(self)).items()
        }

    def session_values(self) -> dict[str, Any]:
        return {name: value for name, value in self.values().items() if declared(type(self))[name].in_session}

    def record_values(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name, option in declared(type(self)).items() if option.in_record
        }


def declared(kind: type) -> dict[str, Option]:
    """Return the options that a class declares, by field name and in the order of the fields."""
    return _declared(kind)


@cache
def _declared(kind: Any) -> dict[str, Option]:
    return {field.name: field.metadata["option"] for field in fields(kind) if "option" in field.metadata}


@cache
def _kinds(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields, by field name."""
    return get_type_hints(kind)


def _in_type(kind: Any, value: Any, name: str) -> Any:
    """Return a value in the type of its field. Raises UsageError. name: the option's name in the error."""
    if isinstance(kind, UnionType):
        # X | None
        if value is None:
            return None
        kind = get_args(kind)[0]
    plain = get_origin(kind) or kind
    if isinstance(value, bool) or plain is bool:
        is_right = isinstance(value, bool) and plain is bool
    elif plain is tuple:
        each, *rest = get_args(kind)
        if is_right := isinstance(value, (tuple, list)):
            value = tuple(_in_type(each, item, name) for item in value) if rest == [...] else tuple(value)
    elif plain is int:
        if is_right := isinstance(value, Integral):
            value = int(value)
    elif plain is float:
        is_right = isinstance(value, Real)
    elif plain is Path:
        if is_right := isinstance(value, (str, PathLike)):
            value = Path(value)
    elif is_right := isinstance(value, (str, Real)):
        value = str(value)
    if not is_right:
        raise UsageError(f"{name} must be {_KINDS[plain]}, got {value!r}")
    return value


def check_choice(value: str | None, choices: tuple[str, ...], name: str) -> None:
    """Raise UsageError unless a value is None or one of `choices`. name: name of the value in the error."""
    if value is not None and value not in choices:
        *first, last = choices
        allowed = f"{', '.join(first)} or {last}" if len(first) < 3 else f"one of {', '.join(choices)}"
        raise UsageError(f"{name} must be {allowed}, got {value!r}")


def repeated(raw: Iterable[Any] | None, flag: str) -> tuple[Any, ...]:
    """Return the values of a repeatable option as a tuple. Use this function as `Option.read`."""
    return tuple(raw or ())


def parts(text: str) -> list[str]:
    """Return the parts of a list that is separated by commas. Empty parts are left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def tested(check: Callable[[str], object]) -> Callable[[Any, str], Any]:
    """Return a function that checks a text and returns it unchanged. Use the function as `Option.read`.

    check: function that raises KvtoolError for a text that the option does not accept. The option's name is
    put before a message that does not contain the name. None is not checked.
    """

    def read(raw: str | None, name: str) -> str | None:
        try:
            if raw is not None:
                check(raw)
        except KvtoolError as error:
            raise about(error, name) from None
        return raw

    return read


def tested_each(check: Callable[[str], object]) -> Callable[[Any, str], tuple[str, ...]]:
    """Return a function like that of `tested`, for a repeatable option."""
    return lambda raw, name: tuple(tested(check)(each, name) for each in raw or ())


def about(error: KvtoolError, name: str) -> KvtoolError:
    """Put the name of an option or a setting before an error's message if the message lacks this name."""
    if name not in str(error):
        error.args = (f"{name}: {error}",)
    return error


def unless(default: int) -> Callable[[int | None, str], int | None]:
    """Return a function that converts the number `default` to None. Use the function as `Option.read`.

    For example, -1 for no limit becomes None.
    """
    return lambda value, flag: None if value == default else value
