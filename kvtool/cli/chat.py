"""kvtool chat: a conversation that does not end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli import flags as opt
from kvtool.cli.explain import Notice, explain_run, policy_line
from kvtool.cli.keeper import Keeper, open_transcript
from kvtool.cli.opening import EngineOptions, open_engine, sampler, take_saved
from kvtool.errors import InputError, SessionError, StreamEnd, UsageError
from kvtool.system import interrupt

if TYPE_CHECKING:
    from kvtool.chats.conversation import Conversation

HELP = """\
/help          this
/stats         what the cache holds and takes
/undo          take the last turn back
/save FILE     write the chat into a session file
/load FILE     go on with the chat in a session file
/cells [N]     the chat's last N tokens, shaded by the share of the rows that hold each
/reset         forget everything and start over
/system TEXT   start over under another system prompt
/exit          leave (or Ctrl-D)
Ctrl-C stops a reply and keeps the chat."""


def chat(
    context: typer.Context,
    policy: opt.Policy = opt.POLICY,
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
    session: Annotated[
        Path | None,
        typer.Option("--session", help="Keep the chat in this file, and go on with what is in it."),
    ] = None,
    transcript: Annotated[
        Path | None, typer.Option("--transcript", help="Append what is said to this file, as plain text.")
    ] = None,
    n_ctx: opt.Context = None,
    n_batch: opt.Batch = None,
    threads: opt.Threads = None,
    gpu_layers: opt.GpuLayers = None,
    rpc: opt.Rpc = None,
    type_k: opt.TypeK = "f16",
    type_v: opt.TypeV = "f16",
    flash: opt.Flash = "auto",
    explain: opt.Explain = False,
    verbose: opt.Verbose = False,
) -> None:
    """Chat without an end: memory and speed stay as they are. With a pipe on stdin each line is a turn."""
    with ExitStack() as stack:
        if session:
            from kvtool.chats import session as sessions

            stack.enter_context(sessions.held(session))
            if is_old := session.exists() and session.stat().st_size > 0:
                take_saved(context, sessions.read_meta(session)["options"])
        wanted = EngineOptions.of(context)
        opened = stack.enter_context(open_engine(wanted, default_budget=1024, n_batch=opt.N_BATCH))

        from kvtool.chats.conversation import Conversation, Writer, template_of

        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        writer = Writer(opened.engine, sampler(context, opened.engine))
        conversation = Conversation(writer, template_of(opened.engine.model), system, undoable=is_terminal)
        stack.callback(conversation.close)
        keeper = Keeper(context, conversation, session)
        if session and is_old:
            keeper.resume(session)
        if transcript:
            keeper.transcript = stack.enter_context(open_transcript(transcript))
        if explain:
            conversation.pin_system()
            explain_run(opened.engine, wanted.policy, "turn")
        writer.before_reading = Notice(opened.engine, "turn")
        if is_terminal:
            _Terminal(conversation, keeper, wanted.policy, n).run()
        else:
            _pipe(conversation, keeper, n)
    keeper.check()


def _pipe(conversation: Conversation, keeper: Keeper, n_max: int | None) -> None:
    """Each line of stdin is a turn; only replies go to stdout."""
    try:
        for line in sys.stdin:
            if not line.strip():
                continue
            interrupt.stops(conversation.writer)
            for piece in conversation.reply(line.rstrip("\n"), n_max):
                sys.stdout.write(piece)
                sys.stdout.flush()
            keeper.keep()
            keeper.check()
            sys.stdout.write("\n")
            sys.stdout.flush()
            if conversation.writer.stop:
                raise KeyboardInterrupt
            # between turns nothing is under way
            interrupt.ends()
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not UTF-8 (byte {error.start})") from None


@contextmanager
def _keys_wait() -> Iterator[None]:
    """What is typed meanwhile is not shown, where it would break what is drawn; the next prompt has it."""
    try:
        import termios
    except ImportError:
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    waiting = termios.tcgetattr(sys.stdin)
    waiting[3] &= ~termios.ECHO
    # else the terminal itself takes Ctrl-D, and the prompt hears nothing of it
    waiting[6][termios.VEOF] = bytes([os.fpathconf(sys.stdin.fileno(), "PC_VDISABLE") & 0xFF])
    termios.tcsetattr(sys.stdin, termios.TCSANOW, waiting)
    try:
        yield
    finally:
        # a terminal that is gone has nothing to be set back
        with suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class _Terminal:
    """The chat that a person sees: prompt, streaming Markdown, a status line after each reply."""

    def __init__(self, conversation: Conversation, keeper: Keeper, policy: str, n_max: int | None) -> None:
        from rich.console import Console

        self.conversation = conversation
        self.keeper = keeper
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
        if self.conversation.n_turn:
            self._note(f"going on after {self.conversation.n_turn} turns, {engine.n_past:,} tokens")
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        while (line := self._ask()) is not None:
            line = line.strip()
            with _keys_wait():
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
        elif name == "/undo":
            undone = self.conversation.undo()
            self._note("the last turn is taken back" if undone else "nothing to take back")
            self.keeper.keep_session()
        elif name in ("/save", "/load"):
            self._file(name, rest.strip())
        elif name == "/cells":
            self._cells(rest.strip())
        elif name == "/reset":
            self.conversation.reset(self.conversation.system)
            self._note("everything forgotten")
            self.keeper.keep_session()
        elif name == "/system":
            if rest.strip():
                self.conversation.reset(rest)
                self._note("started over under the new system prompt")
                self.keeper.keep_session()
            else:
                self.console.print(self.conversation.system or "(none)", highlight=False, markup=False)
        else:
            self.console.print(f"[red]no command {name}[/]; /help lists them", highlight=False)
        return True

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False, markup=False)

    def _file(self, command: str, name: str) -> None:
        if not name:
            self.console.print(f"[red]{command} needs a file[/]")
            return
        path = Path(name).expanduser()
        try:
            if command == "/save":
                self.keeper.save(path)
                self._note(f"saved to {path}")
            else:
                self.keeper.load(path)
                self._note(f"going on after {self.conversation.n_turn} turns of {path}")
                self.keeper.keep_session()
        except SessionError as error:
            self.console.print(f"[red]{error}[/]", highlight=False)

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
            self._note("stopped")
        self.keeper.keep()
        if self.keeper.unsaved:
            self.console.print(f"[red]{self.keeper.unsaved}[/]", highlight=False)
        self._note(self._status())

    def _cells(self, last: str) -> None:
        from kvtool.cli import inspect
        from kvtool.measure import holdings

        if last and not (last.isdecimal() and int(last)):
            self.console.print(
                f"[red]/cells takes a number of tokens[/], like /cells {inspect.LAST}", highlight=False
            )
            return
        engine = self.engine
        if not engine.n_past:
            self.console.print("[dim]nothing read yet[/]")
            return
        texts = holdings.texts(engine.model, self.conversation.writer.tokens)
        inspect.show(self.console, texts, engine.cells().share(), int(last or inspect.LAST))

    def _status(self) -> str:
        from kvtool.measure.holdings import n_forgotten
        from kvtool.units import format_bytes

        engine = self.engine
        return (
            f"{engine.n_past:,} tokens, {n_forgotten(engine):,} forgotten · "
            f"{engine.mean_kv:,.0f}/{engine.policy.budget:,} cells · "
            f"cache {format_bytes(engine.cache_bytes)} · {self.tokens_per_s:.1f} tokens/s"
        )

    def _stats(self) -> None:
        from rich.table import Table

        from kvtool.measure.holdings import n_forgotten
        from kvtool.system.memory import rss_bytes
        from kvtool.units import format_bytes

        engine = self.engine
        resident = rss_bytes()
        rows = {
            "model": engine.model.path.name,
            "policy": policy_line(engine, self.policy),
            "tokens streamed": f"{engine.n_past:,}",
            "cells held": f"{engine.mean_kv:,.0f} of {engine.policy.budget:,} a row",
            "rows": str(engine.context.n_row),
            "pinned": f"{engine.n_pinned:,}",
            "evicted": f"{engine.n_evicted:,} a row",
            "forgotten": f"{n_forgotten(engine):,} tokens, held by no row",
            "positions": f"{engine.settings.positions}, started over {engine.n_restart} times",
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
