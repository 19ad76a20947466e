"""Options as data: a field of a dataclass, with its names, its help, its range and its uses."""

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

Some = TypeVar("Some", bound="Options")


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option, without its type and default.

    Attributes
    ----------
    flags
        All its names on the command line.
    help
        Its text in the help.
    group
        Its group in the help; None for the options of one command.
    metavar
        The name of its value in the help.
    words
        Its default in the help: a text, True for the value, False for none. "{name}" is an attribute of the
        options' class, "{model}" the default model.
    least, most
        The smallest and the largest number that it takes.
    fits
        Returns True for a value in its range.
    needed
        That range in words; behind a semicolon a hint.
    choices
        The texts that it takes.
    completes
        What a shell completes: a function of `kvtool.cli.completion`.
    read
        Makes the value from a typed text, a setting, or a session's value. Its second argument is the name
        for errors.
    write
        Makes from the value the argument of `read`.
    is_count
        True if it takes no value and counts how often it is typed.
    kept
        True if a session keeps it.
    identity
        True if the record of a result has it: another value gives another result.
    request
        Its names in a request to the server, which `/set` also takes.
    also
        More names that `/set` takes.
    """

    flags: tuple[str, ...]
    help: str
    group: str | None = None
    metavar: str | None = None
    words: str | bool = True
    least: float | None = None
    most: float | None = None
    fits: Callable[[Any], bool] | None = None
    needed: str = ""
    choices: tuple[str, ...] = ()
    completes: str | None = None
    read: Callable[[Any, str], Any] | None = None
    write: Callable[[Any], Any] | None = None
    is_count: bool = False
    kept: bool = False
    identity: bool = False
    request: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name in errors and documents: the first long one, or its only one."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])

    def check(self, value: Any, name: str) -> None:
        """Raise UsageError for a value that is out of range. name: how the error calls the option."""
        for each in value if isinstance(value, tuple) else () if value is None else (value,):
            if self.choices:
                check_choice(each, self.choices, name)
            if self.fits and not self.fits(each):
                needed, semicolon, hint = self.needed.partition(";")
                raise UsageError(f"{name} must be {needed}, got {each:g}{semicolon}{hint}")
            if None not in (self.least, self.most) and not self.least <= each <= self.most:
                raise UsageError(f"{name} must be in {self.least}..{self.most}, got {each}")
            if self.least is not None and not each >= self.least:
                raise UsageError(f"{name} must be at least {self.least}, got {each}")
            if self.most is not None and each > self.most:
                raise UsageError(f"{name} must be at most {self.most}, got {each}")

    def names(self, field: str) -> tuple[str, ...]:
        """Return its names in `/set`. field: the name of its field."""
        return (field, *self.request, *self.also)

    def taken(self, raw: Any, name: str | None = None) -> Any:
        """Return the value for a typed text, a setting, or a session's value. Raises UsageError.

        name: the option's name in an error, unless it is `self.name`.
        """
        return self.read(raw, name or self.name) if self.read else raw


def option(usage: str, default: Any, help: str, **more: Any) -> Any:
    """A field of options: "-c, --ctx-size N", its default, its help, and the attributes of `Option`."""
    *first, last = usage.split(", ")
    flag, _, metavar = last.partition(" ")
    its = Option((*first, flag), help, metavar=metavar or None, **more)
    return field(default=default, metadata={"option": its})


def redeclared(kind: type[Options], name: str, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """The field of that name once more, for a class of options in which something of it is different."""
    (known,) = (each for each in fields(kind) if each.name == name)
    changed = dataclasses.replace(known.metadata["option"], **more)
    return field(
        default=known.default if default is dataclasses.MISSING else default, metadata={"option": changed}
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one kind. Raises UsageError for a value that is out of its range.

    Attributes
    ----------
    typed
        Names of the fields that were typed.
    given
        Names of the fields that were typed, or set in a file or a variable.
    hidden
        Names of the fields that a command does not have: they keep their defaults.
    """

    typed: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    hidden: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, its in declared(type(self)).items():
            its.check(getattr(self, name), its.name)

    @classmethod
    def filled(
        cls: type[Some], raw: Mapping[str, Any], typed: Iterable[str] = (), given: Iterable[str] = ()
    ) -> Some:
        """Return the options for a command line and settings. None means the default where it is a default.

        Raises UsageError.
        """
        values = {name: its.taken(raw[name]) for name, its in declared(cls).items() if name in raw}
        names = frozenset(declared(cls))
        return cls(**values, typed=names & frozenset(typed), given=names & frozenset(given))

    def changed(self: Some, **values: Any) -> Some:
        """The same with these values, which count as given. Raises UsageError."""
        return dataclasses.replace(self, **values, given=self.given | values.keys())

    def resumed(self: Some, saved: Mapping[str, Any]) -> Some:
        """Return these options, with a session's values for fields that were not typed. Raises UsageError."""
        names = [name for name in declared(type(self)) if name in saved and name not in self.typed]
        values = {name: declared(type(self))[name].taken(saved[name]) for name in names}
        return dataclasses.replace(self, **values, given=self.given - values.keys())

    def values(self) -> dict[str, Any]:
        """All of them by name, as `filled` takes them."""
        own = declared(type(self))
        return {n: its.write(getattr(self, n)) if its.write else getattr(self, n) for n, its in own.items()}

    def kept(self) -> dict[str, Any]:
        """Return the values that a session keeps."""
        return {name: value for name, value in self.values().items() if declared(type(self))[name].kept}

    def identity(self) -> dict[str, Any]:
        """Return the values that the record of a result has."""
        return {name: getattr(self, name) for name, its in declared(type(self)).items() if its.identity}


def declared(kind: type) -> dict[str, Option]:
    """The options of a class by the names of their fields, in their order."""
    return _declared(kind)


@cache
def _declared(kind: Any) -> dict[str, Option]:
    return {each.name: each.metadata["option"] for each in fields(kind) if "option" in each.metadata}


def check_choice(value: str | None, choices: tuple[str, ...], name: str) -> None:
    """Raise UsageError unless the value is None or a choice. name: the value's name in the error."""
    if value is not None and value not in choices:
        *first, last = choices
        needed = f"{', '.join(first)} or {last}" if len(first) < 3 else f"one of {', '.join(choices)}"
        raise UsageError(f"{name} must be {needed}, got {value!r}")


def within(low: float, high: float, hint: str = "") -> dict[str, Any]:
    """The range of a number, as attributes of `Option`. hint: the end of an error."""
    # NaN is in no range
    return {"fits": lambda x: low <= x <= high, "needed": f"in {low}..{high}{hint}"}


def repeated(raw: Iterable[Any] | None, flag: str) -> tuple[Any, ...]:
    """Reads all values of an option that may be repeated."""
    return tuple(raw or ())


def unless(wanted: int) -> Callable[[int | None, str], int | None]:
    """Read a number, of which one value means the default, as in llama.cpp."""
    return lambda value, flag: None if value == wanted else value
