"""Open the text that a command streams, read the first tokens, and check the length of the text."""

from __future__ import annotations

import sys
from contextlib import suppress
from select import select
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli.console import say
from kvtool.errors import InputError, UsageError
from kvtool.system.texts import TextSource, is_stdin
from kvtool.units import format_tokens

if TYPE_CHECKING:
    import numpy as np

    from kvtool.engine.loop import Engine
    from kvtool.llama.loaded.model import Model

File = Annotated[
    str | None,
    typer.Argument(metavar="[FILE]", help="A text file, or - for stdin.", show_default="a pipe on stdin"),
]
"""The argument that names a text."""

_MARGIN = 256
"""Number of additional tokens to read and drop.

Only the start of a text is tokenized. Near the end of this part, the tokens may differ from those of the
whole text.
"""

_TOKEN_BYTES = 8
"""Bytes to read per token at first. If they hold too few tokens, more bytes are read."""

_PATIENCE_S = 2.0
"""Seconds without the first byte of stdin after which a line says that kvtool waits."""


def source(file: str | None) -> TextSource:
    """Open a file, or stdin if no file is named.

    Raises UsageError if stdin is a terminal, and InputError if the text cannot be read.
    """
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("name a text file, or give a text in a pipe")
    if file is None or is_stdin(file):
        await_stdin()
    return TextSource("-" if file is None else file)


def await_stdin(advice: str = "") -> None:
    """Wait for the first byte of stdin, at most _PATIENCE_S seconds. Then print a line that ends in `advice`.

    In a terminal, do nothing.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return
    # Windows can wait for sockets only
    with suppress(OSError, ValueError):
        if not select([sys.stdin], [], [], _PATIENCE_S)[0]:
            say(f"waiting for the end of stdin{advice}")


def first_tokens(model: Model, text: TextSource, n: int | None, *, n_min: int = 2) -> np.ndarray:
    """Return the first n tokens of a text, i32[<= n]. Only as much of the text as necessary is read.

    They begin with a BOS token if the model uses one.

    n: number of tokens, or None for all tokens. Raises InputError if the text has fewer than n_min tokens.
    """
    n_bytes = None if n is None else (n + _MARGIN) * _TOKEN_BYTES
    while True:
        tokens = model.tokenize(text.start(n_bytes), start=True)
        if text.is_whole or n is None or len(tokens) >= n + _MARGIN:
            break
        n_bytes = 2 * n_bytes if n_bytes else None
    tokens = tokens[:n]
    if len(tokens) < n_min:
        count = format_tokens(len(tokens))
        raise InputError(f"{text.name} is too short: {count}, at least {n_min} needed")
    return tokens


def check_length(engine: Engine, n_tokens: int, noun: str = "text") -> None:
    """Raise InputError if the engine cannot read a text to its end. noun: "text", "prompt" or "chat"."""
    can_grow = engine.n_ctx < engine.model.n_ctx_train
    of_chat = "or a larger --ctx-size" if can_grow else "or leave out --reread"
    shorter = {"text": "or --max-tokens", "chat": of_chat}.get(noun, "or a shorter prompt")
    if not engine.policy.evicts and n_tokens > engine.policy.budget:
        raise InputError(
            f"the {noun} ({n_tokens:,} tokens) does not fit in the cache ({engine.policy.budget:,}) and "
            f"`full` never evicts; use --policy recall {shorter}"
        )
    check_positions(engine.settings.positions, n_tokens, engine.n_ctx, noun, shorter)


def check_positions(
    positions: str, n_tokens: int, n_ctx: int, noun: str = "text", shorter: str = "or --max-tokens"
) -> None:
    """Raise InputError if a text has more tokens than there are positions.

    shorter: end of the message, which says how to make the text shorter.
    """
    if positions == "original" and n_tokens > n_ctx:
        raise InputError(
            f"the {noun} has {n_tokens:,} tokens, and original positions end at {n_ctx:,}; "
            f"choose --positions auto or in-cache, {shorter}"
        )
