"""`kvtool serve`: answer requests of the OpenAI and Anthropic APIs, with caches of a fixed size."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvtool.cli.console import say
from kvtool.cli.declared import ModelName, options
from kvtool.cli.explain import explain_run
from kvtool.cli.progress import hashing_progress
from kvtool.cli.worker import listener
from kvtool.cli.writing import of_model, sampling_of, with_thinking
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import ChatOptions, RunOptions
from kvtool.config.system import SystemOptions
from kvtool.errors import LibraryError, UsageError
from kvtool.llama.libllama import endpoints
from kvtool.options import SERVER, Options, Range, option, redeclared, tested
from kvtool.system import interrupt
from kvtool.system.paths import extra_command
from kvtool.system.texts import check_file, read_text, shown
from kvtool.units import parse_bytes

if TYPE_CHECKING:
    from kvtool.chats.template import Template
    from kvtool.serve.api.thinking import ThinkingOptions
    from kvtool.serve.http.app import Site
    from kvtool.serve.pool import SlotPool


_serving = partial(option, group=SERVER)


def _origins(raw: Sequence[str] | None, flag: str) -> tuple[str, ...]:
    """Check origins, and return them in lower case, as browsers send them. Raises UsageError."""
    for origin in raw or ():
        if not re.fullmatch(r"\*|null|[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s]+", origin):
            raise UsageError(
                f"{flag} must be like https://example.com, without a path, or *; got {shown(origin)!r}"
            )
    return tuple(origin.lower() for origin in raw or ())


def _check_keys(file: str | Path) -> None:
    """Raise KvtoolError if a file of API keys cannot be read or has no key. A pipe is not read."""
    check_file(str(file))
    if Path(file).is_file():
        _keys(Path(file))


@dataclass(frozen=True)
class _ServeOptions(Options):
    host: str = _serving(
        "--host ADDRESS",
        "127.0.0.1",
        "Address to listen on: a name or IPv4 address of this machine.",
        read=tested(endpoints.address),
    )
    port: int = _serving("--port N", 8080, "Port to listen on (0 to 65535).", valid=Range(0, 65535))
    api_key_file: Path | None = _serving(
        "--api-key-file",
        None,
        "File of API keys, one per line; every request needs one.",
        read=tested(_check_keys),
    )
    allow_origin: tuple[str, ...] = _serving(
        "--allow-origin ORIGIN",
        (),
        "A web page or app that may ask, such as app://obsidian.md; * allows all. Repeatable.",
        read=_origins,
    )
    sessions: Path | None = _serving("--sessions FOLDER", None, "Store all chats in this folder.")
    sessions_bytes: str = _serving(
        "--sessions-bytes BYTES", "4GiB", "Maximum size of all stored chats.", read=tested(parse_bytes)
    )
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
    # until the server handles signals, let SIGTERM and SIGHUP print a line, as Ctrl-C does
    for number in interrupt.not_ignored():
        signal.signal(number, lambda number, _: interrupt.end_by(number))
    run = of_model(typed_run, model_name)

    # import this first: if llama.cpp and a package are both missing, report llama.cpp
    import kvtool.llama.libllama.bindings  # noqa: F401

    try:
        from kvtool.serve.http.server import serve as answer
    except ModuleNotFoundError as error:
        raise LibraryError(f"{error.name} is missing; install it: {extra_command('serve')}") from None

    from kvtool.config.model import find_model
    from kvtool.config.opening import check
    from kvtool.config.report import archive_limit

    address = endpoints.address(serving.host)
    is_local = endpoints.is_loopback(address)
    site = _site(run, serving, system, generation, is_local=is_local)
    listening = listener(address, serving.port)
    port = listening.getsockname()[1]
    # find wrong options before the model is downloaded, and download the model before the first request
    check(run)
    find_model(run.model)

    def ready(pool: SlotPool) -> None:
        engine, keys = pool.slots[0].engine, site.limits.keys
        if run.explain:
            explain_run(engine, site.policy, "chat")
        else:
            n_most = engine.n_ctx if serving.overflow == "error" else None
            say(archive_limit(engine, pool.n_max, n_most))
        if not is_local and not keys:
            say("there is no API key: whoever reaches the port can use the model")
        elif "*" in serving.allow_origin and not keys:
            say("there is no API key: any web page that a browser here opens can use the model")
        say(f"serving {site.model} on http://{address}:{port}/v1, a chat page at /; Ctrl-C ends it")

    with listening:
        interrupt.end_by(answer(site, partial(_open, site, run, serving, generation), listening, ready))


def _site(
    run: RunOptions,
    serving: _ServeOptions,
    system: SystemOptions,
    generation: GenerationOptions,
    *,
    is_local: bool,
) -> Site:
    """Return the state that all routes use. `opened` completes it. Raises KvtoolError.

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
        say=say,
    )


def _open(
    site: Site, run: RunOptions, serving: _ServeOptions, generation: GenerationOptions
) -> AbstractContextManager[SlotPool]:
    """Return a context that opens the first engine."""
    from kvtool.serve.opening import opened

    return opened(
        site,
        run,
        folder=serving.sessions,
        max_bytes=parse_bytes(serving.sessions_bytes),
        overflow=serving.overflow,
        n_max=serving.parallel,
        kept=generation.session_values(),
        thinking=partial(_checked_thinking, generation) if generation.think else None,
        hashing=hashing_progress,
    )


def _checked_thinking(generation: GenerationOptions, template: Template) -> ThinkingOptions:
    """Return the thinking of requests that set none. Raises UsageError."""
    from kvtool.chats.effort import Efforts
    from kvtool.serve.api.thinking import ThinkingOptions

    efforts = Efforts.of(template)

    def checked(effort: str | None, budget: int | None) -> ThinkingOptions:
        efforts.exact(effort, budget)
        return ThinkingOptions(effort=effort, name="--think", budget=budget)

    return with_thinking(generation, checked)


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    lines = (line.strip() for line in read_text(str(path)).splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UsageError(f"{path} has no API key; write one key per line")
    if any(len(key.split()) > 1 for key in keys):
        raise UsageError(f"{path} has a key with white space inside; begin lines of comments with '#'")
    return keys
