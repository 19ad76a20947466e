"""Lines of lab/papers/records, and how the commands of experiments are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.measure import records
from kvtool.measure.grid import split_policy
from lab.papers.texts import listed

Line = dict[str, Any]
"""A line of lab/papers/records: one policy with one budget on one file.

label
    The policy with its options.
budget
    The budget as in the command; None for a policy without a budget.
of
    The file or the data set.
scores
    Lists by the name of the score. A list has a number for each item or for each block of tokens.
weights
    Number of tokens of each block, by the name of the score.
cells
    The budget of each item, in cells.
bytes
    Bytes of keys and values on the device, and of the archive on the host.
text_sha256
    The SHA-256 of the text of the tokens. Older lines lack it.
seconds, and VERSIONS
    The time and the versions of the measurement.
"""

VERSIONS = ("model", "kvtool", "llama_cpp_python", "patch")


@dataclass(frozen=True, slots=True)
class Ask:
    """A command that has not been run yet.

    Attributes
    ----------
    command
        Words after `kvtool` or `python -m`, without the model.
    store
        Name of the file of records.
    goes_on
        True if the program itself writes the file of records, and continues an existing file.
    """

    command: tuple[str, ...]
    store: str
    goes_on: bool = False


class ByText:
    """Base of a run that has one command for each text."""

    __slots__ = ()

    files: tuple[str, ...]
    max_tokens: int

    def missing(self, kept: Sequence[Line], name: str) -> Iterator[Ask]:
        there = {line["of"] for line in kept if line["tokens"] == self.max_tokens}
        for file in self.files:
            if Path(file).name not in there:
                yield Ask(self._command(file), name)

    def commands(self) -> Iterator[tuple[str, ...]]:
        for file in self.files:
            yield self._command(file)

    def _command(self, file: str) -> tuple[str, ...]:
        raise NotImplementedError


def is_program(command: Sequence[str]) -> bool:
    """True for a module of this folder, False for a command of kvtool."""
    return command[0].startswith("lab.papers.")


def shell(command: Sequence[str], model: str = "") -> str:
    """The command as a user types it: files have no folder, and an empty argument is written as quotes."""
    program = "python -m " if is_program(command) else "kvtool "
    words = [*command, *(("-m", model) if model else ())]
    return program + " ".join(Path(part).name if "/" in part else part or "''" for part in words)


def each_of(files: Sequence[str]) -> str:
    """The comment below a command that is run for each of these texts."""
    return f"\n    # FILE: {listed(tuple(files))}"


def typed(label: str, type_k: str) -> str:
    """The policy, followed by the type of its cache unless that is f16."""
    return label if type_k == "f16" else f"{label} {type_k}"


def option_words(label: str) -> list[str]:
    """A policy as arguments of kvtool: its name, and -o for each parameter."""
    name, options = split_policy(label)
    return [name, *(part for option in options for part in ("-o", option))]


def about(*measured: records.Record, lines: int = 1) -> Line:
    """Return the seconds, the versions and the hash of the text for a line that is made from these records.

    lines: number of lines that are made from the same records. Each gets an equal share of the seconds.
    """
    versions = {name: measured[0][name] for name in VERSIONS} | {"model": Path(measured[0]["model"]).name}
    # CPU time is preferred, because it does not depend on other programs
    seconds = sum(record.get("cpu_s", record.get("seconds", 0)) for record in measured)
    text = {name: measured[0][name] for name in ("text_sha256",) if name in measured[0]}
    return {"seconds": seconds / lines, **text, **versions}
