"""Open the engines of a server. The first is opened at the start, others as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.chats.conversation import Conversation
from kvtool.chats.prompt import template_of
from kvtool.chats.session_meta import Hashing, fixed_of, meta_of
from kvtool.chats.template import Template
from kvtool.chats.writer import Writer
from kvtool.config import drafting
from kvtool.config.opening import open_run
from kvtool.config.run import RunOptions
from kvtool.engine.loop import Engine
from kvtool.errors import ModelError, OutOfMemory
from kvtool.llama.libllama.devices import has_gpu
from kvtool.llama.sampler import Sampler
from kvtool.serve.api.thinking import ThinkingOptions
from kvtool.serve.batching import ComputeLock, StepBatcher
from kvtool.serve.pool import SlotPool
from kvtool.serve.rendering import Renderings
from kvtool.serve.slot import N_OUTPUT, Slot
from kvtool.serve.store.chats import ChatStore, lock_folder
from kvtool.system.memory import free_bytes
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from kvtool.serve.http.app import Site


@contextmanager
def opened(
    site: Site,
    run: RunOptions,
    *,
    folder: Path | None,
    max_bytes: int,
    overflow: str,
    n_max: int,
    kept: Mapping[str, Any],
    thinking: Callable[[Template], ThinkingOptions] | None,
    hashing: Hashing,
) -> Iterator[SlotPool]:
    """Open the first engine, and yield the pool of slots: each slot answers requests with its own engine.

    Also set `site.policy`, because `open_run` may have replaced the requested policy, and the thinking of
    `site.defaults`. Notes go to `site.say`. Raises KvtoolError.

    folder: folder of the stored chats; None for a temporary folder.
    max_bytes: maximum size of all stored chats.
    kept: values of further options that are saved in sessions.
    thinking: returns the thinking of requests that set none. None to leave it to the template.
    """
    with ExitStack() as stack:
        first_run = stack.enter_context(open_run(run, guarded=True, n_output=N_OUTPUT))
        for note in first_run.notes:
            site.say(note)
        first, run = first_run.engine, first_run.run
        site.policy = run.policy
        folder = stack.enter_context(lock_folder(folder))
        template = None
        with suppress(ModelError):
            template = template_of(first.model, run.chat_template)
        fixed, kept = fixed_of(first, run, template, hashing), run.session_values() | dict(kept)
        chats = stack.enter_context(closing(ChatStore(folder, max_bytes, fixed, site.log)))
        for line in _notes(chats):
            site.say(line)
        if template and thinking:
            site.defaults = replace(site.defaults, thinking=thinking(template))
        if template and site.defaults.system:
            # if the system prompt does not fit, raise the error before the first request
            chat = Conversation(Writer(first, Sampler(first.model)), template)
            chat.check_system(site.defaults.system)
        renderings = Renderings(first.model, template) if template else None
        # with --rpc, allow only one cache: if a worker had no memory for a second cache, the server process
        # would end
        n_max = _share_memory(first, 1 if run.rpc else n_max)
        lock, drafts = ComputeLock(), stack.enter_context(drafting.opened(run, first.model))
        batcher = stack.enter_context(closing(StepBatcher(lock, n_max, site.say)))

        def slot(engine: Engine) -> Slot:
            return Slot(
                Writer(engine, Sampler(engine.model), drafts.of(engine)),
                renderings,
                chats,
                overflow=overflow,
                meta=lambda chat: meta_of(engine, chat.n_turn, fixed, kept),
                batcher=batcher,
            )

        def another() -> Slot:
            return slot(stack.enter_context(closing(_another_engine(first))))

        yield SlotPool(lock, slot(first), another, n_max, site.say)


def _notes(chats: ChatStore) -> Iterator[str]:
    """Yield lines about files that the server cannot continue."""
    where = f"in {chats.folder}"
    if n := len(chats.others):
        yield f"chats of another model, policy or options {where}: {n:,}; they count towards --sessions-bytes"
    if n := chats.n_unusable:
        yield f"damaged files and archives without a chat {where}: {n:,}; they stay"
    if n := chats.n_foreign:
        yield f"chats of `kvtool chat` {where}: {n:,}; they stay"


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
