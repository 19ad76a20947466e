"""Options of the system prompt."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.errors import UsageError
from kvtool.options import Options, option, tested
from kvtool.system.texts import check_file, read_text, utf8


@dataclass(frozen=True)
class SystemOptions(Options):
    """The system prompt, given as a text or as a file. Raises UsageError if both options are given."""

    system: str | None = option(
        "--system",
        None,
        "System prompt. No policy forgets it; recall may archive the part beyond half of the budget.",
        read=lambda raw, flag: utf8(flag, raw),
        aliases=("-sys", "--system-prompt"),
    )
    system_file: str | None = option(
        "--system-file FILE",
        None,
        "Read the system prompt from this file.",
        read=tested(check_file),
        aliases=("-sysf", "--system-prompt-file"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.system is not None and self.system_file is not None:
            raise UsageError("--system and --system-file are both given; leave out one of them")

    def text(self) -> str | None:
        """Return the system prompt. Raises InputError if the file cannot be read."""
        return self.system if self.system_file is None else read_text(self.system_file).rstrip("\n")
