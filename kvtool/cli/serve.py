"""kvtool serve: the OpenAI API over caches that never fill."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import flags as opt
from kvtool.cli import sampling as draw
from kvtool.cli.command import DRAWS, SERVES
from kvtool.cli.completion import models
from kvtool.cli.explain import explain_run
from kvtool.cli.keeper import fixed_of, meta_of
from kvtool.cli.opening import (
    EngineOptions,
    checked_model,
    n_ctx_of,
    open_engine,
    system_text,
    take_positional,
)
from kvtool.cli.texts import read_text
from kvtool.cli.worker import listener
from kvtool.errors import LibraryError, UsageError
from kvtool.system import interrupt

if TYPE_CHECKING:
    from kvtool.serve.app import Site
    from kvtool.serve.talk import Talk


def serve(
    context: typer.Context,
    model_name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A model, as for -m.", show_default=False, autocompletion=models
        ),
    ] = None,
    policy: opt.Policy = opt.POLICY,
    budget: opt.Budget = None,
    model: opt.Model = None,
    options: opt.Options = None,
    evict_every: opt.EvictEvery = None,
    positions: opt.Positions = "auto",
    prefill: opt.Prefill = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.", rich_help_panel=SERVES)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="N", min=0, max=65535, help="Port to listen on.", rich_help_panel=SERVES
        ),
    ] = 8080,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="File of API keys, one a line: each request needs one.",
            rich_help_panel=SERVES,
        ),
    ] = None,
    sessions: Annotated[
        Path | None,
        typer.Option(
            "--sessions", metavar="FOLDER", help="Keep all chats in this folder.", rich_help_panel=SERVES
        ),
    ] = None,
    sessions_bytes: Annotated[
        str,
        typer.Option(
            "--sessions-bytes",
            metavar="BYTES",
            help="The most that stored chats take.",
            rich_help_panel=SERVES,
        ),
    ] = "4GiB",
    overflow: Annotated[
        str,
        typer.Option(
            "--overflow",
            metavar="forget|error",
            help="What a chat longer than the context gets: forget, as the policy does, or error.",
            rich_help_panel=SERVES,
        ),
    ] = "forget",
    queue: Annotated[
        int,
        typer.Option(
            "--queue", metavar="N", min=1, help="The most requests that wait.", rich_help_panel=SERVES
        ),
    ] = 64,
    read_timeout: Annotated[
        float,
        typer.Option(
            "--read-timeout",
            metavar="SECONDS",
            min=0.1,
            help="Seconds that a request's body may take.",
            rich_help_panel=SERVES,
        ),
    ] = 30.0,
    metrics: Annotated[
        bool,
        typer.Option("--metrics", help="Tell Prometheus at /metrics what was done.", rich_help_panel=SERVES),
    ] = False,
    system: opt.System = None,
    system_file: opt.SystemFile = None,
    n: Annotated[
        int,
        typer.Option(
            "-n",
            "--predict",
            "--n-predict",
            min=1,
            metavar="N",
            help="Maximum tokens of an answer, unless a request says how many.",
            rich_help_panel=DRAWS,
        ),
    ] = 2048,
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
    """Answer programs that speak the OpenAI API, from caches that never fill."""
    take_positional(context, "model_name", "model", "-m")
    if overflow not in ("forget", "error"):
        raise UsageError(f"--overflow must be forget or error, got {overflow!r}")
    try:
        from kvtool.serve.app import Limits, Site
        from kvtool.serve.server import serve as run
    except ModuleNotFoundError as error:
        raise LibraryError(f"{error.name} is missing; install it: pip install 'kvtool[serve]'") from None

    from kvtool.llama import endpoints
    from kvtool.serve.jobs import Waiting
    from kvtool.serve.requests import Defaults
    from kvtool.units import parse_bytes

    system = system_text(system, system_file)
    address = endpoints.address(host)
    most_bytes = parse_bytes(sessions_bytes)
    keys = _keys(api_key_file)
    settings = draw.settings(context)
    wanted = EngineOptions.of(context)
    listening = listener(address, port)
    port = listening.getsockname()[1]
    # downloads come before anybody can ask
    _, info = checked_model(wanted)
    # it is said once that a context is cut
    wanted = replace(wanted, n_ctx=wanted.n_ctx and n_ctx_of(wanted.n_ctx, info))
    name = Path(wanted.model).stem if wanted.model else _default_model()
    site = Site(
        name,
        policy,
        Waiting(queue),
        Defaults(settings, n, seed, system),
        Limits(keys, local_only=endpoints.is_loopback(address) and not keys, read_timeout=read_timeout),
        has_metrics=metrics,
    )

    def ready(talk: Talk) -> None:
        _tell(site, talk)
        if explain:
            explain_run(talk.engine, policy, "chat")
        if not endpoints.is_loopback(address) and not keys:
            sys.stderr.write("there is no API key: whoever reaches the port can use the model\n")
        sys.stderr.write(f"serving {name} on http://{address}:{port}/v1, a chat page at /; Ctrl-C ends it\n")
        sys.stderr.flush()

    def opened() -> Any:
        return _opened(context, wanted, system, sessions, most_bytes)

    with listening:
        interrupt.end_by(run(site, opened, listening, ready))


@contextmanager
def _opened(
    context: typer.Context,
    wanted: EngineOptions,
    system: str | None,
    folder: Path | None,
    most_bytes: int,
) -> Iterator[Talk]:
    """The engine, and what it needs to answer."""
    from kvtool.chats.conversation import Conversation
    from kvtool.chats.prompt import template_of
    from kvtool.chats.writer import Writer
    from kvtool.errors import ModelError
    from kvtool.llama.sampler import Sampler
    from kvtool.serve.store import Chats, held
    from kvtool.serve.talk import Talk

    with ExitStack() as stack:
        opened = stack.enter_context(open_engine(wanted, default_budget=1024, n_batch=opt.N_BATCH))
        engine = opened.engine
        path = stack.enter_context(held(folder))
        fixed = fixed_of(engine, wanted.policy)
        chats = stack.enter_context(closing(Chats(path, most_bytes, fixed)))
        if chats.n_others:
            sys.stderr.write(
                f"{chats.n_others:,} files in {folder} are damaged, or of another model, policy or options; "
                "they stay as they are\n"
            )
        params = context.params
        template = None
        with suppress(ModelError):
            template = template_of(engine.model)
        writer = Writer(engine, Sampler(engine.model))
        if template and system:
            # it must fit before anybody asks
            Conversation(writer, template).check(system)
        say = _say if params["verbose"] else lambda line: None
        yield Talk(
            writer, template, chats, params["overflow"], lambda chat: meta_of(chat, fixed, params), say
        )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _tell(site: Site, talk: Talk) -> None:
    """Lets the routes know the engine."""
    from kvtool.serve.talk import text_of

    engine, model = talk.engine, talk.model
    template = talk.template

    def tokenize(text: str, start: bool, special: bool) -> list[int]:
        found: list[int] = model.tokenize(text, special=special, start=start).tolist()
        return found

    def detokenize(tokens: list[int]) -> str:
        if any(not 0 <= token < model.n_vocab for token in tokens):
            from kvtool.serve.errors import ApiError

            raise ApiError(f"tokens must be in 0..{model.n_vocab - 1}", param="tokens")
        return text_of(model, tokens)

    site.tokenize, site.detokenize = tokenize, detokenize
    site.stored = lambda: (len(talk.chats), talk.chats.n_bytes)
    site.props = {
        "model_path": str(model.path),
        "model_alias": site.model,
        "chat_template": template.source if template else "",
        "total_slots": 1,
        "default_generation_settings": {"n_ctx": engine.n_ctx},
        "policy": site.policy,
        "budget": engine.policy.budget,
        "asked": engine.policy.n_asked,
        "cache_bytes": engine.cache_bytes,
        "n_stored": len(talk.chats),
        "model_meta": {"n_ctx_train": model.n_ctx_train, "n_vocab": model.n_vocab},
    }


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    lines = (line.strip() for line in read_text(str(path)).splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UsageError(f"{path} has no key; write one a line")
    return keys


def _default_model() -> str:
    from kvtool.models.catalogue import registry

    return next(iter(registry()))
