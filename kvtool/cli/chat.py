"""kvtool chat: a chat of any length."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli import flags as opt
from kvtool.cli import sampling as draw
from kvtool.cli import utf8
from kvtool.cli.command import SHOWS
from kvtool.cli.completion import models
from kvtool.cli.completion import sessions as sessions_here
from kvtool.cli.explain import Notice, explain_run, may_lose_system, say_spare, unpinned
from kvtool.cli.keeper import Keeper, open_transcript
from kvtool.cli.opening import EngineOptions, open_engine, system_text, take_positional, take_saved
from kvtool.system import interrupt

if TYPE_CHECKING:
    from kvtool.chats.conversation import Conversation
    from kvtool.engine.loop import Engine


def chat(
    context: typer.Context,
    model_name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model, as for -m.",
            show_default=False,
            autocompletion=models,
        ),
    ] = None,
    policy: opt.Policy = opt.POLICY,
    budget: opt.Budget = None,
    model: opt.Model = None,
    system: opt.System = None,
    system_file: opt.SystemFile = None,
    options: opt.Options = None,
    evict_every: opt.EvictEvery = None,
    positions: opt.Positions = "auto",
    prefill: opt.Prefill = None,
    n: opt.ReplyPredict = None,
    temp: opt.Temp = opt.TEMP,
    top_k: opt.TopK = opt.TOP_K,
    top_p: opt.TopP = opt.TOP_P,
    min_p: opt.MinP = opt.MIN_P,
    repeat_penalty: opt.RepeatPenalty = 1.0,
    repeat_last_n: draw.RepeatLastN = 64,
    presence_penalty: draw.PresencePenalty = 0.0,
    frequency_penalty: draw.FrequencyPenalty = 0.0,
    typical: draw.Typical = 1.0,
    xtc_probability: draw.XtcProbability = 0.0,
    xtc_threshold: draw.XtcThreshold = 0.1,
    dry_multiplier: draw.DryMultiplier = 0.0,
    dry_base: draw.DryBase = 1.75,
    dry_allowed_length: draw.DryAllowedLength = 2,
    dry_penalty_last_n: draw.DryPenaltyLastN = 64,
    dry_sequence_breaker: draw.DrySequenceBreaker = None,
    mirostat: draw.Mirostat = 0,
    mirostat_lr: draw.MirostatLr = 0.1,
    mirostat_ent: draw.MirostatEnt = 5.0,
    logit_bias: draw.LogitBias = None,
    stop: draw.Stop = None,
    grammar: draw.Grammar = None,
    json_schema: draw.JsonSchema = None,
    seed: opt.Seed = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Show replies as the model writes them, without colours.",
            rich_help_panel=SHOWS,
        ),
    ] = False,
    hide_thinking: Annotated[
        bool,
        typer.Option("--hide-thinking", help="Show nothing of the model's reasoning.", rich_help_panel=SHOWS),
    ] = False,
    session: Annotated[
        Path | None,
        typer.Option(
            "--session",
            help="Session file: continues the chat in it, and saves it after every reply.",
            autocompletion=sessions_here,
        ),
    ] = None,
    transcript: Annotated[
        Path | None, typer.Option("--transcript", help="Append what is said to this file as plain text.")
    ] = None,
    n_ctx: opt.Context = None,
    n_batch: opt.Batch = None,
    threads: opt.Threads = None,
    gpu_layers: opt.GpuLayers = None,
    rpc: opt.Rpc = None,
    type_k: opt.TypeK = "f16",
    type_v: opt.TypeV = "f16",
    archive: opt.Archive = None,
    archive_file: opt.ArchiveFile = None,
    archive_type: opt.ArchiveType = "q8_0",
    flash: opt.Flash = "auto",
    explain: opt.Explain = False,
    verbose: opt.Verbose = 0,
) -> None:
    """Start a chat: memory and speed stay constant however long it gets. Piped stdin: each line is a turn."""
    take_positional(context, "model_name", "model", "-m")
    system = system_text(system, system_file)
    with ExitStack() as stack:
        is_old = False
        if session:
            from kvtool.chats import session as sessions

            stack.enter_context(sessions.held(session))
            if saved := sessions.peek(session):
                is_old = True
                take_saved(context, saved["options"])
        # a session may have had its own
        n = context.params["n"]
        wanted = EngineOptions.of(context)
        settings = draw.settings(context)
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if is_terminal:
            # its import takes as long as loading a small model: the two go side by side
            Thread(target=import_module, args=["kvtool.cli.chat_terminal"], daemon=True).start()
        opened = stack.enter_context(open_engine(wanted, default_budget=1024, n_batch=opt.N_BATCH))

        from kvtool.chats.conversation import Conversation
        from kvtool.chats.prompt import template_of
        from kvtool.chats.writer import Writer

        writer = Writer(opened.engine, draw.sampler(context, opened.engine, settings))
        conversation = Conversation(writer, template_of(opened.engine.model), system, undoable=is_terminal)
        stack.callback(conversation.close)
        keeper = stack.enter_context(closing(Keeper(context, conversation, session)))
        if session and is_old:
            keeper.resume(session)
        conversation.pin_system()
        if transcript:
            keeper.transcript = stack.enter_context(closing(open_transcript(transcript)))
        if explain:
            explain_run(opened.engine, wanted.policy, "turn")
        else:
            say_spare(opened.engine)
        if may_lose_system(conversation):
            sys.stderr.write(unpinned("the system prompt") + "\n")
        writer.before_reading = Notice(opened.engine, "turn")
        if is_terminal:
            from kvtool.cli.chat_terminal import Terminal

            Terminal(conversation, keeper, wanted.policy, n, plain=plain, hide_thinking=hide_thinking).run()
        else:
            _pipe(conversation, keeper, n, utf8.stdin_lines())
            if verbose:
                _say_statistics(opened.engine)
    keeper.check()


def _say_statistics(engine: Engine) -> None:
    from kvtool.units import format_bytes

    sys.stderr.write(
        f"{engine.n_past:,} tokens, {engine.mean_kv:.0f}/{engine.policy.budget} cells per row, "
        f"cache {format_bytes(engine.cache_bytes)}, policy state {format_bytes(engine.host_bytes)}\n"
    )


def _pipe(conversation: Conversation, keeper: Keeper, n_max: int | None, lines: Iterator[str]) -> None:
    """Takes each line as a turn; only replies go to stdout."""
    for line in lines:
        if not line.strip():
            continue
        interrupt.stops(conversation.writer)
        for piece in conversation.reply(line, n_max):
            sys.stdout.write(piece)
            sys.stdout.flush()
        keeper.keep()
        keeper.check()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if conversation.writer.stop:
            raise KeyboardInterrupt
        # between turns there is nothing to finish
        interrupt.ends()
