"""Commands that show the cache, the text and the settings of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtool.cli.console import table
from kvtool.cli.explain import policy_line
from kvtool.config.generation import GenerationOptions
from kvtool.config.report import archive_line, report
from kvtool.errors import UsageError
from kvtool.options import declared
from kvtool.system.memory import rss_bytes
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from kvtool.cli.chat.screen import Terminal
    from kvtool.engine.loop import Engine


def count(text: str, default: int, usage: str) -> int:
    """Parse a number above 0 that was typed after a command. If the text is "", return the default.

    Raises UsageError with the message `usage`.
    """
    if text and not (text.isdecimal() and len(text) < 10 and int(text)):
        raise UsageError(usage)
    return int(text or default)


def cells(terminal: Terminal, last: str) -> None:
    """Show the last tokens, coloured by the share of rows that hold each token.

    last: number of tokens as text, or "" for the default. Any other text raises UsageError.
    """
    from kvtool.cli.inspect.command import LAST
    from kvtool.cli.inspect.terminal import show
    from kvtool.measure import holdings

    engine = terminal.engine
    n = count(last, LAST, f"/cells takes a number of tokens, like /cells {LAST}")
    if not engine.n_past:
        terminal.note("the cache is empty")
        return
    texts = holdings.texts(engine.model, terminal.conversation.writer.tokens)
    share, archived = engine.cells().share(), holdings.is_archived(engine)
    show(terminal.console, texts, share, archived, n)


def stats(terminal: Terminal) -> None:
    """Show where the tokens of the chat are, the sizes in bytes, the speed, and options that change them."""
    from kvtool.measure.holdings import n_forgotten

    engine = terminal.engine
    n_synthetic = engine.mean_kv - engine.mean_live
    writer, resident = terminal.conversation.writer, rss_bytes()
    held, most = f"{engine.mean_live:,.0f} tokens per row", f"at most {engine.policy.budget:,}"
    is_full = engine.policy.budget == engine.n_ctx
    rows = {
        "model": engine.model.path.name,
        "policy": policy_line(engine, terminal.policy),
        "tokens so far": f"{engine.n_past:,}",
        "in the cache": f"{held}, {most} ({'--ctx-size' if is_full else '--budget'})",
    }
    if n_synthetic:
        rows["in the cache"] = f"{held} and {n_synthetic:.0f} places for archived text, {most} (--budget)"
    if engine.context.archive:
        rows["archived"] = f"{archive_line(report(engine, terminal.policy))} (--archive)"
    forgotten = "kept by no KV head, not archived" if engine.policy.recall else "kept by no KV head"
    rows |= {
        "forgotten": f"{n_forgotten(engine):,} tokens: {forgotten}",
        "never evicted": f"{engine.n_pinned:,} tokens of the system prompt",
        "rows": f"{engine.context.n_row}: one for each layer and KV head",
        "context": f"{engine.n_ctx:,} tokens (trained: {engine.model.n_ctx_train:,})" + _renumbered(engine),
        "cache": format_bytes(engine.cache_bytes),
        "policy state": format_bytes(engine.state_bytes),
        "process memory": format_bytes(resident) if resident else "unknown",
    }
    if n := len(engine.checkpoints):
        rows["checkpoints"] = f"{n}, {format_bytes(engine.checkpoints.n_bytes)} of host memory"
    if terminal.tokens_per_s:
        rows["speed"] = f"{terminal.tokens_per_s:.1f} tokens/s in the last reply"
    if writer.n_drafted:
        right = f"{writer.n_accepted:,} of {writer.n_drafted:,} draft tokens"
        rows["accepted"] = f"{right} since the start (--draft)"
    two_columns(terminal, rows)


def _renumbered(engine: Engine) -> str:
    """Return a note if cached tokens got new positions, because the chat exceeded the context. Else ""."""
    n = engine.n_restart
    return f"; the chat went beyond it, and positions were assigned again {n:,} times" if n else ""


def show(terminal: Terminal, name: str) -> None:
    """Show a part of the chat. name: a key of `SHOWN`. Raises UsageError for any other text."""
    if name not in SHOWN:
        raise UsageError(f"/show takes one of {', '.join(SHOWN)}")
    SHOWN[name](terminal)


def system(terminal: Terminal) -> None:
    chat = terminal.conversation
    own = "none was given; the model's chat template brings its own"
    if terminal.engine.policy.evicts:
        own += ", which may be evicted"
    none = own if chat.template.has_own_system else "(none)"
    terminal.console.print(chat.system or none)


def setting(terminal: Terminal, name: str) -> str:
    """Return the value of a field of `GenerationOptions` as readable text."""
    generation = terminal.files.generation
    if name == "seed":
        return str(terminal.conversation.writer.sampler.seed)
    value = generation.session_values()[name]
    if isinstance(value, list):
        # write the texts as a user types them for /set, with \n for a line break
        return ", ".join('"' + text.replace('"', '\\"') + '"' for text in value) or "(none)"
    if value is None:
        return {"n": "no limit", "think": "(the model's own)", "think_budget": "no limit"}.get(name, "(none)")
    return str(value).rstrip()


def settings(terminal: Terminal) -> None:
    """Show the settings that users change most, and all settings that differ from their default."""
    generation, default = terminal.files.generation, GenerationOptions()
    names = [
        name
        for name in declared(GenerationOptions)
        if name in _COMMON or getattr(generation, name) != getattr(default, name)
    ]
    two_columns(terminal, {name: setting(terminal, name) for name in names})
    terminal.note(f"/show settings shows all {len(declared(GenerationOptions))}")


SHOWN: dict[str, Callable[[Terminal], None]] = {
    "system": lambda on: system(on),
    "settings": lambda on: two_columns(on, {name: setting(on, name) for name in declared(GenerationOptions)}),
    "template": lambda on: on.console.print(on.conversation.template.source),
    "policy": lambda on: on.console.print(policy_line(on.engine, on.policy)),
    "thought": lambda on: on.note(on.thought.strip() or "the last reply has no thought"),
    "last": lambda on: on.show_last() if on.conversation.n_turn else on.note("the chat has no turns"),
}
"""Words that a user can type after /show, each with the function that /show calls."""


_COMMON = ("n", "temp", "top_k", "top_p", "min_p", "seed")
"""Settings that /set without a name always shows."""


def two_columns(terminal: Terminal, rows: dict[str, str], dim: bool = True) -> None:
    """Show a table of two columns. rows: maps a text of the first column to a text of the second."""
    from rich.table import Column

    columns = Column(style="dim" if dim else "", no_wrap=True), Column(overflow="fold")
    terminal.console.print(table(columns, rows.items(), show_header=False))
