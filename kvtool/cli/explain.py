"""Lines that explain a run before it starts.

They explain the parts of the budget, the memory in bytes, the first eviction, and how a long text is read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool import policies
from kvtool.cli.console import say
from kvtool.cli.model_advice import too_much
from kvtool.config.run import RunOptions
from kvtool.units import PLAIN, format_bytes

if TYPE_CHECKING:
    from kvtool.chats.conversation import Conversation
    from kvtool.engine.loop import Engine
    from kvtool.models.header import ModelInfo
    from kvtool.policy import Policy


def explain_run(engine: Engine, policy: str, noun: str, n_text: int = 0, *, is_all: bool = False) -> None:
    """Explain on stderr how the engine will run, for --explain.

    policy: name of the policy. noun: kind of the first text, such as "prompt". n_text: number of tokens of
    this text, or 0 if it is unknown. is_all: True if the engine reads nothing after this text.
    """
    lines = {
        "policy": policy_line(engine, policy),
        "rows": _rows(engine),
        "budget": _budget(engine),
        "memory": _memory(engine),
        "eviction": _eviction(engine, noun, n_text, is_all=is_all),
        "positions": _positions(engine, noun, n_text),
        "prefill": "; ".join(filter(None, [_prefill(engine), long_text(engine, noun, n_text)])),
    }
    say(*(f"{name:<11} {text}" for name, text in lines.items()), indent=12)


def before_text(
    engine: Engine,
    run: RunOptions,
    noun: str,
    n: int = 0,
    info: ModelInfo | None = None,
    *,
    is_all: bool = False,
) -> Notice:
    """Write to stderr how a text will be read. Return the object for later notices.

    Without --explain, write only if the text is too long or the budget is very small.

    noun, info: see `Notice`. n, is_all: see `explain_run`.
    """
    if run.explain:
        explain_run(engine, run.policy, noun, n, is_all=is_all)
    else:
        say_spare(engine)
    notice = Notice(engine, noun, info)
    notice(n, is_explained=run.explain)
    return notice


@dataclass
class Notice:
    """Reports on stderr that a text is longer than the budget, or too long for the model.

    Each fact is reported once. The first is reported again for every text that will be partly forgotten.

    noun: kind of the text, such as "prompt".
    info: header of the model if the model will answer the text, else None.
    is_long, is_much: True if it was reported that a text is longer than the budget, or too long for the
    model.
    is_lost: True if the user knows that the archive has no room for the oldest tokens.
    """

    engine: Engine
    noun: str
    info: ModelInfo | None = None
    is_long: bool = False
    is_much: bool = False
    is_lost: bool = False

    def __call__(self, n: int, *, is_explained: bool = False) -> None:
        """Report on a text of n tokens before it is read.

        is_explained: True if --explain has already printed the line about the budget.
        """
        is_new = not self.is_long or _forgets(self.engine, n)
        if not is_explained and is_new and (text := long_text(self.engine, self.noun, n)):
            self.is_long = True
            say(text)
        if self.info and not self.is_much and (text := too_much(self.info, n, self.engine.n_past)):
            self.is_much = True
            say(text)
        # after /reset or /undo, the archive may have room again
        self.is_lost = _forgets(self.engine, n) or (self.is_lost and self._has_lost())

    def after(self) -> str | None:
        """Return a line if the archive is full and the oldest tokens are forgotten since the last text."""
        archive = self.engine.context.archive
        if self.is_lost or not archive or not self._has_lost():
            return None
        self.is_lost = True
        return (
            f"the archive is full ({archive.n_max:,} tokens): from now on, the oldest tokens are forgotten; "
            "a larger --archive keeps more"
        )

    def _has_lost(self) -> bool:
        """Return True if the archive is full, and tokens are forgotten."""
        from kvtool.measure.holdings import n_forgotten

        archive = self.engine.context.archive
        return bool(archive and archive.n >= archive.n_max and n_forgotten(self.engine))


def long_text(engine: Engine, noun: str, n: int) -> str | None:
    """Return a line that says how a text of n tokens will be read, or None if the text fits in the budget."""
    settings = engine.settings
    budget = _n_kept(engine, n)
    if n <= budget:
        return None
    if not engine.policy.evicts:
        return (
            f"the {noun} ({n:,} tokens) does not fit in the cache ({budget:,}) and the policy never evicts: "
            "reading stops when the cache is full"
        )
    start, share = f"the {noun} has {n:,} tokens", _share(engine, budget, n)
    if engine.reads_whole(n):
        reader = engine.whole_reader
        segments = reader.n_segments(n)
        if segments > 1 and settings.positions == "original":
            return f"{start}, but original positions end at {engine.n_ctx:,}: it cannot be read whole"
        if segments > 1 and not reader.in_segments:
            return f"{start}, more than {reader.undivided} can read whole in a context of {engine.n_ctx:,}"
        manner = f"in {segments} parts that do not see each other" if segments > 1 else "at once"
        manner += ", twice" if engine.policy.reconstruction else ""
        cache = format_bytes(reader.n_bytes(n))
        if n_bytes := reader.signal_bytes(n):
            cache += f" and {format_bytes(n_bytes)} of signals"
        return f"{start}: {share}. It is read {manner}, in a cache of {cache}, which is freed then"
    if settings.positions == "original" and engine.n_past + n > engine.n_ctx:
        return f"{start}, but original positions end at {engine.n_ctx:,}: reading stops there"
    if n_exact := engine.n_exact(n):
        exact = engine.exact_reader
        which = "It" if n_exact == n else f"Its first {n_exact:,} tokens"
        is_or_are = "is" if n_exact == n else "are"
        return (
            f"{start}; {share}. {which} {is_or_are} read in chunks of {exact.n_chunk:,} that attend to all "
            f"tokens before them, with {format_bytes(exact.device_bytes(engine.n_past + n_exact))} "
            "more on the device meanwhile"
        )
    return f"{start}: {share}"


def _n_kept(engine: Engine, n: int) -> int:
    """Return the maximum number of cells per row after a text of n tokens was read."""
    is_capped = engine.reads_whole(n) or _shares(engine.policy)
    return engine.policy.n_asked if is_capped else engine.policy.budget


def _forgets(engine: Engine, n: int) -> bool:
    """Return True if the cache and the archive together cannot hold all n tokens of a text."""
    archive = engine.context.archive
    return engine.policy.evicts and n > _n_kept(engine, n) + (archive.n_max if archive else 0)


def _share(engine: Engine, n_kept: int, n: int) -> str:
    """Return a clause that says how many of n tokens stay in the cache, and where the rest is kept."""
    percent = 100 * n_kept / n
    kept = f"{n_kept:,} of them ({percent:{'.0f' if percent >= 1 else '.1g'}} %)"
    if not (archive := engine.context.archive):
        mean = ", in the mean," if _shares(engine.policy) else ""
        return f"each KV head{mean} keeps at most {kept} and forgets the others; a larger --budget keeps more"
    place = archive.file or "host memory"
    if (n_lost := n - n_kept - archive.n_max) > 0:
        return (
            f"at most {kept} stay in the cache, {archive.n_max:,} fit into {place} and are still used, and "
            f"the oldest {n_lost:,} are forgotten (--archive sets that)"
        )
    return f"at most {kept} stay in the cache, the others go to {place} and are still used"


def spare_line(engine: Engine) -> str | None:
    """Return a text that lists the bytes of the budget's cells and the bytes of other cells.

    None if there are no other cells, or if rows may keep different numbers of cells (`Policy.ragged`).
    """
    from kvtool.measure.run import budget_bytes, fixed_bytes
    from kvtool.models.layers import PAD

    taken, fixed = budget_bytes(engine), fixed_bytes(engine)
    spare = engine.cache_bytes - taken - fixed
    if spare <= 0 or engine.policy.ragged:
        return None
    return (
        f"{format_bytes(taken)} for the budget's cells, "
        + (f"{format_bytes(fixed)} for sliding or recurrent layers, " if fixed else "")
        + f"{format_bytes(spare)} more for batches (--batch-size) and because llama.cpp allocates {PAD} "
        "cells at a time"
    )


def say_spare(engine: Engine) -> None:
    """If the budget is smaller than llama.cpp's smallest allocation, report the bytes that are allocated.

    Nothing is reported if stderr is not a terminal.
    """
    # imported here, because the import takes 10 ms, and --help needs none of it
    from kvtool.models.layers import PAD

    if not sys.stderr.isatty():
        return
    if engine.policy.evicts and engine.policy.budget < PAD and (spare := spare_line(engine)):
        say(f"a budget of {engine.policy.budget} takes {spare}")


def may_lose_system(conversation: Conversation) -> bool:
    """Return True if the policy evicts and the system prompt is not pinned, so that it may be evicted."""
    return not conversation.is_pinned and conversation.writer.engine.policy.evicts


def unpinned(noun: str) -> str:
    """Return a warning that a text cannot be pinned. noun: kind of the text, such as "the prompt"."""
    return f"{noun} may be evicted: the model's chat template leaves it out, cuts it or moves it"


def policy_line(engine: Engine, name: str) -> str:
    parameters = policies.chosen(engine.policy)
    if engine.model.layers.has_values:
        # leave out `recalled`, because it can be set only for models without values (MLA)
        parameters.pop("recalled", None)
    if parameters.get("search") == "all":
        parameters.pop("exact", None)
    return " ".join([name, *(f"{key}={value}" for key, value in parameters.items())])


def _rows(engine: Engine) -> str:
    context = engine.context
    n_layer = len(context.layer_cells)
    per_layer = context.n_row // n_layer
    heads = f"{per_layer} KV heads" if per_layer > 1 else "one KV head"
    if per_layer * n_layer != context.n_row:
        heads = "different numbers of KV heads"
    return f"{context.n_row}: {n_layer} layers of {heads}"


def _budget(engine: Engine) -> str:
    policy = engine.policy
    cells = f"{policy.budget:,} cells per row"
    if not policy.evicts:
        return f"{cells}, none evicted"
    is_shared = _shares(policy)
    if is_shared:
        cells = f"{policy.n_asked:,} cells per row in the mean"
    parts = " + ".join(f"{n:,} {name}" for name, n in policy.split(engine.n_pinned).items() if n)
    cap = ", an upper limit: the policy chooses how many each row keeps" if policy.ragged else ""
    if is_shared:
        cap = f"; rows share them, and none takes more than {policy.budget:,}"
    elif policy.n_asked != policy.budget:
        cap = f"; at most {policy.n_asked:,} after an eviction"
    return f"{cells} = {parts}{cap}"


def _shares(policy: Policy) -> bool:
    """Return True if rows or layers share the requested budget, so that a row may have more cells."""
    return policy.ragged and policy.n_asked != policy.budget


def _memory(engine: Engine) -> str:
    from kvtool.config.report import resident_cells

    cells = f"{engine.context.n_cell:,} cells per row"
    if engine.policy.ragged:
        cells += " at the start, later as many as the longest row takes"
    state = f"policy state {format_bytes(engine.state_bytes)}"
    if archive := engine.context.archive:
        most, kind = format_bytes(archive.max_bytes), engine.settings.archive_type.removeprefix(PLAIN)
        state += f", an archive of at most {archive.n_max:,} tokens ({most} as {kind})"
        state += f" in {archive.file or 'host memory'}"
    if resident := resident_cells(engine):
        state += f"; {resident}"
    cells += f"; {spare}" if (spare := spare_line(engine)) else ""
    return f"K and V {format_bytes(engine.cache_bytes)} ({cells}), {state}"


def _eviction(engine: Engine, noun: str, n_text: int, *, is_all: bool) -> str:
    first = engine.first_plan(n_text)
    if first is None:
        return "never"
    # a plan that is due after the last token of a streamed text is never made
    if is_all and n_text <= first and not engine.reads_whole(n_text):
        return f"never: the {noun} fits"
    every = f", then every {engine.policy.slack:,}" if engine.policy.ragged else ""
    behind = f", including the {noun}'s {n_text:,}" if 0 < n_text < first else ""
    kind = "the policy first chooses" if engine.policy.ragged else "first"
    text = f"{kind} after {first:,} tokens{every}{behind}"
    batched = engine.first_plan(sys.maxsize) if not n_text else first
    if batched != first and not engine.reads_whole(sys.maxsize):
        text += f"; in a long {noun} after {batched:,}"
    return text


def _positions(engine: Engine, noun: str, n_text: int) -> str:
    mode, n_ctx = engine.settings.positions, engine.n_ctx
    if mode == "in-cache":
        return "in-cache from the first token"
    if mode == "original":
        return f"original: the stream ends after {n_ctx:,} tokens"
    if not engine.policy.evicts:
        return f"original for the {engine.n_cell:,} tokens that fit"
    reader = engine.whole_reader
    if engine.reads_whole(n_text) and reader.n_segments(n_text) > 1 and reader.in_segments:
        return f"auto: original within each segment of the {noun}, then gaps are closed"
    return f"auto: as original, until the context of {n_ctx:,} tokens is full; then gaps are closed"


def _prefill(engine: Engine) -> str:
    if (engine.settings.prefill or engine.policy.prefill) == "whole":
        return (
            f"whole: a prompt of more than {engine.policy.n_asked:,} tokens is decoded whole, "
            f"{'read once more, ' if engine.policy.reconstruction else ''}then compressed once"
        )
    stream = f"in batches of up to {min(engine.n_batch, engine.n_cell):,} tokens"
    if engine.n_batch < engine.settings.n_batch:
        # only recall reduces n_batch: `Sizes.of` limits it to recall's `chunk`
        stream += " (recall's `chunk`) once tokens are archived"
    if engine.policy.evicts and not engine.settings.over_budget:
        stream += ", each of which ends where an eviction is due"
    if engine.exact_reader.n_chunk:
        chunks = f"in chunks of up to {engine.exact_reader.n_chunk:,} tokens that attend to all before them"
        return f"exact: {chunks}" if engine.settings.prefill else f"exact: {chunks}; short texts {stream}"
    return f"stream: {stream}"
