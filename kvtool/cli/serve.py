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
from kvtool.cli.locate import locate
from kvtool.cli.worker import listener
from kvtool.cli.writing import of_model, sampling_of, with_thinking
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import ChatOptions, RunOptions
from kvtool.config.system import SystemOptions
from kvtool.errors import LibraryError, ModelError, OutOfMemory, UsageError
from kvtool.options import SERVER, Options, option, redeclared
from kvtool.system import interrupt
from kvtool.system.memory import free_bytes
from kvtool.system.paths import extra_command
from kvtool.system.texts import read_text, shown
from kvtool.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvtool.chats.conversation import Conversation
    from kvtool.chats.session import Meta
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
    host: str = _serving("--host ADDRESS", "127.0.0.1", "Address to listen on.")
    port: int = _serving("--port N", 8080, "Port to listen on.", least=0, most=65535)
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
        least=1,
    )
    queue: int = _serving("--queue N", 64, "Maximum number of waiting requests.", least=1)
    read_timeout: float = _serving(
        "--read-timeout SECONDS",
        30.0,
        "Maximum time for receiving the body of a request, in seconds.",
        least=0.1,
    )
    strict_model: bool = _serving(
        "--strict-model", False, "Refuse requests that name a model other than the running one."
    )
    keep_headers: bool = _serving(
        "--keep-headers", False, "Keep the header line that Claude Code puts before its system prompt."
    )
    pin: bool = _serving(
        "--pin", False, "Pin system prompts and tools with recall as well; other policies always do."
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
    import kvtool.llama.bindings  # noqa: F401

    try:
        from kvtool.serve.http.app import Site
        from kvtool.serve.http.gate import Limits, own_names
        from kvtool.serve.http.server import serve as answer
    except ModuleNotFoundError as error:
        raise LibraryError(f"{error.name} is missing; install it: {extra_command('serve')}") from None

    from kvtool.config.model import find_model
    from kvtool.config.notes import within_context
    from kvtool.config.opening import check
    from kvtool.config.report import archive_limit
    from kvtool.llama import endpoints
    from kvtool.models.catalogue import registry
    from kvtool.serve.api.requests import Defaults
    from kvtool.serve.api.thinking import ThinkingOptions
    from kvtool.serve.queue import JobQueue

    prompt, address = system.text(), endpoints.address(serving.host)
    most_bytes, keys = parse_bytes(serving.sessions_bytes), _keys(serving.api_key_file)
    sampling = sampling_of(generation)
    listening = listener(address, serving.port)
    port = listening.getsockname()[1]
    # find wrong options before the model is downloaded, and download the model before the first request
    check(run)
    info = find_model(run.model, locate)
    run, n_ctx, limits = within_context(run, info.n_ctx_train)
    say(*limits)
    # store the reduced context length: otherwise `open_run` would return the same note again
    run = run.changed(n_ctx=run.n_ctx and n_ctx)
    name = Path(run.model).stem if run.model else next(iter(registry()))
    is_local = endpoints.is_loopback(address)
    site = Site(
        name,
        run.policy,
        JobQueue(serving.queue),
        Defaults(
            sampling,
            generation.n,
            generation.seed,
            prompt,
            model=name if serving.strict_model else None,
            keep_headers=serving.keep_headers,
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
    )

    def ready(pool: SlotPool) -> None:
        _connect(site, pool)
        engine = pool.slots[0].engine
        if run.explain:
            explain_run(engine, site.policy, "chat")
        else:
            say(archive_limit(engine, pool.n_max))
        if not is_local and not keys:
            say("there is no API key: whoever reaches the port can use the model")
        elif "*" in serving.allow_origin and not keys:
            say("there is no API key: any web page that a browser here opens can use the model")
        say(f"serving {name} on http://{address}:{port}/v1, a chat page at /; Ctrl-C ends it")

    with listening:
        opened = partial(_opened, site, run, generation, serving, prompt, most_bytes)
        interrupt.end_by(answer(site, opened, listening, ready))


@contextmanager
def _opened(
    site: Site,
    run: RunOptions,
    generation: GenerationOptions,
    serving: _ServeOptions,
    system: str | None,
    most_bytes: int,
) -> Iterator[SlotPool]:
    """Open the first engine, and yield the pool of slots: each slot answers requests with its own engine.

    Also set `site.policy`, because `open_run` may have replaced the requested policy.
    """
    from kvtool.chats.conversation import Conversation
    from kvtool.chats.effort import Efforts
    from kvtool.chats.prompt import template_of
    from kvtool.chats.writer import Writer
    from kvtool.cli.chat.files import meta_of
    from kvtool.config import drafting
    from kvtool.config.opening import open_run
    from kvtool.engine.loop import Engine
    from kvtool.llama.devices import has_gpu
    from kvtool.llama.sampler import Sampler
    from kvtool.serve.api.thinking import ThinkingOptions
    from kvtool.serve.batching import ComputeLock, StepBatcher
    from kvtool.serve.pool import SlotPool
    from kvtool.serve.rendering import Renderings
    from kvtool.serve.slot import N_OUTPUT, Slot
    from kvtool.serve.store.chats import ChatStore, lock_folder

    with ExitStack() as stack:
        opened = stack.enter_context(open_run(run, find=locate, guarded=True, n_output=N_OUTPUT))
        say(*opened.notes)
        engine, run = opened.engine, opened.run
        site.policy = run.policy
        path = stack.enter_context(lock_folder(serving.sessions))
        fixed = fixed_of(engine, run.policy)
        chats = stack.enter_context(closing(ChatStore(path, most_bytes, fixed)))
        if chats.n_others:
            others = f"{chats.n_others:,} files in {serving.sessions} are damaged, archives without a chat"
            say(f"{others}, or of another model, policy or options; they stay as they are")
        kept = run.session_values() | generation.session_values()
        template = None
        with suppress(ModelError):
            template = template_of(engine.model)
        if template and generation.think:
            efforts = Efforts.of(template)

            def checked(effort: str | None, budget: int | None) -> ThinkingOptions:
                efforts.exact(effort, budget)
                return ThinkingOptions(effort=effort, name="--think", budget=budget)

            site.defaults = replace(site.defaults, thinking=with_thinking(generation, checked))
        if template and system:
            # if the system prompt does not fit, raise the error before the first request
            Conversation(Writer(engine, Sampler(engine.model)), template).check_system(system)

        def meta(chat: Conversation) -> Meta:
            return meta_of(chat, fixed, kept)

        # with --rpc, allow only one cache: if a worker had no memory for a second cache, the server process
        # would end
        n_max, archive = 1 if run.rpc else serving.parallel, engine.context.archive
        lock, drafts = ComputeLock(), stack.enter_context(drafting.opened(run, engine.model))

        batcher = stack.enter_context(closing(StepBatcher(lock, n_max, say)))

        renderings = Renderings(engine.model, template) if template else None

        def slot(engine: Engine) -> Slot:
            writer = Writer(engine, Sampler(engine.model), drafts.of(engine))
            rest = serving.overflow, meta, serving.pin, batcher
            return Slot(writer, renderings, chats, *rest)

        def more() -> Slot:
            n_bytes = engine.cache_bytes + engine.state_bytes
            # without a GPU, check the free memory, because Linux lets a process allocate more than there is.
            # A GPU reports an error if its memory does not suffice
            if n_bytes > free_bytes() and not has_gpu():
                raise OutOfMemory(f"no memory for another cache of {format_bytes(n_bytes)}")
            another = stack.enter_context(closing(Engine(engine.model, engine.policy, engine.settings)))
            if archive and another.context.archive:
                another.context.archive.n_max = archive.n_max
            another.checkpoints.max_bytes = engine.checkpoints.max_bytes
            return slot(another)

        if archive and engine.settings.archive is None:
            n_max = archive.share(n_max)
        if engine.settings.checkpoints is None:
            engine.checkpoints.share(n_max)
        yield SlotPool(lock, slot(engine), more, n_max, say)


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
