"""`kvtool serve`: answer requests of the OpenAI and Anthropic APIs, with caches of a fixed size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvtool.cli.chat.fixed import fixed_of
from kvtool.cli.console import say
from kvtool.cli.declared import ModelName, options
from kvtool.cli.explain import explain_run
from kvtool.cli.locate import locate, locate_model
from kvtool.cli.worker import listener
from kvtool.cli.writing import of_model, sampling_of, with_thinking
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import ChatOptions, RunOptions
from kvtool.config.system import SystemOptions
from kvtool.errors import LibraryError, ModelError, OutOfMemory, UsageError
from kvtool.options import SERVER, Options, Range, option, redeclared
from kvtool.system import interrupt
from kvtool.system.memory import free_bytes
from kvtool.system.paths import extra_command
from kvtool.system.texts import read_text, shown
from kvtool.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvtool.chats.template import Template
    from kvtool.engine.loop import Engine
    from kvtool.serve.api.thinking import ThinkingOptions
    from kvtool.serve.http.app import Site
    from kvtool.serve.pool import SlotPool


_serving = partial(option, group=SERVER)


def _origins(raw: Sequence[str] | None, flag: str) -> tuple[str, ...]:
    """Check origins, and return them in lower case, because browsers send origins in lower case.

    Raises UsageError.
    """
    for origin in raw or ():
        if not re.fullmatch(r"\*|null|[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s]+", origin):
            raise UsageError(
                f"{flag} must be like https://example.com, without a path, or *; got {shown(origin)!r}"
            )
    return tuple(origin.lower() for origin in raw or ())


@dataclass(frozen=True)
class _ServeOptions(Options):
    host: str = _serving(
        "--host ADDRESS", "127.0.0.1", "Address to listen on: a name or IPv4 address of this machine."
    )
    port: int = _serving("--port N", 8080, "Port to listen on (0 to 65535).", valid=Range(0, 65535))
    api_key_file: Path | None = _serving(
        "--api-key-file", None, "File of API keys, one per line; every request needs one."
    )
    allow_origin: tuple[str, ...] = _serving(
        "--allow-origin ORIGIN",
        (),
        "A web page or app that may ask, such as app://obsidian.md; * allows all. Repeatable.",
        read=_origins,
    )
    sessions: Path | None = _serving("--sessions FOLDER", None, "Store all chats in this folder.")
    sessions_bytes: str = _serving("--sessions-bytes BYTES", "4GiB", "Maximum size of all stored chats.")
    overflow: str = _serving(
        "--overflow MODE",
        "forget",
        "What to do if a chat is longer than the context: forget (as the policy does) or error.",
        choices=("forget", "error"),
    )
    parallel: int = _serving(
        "--parallel N",
        2,
        "Maximum number of requests answered at the same time, each with its own cache; 1 with --rpc.",
        valid=Range(1),
        aliases=("-np",),
    )
    queue: int = _serving("--queue N", 64, "Maximum number of waiting requests.", valid=Range(1))
    read_timeout: float = _serving(
        "--read-timeout SECONDS",
        30.0,
        "Maximum time for receiving the body of a request, in seconds.",
        valid=Range(0.1),
    )
    metrics: bool = _serving("--metrics", False, "Serve metrics for Prometheus at /metrics.")


@dataclass(frozen=True)
class _RequestDefaults(GenerationOptions):
    # hide --stop-loops: no API has a finish reason for an answer that ended in a loop
    hidden: ClassVar = ("stop_loops",)

    n: int = redeclared(
        GenerationOptions,
        "n",
        help="Maximum tokens of an answer if a request sets no limit; -1 means no limit.",
    )


@options
def serve(
    *,
    model_name: ModelName = None,
    serving: _ServeOptions,
    system: SystemOptions,
    generation: _RequestDefaults,
    typed_run: ChatOptions,
) -> None:
    """Serve the OpenAI and Anthropic APIs, from caches that never fill."""
    run = of_model(typed_run, model_name)

    # import this first: if llama.cpp and a package are both missing, report llama.cpp
    import kvtool.llama.libllama.bindings  # noqa: F401

    try:
        from kvtool.serve.http.server import serve as answer
    except ModuleNotFoundError as error:
        raise LibraryError(f"{error.name} is missing; install it: {extra_command('serve')}") from None

    from kvtool.config.opening import check
    from kvtool.config.report import archive_limit
    from kvtool.llama.libllama import endpoints

    address = endpoints.address(serving.host)
    is_local, max_bytes = endpoints.is_loopback(address), parse_bytes(serving.sessions_bytes)
    site = _site(run, serving, system, generation, is_local=is_local)
    listening = listener(address, serving.port)
    port = listening.getsockname()[1]
    # find wrong options before the model is downloaded, and download the model before the first request
    check(run)
    run, _, n_ctx = locate_model(run)
    # store the reduced context length: otherwise `open_run` would return the same note again
    run = run.changed(n_ctx=run.n_ctx and n_ctx)

    def ready(pool: SlotPool) -> None:
        _connect(site, pool)
        engine, keys = pool.slots[0].engine, site.limits.keys
        if run.explain:
            explain_run(engine, site.policy, "chat")
        else:
            say(archive_limit(engine, pool.n_max))
        if not is_local and not keys:
            say("there is no API key: whoever reaches the port can use the model")
        elif "*" in serving.allow_origin and not keys:
            say("there is no API key: any web page that a browser here opens can use the model")
        say(f"serving {site.model} on http://{address}:{port}/v1, a chat page at /; Ctrl-C ends it")

    with listening:
        opened = partial(_opened, site, run, generation, serving, max_bytes)
        interrupt.end_by(answer(site, opened, listening, ready))


def _site(
    run: RunOptions,
    serving: _ServeOptions,
    system: SystemOptions,
    generation: GenerationOptions,
    *,
    is_local: bool,
) -> Site:
    """Return the state that all routes use. `_opened` and `_connect` complete it. Raises KvtoolError.

    is_local: True if only this machine can reach the server's address.
    """
    from kvtool.models.catalogue import registry
    from kvtool.serve.api.requests import Defaults
    from kvtool.serve.api.thinking import ThinkingOptions
    from kvtool.serve.http.app import Site
    from kvtool.serve.http.gate import Limits, own_names
    from kvtool.serve.queue import JobQueue

    name = Path(run.model).stem if run.model else next(iter(registry()))
    prompt, keys = system.text(), _keys(serving.api_key_file)
    return Site(
        name,
        run.policy,
        JobQueue(serving.queue, serving.parallel),
        Defaults(
            sampling_of(generation),
            generation.n,
            generation.seed,
            prompt,
            thinking=ThinkingOptions(effort=generation.think, name="--think", budget=generation.think_budget),
        ),
        Limits(
            keys,
            names=None if keys else own_names(serving.host, is_local=is_local),
            origins=serving.allow_origin,
            read_timeout=serving.read_timeout,
        ),
        has_metrics=serving.metrics,
        log=say if run.verbose else None,
        warn=say,
    )


@contextmanager
def _opened(
    site: Site, run: RunOptions, generation: GenerationOptions, serving: _ServeOptions, max_bytes: int
) -> Iterator[SlotPool]:
    """Open the first engine, and yield the pool of slots: each slot answers requests with its own engine.

    Also set `site.policy`, because `open_run` may have replaced the requested policy, and the thinking of
    `site.defaults`. Raises KvtoolError.

    max_bytes: maximum size of all stored chats.
    """
    from kvtool.chats.conversation import Conversation
    from kvtool.chats.prompt import template_of
    from kvtool.chats.writer import Writer
    from kvtool.cli.chat.files import meta_of
    from kvtool.config import drafting
    from kvtool.config.opening import open_run
    from kvtool.llama.sampler import Sampler
    from kvtool.serve.batching import ComputeLock, StepBatcher
    from kvtool.serve.pool import SlotPool
    from kvtool.serve.rendering import Renderings
    from kvtool.serve.slot import N_OUTPUT, Slot
    from kvtool.serve.store.chats import ChatStore, lock_folder

    with ExitStack() as stack:
        opened = stack.enter_context(open_run(run, find=locate, guarded=True, n_output=N_OUTPUT))
        say(*opened.notes)
        first, run = opened.engine, opened.run
        site.policy = run.policy
        folder = stack.enter_context(lock_folder(serving.sessions))
        template = None
        with suppress(ModelError):
            template = template_of(first.model, run.chat_template)
        fixed, kept = fixed_of(first, run, template), run.session_values() | generation.session_values()
        chats = stack.enter_context(closing(ChatStore(folder, max_bytes, fixed)))
        if chats.n_others:
            others = f"{chats.n_others:,} files in {folder} are damaged, archives without a chat"
            say(f"{others}, or of another model, policy or options; they stay as they are")
        if template and generation.think:
            site.defaults = replace(site.defaults, thinking=_checked_thinking(generation, template))
        if template and site.defaults.system:
            # if the system prompt does not fit, raise the error before the first request
            chat = Conversation(Writer(first, Sampler(first.model)), template)
            chat.check_system(site.defaults.system)
        renderings = Renderings(first.model, template) if template else None
        # with --rpc, allow only one cache: if a worker had no memory for a second cache, the server process
        # would end
        n_max = _share_memory(first, 1 if run.rpc else serving.parallel)
        lock, drafts = ComputeLock(), stack.enter_context(drafting.opened(run, first.model))
        batcher = stack.enter_context(closing(StepBatcher(lock, n_max, say)))

        def slot(engine: Engine) -> Slot:
            return Slot(
                Writer(engine, Sampler(engine.model), drafts.of(engine)),
                renderings,
                chats,
                overflow=serving.overflow,
                meta=partial(meta_of, fixed=fixed, kept=kept),
                batcher=batcher,
            )

        def another() -> Slot:
            return slot(stack.enter_context(closing(_another_engine(first))))

        yield SlotPool(lock, slot(first), another, n_max, say)


def _checked_thinking(generation: GenerationOptions, template: Template) -> ThinkingOptions:
    """Return the thinking of requests that set none. Raises UsageError: see `with_thinking`."""
    from kvtool.chats.effort import Efforts
    from kvtool.serve.api.thinking import ThinkingOptions

    efforts = Efforts.of(template)

    def checked(effort: str | None, budget: int | None) -> ThinkingOptions:
        efforts.exact(effort, budget)
        return ThinkingOptions(effort=effort, name="--think", budget=budget)

    return with_thinking(generation, checked)


def _share_memory(first: Engine, n: int) -> int:
    """Divide the memory of the first engine's archive and checkpoints among n engines.

    Limits that the user has set with --checkpoints, or with --archive in tokens, hold for each engine and are
    not divided.

    Returns the number of engines, which is less than n if n archives would be too small.
    """
    archive = first.context.archive
    if archive and first.settings.archive is None:
        n = archive.share(n)
    if first.settings.checkpoints is None:
        first.checkpoints.share(n)
    return n


def _another_engine(first: Engine) -> Engine:
    """Return an engine like the first, with the same limits. Raises OutOfMemory."""
    from kvtool.engine.loop import Engine
    from kvtool.llama.libllama.devices import has_gpu

    n_bytes = first.cache_bytes + first.state_bytes
    # without a GPU, check the free memory, because Linux lets a process allocate more than there is.
    # A GPU reports an error if its memory does not suffice
    if n_bytes > free_bytes() and not has_gpu():
        raise OutOfMemory(f"no memory for another cache of {format_bytes(n_bytes)}")
    engine = Engine(first.model, first.policy, first.settings)
    if engine.context.archive and first.context.archive:
        engine.context.archive.n_max = first.context.archive.n_max
    engine.checkpoints.max_bytes = first.checkpoints.max_bytes
    return engine


def _connect(site: Site, pool: SlotPool) -> None:
    """Set the fields of `site` that need the loaded model, such as `tokenize`, `count` and `props`."""
    from kvtool.serve.slot import text_of

    slot = pool.slots[0]
    engine, model, template = slot.engine, slot.model, slot.template

    def detokenize(tokens: list[int]) -> bytes:
        if any(not 0 <= token < model.n_vocab for token in tokens):
            from kvtool.serve.api.errors import ApiError

            raise ApiError(f"tokens must be in 0..{model.n_vocab - 1}", param="tokens")
        return b"".join(model.piece(token, special=True) for token in tokens)

    site.tokenize = lambda text, start, special: model.tokenize(text, special=special, start=start).tolist()
    site.detokenize = detokenize
    site.count = slot.count
    site.stored = lambda: (len(slot.chats), slot.chats.n_bytes)
    site.caches = lambda: (pool.n_max, len(pool.slots), pool.cache_bytes)
    site.created = int(model.path.stat().st_mtime)
    site.props = {
        "model_path": str(model.path),
        "model_alias": site.model,
        "chat_template": template.source if template else "",
        "bos_token": text_of(model, [model.bos]) if model.bos >= 0 else None,
        "eos_token": text_of(model, [model.eos]) if model.eos >= 0 else None,
        "default_generation_settings": {"n_ctx": engine.n_ctx},
        "policy": site.policy,
        "budget": engine.policy.budget,
        "asked": engine.policy.n_asked,
        "n_stored": len(slot.chats),
        "model_meta": {"n_ctx_train": model.n_ctx_train, "n_vocab": model.n_vocab},
    }


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    lines = (line.strip() for line in read_text(str(path)).splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UsageError(f"{path} has no API key; write one key per line")
    return keys
