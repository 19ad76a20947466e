"""Options declared as data: dataclass fields that carry flags, help, allowed values and uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, TypeVar

from kvtool.errors import UsageError

CACHE = "Cache and eviction"
SAMPLING = "Sampling"
HARDWARE = "Model and hardware"
ARCHIVE = "Archive (--policy recall)"
OUTPUT = "Output"
SERVER = "Server"
"""Groups of options in the help."""

Self = TypeVar("Self", bound="Options")


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of an option, without its type and default.

    Attributes
    ----------
    flags
        All names on the command line.
    help
        Help text.
    group
        Group in the help; None for options of a single command.
    metavar
        Name of the value in the help.
    default_text
        Default as shown in the help: a text, True for the value itself, False for none. "{name}" is replaced
        by an attribute of the options' class, "{model}" by the default model.
    words
        Words that stand for a number, such as "auto".
    least, most
        Smallest and largest allowed number.
    is_valid
        Returns True for an allowed number; for ranges that `least` and `most` cannot express.
    range_text
        Description of that range; text after a semicolon is a hint.
    choices
        Allowed texts.
    completes
        Name of the function in `kvtool.cli.completion` that completes the value in a shell.
    read
        Converts a typed text, a setting or a session's value to the field's value. Its second argument is the
        option's name for errors.
    write
        Converts the field's value to a value that `read` takes.
    is_count
        True if the option takes no value and counts how often it is typed.
    in_session
        True if a session keeps the value.
    in_record
        True if the value changes results, so that the record of a result keeps it.
    request
        Names in requests to the server, which `/set` also accepts.
    also
        Further names that `/set` accepts.
    """

    flags: tuple[str, ...]
    help: str
    group: str | None = None
    metavar: str | None = None
    default_text: str | bool = True
    words: Mapping[str, int] = field(default_factory=dict)
    least: float | None = None
    most: float | None = None
    is_valid: Callable[[Any], bool] | None = None
    range_text: str = ""
    choices: tuple[str, ...] = ()
    completes: str | None = None
    read: Callable[[Any, str], Any] | None = None
    write: Callable[[Any], Any] | None = None
    is_count: bool = False
    in_session: bool = False
    in_record: bool = False
    request: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in errors and documents: the first flag with two dashes, else the only flag."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])

    def check(self, value: Any, name: str) -> None:
        """Raise UsageError if a value is out of range. name: the option's name in the error."""
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            if self.choices:
                check_choice(item, self.choices, name)
            if self.is_valid and not self.is_valid(item):
                range_text, semicolon, hint = self.range_text.partition(";")
                raise UsageError(f"{name} must be {range_text}, got {item:g}{semicolon}{hint}")
            if None not in (self.least, self.most) and not self.least <= item <= self.most:
                raise UsageError(f"{name} must be in {self.least}..{self.most}, got {item}")
            if self.least is not None and not item >= self.least:
                raise UsageError(f"{name} must be at least {self.least}, got {item}")
            if self.most is not None and item > self.most:
                raise UsageError(f"{name} must be at most {self.most}, got {item}")

    def names(self, field: str) -> tuple[str, ...]:
        """Return all names that `/set` accepts. field: the name of the option's field."""
        return (field, *self.request, *self.also)

    def parse(self, raw: Any, name: str | None = None) -> Any:
        """Convert a typed text, a setting or a session's value to the field's value. Raises UsageError.

        name: the option's name in the error; defaults to `self.name`.
        """
        return self.read(raw, name or self.name) if self.read else raw


def option(usage: str, default: Any, help: str, **attributes: Any) -> Any:
    """Declare an option as a dataclass field.

    usage: flags and metavar, such as "-c, --ctx-size N". attributes: further attributes of `Option`.
    """
    *first, last = usage.split(", ")
    flag, _, metavar = last.partition(" ")
    declaration = Option((*first, flag), help, metavar=metavar or None, **attributes)
    return field(default=default, metadata={"option": declaration})


def redeclared(kind: type[Options], name: str, default: Any = dataclasses.MISSING, **attributes: Any) -> Any:
    """Declare a field of another class of options again, with a new default or other attributes."""
    (original,) = (field for field in fields(kind) if field.name == name)
    changed = dataclasses.replace(original.metadata["option"], **attributes)
    return field(
        default=original.default if default is dataclasses.MISSING else default, metadata={"option": changed}
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of groups of options. Raises UsageError for a value that is out of range.

    Attributes
    ----------
    typed
        Names of the fields that were typed on the command line.
    given
        Names of the fields that were typed or set in a file or a variable.
    hidden
        Names of the fields that a command does not offer; they keep their defaults.
    """

    typed: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    hidden: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, declaration in declared(type(self)).items():
            declaration.check(getattr(self, name), declaration.name)

    @classmethod
    def from_values(
        cls: type[Self], raw: Mapping[str, Any], typed: Iterable[str] = (), given: Iterable[str] = ()
    ) -> Self:
        """Return the options for values that were typed, set or saved. Raises UsageError.

        raw: the values by field name. typed, given: as in the attributes; names of other classes' fields are
        ignored.
        """
        declarations = declared(cls)
        values = {name: declarations[name].parse(raw[name]) for name in declarations if name in raw}
        names = frozenset(declarations)
        return cls(**values, typed=names & frozenset(typed), given=names & frozenset(given))

    def changed(self: Self, **values: Any) -> Self:
        """Return a copy with these values, which count as given. Raises UsageError."""
        return dataclasses.replace(self, **values, given=self.given | values.keys())

    def resumed(self: Self, saved: Mapping[str, Any]) -> Self:
        """Return a copy with a session's values for all fields that were not typed. Raises UsageError."""
        names = [name for name in declared(type(self)) if name in saved and name not in self.typed]
        values = {name: declared(type(self))[name].parse(saved[name]) for name in names}
        return dataclasses.replace(self, **values, given=self.given - values.keys())

    def values(self) -> dict[str, Any]:
        """Return all values by field name, as `from_values` takes them."""
        return {
            name: declaration.write(getattr(self, name)) if declaration.write else getattr(self, name)
            for name, declaration in declared(type(self)).items()
        }

    def session_values(self) -> dict[str, Any]:
        """Return the values that a session keeps."""
        return {name: value for name, value in self.values().items() if declared(type(self))[name].in_session}

    def record_values(self) -> dict[str, Any]:
        """Return the values that the record of a result keeps."""
        return {
            name: getattr(self, name) for name, option in declared(type(self)).items() if option.in_record
        }


def declared(kind: type) -> dict[str, Option]:
    """Return the options of a class of `Options` by field name, in order."""
    return _declared(kind)


@cache
def _declared(kind: Any) -> dict[str, Option]:
    return {field.name: field.metadata["option"] for field in fields(kind) if "option" in field.metadata}


def check_choice(value: str | None, choices: tuple[str, ...], name: str) -> None:
    """Raise UsageError unless the value is None or a choice. name: the value's name in the error."""
    if value is not None and value not in choices:
        *first, last = choices
        allowed = f"{', '.join(first)} or {last}" if len(first) < 3 else f"one of {', '.join(choices)}"
        raise UsageError(f"{name} must be {allowed}, got {value!r}")


def within(low: float, high: float, hint: str = "") -> dict[str, Any]:
    """Return attributes of `Option` that allow numbers in low..high, and not NaN. hint: end of the error."""
    return {"is_valid": lambda x: low <= x <= high, "range_text": f"in {low}..{high}{hint}"}


def repeated(raw: Iterable[Any] | None, flag: str) -> tuple[Any, ...]:
    """Read all values of a repeatable option."""
    return tuple(raw or ())


def unless(default: int) -> Callable[[int | None, str], int | None]:
    """Return a `read` that turns the number `default`, such as llama.cpp's -1 for no limit, into None."""
    return lambda value, flag: None if value == default else value
