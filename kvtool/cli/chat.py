"""kvtool chat: a conversation that does not end."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from typing import Annotated

import typer

from kvtool import interrupt
from kvtool.cli import options as opt
from kvtool.errors import InputError, StreamEnd, UsageError

HELP = """\
/help          this
/stats         what the cache holds and takes
/reset         forget everything and start over
/system TEXT   start over under another system prompt
/exit          leave (or Ctrl-D)
Ctrl-C stops a reply and keeps the chat."""


def chat(
    context: typer.Context,
    policy: opt.Policy = "buzz",
    budget: opt.Budget = None,
    model: opt.Model = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt, never evicted.")] = None,
    options: opt.Options = None,
    evict_every: opt.EvictEvery = None,
    positions: opt.Positions = "auto",
    prefill: opt.Prefill = None,
    n: Annotated[
        int | None, typer.Option("-n", "--predict", min=1, help="The most tokens of a reply.")
    ] = None,
    temp: opt.Temp = 0.8,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    repeat_penalty: opt.RepeatPenalty = 1.0,
    seed: opt.Seed = None,
    n_ctx: opt.Context = None,
    n_batch: opt.Batch = None,
    threads: opt.Threads = None,
    gpu_layers: opt.GpuLayers = None,
    type_k: opt.TypeK = "f16",
    type_v: opt.TypeV = "f16",
    flash: opt.Flash = "auto",
    verbose: opt.Verbose = False,
) -> None:
    """Chat without an end: memory and speed stay as they are. With a pipe on stdin each line is a turn."""
    wanted = opt.EngineOptions.of(context)
    with opt.open_engine(wanted, default_budget=1024, n_batch=256) as opened:
        from kvtool.conversation import Conversation, Writer, template_of
        from kvtool.llama import Sampler

        sampler = Sampler(
            temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed
        )
        writer = Writer(opened.engine, sampler)
        conversation = Conversation(writer, template_of(opened.engine.model), system)
        if sys.stdin.isatty() and sys.stdout.isatty():
            _Terminal(conversation, policy, n).run()
        else:
            _pipe(conversation, n)


def _pipe(conversation, n_max: int | None) -> None:
    """Each line of stdin is a turn; only replies go to stdout."""
    try:
        for line in sys.stdin:
            if not line.strip():
                continue
            interrupt.stops(conversation.writer)
            for piece in conversation.reply(line.rstrip("\n"), n_max):
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()
            if conversation.writer.stop:
                raise KeyboardInterrupt
            # between turns nothing is under way
            interrupt.ends()
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not UTF-8 (byte {error.start})") from None


class _Terminal:
    """The chat that a person sees: prompt, streaming Markdown, a status line after each reply."""

    def __init__(self, conversation, policy: str, n_max: int | None) -> None:
        from rich.console import Console

        self.conversation = conversation
        self.engine = conversation.writer.engine
        self.policy = policy
        self.n_max = n_max
        self.console = Console()
        self.tokens_per_s = 0.0

    def run(self) -> None:
        engine = self.engine
        self.console.print(
            f"[bold]{engine.model.path.stem}[/] under [bold]{self.policy}[/], {engine.policy.budget} cells, "
            f"/help for help",
            highlight=False,
        )
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        while (line := self._ask()) is not None:
            line = line.strip()
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif line:
                self._answer(line)

    def _ask(self) -> str | None:
        """The person's next line; None to leave."""
        interrupt.raises()
        while True:
            try:
                return input("\n> ")
            except EOFError:
                self.console.print()
                return None
            except KeyboardInterrupt:
                self.console.print("\n[dim]Ctrl-D or /exit leaves[/]")

    def _command(self, line: str) -> bool:
        """Does what a line with a slash says; False to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            self.console.print(HELP, highlight=False, markup=False)
        elif name == "/stats":
            self._stats()
        elif name == "/reset":
            self.conversation.reset(self.conversation.system)
            self.console.print("[dim]everything forgotten[/]")
        elif name == "/system":
            if rest.strip():
                self.conversation.reset(rest)
                self.console.print("[dim]started over under the new system prompt[/]")
            else:
                self.console.print(self.conversation.system or "(none)", highlight=False, markup=False)
        else:
            self.console.print(f"[red]no command {name}[/]; /help lists them", highlight=False)
        return True

    def _answer(self, text: str) -> None:
        from kvtool.cli.markdown import MarkdownStream

        signal.signal(signal.SIGINT, lambda *_: setattr(self.conversation.writer, "stop", True))
        started = None
        self.console.print()
        try:
            pieces = self.conversation.reply(text, self.n_max)
            with self.console.status("reading"):
                first = next(pieces, "")
            started = time.monotonic()
            with MarkdownStream(self.console) as out:
                out.write(first)
                for piece in pieces:
                    out.write(piece)
        except (StreamEnd, UsageError) as error:
            self.console.print(f"[red]{error}[/]; or /reset", highlight=False)
        if started is not None:
            n = self.conversation.writer.n_written - 1
            seconds = time.monotonic() - started
            self.tokens_per_s = n / seconds if n > 0 and seconds > 0 else self.tokens_per_s
        if self.conversation.writer.stop:
            self.console.print("[dim]stopped[/]")
        self.console.print(f"[dim]{self._status()}[/]", highlight=False)

    def _status(self) -> str:
        from kvtool.units import format_bytes

        engine = self.engine
        return (
            f"{engine.n_past:,} tokens · {engine.mean_kv:,.0f}/{engine.policy.budget:,} cells · "
            f"cache {format_bytes(engine.cache_bytes)} · {self.tokens_per_s:.1f} tokens/s"
        )

    def _stats(self) -> None:
        from dataclasses import asdict

        from rich.table import Table

        from kvtool.measure.memory import rss_bytes
        from kvtool.units import format_bytes

        engine = self.engine
        params = {
            key: value for key, value in asdict(engine.policy).items() if key not in ("budget", "slack")
        }
        resident = rss_bytes()
        rows = {
            "model": engine.model.path.name,
            "policy": " ".join([self.policy, *(f"{key}={value}" for key, value in params.items())]),
            "tokens streamed": f"{engine.n_past:,}",
            "cells held": f"{engine.mean_kv:,.0f} of {engine.policy.budget:,} a row",
            "rows": str(engine.context.n_row),
            "pinned": f"{engine.n_pinned:,}",
            "evicted": f"{engine.n_evicted:,} a row",
            "positions": "in-cache" if engine.is_in_cache else "original",
            "cache": format_bytes(engine.cache_bytes),
            "policy state": format_bytes(engine.host_bytes),
            "resident": format_bytes(resident) if resident else "unknown",
            "speed": f"{self.tokens_per_s:.1f} tokens/s",
        }
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="dim")
        for name, value in rows.items():
            table.add_row(name, value)
        self.console.print(table)
